"""Outcomes are named for readers and found by what a run is, also by versions whose configuration has more fields."""

import json
from pathlib import Path

import pytest

from unskew.config.experiment import Experiment, NetworkConfig
from unskew.config.loader import experiment
from unskew.reproduction.outcomes import (
    experiment_hash,
    identity_hash,
    outcome_files,
    outcome_path,
    read_outcome,
    run_identity,
    store_outcome,
    stored_outcome,
    write_outcome,
)

RUNS = Path(__file__).parents[2] / "results" / "runs"
SOME = {"data": "cifar10", "method": "feddle:lr=0.01", "network": {"delay": "half-normal:20"}, "seed": 3}


class LaterNetwork(NetworkConfig):
    jitter: float = 0.0


class LaterExperiment(Experiment):
    network: LaterNetwork = LaterNetwork()
    shuffle: bool = True


def outcomes():
    return {path: json.loads(path.read_text()) for paths in outcome_files(RUNS).values() for path in paths}


def test_every_file_lies_where_what_it_says_it_is_belongs():
    for path, outcome in outcomes().items():
        assert path.relative_to(RUNS) == outcome_path(outcome["run"]), path
        assert not [v for v in outcome["run"].values() if str(v).startswith("/")], (
            f"{path} names a place of one machine"
        )


@pytest.mark.parametrize("kind", [Experiment, LaterExperiment])
def test_every_run_is_found_by_its_configuration_also_when_fields_are_added(kind):
    files = outcome_files(RUNS)
    for path, outcome in outcomes().items():
        run = dict(outcome["run"])
        if "study" in run:
            assert read_outcome(files, run) == outcome
            continue
        parent = run.pop("begins_with", None)
        before = {"lr": 0.01}  # the default when the first outcomes were kept
        configs = [None if one is None else kind.model_validate({**before, **one}) for one in (run, parent)]
        assert stored_outcome(files, *configs) == outcome, path


def test_a_field_with_its_default_names_nothing_anew():
    for values in ({}, SOME):
        assert experiment_hash(LaterExperiment.model_validate(values)) == experiment_hash(experiment(values))
    other = [{**SOME, "shuffle": False}, {**SOME, "network": {**SOME["network"], "jitter": 0.5}}]
    keys = {experiment_hash(LaterExperiment.model_validate(values)) for values in (SOME, *other)}
    assert len(keys) == 3
    assert run_identity(LaterExperiment.model_validate(other[1]))["network"]["jitter"] == 0.5
    assert run_identity(experiment({"model_options": {"width": None}}))["model_options"] == {"width": None}


def test_a_file_is_found_wherever_it_was_moved_and_only_for_its_own_run(tmp_path):
    run = run_identity(experiment(SOME))
    path = write_outcome(tmp_path, run, {"summary": {"accuracy": 0.5}})
    assert path == tmp_path / outcome_path(run)
    outcome = read_outcome(tmp_path, run)
    flat = path.rename(tmp_path / f"{identity_hash(run)}.json")  # as older versions named it
    assert read_outcome(tmp_path, run) == outcome
    flat.rename(tmp_path / f"anything-{identity_hash(run)[:8]}.json")
    assert read_outcome(tmp_path, run) == outcome
    other = run_identity(experiment({**SOME, "seed": 4}))
    assert read_outcome(tmp_path, other) is None
    (tmp_path / f"{identity_hash(other)}.json").write_text(
        json.dumps(outcome)
    )  # the name is another's: not to be believed
    assert read_outcome(tmp_path, other) is None


def test_names_are_safe_and_short_and_two_runs_never_share_one():
    run = {"data": "table:C:\\my files\\a?.csv", "method": "fedprox:mu=1.", "partition": "natural:<a|b>", "seed": 0}
    assert outcome_path(run).as_posix().startswith("table-C--my-files-a-.csv/fedprox-mu=1/natural--a-b--seed0-")
    long = [{**run, "method": "+".join(["feddle:lr=0.002,epochs=1"] * 40) + end} for end in ("", ",lam=0")]
    places = [outcome_path(one) for one in long]
    assert all(len(piece) <= 110 for place in places for piece in place.parts)
    assert places[0].parent != places[1].parent
    assert outcome_path({**run, "lr": 0.5}) != outcome_path(run)
    assert (
        outcome_path({"study": "quadratic", "part": "errors", "seed": 1})
        .as_posix()
        .startswith("studies/quadratic/errors-")
    )


def test_outcomes_of_before_a_default_changed_are_marked_and_give_way_to_new_ones(tmp_path):
    """They are no run that a preset names, and never mixed with one."""
    from unskew.reproduction import tables
    from unskew.reproduction.legacy_outcomes import notes
    from unskew.reproduction.preset import load_preset
    from unskew.reproduction.sweep import Sweep

    sweep = Sweep(load_preset("fedssyn/table-1"), "paper", tmp_path / "runs", tmp_path, {})
    history = [{"round": 1, "accuracy": 0.5, "bytes_up": 1, "bytes_down": 1}]
    summary = {
        "accuracy": 0.5,
        "rounds_to_target": 1,
        "bytes_to_target": 2,
        "bytes_up": 1,
        "bytes_down": 1,
        "target": 0.8,
    }
    (cell,) = (c for c in sweep.cells(0) if (c.row, c.column) == ("FedAvg + Fedssyn", "N=10, C=1, α=0.01"))
    for seed, method in ((0, cell.config.method), (1, cell.config.method)):
        before = method + ",match_steps=epochs"
        for one in (before, method)[: 1 + seed]:
            store_outcome(
                tmp_path, cell.config.model_copy(update={"method": one, "seed": seed}), None, history, summary
            )
    found = list(sweep.found([0, 1]))
    assert [(c.row, c.config.seed) for c, _ in found] == [("FedAvg + Fedssyn †", 0), ("FedAvg + Fedssyn", 1)]
    assert {e.row: e.published for e in tables.table_entries(sweep.preset, found)} == dict.fromkeys(
        (c.row for c, _ in found), 4
    )
    (note,) = notes(c for c, _ in found)
    assert "fedssyn:match_steps=epochs" in note
    assert notes(c for c, _ in found[1:]) == []
