"""Grouping of runs: what may be compared is in one group, and only the same runs are left out."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.run_groups import summary

from unskew.config.experiment import Experiment
from unskew.reporting.run_groups import group_runs
from unskew.reporting.run_reader import RunFiles

PLAIN = {"data": "digits", "partition": "iid", "clients": 3, "model": "logistic", "data_checksum": "0000000a"}
CONFIG = Experiment(lr=0.1).model_dump(mode="json")
RUN = RunFiles(Path("run"), CONFIG, summary("fedavg", 0, 0.5, **PLAIN), [], [], {}, [])


def changed(folder, config, summary):
    """Return another run with some fields and results of its own."""
    return replace(RUN, folder=Path(folder), config=RUN.config | config, summary=RUN.summary | summary)


EDITED, BASE = {"data_checksum": "0000000e"}, {"start_from": "/base"}


@pytest.mark.parametrize(
    ("config", "summary", "titles", "labels"),
    [
        ({}, {}, [""], ["fedavg"]),
        ({}, EDITED, [", data_checksum=0000000a", ", data_checksum=0000000e"], ["fedavg"]),
        ({}, {**EDITED, "seed": 9}, [""], ["fedavg"]),
        ({"features": ["a"]}, EDITED, [""], ["fedavg (features=[])", "fedavg (features=['a'])"]),
        (BASE, {}, [""], ["fedavg (start_from=none)", "fedavg (start_from=/base)"]),
        (BASE, {"seed": 9}, [""], ["fedavg (start_from=none)", "fedavg (start_from=/base)"]),
        ({"synthetic": "/x", "lr": 9}, {}, [""], ["fedavg (lr=0.1)", "fedavg (lr=9)"]),
        ({"loss": "mae"}, {}, [""], ["fedavg (loss=auto)", "fedavg (loss=mae)"]),
        ({"loss": "mae"}, {"objective": "loss"}, [", objective=accuracy, loss=auto", ", objective=loss, loss=mae"],
         ["fedavg"]),
    ],
)  # fmt: skip
def test_runs_are_the_same_only_with_the_same_data_start_and_metrics(config, summary, titles, labels):
    """Samples may differ between runs with different seeds or features of the same data."""
    parts, notes = group_runs([RUN, changed("other", config, summary)])
    assert [part.title for part in parts] == [f"digits, iid, 3 clients, logistic{title}" for title in titles]
    assert [one.label for one in parts[0].series] == labels
    assert sum(len(part.runs) for part in parts) == 2 - len(notes)
    assert notes == ([] if config or summary else ["other is left out: run is the same run."])


def test_one_name_of_a_metric_has_one_definition_in_a_group():
    scores = {"objective": "auprc", "auprc": 0.5, "best_auprc": 0.5}

    def titles(*changes):
        runs = [changed(str(k), config, {**scores, **own}) for k, (config, own) in enumerate(changes)]
        return [part.title.partition("logistic, ")[2] for part in group_runs(runs)[0]]

    assert titles(({}, {"positive": "ill"}), ({}, {"method": "m", "positive": "well"})) == [
        "positive=ill",
        "positive=well",
    ]
    judged = {"objective": "loss"}
    two = ({"loss": "mse"}, judged), ({"loss": "huber:0.1"}, judged)
    assert titles(*two) == ["loss=mse", "loss=huber:0.1"]
    assert len(titles(two[0], ({"loss": "auto"}, judged))) == 1
    own = {"objective": "cost"}
    assert len(titles(({"objective": "a:cost"}, own), ({"objective": "b:cost"}, own))) == 2


def test_the_seeds_of_a_comparison_stay_together_after_its_data_changed():
    runs = [
        changed(folder, {}, {"seed": seed, "data_checksum": checksum})
        for folder, seed, checksum in (
            ("a", 0, "a0"), ("b", 0, "b0"), ("b", 1, "b1"), ("c", 0, "a0"), ("c", 1, "a1"), ("d", 1, "b1"), ("d", 2, "b2"),
        )
    ]  # fmt: skip
    parts, notes = group_runs(runs)
    found = [[run.summary["data_checksum"] for run in part.runs] for part in parts]
    assert found == [["a0", "a1"], ["b0", "b1", "b2"]]
    assert notes == ["c is left out: a is the same run.", "d is left out: b is the same run."]
