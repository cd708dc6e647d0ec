"""Warnings of loading: repeated for cached data, recorded in run folders, printed with ``--quiet``."""

import json
import logging

import pytest
from support.running import call
from support.tiny import OPT, write_jsonl

import unskew
from unskew.data.load import load_federation
from unskew.data.loading_warnings import CachedLoader, collect_warnings

LOG = logging.getLogger("unskew")
ROWS = [
    {"q": "how" if site != "north" else 30 * "long ", "a": "so", "site": site}
    for site in ("east", "north", "west")
    for _ in range(10)
]
TEXT = {"prompt": "q", "answer": "a", "tokenizer": "bytes", "block": 16}
LOST = (
    "rows: all texts of north (column site) are dropped, because no token that counts remains, so the partition has no data "
    "of them. Set text.block to a larger number, or remove these rows."
)
SETTINGS = {
    "partition": "natural:site", "text": TEXT, "model": "hf:opt", "rounds": 1, "local_steps": 1, "lr": 0.1,
    "engine": "inline",
    "model_options": {"pretrained": False, "config": {"vocab_size": 257, **OPT}},
}  # fmt: skip


def recorded(folder):
    return [line.partition(": ")[2] for line in (folder / "warnings.txt").read_text().splitlines()]


def test_collects_each_warning_once_and_no_notices():
    with collect_warnings() as texts:
        for _ in range(2):
            LOG.warning("a %d", 1)
        LOG.info("b")
    LOG.warning("c")
    assert texts == ["a 1"]


def test_a_cached_result_logs_its_warnings_again():
    calls = []

    def load(number):
        calls.append(number)
        LOG.warning("number %d", number)
        return -number

    cached = CachedLoader(load, size=1)
    for _ in range(2):
        with collect_warnings() as texts:
            assert cached(3) == -3
        assert texts == ["number 3"]
    assert calls == [3]


@pytest.mark.parametrize("pack", [False, True])
def test_a_client_that_loses_all_texts_is_named(pack, tmp_path):
    fed = load_federation(
        f"text:{write_jsonl(tmp_path / 'rows.jsonl', ROWS)}", partition="natural:site", text={**TEXT, "pack": pack}
    )
    assert fed.client_names == ("east", "west")
    assert fed.warnings[-1] == LOST


def test_no_value_is_named_if_each_has_a_text(tmp_path):
    rows = [*ROWS, {"q": "how", "a": "so", "site": "north"}]
    fed = load_federation(f"text:{write_jsonl(tmp_path / 'rows.jsonl', rows)}", partition="iid", clients=2, text=TEXT)
    (text,) = fed.warnings
    assert text.startswith("rows, the training rows: 10 of 31 answers do not end")


def test_warnings_of_loading_are_in_each_run_folder_and_printed_with_quiet(tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    settings = {**SETTINGS, "data": f"text:{path}"}
    unskew.compare(methods=["fedavg", "fedprox:mu=0.1"], out=tmp_path / "both", references=False, seeds=1, **settings)
    folders = [file.parent for file in (tmp_path / "both").rglob("metrics.jsonl")]
    assert len(folders) == 2
    for folder in folders:
        assert recorded(folder)[1:] == [LOST]
        clients = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
        assert [sum(row["class_counts"].values()) for row in clients] == [row["samples"] for row in clients]
        assert all(row["num_held_out"] for row in clients)
    (tmp_path / "config.yaml").write_text(json.dumps({**settings, "rounds": 2}))
    monkeypatch.chdir(tmp_path)
    quiet = call(capsys, "run", "config.yaml", "--out", "quiet", "--quiet")
    assert (quiet.code, quiet.err.count(LOST), quiet.err.count("answers do not end")) == (0, 1, 1)
    assert recorded(tmp_path / "quiet")[1:] == [LOST]
