"""The report: its numbers are those of the run folders, its names are text, and it loads nothing."""

import base64
import hashlib
import io
import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy import stats
from support.html_page import Page
from support.named import CLASSES, CLIENTS, federation
from support.running import TINY, call

import unskew
from unskew.comparison.significance import holm
from unskew.errors import CheckpointError, ConfigError
from unskew.measurements.label_skew import label_skew_metrics
from unskew.plots.curves import prevalence
from unskew.reporting.label_distribution import distribution_of, heat_map, skew_statistics
from unskew.reporting.page import csp_hash, escape_script
from unskew.reporting.run_description import method_details
from unskew.reporting.run_groups import group_runs
from unskew.reporting.run_reader import read_runs
from unskew.reporting.tables import Cell, Table
from unskew.tasks.intervals import interval95

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def page(compared, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for module in ("page", "report"):
            patch.setattr(f"unskew.reporting.{module}.plotly_script", lambda: 'var drawn = "</script>";\r\n')
        return Page(unskew.report(compared[1], tmp_path_factory.mktemp("page") / "a" / "report.html").read_text())


def summaries(folder, method):
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{method}/seed-*/summary.json"))]


# ---- numbers ----------------------------------------------------------------------------------------------------------


def test_every_run_is_there_with_the_figures_of_its_summary(compared, page):
    folder, _ = compared
    wanted = [s for method in ("fedprox-mu=0.5", "fedavg", "fedexp+ft") for s in summaries(folder, method)]
    for title, key, factor in (
        ("seed", "seed", 1),
        ("last round, %", "accuracy", 100),
        ("best round, %", "best_accuracy", 100),
        ("loss", "loss", 1),
        ("clients, mean %", "client_accuracy_mean", 100),
        ("worst decile, %", "client_accuracy_worst_decile", 100),
        ("MB up", "bytes_up", 1e-6),
        ("seconds", "seconds", 1),
    ):
        assert page.column("runs", title) == pytest.approx([factor * s[key] for s in wanted], rel=1e-12), title


def test_the_comparison_is_that_of_comparison_json(compared, page):
    rows = json.loads((compared[0] / "comparison.json").read_text())
    assert page.column("comparison", "method") == [row["method"] for row in rows]
    assert page.column("comparison", "last round, %") == [100 * row["accuracy"] for row in rows]
    assert page.column("comparison", "rounds to 50.0 %") == [
        f"{row['seeds_reaching_target']} of 2 seeds" if row["rounds_to_target"] is None else row["rounds_to_target"]
        for row in rows
    ]
    personal = [100 * row["personal_accuracy_mean"] if row["personal_accuracy_mean"] else "-" for row in rows]
    assert page.column("comparison", "personal, mean %") == personal


def test_columns_without_any_value_are_not_on_the_page():
    rows = [[Cell("fedavg"), Cell("-"), Cell("1.0", 1.0)], [Cell("local"), Cell(""), Cell("-")]]
    table = Table("t", "caption", ["method", "Gini", "mean"], rows)
    assert table.columns == ["method", "mean"]
    assert [[cell.text for cell in row] for row in table.rows] == [["fedavg", "1.0"], ["local", "-"]]


def test_differences_are_paired_by_seed(compared, page):
    mine, base = (summaries(compared[0], name) for name in ("fedavg", "fedprox-mu=0.5"))
    values = [100 * (a["accuracy"] - b["accuracy"]) for a, b in zip(mine, base, strict=True)]
    pairs = list(zip(page.column("differences", "method"), page.column("differences", "minus"), strict=True))
    assert len(pairs) == 6
    at = pairs.index(("fedavg", "fedprox:mu=0.5"))
    assert page.column("differences", "last: accuracy, points")[at] == pytest.approx(np.mean(values))
    low, high = interval95(values)
    assert page.column("differences", "last: 95 % interval")[at] == f"{low:+.1f} to {high:+.1f}"  # both ends in copies
    other = [s["accuracy"] - b["accuracy"] for s, b in zip(summaries(compared[0], "fedexp+ft"), base, strict=True)]
    p = holm([stats.ttest_1samp(differences, 0).pvalue for differences in (values, other)])
    assert page.column("differences", "last: significant?")[at] == pytest.approx(p[0])


def test_curves_are_means_over_seeds(compared, page):
    (part,) = page.data["parts"]
    histories = compared[1].histories["fedavg"]
    line = part["curves"]["lines"]["fedavg"]["accuracy"]
    values = 100 * np.array([[row["accuracy"] for row in history] for history in histories])
    np.testing.assert_allclose(line["mean"], values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(line["std"], values.std(0, ddof=1), rtol=1e-5, atol=1e-9)
    assert line["round"] == [1, 2, 3]
    assert line["mb"] == pytest.approx([(row["bytes_up"] + row["bytes_down"]) / 1e6 for row in histories[0]], rel=1e-5)
    assert part["curves"]["target"] == 50
    assert part["measured"]["lines"]["fedexp_eta"]["fedexp+ft"]["mean"]


def test_who_holds_what_is_what_the_federation_holds(page):
    fed = federation()
    (held,) = page.data["parts"][0]["holdings"]
    counts = fed.class_counts()
    assert held["map"]["rows"] == list(CLIENTS)
    assert held["map"]["classes"] == list(CLASSES)
    assert held["map"]["counts"] == counts.tolist()
    wanted = label_skew_metrics(fed, range(4))
    found = skew_statistics(counts.astype(float))
    assert found["distance of a client's labels from all (total variation), mean"] == pytest.approx(
        wanted["label_distance_mean"]
    )
    assert found["effective number of classes per client, mean"] == pytest.approx(wanted["effective_classes"])
    assert held["statistics"]["effective number of clients"] == pytest.approx(wanted["effective_clients"], rel=1e-5)


def test_many_clients_and_classes_become_few_rows_and_columns():
    counts = np.zeros((2500, 200))
    counts[np.arange(2500), np.arange(2500) % 200] = 4
    shown = heat_map(counts, [str(k) for k in range(2500)], [])
    assert np.shape(shown["counts"]) == (100, 100)
    assert len(shown["rows"]) == 100
    assert sum(map(sum, shown["counts"])) * 25 == pytest.approx(counts.sum(), rel=0.01)  # they are rounded
    assert shown["rows"][0] == "mostly 0 (25 clients)"
    assert "2500 clients in 100 rows" in shown["note"]


def test_two_classes_are_shown_as_prevalence_with_its_interval():
    """The ends solve ``(p - share)^2 = z^2 p (1 - p) / n``, from which Wilson's interval is derived."""
    counts = np.array([[92, 8], [85, 15], [0, 0], [40, 0]])
    rare, (share, low, high), pooled = prevalence(counts)
    assert (rare, pooled) == (1, pytest.approx(23 / 240))
    assert share.tolist() == pytest.approx([0.08, 0.15, 0, 0])
    for end in (low[:2], high[:2]):
        n = counts[:2].sum(1)
        assert (end - share[:2]) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / n)
    assert np.isnan([low[2], high[2]]).all()
    rows = [
        {"client": k, "samples": int(row.sum()), "class_counts": {"0": int(row[0]), "1": int(row[1])}}
        for k, row in enumerate(counts)
    ]
    run = SimpleNamespace(clients=rows, summary={"seed": 0, "partition_hash": ""}, about={"classes": ["no", "yes"]})
    shown = distribution_of(run)["prevalence"]
    assert (shown["title"], shown["share"][1], shown["counts"]) == ("yes", 0.15, [100, 100, 0, 40])
    rows[0]["samples"] = 90  # two labels of a multi-label task: some samples have both
    assert "prevalence" not in distribution_of(run)


def test_fairness_and_personal_models(compared, page):
    found = dict(zip(page.column("fairness", "method"), page.column("fairness", "Gini"), strict=True))
    rows = [json.loads(line) for line in (compared[0] / "fedavg/seed-0/clients.jsonl").read_text().splitlines()]
    scores = [[row["accuracy"] for row in rows]]
    scores += [
        [json.loads(x)["accuracy"] for x in (compared[0] / "fedavg/seed-1/clients.jsonl").read_text().splitlines()]
    ]
    by_pairs = [np.abs(np.subtract.outer(v, v)).mean() / (2 * np.mean(v)) for v in scores]
    assert found["fedavg"] == pytest.approx(np.mean(by_pairs))
    assert page.column("fairness", "model").count("personal") == 1
    assert set(page.data["parts"][0]["boxes"]) == {"accuracy", "loss", "personal_accuracy", "personal_loss"}


# ---- the file ---------------------------------------------------------------------------------------------------------


def test_it_loads_nothing_and_runs_only_what_its_policy_names(page):
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert rules["default-src"] == "'none'"
    running = [text for kind, text in page.scripts if kind != "application/json"]
    assert len(running) == 2
    for texts, rule in ((running, "script-src"), (page.styles, "style-src")):
        for text in texts:
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in rules[rule].split()
        assert "unsafe" not in rules[rule]
    assert len(rules["script-src"].split()) == 2
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "base")
        assert not any(name == "style" or name.startswith("on") for name in attrs)
        assert all(attrs[name].startswith(("#", "data:")) for name in ("src", "href") if name in attrs)


@pytest.mark.fuzz
def test_names_from_data_are_text(page):
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert not [tag for tag, _ in page.tags if tag in ("img", "b")]
    raw = next(text for kind, text in page.scripts if kind == "application/json")
    assert "<" not in raw
    assert escape_script("a</SCRIPT>\r\n") == "a\\x3c/SCRIPT>\n"
    assert csp_hash("") == "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"


@pytest.mark.fuzz
def test_a_forged_method_is_text_and_its_code_stays_alone(compared, tmp_path, light, monkeypatch):
    folder = tmp_path / "<b>run"
    shutil.copytree(compared[0] / "fedavg" / "seed-0", folder)
    summary = json.loads((folder / "summary.json").read_text())
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (folder / "summary.json").write_text(json.dumps({**summary, "method": "evil.Method:x=<img src=y>"}))
    page = Page(unskew.report(folder, tmp_path / "r.html").read_text())
    assert not [tag for tag, _ in page.tags if tag in ("img", "b")]
    assert "evil.Method:x=<img src=y>" in page.column("runs", "method")
    assert "evil" not in sys.modules
    assert [fact.name for fact in method_details("evil.Method+fedprox:mu=1")] == ["evil.Method", "fedprox"]


def test_a_title_and_the_units_are_text(compared, tmp_path, light):
    page = Page(unskew.report(compared[0], tmp_path / "r.html", title="A <b> title").read_text())
    assert page.texts.count("A <b> title") == 2, "of the window, and of the page"
    assert any("millions of bytes" in text for text in page.texts)


def test_it_says_how_it_was_made_and_how_to_repeat_it(compared, page):
    told = "".join(page.texts)
    assert f"unskew compare fedprox:mu=0.5 fedavg fedexp+ft --seeds 0,1 --config {compared[0]}" in told
    assert "Each client" not in told or "theta" in told
    assert "arXiv:1812.06127" in told
    assert "theta" in told  # the formula of FedProx
    assert unskew.__version__ in told
    for text in ("lr: 0.1", "inline", "finished on "):
        assert text in told


@pytest.mark.slow
def test_made_images_stand_beside_real_ones_and_layers_beside_their_periods(tmp_path, capsys, light):
    """Of a comparison whose other method made nothing; without the data, the page says that it has no real images."""
    quick = {"model": "mlp", "clients": 2, "rounds": 2, "local_steps": 2, "engine": "inline", "max_train_samples": 60}
    made = "fedssyn:generator=vae-small,epochs=1,n_syn=6"
    folder = unskew.compare(methods=[made, "fedals:alpha=2"], seeds=1, out=tmp_path / "c", **quick).folder
    text = call(capsys, "report", folder).out
    assert "real images of clients; unskew report --no-images omits them" in " ".join(text.split())
    page = Page((folder / "report.html").read_text())
    images = [attrs for tag, attrs in page.tags if tag == "img" and "images of" in attrs["alt"]]
    assert [one["alt"] for one in images[:2]] == ["real images of 0", "generated images of 0"]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(images[0]["src"].partition(",")[2]))))
    fed = unskew.load_federation("digits", clients=2, max_train_samples=60)
    who = next(k for k in (0, 1) if f"client {k}, seed 0" in page.texts)
    client = fed.clients[who]
    np.testing.assert_array_equal(pixels[:, :8], client.x[client.y == 0][0, 0].numpy())
    assert len(images[0]["src"]) < 3000
    assert sum("beside real ones" in text for text in page.texts) == 1
    assert page.column("periods of fedals:alpha=2", "averaged every, local steps") == [4, 4, 2]
    dots = page.data["parts"][0]["measured"]["dots"]["fedals_averaged"]["fedals:alpha=2"]
    assert list(zip(dots["round"], dots["value"], strict=True)) == [(1, 3), (2, 1), (2, 2), (2, 3)]
    bare = unskew.report(folder, tmp_path / "bare.html", images=False).read_text()
    assert not [tag for tag, _ in Page(bare).tags if tag == "img"]
    path = folder / "fedssyn-generator=vae-small,epochs=1,n_syn=6" / "seed-0" / "config.yaml"
    path.write_text(path.read_text().replace("partition: dirichlet:0.1", "partition: iid"))
    told = Page(unskew.report(folder).read_text())
    assert any("the data of the run are not at hand" in text for text in told.texts)
    assert "real images of 0" not in str(told.tags)


def test_warnings_are_kept_and_shown(tmp_path, light):
    options = {"model": "logistic", "clients": 4, "rounds": 2, "local_steps": 2, "engine": "inline"}
    options |= {"eval_clients": 0, "method": "ft"}
    with pytest.warns(UserWarning, match="no personal metrics are reported"):
        result = unskew.run(**options, out=tmp_path / "run")
    kept = (tmp_path / "run" / "warnings.txt").read_text().splitlines()
    page = Page(unskew.report(result).read_text())
    assert (tmp_path / "run" / "report.html").is_file()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ after round 0: ft personalizes only evaluated clients; .*", kept[0]
    )
    assert any(kept[0].partition(": ")[2] in text for text in page.texts)


@pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed")
def test_twelve_long_runs_take_less_than_six_megabytes(compared, tmp_path):
    source = compared[0] / "fedavg" / "seed-0"
    rows = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
    long = "".join(json.dumps({**rows[0], "round": number + 1}) + "\n" for number in range(400))
    client = json.loads((source / "clients.jsonl").read_text().splitlines()[0])
    clients = "".join(json.dumps({**client, "client": k, "name": f"client {k}"}) + "\n" for k in range(200))
    for number in range(12):
        folder = tmp_path / "runs" / str(number)
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("checkpoints"))
        (folder / "metrics.jsonl").write_text(long)
        (folder / "clients.jsonl").write_text(clients)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "method": f"fedprox:mu={number + 1}"}))
    file = unskew.report(tmp_path / "runs")
    assert file.stat().st_size < 6_000_000
    assert b"Plotly" in file.read_bytes()


# ---- folders ----------------------------------------------------------------------------------------------------------


METRICS = (
    '{"round": 1, "accuracy": 0.5, "loss": 1, "bytes_up": 8, "bytes_down": 8, "setup_seconds": 0, "train_seconds": 0, '
    '"seconds": 1.5}\n'
)


@pytest.fixture
def run(compared, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(compared[0] / "fedavg" / "seed-0", folder)
    return folder


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("file", "content", "error", "sentence"),
    [
        ("summary.json", "{", CheckpointError, "summary.json is corrupted"),
        ("summary.json", "[]", CheckpointError, "it must be an object"),
        ("summary.json", '{"method": "fedavg"}', CheckpointError, "summary.json is corrupted: data: Field required"),
        ("metrics.jsonl", "", CheckpointError, "lacks rounds"),
        ("metrics.jsonl", METRICS.replace("1.5", "null"), CheckpointError, "their traffic or times"),
        ("metrics.jsonl", METRICS.replace("1.5", "1" + "0" * 400), CheckpointError, "metrics.jsonl is corrupted"),
        ("config.yaml", "1: 2", ConfigError, "not the configuration of a run"),
        ("clients.jsonl", '{"client": 0, "samples": -1}\n', CheckpointError, "Remove it"),
        ("metrics.jsonl", "x\n", CheckpointError, "metrics.jsonl is corrupted"),
        ("clients.jsonl", '{"client": 0}\n', CheckpointError, "clients.jsonl is corrupted. Remove it"),
        ("clients.jsonl", '{"client": 0, "samples": 1, "class_counts": {"x": 1}}\n', CheckpointError, "Remove it"),
        ("clients.jsonl", '{"client": 0, "samples": 1, "events": "x"}\n', CheckpointError, "Remove it"),
        ("about.json", '{"classes": [1]}', CheckpointError, "about.json is corrupted"),
        ("config.yaml", "a: [", ConfigError, "not a valid YAML file"),
        ("summary.json", None, ConfigError, "is not finished; continue with: unskew resume"),
        ("config.yaml", None, ConfigError, "contains no finished run"),
    ],
)
def test_a_damaged_or_foreign_folder_is_a_sentence(run, light, file, content, error, sentence):
    (run / file).unlink() if content is None else (run / file).write_text(content)
    with pytest.raises(error, match=re.escape(sentence)):
        unskew.report(run)
    assert not (run / "report.html").exists()


def test_what_cannot_be_reported_on_is_a_sentence(run, light, tmp_path):
    memory = unskew.run(model="logistic", clients=2, rounds=1, local_steps=1, engine="inline")
    (tmp_path / "other.html").write_text("<html>mine</html>")
    for args, sentence in (
        ((tmp_path / "nowhere",), "does not exist"),
        ((run / "config.yaml",), "is a file, not a folder"),
        ((memory,), "Run it with out="),
        (([],), "Name at least one"),
        ((3,), "not 3"),
        ((run, tmp_path / "other.html"), "exists and is not a report"),
        ((run, tmp_path / "report.pdf"), "must end with .html"),
        ((run, tmp_path), "is a folder"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            unskew.report(*args)
    assert (tmp_path / "other.html").read_text() == "<html>mine</html>"
    assert unskew.report(run) == unskew.report(run) == run / "report.html"  # an older report is replaced


def test_older_folders_have_a_report_that_says_what_is_missing(run, light):
    (run / "about.json").unlink()
    rows = [json.loads(line) for line in (run / "clients.jsonl").read_text().splitlines()]
    without = [{key: value for key, value in row.items() if key != "class_counts"} for row in rows]
    (run / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without))
    assert "do not say how many samples of each" in "".join(Page(unskew.report(run).read_text()).texts)
    (run / "clients.jsonl").unlink()
    told = "".join(Page(unskew.report(run).read_text()).texts)
    assert "do not say which samples each client has" in told
    assert "an earlier version made them" in told


def test_of_language_models_losses_count(run, light):
    summary = json.loads((run / "summary.json").read_text())
    told = {"objective": "loss", "perplexity": 3.5, "best_loss": 1.25, "best_perplexity": 3.0}
    (run / "summary.json").write_text(json.dumps(summary | told))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps({**row, "perplexity": 4.0}) + "\n" for row in rows))
    page = Page(unskew.report(run).read_text())
    assert page.column("comparison", "perplexity") == [3.5]
    assert page.column("comparison", "best round") == [1.25]
    assert list(page.data["parts"][0]["curves"]["metric_titles"]) == ["loss", "accuracy", "perplexity"]
    assert page.data["parts"][0]["curves"]["target"] == 1.39  # 1.25 / 0.9
    assert "target" in page.tables


def test_runs_are_sorted_into_what_may_be_compared(run, tmp_path):
    folders = [run]

    def another(name, **changes):
        folders.append(tmp_path / name)
        shutil.copytree(run, folders[-1])
        config = yaml.safe_load((run / "config.yaml").read_text())
        summary = json.loads((run / "summary.json").read_text())
        (folders[-1] / "config.yaml").write_text(yaml.safe_dump({**config, **changes}))
        (folders[-1] / "summary.json").write_text(
            json.dumps(summary | {k: changes[k] for k in changes if k in summary})
        )

    another("lr", lr=0.5)
    another("seed", seed=1)
    another("same")
    another("data", data="digits", clients=7)
    another("label", label="outcome")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "config.yaml").touch()
    runs, notes = read_runs([tmp_path, run])
    assert len(runs) == 6
    assert notes == [f"{tmp_path / 'open'} is not finished and is left out."]
    parts, notes = group_runs(runs)
    assert [len(part.series) for part in parts] == [1, 1, 2]
    assert [part.title.rpartition(", ")[2] for part in parts[1:]] == ["label=outcome", "label=none"]
    two = parts[2].series
    assert sorted(one.label for one in two) == ["fedavg (lr=0.1)", "fedavg (lr=0.5)"]
    assert sorted(len(one.runs) for one in two) == [1, 2]
    assert notes == [f"{tmp_path / 'same'} is left out: {run} is the same run."]


# ---- the command line -------------------------------------------------------------------------------------------------


def test_compare_ends_with_a_report(capsys, tmp_path, monkeypatch, light):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unskew.cli.report.find_spec", lambda name: name)
    quick = (*TINY, "--rounds", "1", "--seeds", "0")
    outcome = call(capsys, "compare", "fedavg", *quick, "--out", "both")
    assert "The report is both/report.html" in outcome.out
    assert Path("both/report.html").is_file()
    outcome = call(capsys, "report", "both", "both/fedavg", "--out", "x.html")
    assert (outcome.code, Path("x.html").is_file()) == (0, True)
    assert "The report is x.html" in outcome.out
    assert call(capsys, "report", "nowhere").code == 2

    monkeypatch.setattr("unskew.cli.report.find_spec", lambda name: None)
    outcome = call(capsys, "compare", "fedavg", *quick, "--out", "hint", "--json")
    assert outcome.json()["folder"] == "hint"
    assert "pip install 'unskew[report]'" in outcome.err
    assert not Path("hint/report.html").exists()


def test_without_plotly_a_sentence_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'unskew[report]'")):
        unskew.report(run)


def test_periods_of_layers_are_shown_for_epochs_too(run, tmp_path, light):
    """FedALS with local_epochs, the default: no number of local steps can be given."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    history[-1]["fedals_periods"] = [1.0, 4.0]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "local_steps": None, "local_epochs": 1}))
    page = Page(unskew.report(run).read_text())
    (name,) = [name for name in page.tables if name.startswith("periods of")]
    assert page.column(name, "averaged every, rounds") == [1, 4]


def test_a_broken_section_does_not_cost_the_others(compared, tmp_path, light, monkeypatch, capsys):
    def broken(part):
        raise TypeError("<b> * None")

    monkeypatch.setattr("unskew.reporting.chart_data.client_boxes", broken)
    monkeypatch.setattr("unskew.reporting.tables.cost_table", broken)
    whole = call(capsys, "report", compared[0], "--out", tmp_path / "r.html").out
    printed = " ".join(whole.split())
    assert printed.count("because of an error: TypeError: <b> * None") == 2
    assert "The report is" in printed
    page = Page((tmp_path / "r.html").read_text())
    assert any(
        text == "The section 'Cost' of the report is missing because of an error: TypeError: <b> * None"
        for text in page.texts
    )
    assert {"comparison", "differences", "fairness", "runs"} <= set(page.tables)
    assert "costs" not in page.tables
    assert page.data["parts"][0]["boxes"] == {}


def test_the_verdict_names_the_best_its_lead_and_its_cost(compared, page):
    last = {name: [s["accuracy"] for s in summaries(compared[0], name)] for name in compared[1].summaries}
    folders = {"fedprox:mu=0.5": "fedprox-mu=0.5"}
    last = {name: [s["accuracy"] for s in summaries(compared[0], folders.get(name, name))] for name in last}
    ranked = sorted(last, key=lambda name: -np.mean(last[name]))
    first, lead, cost = (
        next(text for text in page.texts if part in text)
        for part in (" is the best of 3", "the second", " MB and took")
    )
    assert first.startswith(f"{ranked[0]} is")
    assert f"test accuracy {100 * np.mean(last[ranked[0]]):.1f} %" in first
    leads = 100 * (np.array(last[ranked[0]]) - np.array(last[ranked[1]]))
    low, high = interval95(leads.tolist())
    assert f"of {ranked[1]}"[3:] in lead
    assert f"by {leads.mean():.1f} points (95 % interval {low:+.1f} to {high:+.1f}" in lead
    assert ("conclusive." in lead and "inconclusive" not in lead) == (low > 0)
    assert cost.startswith(f"{ranked[0]} sent")
    headings = [text for text in page.texts if text in ("Result", "Comparison", "Warnings")]
    assert headings[0] == "Result"


def test_the_worst_decile_is_the_same_in_picture_and_table(compared, page):
    boxes = page.data["parts"][0]["boxes"]["accuracy"]
    names = page.column("fairness", "method")
    for name, model, value in zip(
        names, page.column("fairness", "model"), page.column("fairness", "worst decile, %"), strict=True
    ):
        if model == "global":
            assert boxes[name]["decile"] == pytest.approx(value, rel=1e-5)
