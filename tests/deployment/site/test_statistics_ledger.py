"""The record of the statistics that a site has sent: damage, and what its administrator lets it forget."""

import json

import pytest
import torch
import yaml
from support.running import call

from unskew.deployment.common.audit_log import read_events
from unskew.deployment.site.config import load_site_config
from unskew.deployment.site.policy import StatisticsPolicy
from unskew.deployment.site.statistics_ledger import StatisticsLedger
from unskew.errors import CheckpointError, ConfigError
from unskew.sums.base import ClientRows, SumRequest

REQUEST = SumRequest("class_counts", {"classes": 2})


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "site.yaml"
    rules = {"allow": ["counts"], "epsilon": 0.5, "total_epsilon": 1.0}
    file.write_text(yaml.safe_dump({"name": "clinic", "client": 0, "statistics": rules}))
    return file


def ask(path, extra=0):
    labels = [k % 2 for k in range(200)] + [1] * extra
    rows = ClientRows(class_counts=lambda: torch.bincount(torch.tensor(labels)), y=torch.tensor(labels))
    policy = StatisticsPolicy(load_site_config(path), path.parent, print)
    return policy.reply("c" * 64, "a" * 16, [REQUEST], rows, {"label": labels})


def ledger(path):
    return StatisticsLedger(path.parent / "state")


def test_forget_lets_the_site_reply_again_and_says_what_that_risks(path, capsys):
    ask(path)
    with pytest.raises(ConfigError, match=r"unskew deploy forget site\.yaml"):
        ask(path, extra=1)
    found = call(capsys, "deploy", "forget", path)
    assert found.code == 0
    assert "1 stored replies, hashes of 1 data sets, the data schema of inputs, and the grids of no column" in found.out
    assert "the privacy losses, 0.5 in total" in found.out
    assert "difference shows the rows that have changed since" in found.out
    assert ask(path, extra=1).epsilon == 0.5
    assert ledger(path).read().spent == 1  # privacy losses of before count
    with pytest.raises(ConfigError, match=r"would be 1\.5, more than total_epsilon=1"):
        ask(path, extra=30)
    events, _ = read_events(path.parent / "state" / "statistics.jsonl", verify=True)
    assert [event["event"] for event in events] == ["sent", "forgotten", "sent"]


def damaged(path, how):
    folder = path.parent / "state" / "statistics"
    stored = ledger(path).read()
    if how == "cut off":
        (folder / "ledger.json").write_text((folder / "ledger.json").read_text()[:40])
    elif how == "another path":
        values = json.loads((folder / "ledger.json").read_text())
        values["data"] = ["../../data"]
        (folder / "ledger.json").write_text(json.dumps(values))
    elif how == "removed":
        (folder / "ledger.json").unlink()
    elif how == "no reply":
        (folder / f"{stored.replies[0].sums}.safetensors").unlink()
    elif how == "other hashes":
        (folder / f"{stored.data[0]}.safetensors").write_bytes(b"x")


@pytest.mark.parametrize("how", ["cut off", "another path", "removed", "no reply", "other hashes"])
def test_a_damaged_record_is_an_error_and_never_starts_afresh(how, path, capsys):
    ask(path)
    damaged(path, how)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"unskew deploy forget with the site\.yaml"):
            ask(path)
    assert "0.5 in total" in call(capsys, "deploy", "forget", path).out  # from the log, if the record cannot be read
    assert ask(path).epsilon == 0.5
    assert ledger(path).read().spent == 1


def test_without_record_and_log_nothing_is_forgotten(path, capsys):
    ask(path)
    damaged(path, "cut off")
    log = path.parent / "state" / "statistics.jsonl"
    log.write_text(log.read_text().replace('"epsilon": 0.5', '"epsilon": 0.0') * 2)
    found = call(capsys, "deploy", "forget", path)
    assert found.code == 2
    assert "statistics.jsonl was modified" in found.err
    with pytest.raises(CheckpointError):
        ask(path)


def test_forget_before_any_statistics_changes_nothing_that_matters(path, capsys):
    assert "0 stored replies" in call(capsys, "deploy", "forget", path).out
    assert ask(path).epsilon == 0.5
