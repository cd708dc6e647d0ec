"""The papers' tables as presets: what they hold, how their runs are carried out, kept, reused and shown."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.federations import blobs
from support.running import call
from support.slow import slow_but

import unskew
from unskew.config.loader import experiment
from unskew.data.federation import ServerData
from unskew.data.load import federation_of
from unskew.errors import ConfigError, DataError
from unskew.methods.registry import method
from unskew.protocol.run_context import PreRunContext
from unskew.reproduction import sweep, tables
from unskew.reproduction.outcomes import experiment_hash, run_identity, stored_outcome
from unskew.reproduction.preset import (
    SCALES,
    Preset,
    PresetCell,
    fill_placeholders,
    load_preset,
    merge_values,
    num_seeds,
    preset_cells,
    preset_names,
)
from unskew.reproduction.settings import settings_note
from unskew.reproduction.study import study_names
from unskew.runs.round_plan import make_round_plan
from unskew.runs.run import run_experiment

FEW = ["FedAvg", "FedCOG"]
SPEC = unskew.ModelSpec(
    torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5), torch.nn.Linear(5, 10)), (1, 8, 8), 10
)


@pytest.mark.parametrize("name", preset_names())
def test_every_run_of_a_preset_is_a_valid_experiment_whose_method_takes_its_settings(name):
    """At every scale; the network and the optimizer, too."""
    federation = blobs([8, 8], shape=(1, 8, 8), classes=10)
    federation = replace(federation, server=ServerData(*federation.test))
    preset = load_preset(name)
    for scale in SCALES:
        found = preset_cells(preset, scale, 0, {})
        assert len(found) == len(preset.rows) * len(preset.columns)
        assert num_seeds(preset, scale) >= 1
        for cell in found:
            assert "$" not in cell.config.method
            if cell.parent is not None:
                assert cell.parent.rounds < cell.config.rounds
                shared = (
                    "data",
                    "partition",
                    "clients",
                    "model",
                    "lr",
                    "momentum",
                    "batch_size",
                    "seed",
                    *(() if cell.config.save_samples else ("local_steps",)),  # images come before local steps
                )
                assert all(getattr(cell.parent, f) == getattr(cell.config, f) for f in shared)
            delayed = cell.config.network.delay != "none"
            for config in filter(None, (cell.config, cell.parent)):
                chosen = method(config.method)
                run = PreRunContext(
                    federation, lambda: SPEC, make_round_plan(config, config.clients or len(federation.clients), chosen),
                    delayed, base_run=config.base_run,
                )  # fmt: skip
                for rule in (*chosen.client, *filter(None, [chosen.server])):
                    rule.check(run)
                assert not (delayed and chosen.sync)
        for value in preset.values:
            stem, slash, _ = value.partition("/")
            if slash and stem in ("consensus", "generalization", "gradients", "updates"):
                assert all(stem in cell.config.diagnose for cell in found), "what is shown is measured"
    assert all(tables.value_format(value.removesuffix("*"))[0] for value in preset.values)
    for value, columns in preset.published.items():
        assert value in preset.values
        assert set(columns) <= set(preset.columns)
        assert all(set(rows) <= set(preset.rows) for rows in columns.values())


FLAIR = {"fedcog/table-2": 405, "fedcog/table-3-flair": 401}


@pytest.mark.parametrize("name", FLAIR)
def test_the_tables_on_flair_have_the_papers_settings(name):
    for cell in preset_cells(load_preset(name), "paper", 0, {}):
        config = cell.config
        assert (config.data, config.model, config.local_steps, config.rounds) == (
            "table:flair",
            "resnet-18",
            10,
            FLAIR[name],
        )
        assert (config.clients, round(config.participation * config.clients)) == (200, 10)
        assert "fedcog" not in config.method or "start_round=400" in config.method


@pytest.mark.parametrize("name", [n for n in preset_names() if n.startswith("fedcog/") and n not in FLAIR])
def test_the_paper_scale_has_the_papers_settings(name):
    for cell in preset_cells(load_preset(name), "paper", 0, {}):
        config = cell.config
        data = next((data for data in ("cifar100", "fashion_mnist") if data.replace("_", "-") in name), "cifar10")
        model = "cnn-b" if data == "cifar100" else "cnn"
        assert (config.data, config.model, config.batch_size, config.lr) == (data, model, 64, 0.01)
        plain = config.method == "fedreg"
        assert (config.momentum, config.weight_decay, config.augment) == (
            0.0 if plain else 0.9,
            0.0 if plain else 1e-5,
            True,
        )
        one_round = ("fedcog/figure-2", "fedcog/figure-5", "fedcog/table-3", "fedcog/table-4")
        assert config.rounds == (51 if name in one_round else 70)
        assert config.local_steps == 400 or name in ("fedcog/figure-5", "fedcog/table-6")
        if "fedcog" in config.method:
            assert "start_round=50" in config.method
            assert "n=256" in config.method or name == "fedcog/table-11"


@pytest.mark.parametrize("name", ["fedcog/figure-2", "fedcog/table-4"])
def test_methods_of_the_one_round_comparison_begin_at_the_same_model(name):
    """After rounds of FedAvg, whatever is remembered beside; so one more round is all that differs."""
    found = [
        c
        for c in preset_cells(load_preset(name), "paper", 0, {})
        if name != "fedcog/table-4" or c.row not in ("FedProx", "MOON")
    ]
    assert len(found) == (8 if name == "fedcog/figure-2" else 4)
    assert {c.parent.rounds for c in found} == {50}
    assert {c.parent.method for c in found} == {"fedcog:start_round=50", "moon:mu=0,projection=0"}
    assert all(c.parent.method == "moon:mu=0,projection=0" for c in found if "moon" in c.config.method)


@pytest.mark.parametrize("name", [n for n in preset_names() if n.startswith("feddle/table-")])
def test_what_the_feddle_paper_says_of_its_runs_holds_at_its_scale(name):
    """Clients, evaluations, searches, and the epochs that are on its grids."""
    users, costs = name.startswith("feddle/table-2"), name == "feddle/table-6"
    for cell in preset_cells(load_preset(name), "paper", 0, {}):
        config = cell.config
        size = (1000, 50) if users or costs else (500, 10)
        assert (config.clients, round(config.participation * config.clients)) == size
        assert f"{size[1]} of {size[0]}" == cell.column or not costs
        assert (config.reserve_test_samples, config.holdout, config.eval_every) == (
            200 if "celeba" in name else 1000,
            0,
            3 if costs else 10,
        )
        if "celeba" in name:
            assert config.partition == "natural:celeb_id,min=5"  # LEAF leaves out people with fewer images
        options = method(config.method).server
        if costs:
            assert config.rounds == 3
        elif cell.row == "Center":
            assert config.rounds * options.epochs in (10, 20, 50)
        else:
            assert config.rounds == 200
            assert getattr(options, "epochs", None) in (None, 1, 10, 20)


PAPERS = {
    "feddle/table-1": ("Table 1", "fashion_mnist", "resnet-18"),
    "feddle/table-1-vit": ("Table 1", "fashion_mnist", "vit-b16"),
    "feddle/table-1-cifar100": ("Table 1", "cifar100", "resnet-18"),
    "feddle/table-1-cifar100-vit": ("Table 1", "cifar100", "vit-b16"),
    "feddle/table-4": ("Table 4", "cifar10", "resnet-18"),
    "feddle/table-4-vit": ("Table 4", "cifar10", "vit-b16"),
    "feddle/figure-5": ("Figure 5", "cifar100", "resnet-18"),
    "feddle/figure-6": ("Figure 6", "cifar10", "resnet-18"),
    "feddle/figure-7": ("Figure 7", "cifar10", "resnet-18"),
    "feddle/figure-8": ("Figure 8", "cifar10", "cnn-c"),
    "feddle/figure-9": ("Figure 9", "cifar10", "cnn-c"),
}


@pytest.mark.parametrize("name", PAPERS)
def test_what_the_captions_of_the_feddle_paper_say(name):
    where, data, model = PAPERS[name]
    preset = load_preset(name)
    assert preset.where.startswith(where)
    assert {(cell.config.data, cell.config.model) for cell in preset_cells(preset, "paper", 0, {})} == {(data, model)}
    if "figure" in name:
        assert list(preset.columns) == ["D 0.1, N 20"]


def test_the_search_and_fine_tuning_take_as_many_steps_where_their_costs_are_compared():
    found = {
        cell.row: method(cell.config.method).server
        for cell in preset_cells(load_preset("feddle/table-6"), "paper", 0, {})
    }
    assert found["Feddle-ID"].epochs == found["Fed+FT"].epochs


def test_the_clients_of_fedals_weigh_alike():
    """At the paper's scale; at the others they are of one size."""
    for name in (name for name in preset_names() if name.startswith("fedals/table-")):
        assert {cell.config.client_weighting for cell in preset_cells(load_preset(name), "paper", 0, {})} == {"uniform"}


@pytest.mark.parametrize("scale", SCALES)
def test_the_costs_of_a_server_say_how_many_clients_report(scale):
    for cell in preset_cells(load_preset("feddle/table-6"), scale, 0, {}):
        config = cell.config
        assert cell.column == f"{round(config.participation * config.clients)} of {config.clients}"
        assert config.rounds == 3


def test_the_experiment_on_gradients_measures_them_at_the_papers_shares():
    for cell, n_syn in zip(preset_cells(load_preset("fedssyn/gradients"), "paper", 0, {}), (0, 287, 4500), strict=True):
        share = float(cell.row.removeprefix("p="))
        assert n_syn / (4500 + n_syn) == pytest.approx(share, abs=5e-5)
        assert f"n_syn={n_syn}" in cell.config.method or n_syn == 0
        assert cell.config.diagnose == ("gradients",)


def test_a_method_that_does_not_fit_is_refused_before_any_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "run_experiment", lambda *args, **options: pytest.fail("something was trained"))
    settings = {"data": "digits", "clients": 4, "rounds": 1, "model": "mlp", "momentum": 0.9}
    preset = Preset(
        name="x/y", title="", where="", reference="", settings=settings, columns={"iid": {"partition": "iid"}},
        rows={"FedAvg": {"method": "fedavg"}, "FedReg": {"method": "fedreg"}},
    )  # fmt: skip
    made = sweep.Sweep(preset, "paper", tmp_path / "runs", tmp_path / "results", {})
    with pytest.raises(ConfigError, match="fedreg supports only plain SGD"):
        list(made.carry_out([0]))


def test_a_folder_of_data_is_for_rows_whose_data_are_files(tmp_path):
    for scale, expected in (("smoke", None), ("paper", str(tmp_path))):
        found = preset_cells(load_preset("fedssyn/table-1"), scale, 0, {"data_path": str(tmp_path)})
        assert {cell.config.data_path for cell in found} == {expected}


def test_the_folder_of_the_servers_data_is_for_rows_whose_server_has_files():
    found = preset_cells(load_preset("feddle/table-5"), "paper", 0, {"server_data_path": "somewhere"})
    with_path = {cell.row for cell in found if cell.config.server_data_path == "somewhere"}
    assert with_path == {"FedDF-OOD", "Feddle-OOD"}
    assert {c.config.server_data for c in found if c.row in with_path} == {"imagenet64:250000"}
    at_cpu = preset_cells(load_preset("feddle/table-5"), "cpu", 0, {"server_data_path": "somewhere"})
    assert {cell.config.server_data_path for cell in at_cpu} == {None}  # drawn shapes have no files


SMALL = {"data": "digits", "clients": 4, "rounds": 1, "local_steps": 1, "model": "mlp", "engine": "inline"}


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_missing_data_stop_only_the_rows_that_need_them(tmp_path, parallel):
    preset = Preset(
        name="x/y", title="", where="", reference="", settings=SMALL,
        columns={"iid": {"partition": "iid"}, "other": {"data": "nowhere.csv", "label": "y"}},
        rows={"OOD": {"method": "feddf", "server_data": "folder:nowhere"}, "FedAvg": {"method": "fedavg"}},
    )  # fmt: skip
    warned = []
    made = sweep.Sweep(preset, "paper", tmp_path / "runs", tmp_path / "results", {}, warn=warned.append)
    found = [(c.row, c.column, c.config.seed) for c, _ in made.carry_out([0, 1], parallel)]
    assert found == [("FedAvg", "iid", 0), ("FedAvg", "iid", 1)]
    assert sorted(text.split(". ")[0] for text in warned) == [
        "Not run without their data: OOD", "Not run without their data: OOD, FedAvg",
    ]  # fmt: skip
    assert all("nowhere" in text for text in warned)


def test_an_outcome_of_a_row_whose_data_are_gone_is_shown(tmp_path):
    def rows(server):
        return {"Shapes": {"method": "feddf:steps=1", "server_data": server}, "FedAvg": {"method": "fedavg"}}

    preset = Preset(
        name="x/y", title="", where="", reference="", settings=SMALL, columns={"iid": {}}, rows=rows("digits")
    )
    made = sweep.Sweep(preset, "paper", tmp_path / "runs", tmp_path / "results", {}, rows=["Shapes"])
    ((cell, _),) = made.carry_out([0])
    assert cell.row == "Shapes"
    moved = made.__class__(preset, "paper", tmp_path / "runs", tmp_path / "results", {})
    moved.federation = lambda config: federation_of_rest(config)

    def federation_of_rest(config):
        if config.server_data is not None:
            raise DataError("It is gone.")
        return federation_of(config.data_spec, config.seed)

    assert [c.row for c, _ in moved.carry_out([0])] == ["Shapes", "FedAvg"]


def test_data_that_all_rows_need_are_an_error(tmp_path):
    preset = Preset(
        name="x/y", title="", where="", reference="", settings={**SMALL, "data": "folder:nowhere"},
        columns={"iid": {}}, rows={"FedAvg": {"method": "fedavg"}, "Center": {"method": "center", "server_data": 9}},
    )  # fmt: skip
    made = sweep.Sweep(preset, "paper", tmp_path / "runs", tmp_path / "results", {})
    with pytest.raises(DataError, match="nowhere"):
        list(made.carry_out([0]))


def test_presets_extend_one_another_by_their_entries():
    base = {"settings": {"lr": 1}, "scales": {"cpu": {"with": {"a": 1}}}, "rows": {"x": {}}}
    over = {"scales": {"cpu": {"settings": {"rounds": 2}}}, "rows": {"y": {}}}
    both = {"settings": {"lr": 1}, "scales": {"cpu": {"with": {"a": 1}, "settings": {"rounds": 2}}}, "rows": {"y": {}}}
    assert merge_values(base, over) == both
    assert fill_placeholders({"method": "fedcog:n=$n1,g_steps=$steps", "lr": 0.1}, {"n1": 8, "steps": 5}) == {
        "method": "fedcog:n=8,g_steps=5",
        "lr": 0.1,
    }


def test_an_outcome_is_found_by_what_the_run_was():
    base = experiment({"lr": 0.1})
    same = experiment({"lr": 0.1, "engine": "inline", "data_path": "somewhere", "checkpoint_every": 3})
    assert experiment_hash(base) == experiment_hash(same)
    others = [experiment({"lr": 0.2}), experiment({"lr": 0.1, "seed": 1}), experiment({"lr": 0.1, "rounds": 51})]
    assert len({experiment_hash(base), *map(experiment_hash, others), experiment_hash(base, others[0])}) == 5
    assert "begins_with" in run_identity(base, others[0])


SHORT = {"engine": "inline", "model": "mlp", "local_steps": 3}


def make(tmp_path, preset="fedcog/table-1", rows=tuple(FEW), columns=("NIID-2",), settings=SHORT, **kw):
    folders = tmp_path / "runs", tmp_path / "results"
    made = sweep.Sweep(load_preset(preset), "smoke", *folders, settings, rows, columns, **kw)
    made.otherwise = True
    return made


def test_a_sweep_reuses_what_is_finished_and_trains_common_rounds_once(tmp_path, monkeypatch):
    made = []
    real = sweep.run_experiment

    def counted(config, **kw):
        made.append(config.method)
        return real(config, **kw)

    monkeypatch.setattr(sweep, "run_experiment", counted)
    first = list(make(tmp_path).carry_out([0]))
    assert made == ["fedcog:start_round=2", "fedavg", "fedcog:start_round=2,n=32,g_steps=5"]
    again = list(make(tmp_path).carry_out([0]))
    assert len(made) == 3
    assert [o for _, o in again] == [o for _, o in first]
    # Run folders may go: the outcomes are enough.
    (tmp_path / "runs").rename(tmp_path / "gone")
    assert [o for _, o in make(tmp_path).found([0, 1])] == [o for _, o in first]


def test_a_branched_row_is_the_run_from_its_first_round(tmp_path):
    ((cell, outcome),) = make(tmp_path, rows=["FedCOG"]).carry_out([0])
    whole = run_experiment(cell.config)
    assert outcome["summary"]["accuracy"] == whole.summary["accuracy"]
    assert outcome["summary"]["bytes_up"] == whole.summary["bytes_up"]
    assert outcome["curve"]["round"] == [1, 2, 3]
    assert outcome["curve"]["accuracy"] == [round(r["accuracy"], 5) for r in whole.history]


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path):
    class Stop:
        def start(self, config, rounds_done):
            pass

        def round(self, row):
            if row["round"] == 3:
                raise KeyboardInterrupt

        def end(self, summary):
            pass

    with pytest.raises(KeyboardInterrupt):
        list(make(tmp_path, follow=lambda title, common: [Stop()] if title.startswith("FedCOG") else []).carry_out([0]))
    assert len(list(make(tmp_path).found([0]))) == 1
    rest = {c.row: o for c, o in make(tmp_path).carry_out([0])}
    fresh = {c.row: o for c, o in make(tmp_path / "other").carry_out([0])}
    assert {r: o["summary"]["accuracy"] for r, o in rest.items()} == {
        r: o["summary"]["accuracy"] for r, o in fresh.items()
    }


def test_a_finished_run_whose_outcome_was_lost_is_kept_again_without_training(tmp_path, monkeypatch):
    ((cell, outcome),) = make(tmp_path, rows=["FedAvg"]).carry_out([0])
    shutil.rmtree(tmp_path / "results")
    monkeypatch.setattr(sweep, "run_experiment", None)
    monkeypatch.setattr(sweep, "resume", None)
    ((_, again),) = make(tmp_path, rows=["FedAvg"]).carry_out([0])
    assert again["summary"] == outcome["summary"]
    assert stored_outcome(tmp_path / "results", cell.config, cell.parent) == again


def test_numbers_of_a_table_are_means_over_seeds_beside_the_papers():
    preset = load_preset("fedcog/table-1")
    accuracies = {"FedAvg": [0.50, 0.60, 0.70], "FedCOG": [0.52, 0.61, 0.73]}
    outcomes = [
        (cell.of_seed(seed), {"summary": {"accuracy": value}, "curve": {}})
        for cell in preset_cells(preset, "paper", 0, {})
        for seed, value in enumerate(accuracies.get(cell.row, ()))
        if cell.column == "NIID-1"
    ]
    avg, cog = tables.table_entries(preset, outcomes)
    assert (avg.mean, avg.std, avg.paired) == (pytest.approx(60), pytest.approx(10), None)
    assert (cog.mean, cog.seeds, cog.published) == (pytest.approx(62), [0, 1, 2], 64.83)
    assert cog.difference == pytest.approx(62 - 64.83)
    assert cog.paired == (pytest.approx(2), pytest.approx(1), 3)
    ((title, header, body),) = tables.table_lines(preset, [avg, cog])
    assert title == "NIID-1: accuracy after the last round, %"
    assert body[1] == ["FedCOG", "62.00 ± 10.54", "0, 1, 2", "+2.00 ± 1.00", "-0.48 to +4.48", "64.83", "-2.83"]
    assert tables.markdown(header, body).count("\n") == 3
    ((_, _, body),) = tables.table_lines(preset, [avg, cog], whole=True)
    assert ["FedGen", "not run", "", "", "", "62.45", ""] in body
    assert [row[0] for row in body][:2] == ["FedAvg", "FedCOG"]
    assert "FedCOG (authors)" not in [row[0] for row in body]
    # Two of FedAvg's seeds are missing: one difference has no spread, and the table says of how many it is.
    fewer = [(cell, outcome) for cell, outcome in outcomes if cell.row == "FedCOG" or cell.config.seed == 1]
    ((_, _, body),) = tables.table_lines(preset, tables.table_entries(preset, fewer))
    assert body[1][3] == "+1.00 (1 of 3)"


def test_rounds_and_traffic_are_those_to_the_tables_own_target():
    """A run is the same whatever its target was, so a table of another target reads them off its curve."""
    preset = load_preset("fedssyn/subset")

    def found(target, told):
        outcomes = []
        for row, accuracy in (("FedAvg", [0.1, 0.1, 0.3, 0.2]), ("SCAFFOLD", [0.1, 0.3, 0.5, 0.5])):
            curve = {"round": [1, 2, 4, 5], "bytes": [10, 20, 40, 50], "accuracy": accuracy}
            config = experiment({"seed": 0, "target": target})
            outcomes.append(
                (
                    PresetCell(row, "α=0.1", config),
                    {"summary": {"bytes_up": 30, "bytes_down": 20, **told}, "curve": curve},
                )
            )
        made = tables.table_entries(preset, outcomes)
        return {(e.value, e.row): e.mean for e in made if e.value != "accuracy"}

    other = {"target": 0.2, "rounds_to_target": 1, "bytes_to_target": 10}
    for told in (other, {}):
        assert found(0.3, told) == {
            ("rounds_to_target", "FedAvg"): 4, ("rounds_to_target", "SCAFFOLD"): 2, ("saving", "SCAFFOLD"): 50.0,
        }  # fmt: skip
        # FedAvg does not get there, so what it spent in all is the least it would have needed.
        assert found(0.4, told) == {("rounds_to_target", "SCAFFOLD"): 4, ("saving", "SCAFFOLD"): pytest.approx(20.0)}
    assert found(0.2, other)[("rounds_to_target", "FedAvg")] == 1


def test_what_is_called_a_mean_over_rounds_is_none_of_the_last_round():
    """A summary repeats the coefficients and the cosine of the last round."""
    curve = {"round": [10, 20, 30], "accuracy": [0.1, 0.2, 0.3], "coefficients/negative": [4, None, 7]}
    cell = PresetCell("Feddle-ID", "D 0.1, N 20", experiment({"seed": 0}))
    outcome = {"summary": {"accuracy": 0.3, "coefficients/negative": 7}, "curve": curve}
    found = tables.table_entries(load_preset("feddle/figure-6"), [(cell, outcome)])
    assert {entry.value: entry.mean for entry in found} == {"coefficients/negative": 5.5}
    curve = {"surrogate/cosine": [0.5, 0.0, 0.1], "accuracy": [0.1, 0.2, 0.3]}
    outcome = {"summary": {"accuracy": 0.3, "surrogate/cosine": 0.1}, "curve": curve}
    found = tables.table_entries(load_preset("feddle/figure-7"), [(cell, outcome)])
    assert {entry.value: entry.mean for entry in found} == {"surrogate/cosine": pytest.approx(0.2), "accuracy": 30}


def test_the_command_lists_runs_and_shows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = json.loads(call(capsys, "reproduce", "--list", "--json").out)
    assert [row["name"] for row in listed] == [*preset_names(), *study_names()]
    real = federation_of

    def offline(spec, seed):
        if spec.data == "cifar10":
            raise DataError("There is no network.")
        return real(spec, seed)

    monkeypatch.setattr("unskew.comparison.single_run.federation_of", offline)
    args = ("reproduce", "fedcog/table-1", "--row", "FedAvg", "--column", "NIID-1", "--engine", "inline")
    reported = []
    monkeypatch.setattr("unskew.cli.reproduce.report_after_runs", lambda console, *what: reported.append(what))
    outcome = call(capsys, *args)
    assert outcome.code == 0
    (((folder,), page),) = reported
    assert (folder / "summary.json").is_file()
    assert page == Path("runs/reproduce/fedcog-table-1-smoke.html")
    assert "uses digits instead" in outcome.out
    assert "Scale smoke is not the paper's setting: data digits (paper: cifar10); " in outcome.out
    assert "paper (cifar10)" in outcome.out
    assert "64.36" in outcome.out
    assert "ours minus paper" not in outcome.out, "the paper's number is of other data"
    assert len((tmp_path / "results" / "runs" / "fedcog" / "table-1.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr("unskew.comparison.single_run.federation_of", None)  # showing needs no data
    shown = call(capsys, *args, "--show", "--json")
    assert len(reported) == 1, "nothing was run, so there is nothing new to report on"
    found = json.loads(shown.out[shown.out.index("{") :])
    (entry,) = found["entries"]
    assert (entry["row"], entry["seeds"]) == ("FedAvg", [0])
    assert (entry["published"], entry["setting"], entry["difference"]) == (64.36, "cifar10", None)
    assert "model logistic (paper: cnn)" in found["settings"] or "data digits" in found["settings"]


@pytest.mark.parametrize(
    ("name", "scale", "notes", "published", "difference"),
    [
        (
            "fedssyn/table-a1",
            "cpu",
            ("data digits (paper: cifar100)", "model mlp", "target 0.8, 0.9 (paper: 0.3, 0.4)"),
            "paper (cifar100)",
            0,
        ),
        ("feddle/table-4-vit", "cpu", ("model cnn (paper: vit-b16)",), "paper", 0),
        ("fedcog/table-1", "cpu", ("rounds 33 (paper: 70)",), "paper", 1),
        ("fedcog/table-1", "paper", (), "paper", 1),
    ],
)
def test_a_table_states_what_is_not_the_papers_and_subtracts_only_numbers_of_the_same_data(
    name, scale, notes, published, difference
):
    preset = load_preset(name)
    some = [c for c in preset_cells(preset, scale, 0, {}) if c.row in list(preset.rows)[:2]]
    some = [c for c in some if c.column in list(preset.columns)[:2]]
    outcomes = [(c, {"summary": dict.fromkeys(preset.values, 1), "curve": {"round": [], "bytes": []}}) for c in some]
    note = settings_note(preset, scale, some)
    assert all(text in note for text in notes)
    assert bool(note) == bool(notes)
    if name == "fedssyn/table-a1":
        outcomes = [(c, {**o, "summary": {**o["summary"], "target": c.config.target}}) for c, o in outcomes]
    table = [e for e in tables.table_entries(preset, outcomes) if e.value == preset.values[0] and e.against is None]
    assert len(table) == len(some)
    theirs = preset.published[preset.values[0]]
    known = [e for e in table if e.row in theirs[e.column]]
    assert known
    assert all(e.published is not None and (e.difference is not None) == difference for e in known)
    header = {title for _, header, _ in tables.table_lines(preset, table, whole=True) for title in header}
    assert ([title for title in header if title.startswith("paper")], "ours minus paper" in header) == (
        [published], difference,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "numbers"),
    [
        (["fedcog/table-1"], ["64.36", "64.83"]),
        (["fedcog/table-1", "--row", "FedAvg"], ["64.36"]),
        (["fedals/table-2-traffic"], ["2.3440"]),
    ],
)
def test_without_outcomes_the_papers_numbers_are_shown(capsys, tmp_path, args, numbers):
    shown = call(capsys, "reproduce", *args, "--show", "--results", tmp_path)
    assert (shown.code, "There are no outcomes yet." in shown.out) == (0, True)
    assert all(number in shown.out for number in numbers)
    assert ("FedProx" in shown.out) == (args == ["fedcog/table-1"])


@pytest.mark.parametrize("name", ["fedcog/figure-6", "fedcog/figure-6-fashion-mnist"])
def test_the_curves_of_a_table_are_those_of_its_runs(name):
    preset = load_preset(name)
    table = load_preset(name.replace("figure-6", "table-1"))
    assert preset.curves is True
    for scale in SCALES:
        assert [c.config for c in preset_cells(preset, scale, 0, {})] == [
            c.config for c in preset_cells(table, scale, 0, {})
        ]


def test_rows_are_paired_with_the_row_without_images():
    preset = load_preset("fedssyn/table-1")
    rounds = {"SCAFFOLD": [5, 8, 11], "SCAFFOLD + Fedssyn": [3, 3, 3], "FedAvg": [9, 9, None]}
    outcomes = [
        (cell.of_seed(seed), {"summary": {"rounds_to_target": found, "target": 0.8}, "curve": {}})
        for cell in preset_cells(preset, "cpu", 0, {})
        for seed, found in enumerate(rounds.get(cell.row, ()))
        if cell.column == "N=10, C=1, α=0.01"
    ]
    table = [e for e in tables.table_entries(preset, outcomes) if e.value == "rounds_to_target"]
    (pair,) = [e for e in table if e.against is not None]
    low, high = -5 - 4.302652729696142 * 3 / 3**0.5, -5 + 4.302652729696142 * 3 / 3**0.5  # Student's t, two degrees
    assert (pair.row, pair.against, pair.mean, pair.std) == ("SCAFFOLD + Fedssyn", "SCAFFOLD", -5, 3)
    assert pair.interval == pytest.approx((low, high))
    *_, (title, _, body) = tables.table_lines(preset, table)
    assert title.endswith("differences")
    assert body == [["SCAFFOLD + Fedssyn − SCAFFOLD", "0, 1, 2", "-5.0 ± 3.0", "-12.5 to +2.5"]]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fedcog/table-33"], "no preset"),
        (["fedcog/table-1", "--scale", "big"], "scale"),
        (["fedcog/table-1", "--row", "FedAgv"], "has no row"),
        (["fedcog/table-1", "--seeds", "a,b"], "is not a list of seeds"),
        (["fedcog/table-1", "--seeds", "1,1"], "is not a list of seeds"),
        (["fedcog/table-1", "--data-path", "nowhere"], "no file or folder"),
        (["fedcog/table-1", "--minutes", "0"], "use a number above 0"),
        (["fedssyn/quadratic", "--minutes", "1"], "--minutes"),
    ],
)
def test_reproduce_rejects_invalid_arguments(capsys, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    outcome = call(capsys, "reproduce", *args)
    assert outcome.code == 2
    assert words.lower() in outcome.err.lower()
    assert list(tmp_path.iterdir()) == []


def test_a_preset_of_another_shape_is_refused(monkeypatch):
    from unskew.reproduction import preset

    monkeypatch.setattr(preset, "read_yaml", lambda name: {"title": "x"})
    with pytest.raises(ConfigError, match="is not valid"):
        load_preset("fedcog/table-1")


FIGURES = [("fedals/figure-1", None, 6), ("fedcog/figure-3b", ["FedAvg"], 1), ("feddle/figure-6", None, 3)]


@pytest.mark.parametrize(("name", "rows", "size"), slow_but([FIGURES[1]], FIGURES))
def test_tables_can_be_drawn(tmp_path, name, rows, size):
    from PIL import Image

    from unskew.reproduction.figures import draw_curves, draw_points

    made = make(tmp_path, name, rows, None, {"engine": "inline"})
    found = list(made.carry_out([0]))
    entries = tables.table_entries(made.preset, found)
    assert len({e.value for e in entries}) == size
    path = tmp_path / "figure.png"
    if made.preset.curves:
        draw_curves(made.preset, found, path)
    else:
        draw_points(made.preset, entries, path)
    assert Image.open(path).width > 300


def test_curves_over_traffic_end_where_the_table_says(tmp_path, monkeypatch):
    from unskew.reproduction import figures

    made = make(tmp_path, "fedals/long", ["FedAvg", "FedALS"], ["iid"], {"engine": "inline"})
    found = list(made.carry_out([0]))
    drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    figures.draw_curves(made.preset, found, tmp_path / "figure.png")
    (axis,) = drawn[0].axes
    sent = {e.row: e.mean for e in tables.table_entries(made.preset, found) if e.value == "bytes_per_client"}
    assert {line.get_label(): line.get_xdata()[-1] for line in axis.lines} == pytest.approx(sent)
    assert sent["FedALS"] < sent["FedAvg"]


def test_the_least_and_the_largest_are_a_band_about_the_mean(tmp_path, monkeypatch):
    from unskew.reproduction import figures

    preset = load_preset("feddle/figure-2")
    curve = {
        "round": [2, 4],
        "updates/cosine": [0.1, 0.2],
        "updates/cosine_min": [-0.5, 0.0],
        "updates/cosine_max": [0.3, 0.4],
        "updates/cosine_across_rounds": [0.6, 0.7],
    }
    summary = {name: values[-1] for name, values in curve.items()}
    drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    cells = [
        (PresetCell(row, "CIFAR-10", experiment({})), {"summary": summary, "curve": curve}) for row in ("iid", "D 1")
    ]
    figures.draw_curves(preset, cells, tmp_path / "figure.png")
    individual, across = drawn[0].axes
    assert [axis.get_title().split()[1] for axis in (individual, across)] == ["mean", "cosine"]
    for band in individual.collections:
        corners = band.get_paths()[0].vertices
        assert {tuple(c) for c in corners} == {(2, -0.5), (4, 0.0), (4, 0.4), (2, 0.3)}
    assert [line.get_ydata().tolist() for line in across.lines] == [[0.6, 0.7]] * 2


def test_a_row_that_lacks_a_value_keeps_the_colors_of_the_others_and_its_place_in_the_legend(tmp_path, monkeypatch):
    from unskew.reproduction import figures

    preset = load_preset("fedssyn/gradients")
    both = {"round": [2, 4], "gradients/zeta2": [1.0, 2.0], "gradients/zeta2_real": [3.0, 4.0], "accuracy": [0.5, 0.6]}
    curves = {"p=0": {"round": [2, 4], "accuracy": [0.5, 0.6]}, "p=0.06": both, "p=0.5": both}
    drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    figures.draw_curves(
        preset,
        [(PresetCell(row, "α=0.1", experiment({})), {"summary": {}, "curve": curve}) for row, curve in curves.items()],
        tmp_path / "figure.png",
    )
    panels = [{line.get_label(): line for line in axis.lines} for axis in drawn[0].axes]
    assert [list(panel) for panel in panels] == [["p=0.06", "p=0.5"], ["p=0.06", "p=0.5"], ["p=0", "p=0.06", "p=0.5"]]
    for row in curves:
        assert len({(p[row].get_color(), p[row].get_marker()) for p in panels if row in p}) == 1
    legend = drawn[0].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == list(curves)
    assert [mark.get_color() for mark in legend.legend_handles] == [panels[-1][row].get_color() for row in curves]


def test_counted_parameters_are_scaled_to_the_papers_steps():
    summary = {"bytes_up": 4_000, "buffer_bytes_up": 400, "bytes_down": 8_000, "buffer_bytes_down": 800}
    assert tables.value_of({**summary, "clients": 2, "rounds": 100}, "scalars_per_client") == (3600 + 7200) / 4 / 2 * 40


@pytest.mark.parametrize("change", [{"summary": {"accuracy": "x"}}, {"summary": []}, {"curve": 3}])
def test_an_outcome_with_other_values_than_unskews_is_a_sentence(tmp_path, capsys, change):
    stored = (Path(__file__).parents[2] / "results" / "runs" / "trust" / "private.jsonl").read_text()
    lines = [json.dumps({**json.loads(line), **change}) + "\n" for line in stored.splitlines()]
    (tmp_path / "private.jsonl").write_text("".join(lines))
    outcome = call(capsys, "reproduce", "trust/private", "--scale", "cpu", "--show", "--results", tmp_path)
    assert (outcome.code, "is corrupted" in outcome.err) == (2, True), outcome
