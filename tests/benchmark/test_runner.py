"""Benchmark suites: files, units, outcomes, references, tables and pages."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.running import call

import unskew
from speed.advice_evidence import collect
from unskew.benchmark.pages import write_pages
from unskew.benchmark.results import FederationResults, read_results
from unskew.benchmark.runner import SuiteRuns, Unit, own_space, results_of_runs
from unskew.benchmark.suite import BenchmarkFederation, included, load_suite
from unskew.benchmark.tables import federation_table, overview_table, tuning_table
from unskew.errors import ConfigError
from unskew.folder_locks import folder_lock
from unskew.reproduction.outcomes import append_outcome, identity_hash, stored_outcomes
from unskew.tuning.trial_runner import TrialReporter

SETTINGS = {
    "data": "digits",
    "clients": 3,
    "partition": "dirichlet:0.5",
    "model": "logistic",
    "holdout": 0.2,
    "max_train_samples": 300,
    "rounds": 4,
    "local_steps": 2,
    "lr": 0.1,
    "engine": "inline",
}


@pytest.fixture
def suite_file(tmp_path):
    federation = {"title": "Few digits", "kind": "controlled", "source": "scikit-learn", "settings": SETTINGS}
    absent = {**federation, "title": "Absent", "kind": "natural", "needs": "absent.csv"}
    absent["settings"] = {"data": "table:$data/absent.csv", "label": "y", "partition": "natural:site"}
    suite = {
        "title": "Small suite",
        "trials": 2,
        "seeds": [1, 2],
        "federations": ["few.yaml", "absent.yaml"],
        "methods": ["fedavg", "fedprox", "fedper", "ditto"],
        "untuned": ["fedavg"],
        "references": ["pooled", "local"],
        "space": {"fedprox.mu": [0.1, 1.0], "batch_size": 16},
    }
    for name, content in (("few", federation), ("absent", absent), ("small", suite)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "small.yaml"


def test_included_suites_and_federations_are_valid():
    used = {federation.name for name in included("suites") for federation in load_suite(name)[1]}
    assert used == set(included("federations"))


def test_suite_runs_once_and_its_numbers_are_those_of_single_runs(suite_file, tmp_path, capsys):
    pytest.importorskip("optuna")
    results, pages = tmp_path / "results", tmp_path / "pages"
    arguments = ("benchmark", suite_file, "--results", results)
    first = call(capsys, *arguments, "--pages", pages)
    assert first.code == 0, first.err
    assert "absent is left out: the file absent.csv is missing" in " ".join(first.out.split())
    assert "fedper does not apply to few, and is not repeated: " in " ".join(first.out.split())
    runs = SuiteRuns(*load_suite(str(suite_file)), results)
    stored = runs.stored()
    done = [unit for unit in runs.units() if unit.federation == "few"]
    assert set(stored) == set(done)

    outcome = stored[Unit("few", "fedprox", 2)]
    options = {name: value for name, value in outcome["options"].items() if "." not in name}
    method = f"fedprox:mu={outcome['options']['fedprox.mu']}"
    for seed, summary, curve in zip((1, 2), outcome["summaries"], outcome["curves"], strict=True):
        result = unskew.run(**{**SETTINGS, **options}, method=method, seed=seed)
        assert summary["accuracy"] == pytest.approx(result.summary["accuracy"], rel=1e-4)
        assert summary["client_accuracy_mean"] == pytest.approx(result.summary["client_accuracy_mean"], rel=1e-4)
        assert summary["bytes"] == result.summary["bytes_up"] + result.summary["bytes_down"]
        np.testing.assert_allclose(curve, [row["accuracy"] for row in result.history], rtol=1e-4)
    configured = stored[Unit("few", "fedavg", 1)]
    assert configured["options"] == {"lr": 0.1, "local_steps": 2, "batch_size": 64}  # not the 16 of the suite's space
    result = unskew.run(**SETTINGS, method="fedavg", seed=1)
    assert configured["summaries"][0]["accuracy"] == pytest.approx(result.summary["accuracy"], rel=1e-4)

    tuned = stored[Unit("few", "fedavg", 2)]["options"]
    fields = {**SETTINGS, **tuned}
    compared = unskew.compare(methods=["fedavg", "pooled", "local"], seeds=[1, 2], **fields)
    for name, metric in (("pooled", "accuracy"), ("local", "client_accuracy_mean")):
        values = [summary[metric] for summary in compared.summaries[name]]
        found = [summary[metric] for summary in stored[Unit("few", name, 2)]["summaries"]]
        np.testing.assert_allclose(found, values, rtol=1e-4)

    [few] = read_results(runs)
    assert set(few.values("global")) == {"fedavg", "fedprox", "pooled"}
    assert set(few.not_applicable) == {"fedper"}  # a linear model has no body
    assert set(few.values("clients")) == {"fedavg", "fedprox", "ditto", "pooled", "local"}
    before = sorted((path, path.stat().st_mtime_ns) for path in results.rglob("*.jsonl"))
    printed = json.loads(call(capsys, *arguments, "--json").out)
    assert sorted((path, path.stat().st_mtime_ns) for path in results.rglob("*.jsonl")) == before
    assert len(printed["units"]) == len(done)
    assert (pages / "index.md").is_file()
    assert "fedprox" in (pages / "few.md").read_text(encoding="utf-8")
    assert {path.name for path in write_pages(runs, tmp_path / "again")} == {path.name for path in pages.iterdir()}

    content = collect([runs], runs)
    [measured] = content["federations"]
    accuracies = {
        name: [s["accuracy"] for s in stored[Unit("few", name, 2)]["summaries"]] for name in ("fedavg", "fedprox")
    }
    gain = 100 * np.mean(np.subtract(accuracies["fedprox"], accuracies["fedavg"]))
    assert measured["gains"]["global"] == {"fedprox": pytest.approx(gain, abs=0.006)}  # two decimals
    assert set(measured["gains"]["clients"]) == {"fedprox", "ditto"}
    assert measured["coordinates"]["clients"] == pytest.approx(np.log10(3), abs=6e-4)  # three decimals
    assert content["tuning_gain"]["federations"] == 1
    assert content["other_federations"] == content["federations"]


def test_seeds_that_end_at_different_rounds_and_references_of_other_local_work(suite_file, tmp_path, capsys):
    """The tuned epochs replace the configured steps; curves have a value for each round of any seed."""
    pytest.importorskip("optuna")
    values = yaml.safe_load(suite_file.read_text())
    changes = {"methods": ["fedavg"], "trials": 3, "space": {"local_epochs": "1:3"}, "untuned": []}
    changes["federations"] = ["few.yaml"]
    settings = {"early_stopping": 1, "rounds": 8, "lr": 0.5, "network": {"drop": 0.4}}
    suite_file.write_text(yaml.safe_dump({**values, **changes}))
    few = suite_file.parent / "few.yaml"
    few.write_text(yaml.safe_dump({**yaml.safe_load(few.read_text()), "settings": {**SETTINGS, **settings}}))
    first = call(capsys, "benchmark", suite_file, "--results", tmp_path / "results")
    assert first.code == 0, first.err
    assert "does not apply" not in first.out
    runs = SuiteRuns(*load_suite(str(suite_file)), tmp_path / "results")
    assert [unit.method for unit in runs.units()] == ["fedavg", "pooled", "local"]
    stored = runs.stored()
    tuned = stored[Unit("few", "fedavg", 3)]
    assert "local_epochs" in tuned["options"]
    fields = {name: value for name, value in {**SETTINGS, **settings}.items() if name != "local_steps"}
    histories = [unskew.run(**{**fields, **tuned["options"], "seed": seed}).history for seed in (1, 2)]
    assert len({*map(len, histories)}) == 2
    assert tuned["rounds"] == list(range(1, max(map(len, histories)) + 1))
    for history, curve, sent in zip(histories, tuned["curves"], tuned["bytes"], strict=True):
        rest = [None] * (len(tuned["rounds"]) - len(history))
        assert curve == [pytest.approx(row["accuracy"], rel=1e-4) for row in history] + rest
        assert sent == [row["bytes_up"] + row["bytes_down"] for row in history] + rest
    [few] = read_results(runs)
    easier = [{**summary, "accuracy": 0.2} for summary in tuned["summaries"]]
    few.outcomes["fedavg"] = {**tuned, "summaries": easier}
    cost = few.cost("fedavg")
    firsts = [next(row for row in history if row["accuracy"] >= 0.2) for history in histories]
    assert cost.rounds == np.mean([row["round"] for row in firsts])
    assert cost.bytes == np.mean([row["bytes_up"] + row["bytes_down"] for row in firsts])


def test_an_interrupted_unit_continues_with_its_trials(suite_file, tmp_path, monkeypatch):
    """The folder of its trials is removed with the outcome, which is that of an uninterrupted unit."""
    pytest.importorskip("optuna")
    suite, federations = load_suite(str(suite_file))
    whole, parted = (SuiteRuns(suite, federations, tmp_path / name) for name in ("whole", "parted"))
    unit, fitting = Unit("few", "fedprox", 2), Unit("few", "fedper", 2)
    assert [*whole.carry_out([unit])] == [(unit, None)]
    assert not whole.unfinished.exists()

    rounds = []
    round_of = TrialReporter.round

    def interrupted(self, row):
        rounds.append((self.trial.number, row["round"]))
        if len(rounds) == 6:
            raise KeyboardInterrupt
        round_of(self, row)

    monkeypatch.setattr(TrialReporter, "round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        [*parted.carry_out([unit])]
    [folder] = parted.unfinished.iterdir()
    (folder / "seconds.json").write_text("1000.0")
    assert [*parted.carry_out([unit])] == [(unit, None)]
    assert rounds[:6] == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2)]
    assert {number for number, _ in rounds[6:]} == {1}
    assert not parted.unfinished.exists()
    [expected], [found] = whole.stored().values(), parted.stored().values()
    assert found.pop("seconds") > 1000.0 > expected.pop("seconds")
    assert found == expected

    # A folder of another version does not fit: its unit is repeated. A method that does not fit leaves no folder.
    for each in (unit, fitting):
        foreign = parted.unfinished / f"few-{identity_hash(parted.identity(each))}"
        foreign.mkdir(parents=True)
        (foreign / "plan.json").write_text('{"lr": 7}')
    (tmp_path / "parted" / "few.jsonl").unlink()
    assert [*parted.carry_out([unit, fitting])] == [(unit, None), (fitting, None)]
    stored = parted.stored()
    assert stored[unit]["summaries"] == expected["summaries"]
    assert "fedper" in stored[fitting]["not_applicable"]
    assert not parted.unfinished.exists()


def test_unfinished_units_are_next_to_any_folder_of_results(suite_file, tmp_path, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    suite, federations = load_suite(str(suite_file))
    for results, name in ((".", "here/below.unfinished"), ("..", "here.unfinished"), ("a", "here/below/a.unfinished")):
        assert SuiteRuns(suite, federations, Path(results)).unfinished == tmp_path / name


def test_a_unit_of_another_command_is_not_repeated(suite_file, tmp_path):
    suite, federations = load_suite(str(suite_file))
    runs, unit = SuiteRuns(suite, federations, tmp_path / "results"), Unit("few", "fedavg", 1)
    folder = runs.unfinished / f"few-{identity_hash(runs.identity(unit))}"
    folder.mkdir(parents=True)
    with folder_lock(folder):
        [(_, failure)] = runs.carry_out([unit])
    assert "Another process is working in" in failure
    assert not runs.stored()
    append_outcome(runs.results, "few", runs.identity(unit), {"not_applicable": "stored by it"})
    assert [*runs.carry_out([unit])] == [(unit, None)]
    assert runs.stored()[unit]["not_applicable"] == "stored by it"


def test_scores_are_those_of_the_kept_model():
    summary = {
        "objective": "accuracy", "accuracy": 0.4, "kept_accuracy": 0.6, "kept_round": 2, "bytes_up": 1, "bytes_down": 1,
    }  # fmt: skip
    assert results_of_runs([summary], [[]])["summaries"][0]["accuracy"] == 0.6


def test_the_spaces_of_a_method_with_an_import_path_are_used(suite_file):
    values = yaml.safe_load(suite_file.read_text())
    path = "unskew.methods.fedprox.FedProx"
    suite, _ = load_suite(str(suite_file))
    changed = suite.model_copy(
        update={"space": {f"{path}.mu": "5:6", "lr": "0.1:1", "fedprox.mu": values["space"]["fedprox.mu"]}}
    )
    assert set(own_space(changed, path)) == {f"{path}.mu", "lr"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ["fedavgg"]}, "There is no method 'fedavgg'"),
        ({"seeds": [0, 1]}, "used for tuning"),
        ({"methods": ["fedavg", "fedavg"]}, "listed twice"),
        ({"references": ["scaffold"]}, "not a reference"),
        ({"federations": ["nowhere"]}, "There is no federation 'nowhere'"),
        ({"federations": ["nowhere.yaml"]}, "cannot be read"),
        ({"methods": ["fedavg", "antigravity.rules:Rule"]}, "trust-code"),
        ({"settings": {"learning_rate": 1}}, "learning_rate"),
        ({"settings": {"seed": 1}}, "sets seed"),
        ({"trial": 3}, "trial"),
    ],
)
def test_wrong_suites_are_rejected(suite_file, change, message):
    values = {**yaml.safe_load(suite_file.read_text()), **change}
    suite_file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=message):
        load_suite(str(suite_file))


def test_unknown_names_are_rejected(suite_file, tmp_path):
    runs = SuiteRuns(*load_suite(str(suite_file)), tmp_path)
    with pytest.raises(ConfigError, match="no federation 'many'"):
        runs.units(federations=["many"])
    with pytest.raises(ConfigError, match="no method 'moon'"):
        runs.units(methods=["moon"])
    with pytest.raises(ConfigError, match="There is no suite 'skewed'"):
        load_suite("skewed")


def test_location_of_the_data_does_not_change_the_identity(suite_file, tmp_path):
    one, two = (SuiteRuns(*load_suite(str(suite_file)), tmp_path, tmp_path / name) for name in ("a", "b"))
    unit = one.units(federations=["absent"])[0]
    assert one.identity(unit) == two.identity(unit)
    assert "$data" in one.identity(unit)["settings"]["data"]


def test_budgets_grow_with_the_options_and_smaller_ones_are_shown_until_then(suite_file, tmp_path):
    methods = ["fedavg", "fedprox", "fedspeed", "scaffold+fedavgm"]
    values = {**yaml.safe_load(suite_file.read_text()), "methods": methods, "space": {}}

    def runs_of(**changes):
        suite_file.write_text(yaml.safe_dump({**values, **changes}))
        return SuiteRuns(*load_suite(str(suite_file)), tmp_path)

    earlier = runs_of()
    for unit in earlier.units(federations=["few"], methods=["fedavg", "fedprox"]):
        append_outcome(tmp_path, unit.federation, earlier.identity(unit), {"not_applicable": unit.method})
    larger = runs_of(trials_per_option=4)
    budgets = {unit.method: unit.trials for unit in larger.units(federations=["few"]) if unit.trials > 1}
    expected = {"fedavg": 2, "fedprox": 6, "fedspeed": 10, "scaffold+fedavgm": 14, "pooled": 2, "local": 2}
    assert budgets == expected
    assert set(larger.stored()) == {Unit("few", "fedavg", 1), Unit("few", "fedavg", 2)}
    assert {unit: own["not_applicable"] for unit, own in larger.with_fewer_trials().items()} == {
        Unit("few", "fedprox", 6): "fedprox"
    }
    fixed = runs_of(trials_per_option=4, space={"fedprox.mu": [0.1]})
    assert fixed.tuned_unit("few", "fedprox").trials == 2


@pytest.mark.parametrize(("fedprox", "best"), [((0.70, 0.71), "-"), ((0.74, 0.75), "`fedprox`")])
def test_best_method_is_one_that_is_better_than_the_tuned_baseline(fedprox, best):
    def outcome(values):
        summaries = [{"accuracy": value, "diverged": False} for value in values]
        return {"objective": "accuracy", "personal": False, "client_metric": "accuracy", "summaries": summaries}

    outcomes = {"fedavg": outcome((0.72, 0.73)), "fedprox": outcome(fedprox)}
    federation = BenchmarkFederation(name="few", title="Few", kind="controlled", source="", settings={})
    _, header, [row] = tuning_table([FederationResults(federation, outcomes, {}, "fedavg")])
    cells = dict(zip(header, row, strict=True))
    assert cells["best method"] == best
    assert (cells["to tuned"] == "-") is (best == "-")


FEW = BenchmarkFederation(name="few", title="Few", kind="controlled", source="", settings={})


def outcome_of(objective, curves, closing=None, **fields):
    """Return the outcome of runs whose metric has these values in each round, with 10 bytes per round.

    Args:
        objective: Name of the metric.
        curves: Values of each seed.
        closing: Value of each seed after a closing step that sends 5 bytes; None without one.
        **fields: Further fields of the summaries.
    """
    histories = [
        [{"round": t, objective: value, "bytes_up": 10 * t, "bytes_down": 0} for t, value in enumerate(curve, 1)]
        for curve in curves
    ]
    summaries = []
    for curve, last in zip(curves, closing or [None] * len(curves), strict=True):
        after = {} if last is None else {f"{objective}_before_closing": curve[-1]}
        sent = 10 * len(curve) + (0 if last is None else 5)
        values = {"objective": objective, objective: curve[-1] if last is None else last, **after}
        summaries.append({**values, "bytes_up": sent, "bytes_down": 0, **fields})
    return {"personal": False, "options": {}, **results_of_runs(summaries, histories)}


@pytest.mark.parametrize("direction", ["lower", "higher"])
def test_the_direction_of_a_custom_metric_is_stored_and_orders_methods(direction, tmp_path):
    """Costs of 0.0123 and 0.0121 instead of 0.01: a custom metric is a plain number, of which 0.0002 is visible."""
    own = {"own_metrics": {"cost": direction, "other": "lower"}}
    outcomes = {
        "fedavg": outcome_of("cost", [[0.012, 0.0124], [0.012, 0.0122]], **own),
        "fedprox": outcome_of("cost", [[0.0111, 0.0122], [0.0111, 0.012]], **own),
        "scaffold": outcome_of("cost", [[0.013, 0.0121], [0.013, 0.0119]], **own),
    }
    for name, outcome in outcomes.items():
        run = {"benchmark": 1, "federation": "few", "method": name, "seeds": [1, 2]}
        append_outcome(tmp_path, "few", run, outcome)
    stored = {own.outcome["run"]["method"]: own.outcome for own in stored_outcomes(tmp_path).values()}
    assert {name: outcome["own_metrics"] for name, outcome in stored.items()} == {
        name: {"cost": direction} for name in outcomes
    }
    results = FederationResults(FEW, stored, {"fedavg": stored["scaffold"]}, "fedavg")
    sign = -1 if direction == "lower" else 1
    gains = {name: difference.mean for name, difference in results.differences("global").items()}
    assert gains == {"fedprox": pytest.approx(sign * -0.0002), "scaffold": pytest.approx(sign * -0.0003)}
    assert results.tuning_gain("global").mean == pytest.approx(sign * 0.0003)
    assert results.cost("fedprox").rounds == (1 if direction == "lower" else None)

    title, _, rows = federation_table(results)
    assert ("lower is better" in title) is (direction == "lower")
    assert rows[0][1] == "0.0123 ± 0.0001"
    assert rows[1][2].startswith("+0.0002" if direction == "lower" else "-0.0002")
    _, header, rows = overview_table([results], ["fedprox", "scaffold"], "global")
    table = [dict(zip(header, row, strict=True)) for row in rows]
    best_first = ["`scaffold`", "`fedprox`"] if direction == "lower" else ["`fedprox`", "`scaffold`"]
    assert [row["method"] for row in table] == best_first
    assert [row["mean rank"] for row in table] == (["1.0", "2.0"] if direction == "lower" else ["2.0", "3.0"])
    assert tuning_table([results])[2][0][4] == ("`scaffold`" if direction == "lower" else "-")


def test_outcomes_of_built_in_metrics_have_no_direction():
    assert "own_metrics" not in outcome_of("accuracy", [[0.5], [0.6]], own_metrics={"cost": "lower"})


def test_differences_of_other_units_have_no_mean_over_federations():
    accuracy = {name: outcome_of("accuracy", [[v], [v]]) for name, v in (("fedavg", 0.5), ("a", 0.6), ("b", 0.62))}
    loss = {name: outcome_of("mae", [[v], [v]]) for name, v in (("fedavg", 900.0), ("a", 800.0), ("b", 850.0))}
    results = [FederationResults(FEW, outcomes, {}, "fedavg") for outcomes in (accuracy, loss)]
    _, header, rows = overview_table(results, ["a", "b"], "global")
    table = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert {(row["mean difference (95 %)"], row["median"], row["mean rank"]) for row in table.values()} == {
        ("-", "-", "1.5")
    }
    _, _, rows = overview_table(results[1:], ["a", "b"], "global")
    assert [row[5] for row in rows] == ["+100.00", "+50.00"]


def test_cost_includes_the_closing_step():
    """FedAvg ends with 0.6, which the other method reaches in one seed in round 2, and in the other one after the step."""
    outcomes = {
        "fedavg": outcome_of("accuracy", [[0.5, 0.6], [0.5, 0.6]]),
        "ccvr": outcome_of("accuracy", [[0.4, 0.6], [0.4, 0.5]], closing=[0.7, 0.6]),
        "worse": outcome_of("accuracy", [[0.4, 0.5], [0.4, 0.5]], closing=[0.7, 0.55]),
    }
    assert outcomes["fedavg"]["rounds"] == [1, 2]
    assert outcomes["ccvr"]["rounds"] == [1, 2, 2]
    assert outcomes["ccvr"]["curves"] == [[0.4, 0.6, 0.7], [0.4, 0.5, 0.6]]
    results = FederationResults(FEW, outcomes, {}, "fedavg")
    assert (results.cost("ccvr").rounds, results.cost("ccvr").bytes) == (2, (20 + 25) / 2)
    assert results.cost("worse").rounds is None
