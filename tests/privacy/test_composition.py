"""Several private runs on the same data: every output says what they reveal together."""

import json

import pytest
from support.running import call

import unskew
from unskew.privacy.accounting import exact_epsilon
from unskew.reporting.run_description import collect_warnings
from unskew.reporting.run_groups import group_runs
from unskew.reporting.run_reader import read_runs

pytestmark = [pytest.mark.usefixtures("undrawn"), pytest.mark.filterwarnings("ignore::UserWarning")]
SMALL = {"data": "digits", "partition": "iid", "clients": 20, "model": "logistic", "rounds": 2, "local_steps": 1}
SMALL |= {"engine": "inline", "eval_clients": 0}
DELTA = 20**-1.1


def test_a_comparison_and_its_report_add_up_what_all_runs_reveal(tmp_path):
    methods = ["fedavg", "dp:noise=2,adaptive=false", "dp:noise=4,adaptive=false,reproducible=true"]
    compared = unskew.compare(methods=methods, seeds=2, out=tmp_path / "c", **SMALL)
    single, exact = exact_epsilon(2**0.5 / 2, DELTA), exact_epsilon(1.0, DELTA)
    (note,) = [note for note in compared.notes() if "private runs" in note]
    assert note.startswith(
        f"2 private runs on the same data: together epsilon <= {2 * single:.4g} (sum of 2; sum of delta "
    )
    assert f"exactly {exact:.4g} for delta {DELTA:.3g}" in note
    assert [row.get("epsilon") for row in compared.rows()] == [None, pytest.approx(single), None]
    assert compared.rows()[2]["epsilon_if_secret"] > 0
    (part,), _ = group_runs(read_runs([tmp_path / "c"])[0])
    texts = [text for _, text in collect_warnings(part)]
    assert note in texts
    assert any(text.startswith("Privacy: None: noise was computed from the seed") for text in texts)


def test_tuning_counts_its_trials(tmp_path, capsys):
    pytest.importorskip("optuna")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name != "eval_clients"]
    told = call(
        capsys, "tune", "dp:noise=2,adaptive=false", "--trials", 3, "--seeds", 2, "--no-pruning", "--space", "lr=0.1|0.5",
        "--out", tmp_path / "t", "--json", *words,
    )  # fmt: skip
    assert told.code == 0, told.err
    notes = json.loads(told.out)["notes"]
    single = exact_epsilon(2**0.5 / 2, DELTA)
    assert any(note.startswith("2 private runs on the same data") for note in notes)
    assert any(f"5 private runs on the same data: together epsilon <= {5 * single:.4g}" in note for note in notes)
