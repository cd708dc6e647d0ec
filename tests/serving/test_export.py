"""A trained model as files: they give what the run's model gives to raw inputs, and a card says what it is."""

import errno
import json
import shutil
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
import yaml
from support.received import bind_inputs
from support.running import call
from support.slow import slow_but

import unskew
from unskew.errors import CheckpointError, ConfigError
from unskew.models.registry import MODELS
from unskew.serving import portable_model
from unskew.serving.client_model import ServedClient
from unskew.serving.input_files import read_rows
from unskew.serving.load import open_run
from unskew.serving.model_card import model_card_text
from unskew.serving.portable_model import TOLERANCE, example_inputs

pytest.importorskip("onnxruntime")
Image = pytest.importorskip("PIL.Image")
TINY = {"data": "digits", "clients": 3, "rounds": 2, "local_steps": 2, "engine": "inline", "lr": 0.1}


@pytest.fixture(scope="module")
def ditto(tmp_path_factory):
    return unskew.run(model="logistic", method="ditto", out=tmp_path_factory.mktemp("ditto") / "run", **TINY).folder


def ask(kind, file, x):
    """The file's answer, read without unskew."""
    if kind == "onnx":
        import onnxruntime

        return onnxruntime.InferenceSession(str(file)).run(None, {"inputs": x.numpy()})[0]
    with torch.no_grad():
        model = torch.export.load(file).module() if kind == "torch" else torch.jit.load(file)
        return model(x).numpy()


def about(kind, file):
    if kind == "onnx":
        import onnx

        return {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    extra = {"about.json": ""}
    torch.export.load(file, extra_files=extra) if kind == "torch" else torch.jit.load(file, _extra_files=extra)
    return json.loads(extra["about.json"])


@pytest.mark.parametrize("kind", slow_but(["torchscript"], ["torch", "onnx", "torchscript"]))
def test_a_file_gives_what_the_run_gives_to_raw_pixels(ditto, tmp_path, kind):
    done = unskew.export(ditto, kind, out=tmp_path / "out")
    x = unskew.load_federation("digits", clients=3).test[0][:7]
    expected = unskew.load_predictor(ditto).predict_proba(x)
    assert x.dtype == torch.uint8
    assert np.allclose(ask(kind, done.file, x), expected, atol=TOLERANCE, rtol=0)
    assert done.apart <= TOLERANCE
    known = about(kind, done.file)
    assert json.loads(known["class_names"]) == [str(k) for k in range(10)]
    assert known["dtype"] == "uint8"
    with pytest.raises(ConfigError, match="already exists"):
        unskew.export(ditto, kind, out=tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torchscript"])
def test_columns_of_a_table_go_in_as_they_are(tmp_path, capsys, kind):
    draws = np.random.default_rng(0)
    x = (draws.normal(size=(60, 2)) * [10, 0.1] + [100, 5]).astype("float32")
    lines = [f"{a},{b},{'yes' if a > 100 else 'no'},{'uv'[k % 2]}" for k, (a, b) in enumerate(x)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,sick,ward", *lines]) + "\n")
    options = {"partition": "natural:ward", "label": "sick", "features": ["a", "b"], "model": "logistic"}
    unskew.run(data=f"table:{tmp_path / 't.csv'}", rounds=1, engine="inline", out=tmp_path / "run", **options)
    found = call(capsys, "export", tmp_path / "run", "--format", kind, "--json").json()
    assert found["folder"] == str(tmp_path / "run" / f"export-{kind}")
    expected = unskew.load_predictor(tmp_path / "run").predict_proba(x)
    assert np.allclose(ask(kind, found["file"], torch.from_numpy(x)), expected, atol=TOLERANCE, rtol=0)
    known = about(kind, found["file"])
    assert json.loads(known["features"]) == ["a", "b"]
    assert json.loads(known["class_names"]) == ["no", "yes"]


@pytest.mark.parametrize("kind", slow_but(["torchscript"], ["torch", "onnx", "torchscript"]))
def test_probabilities_in_a_file_are_corrected_for_the_class_weights(tmp_path, kind):
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(60, 2)).round(3), np.arange(60) % 5 == 0
    lines = [f"{a},{b},{'ill' if k else 'well'},{'AB'[n % 2]}" for n, ((a, b), k) in enumerate(zip(x, y, strict=True))]
    (tmp_path / "t.csv").write_text("a,b,state,site\n" + "\n".join(lines))
    unskew.run(
        data=str(tmp_path / "t.csv"), label="state", partition="natural:site", class_weights=[4.0, 0.5], positive="ill",
        model="logistic", rounds=2, local_steps=5, engine="inline", out=tmp_path / "run",
    )  # fmt: skip
    predictor = unskew.load_predictor(tmp_path / "run")
    written = unskew.export(tmp_path / "run", kind, out=tmp_path / "out")
    p = ask(kind, written.file, torch.from_numpy(x.astype("float32")))
    normalized = predictor.normalize(predictor.prepared(x.astype("float32")))
    raw = torch.softmax(predictor.module(normalized).detach(), 1).numpy() / [4.0, 0.5]
    assert np.allclose(p, raw / raw.sum(1, keepdims=True), atol=1e-5)
    assert np.allclose(p, predictor.predict_proba(x.astype("float32")), atol=TOLERANCE)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Samples were weighted by class in training: ill 4, well 0.5. The outputs are corrected." in card


@pytest.mark.parametrize("kind", slow_but(["torchscript"], ["torch", "onnx", "torchscript"]))
@pytest.mark.parametrize(("start", "dtype"), [(0.0, "float32"), (1.6e9, "float64")])
def test_the_data_type_of_the_inputs_is_in_the_file_and_in_the_card(tmp_path, kind, start, dtype):
    x = np.column_stack([start + np.arange(60.0), np.random.default_rng(0).normal(size=60).round(3)])
    lines = [f"{a},{b},{int(a - start > 30)}" for a, b in x]
    (tmp_path / "t.csv").write_text("\n".join(["t,b,y", *lines]))
    unskew.run(
        data=f"table:{tmp_path / 't.csv'}", label="y", features=["t", "b"], partition="iid", clients=2, model="logistic",
        rounds=5, lr=0.5, engine="inline", out=tmp_path / "run",
    )  # fmt: skip
    done, predictor = unskew.export(tmp_path / "run", kind), unskew.load_predictor(tmp_path / "run")
    assert about(kind, done.file)["dtype"] == dtype
    assert f"raw `{dtype}` values of shape n x 2" in (done.folder / "README.md").read_text()
    expected = predictor.outputs(read_rows(tmp_path / "t.csv", predictor.inputs).x)
    p = ask(kind, done.file, torch.from_numpy(x.astype(dtype)))
    assert np.allclose(p, expected, atol=TOLERANCE, rtol=0)
    assert p[:, 1].std() > 0.1


@pytest.mark.parametrize("kind", slow_but(["torchscript"], ["torch", "onnx", "torchscript"]))
@pytest.mark.parametrize("model", ["table-mlp", "logistic"])
def test_mixed_columns_go_in_with_their_gaps_and_numbers_come_out(tmp_path, kind, model):
    draws = np.random.default_rng(0)
    rows = [
        ("" if k % 5 == 0 else f"{draws.normal(50, 9):.1f}", "uvw"[k % 3], f"{draws.normal(1.7e9, 20):.2f}")
        for k in range(60)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["age,kind,cost", *map(",".join, rows)]) + "\n")
    options = {"label": "cost", "task": "regression", "categories": ["kind"], "missing": "indicator"}
    unskew.run(
        data=f"table:{tmp_path / 't.csv'}", partition="iid", clients=3, rounds=1, engine="inline", model=model,
        out=tmp_path / "run", **options,
    )  # fmt: skip
    done = unskew.export(tmp_path / "run", kind)
    known = about(kind, done.file)
    columns = json.loads(known["columns"])
    assert [(one["name"], one["values"]) for one in columns] == [("age", []), ("kind", ["u", "v", "w"])]
    x = [[float(age or "nan"), columns[1]["values"].index(kind_) + 1] for age, kind_, _ in rows]
    expected = unskew.load_predictor(tmp_path / "run").predict_file(tmp_path / "t.csv")
    assert known["outputs"] == "numbers"
    assert len({*expected}) > 40  # float32 has one number for all of them
    assert np.allclose(ask(kind, done.file, torch.tensor(x))[:, 0], expected, rtol=0, atol=20 * TOLERANCE)
    text = (done.folder / "README.md").read_text()
    for words in (
        "tabular-regression",
        "Test R²",
        "n x 2",
        "kind: 1 u, 2 v, 3 w",
        "are NaN",
        "order of the outputs: cost",
    ):
        assert words in text


@pytest.mark.usefixtures("undrawn")
def test_the_card_of_a_private_run_has_no_metrics_on_the_data_of_clients(tmp_path):
    options = {"method": "dp:noise=1,adaptive=false", "model": "logistic", "out": tmp_path / "run"}
    result = unskew.run(**{**TINY, **options})
    assert result.summary["client_accuracy_mean"] is not None
    text = model_card_text(open_run(tmp_path / "run"), "onnx")
    assert "Privacy: " in text
    assert "Test accuracy" in text
    for words in ("at clients", "worst client", "client_accuracy"):
        assert words not in text


@pytest.mark.usefixtures("undrawn")
def test_the_card_says_what_the_runs_say(tmp_path):
    both = unskew.compare(methods=["fedprox:mu=0.1"], seeds=2, model="logistic", out=tmp_path / "both", **TINY)
    folder = tmp_path / "both" / "fedprox-mu=0.1" / "seed-0"
    text = model_card_text(open_run(folder), "onnx")
    front = yaml.safe_load(text.split("---")[1])
    row = both.rows()[0]
    (result,) = front["model-index"][0]["results"]
    assert result["metrics"][0] == {
        "type": "accuracy",
        "name": "Test accuracy, last round",
        "value": round(row["accuracy"], 6),
    }
    assert {"federated-learning", "fedprox"} <= set(front["tags"])
    assert front["pipeline_tag"] == "image-classification"
    assert f"| {100 * row['accuracy']:.1f} % | {100 * row['accuracy_std']:.1f} % |" in text
    for words in (
        "dirichlet:0.1",
        "fedprox:mu=0.1",
        "arXiv:1812.06127",
        "2 runs of different seeds",
        "no privacy guarantee",
    ):
        assert words in text


def accuracy_cost(y, p):
    """Its values are not between 0 and 1, so they are not percentages."""
    return 12.0 * float((p.argmax(1) != y).mean())


def test_the_card_has_only_metrics_of_the_kept_model(tmp_path):
    draws = np.random.default_rng(0)
    x = draws.normal(size=(4, 40, 3)).astype("float32")
    y = (x[..., 0] > 0).astype(int)
    clients = [(inputs, 1 - labels, inputs, labels) for inputs, labels in zip(x[:3], y[:3], strict=True)]
    federation = unskew.Federation.from_arrays(clients, test=(x[3], y[3]))  # training makes the model worse
    options = {"model": "logistic", "rounds": 5, "local_epochs": 1, "lr": 0.3, "metrics": [accuracy_cost, "auroc"]}
    summary = unskew.run(federation, keep="best", out=tmp_path / "run", **options).summary
    assert summary["kept_round"] == 1
    predictor = unskew.load_predictor(tmp_path / "run", trust_code=True)
    right = np.mean([int(label) == true for label, true in zip(predictor.predict(x[3]), y[3], strict=True)])
    assert right != summary["accuracy"]
    text = model_card_text(open_run(tmp_path / "run", trust_code=True), "onnx")
    (result,) = yaml.safe_load(text.split("---")[1])["model-index"][0]["results"]
    of_test = [(metric["name"], metric["value"]) for metric in result["metrics"] if metric["name"].startswith("Test")]
    assert of_test == [("Test accuracy, kept round 1", round(right, 6))]
    assert "Global model of the kept round" in text
    assert "last round" not in text
    unskew.run(federation, out=tmp_path / "last", **options)
    text = model_card_text(open_run(tmp_path / "last", trust_code=True), "onnx")
    assert f"| Test accuracy_cost, last round | {summary['accuracy_cost']:.4f} |  |" in text
    assert f"| Test AUROC, last round | {100 * summary['auroc']:.1f} % |  |" in text
    traffic = 5 * 3 * 8 * 4 / 1e6  # rounds, clients, parameters and bytes
    assert f"Traffic of all clients: {traffic:.2g} MB up, {traffic:.2g} MB down." in text


HOSTILE = [
    "<script>alert(1)</script>",
    "a` <b onclick=x>b</b> `c",
    "x\n\n<img src=x onerror=y>\n\n# h",
    "[t](javascript:x) ![i](http://e.x/i.png) <http://e.x> https://e.x www.e.x a@e.x",
    "1 | 2\n|---|\n| 3",
    "\x1b[31mred\u202e\u2028\r<u>",
    "&lt;i&gt; &#60;i> \\<i> ``` ~~~ *e* _e_ $m$",
]


class Markup(HTMLParser):
    """Tags of a page, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.tags |= {name for name, _ in attributes if name not in ("class", "style")}

    def handle_data(self, data):
        self.text += data


def rendered(text):
    markdown, markdown_it = pytest.importorskip("markdown"), pytest.importorskip("markdown_it")
    yield markdown.markdown(text, extensions=["tables", "fenced_code"])
    yield markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)


@pytest.mark.parametrize("value", HOSTILE)
def test_no_value_of_a_file_becomes_markup_in_the_card(ditto, tmp_path, value):
    folder = tmp_path / "run"
    shutil.copytree(ditto, folder)
    tags = [Markup(page).tags for page in rendered(model_card_text(open_run(folder), "onnx"))]
    summary = json.loads((folder / "summary.json").read_text())
    for key in summary:
        if isinstance(summary[key], str) or key in ("clients", "parameters"):
            summary[key] = value
    summary |= {"client_accuracy_worst": 0.5, "client_accuracy_mean": 0.7, "privacy": value, "dpsgd_privacy": value}
    summary["objective"] = "accuracy"
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "about.json").write_text(json.dumps({"versions": {"unskew": value}}))
    (folder / "warnings.txt").write_text(f"2026-01-01T00:00:00 round 1: {value}\n")
    inputs = json.loads((folder / "inputs.json").read_text())
    inputs |= {"class_names": [f"{value}{k}" for k in range(10)], "features": [value]}
    (folder / "inputs.json").write_text(json.dumps(inputs))
    bind_inputs(folder)
    found = replace(open_run(folder), note=value, client=ServedClient(0, value, False))
    for kind in ("onnx", "torchscript"):
        card = model_card_text(found, kind)
        assert "\x1b" not in card
        assert "\u202e" not in card
        for page, expected in zip(rendered(card), tags, strict=True):
            assert Markup(page).tags <= expected | {"em"}  # of a name in the front matter, whose underscores stay
        parts = card.split("---\n", 2)
        assert yaml.safe_load(parts[1])["library_name"]
        shown = " ".join(value.split()).replace("\x1b", "").replace("\u202e", "").split()[0]
        for page, expected in zip(rendered(parts[2]), tags, strict=True):
            assert Markup(page).tags <= expected
            assert shown in Markup(page).text
    assert "no privacy guarantee" not in card


def test_the_card_of_a_personal_model_promises_no_privacy(tmp_path):
    """Its client has trained it on its samples without noise."""
    private = unskew.run(
        data="digits", clients=3, method="dp:noise=1,adaptive=false+ditto", model="logistic", rounds=1, local_steps=1,
        engine="inline", client_weighting="uniform", out=tmp_path / "run",
    )  # fmt: skip
    assert "no privacy guarantee" not in model_card_text(open_run(private.folder), "onnx")
    card = model_card_text(open_run(private.folder, client_number=1), "onnx")
    assert "no privacy guarantee" in card
    assert "Privacy:" not in card


def test_the_card_states_the_privacy_of_the_run(tmp_path):
    private = unskew.run(
        model="logistic", method="dp:noise=2", out=tmp_path / "run", data="digits", clients=30, rounds=1, lr=0.1,
        client_weighting="uniform", engine="inline", local_steps=1,
    )  # fmt: skip
    card = model_card_text(open_run(private.folder), "onnx")
    sentence = private.summary["privacy"]
    assert "no privacy guarantee" not in card
    for page in rendered(card):
        assert f"Privacy: {sentence}" in Markup(page).text


def test_a_summary_with_other_types_is_an_error_and_no_traceback(ditto, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(ditto, folder)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "bytes_up": "many"}))
    with pytest.raises(CheckpointError, match=r"summary\.json is corrupted"):
        model_card_text(open_run(folder), "onnx")


def test_a_client_has_the_model_that_its_method_keeps_for_it(ditto, tmp_path, capsys):
    x, _ = unskew.load_federation("digits", clients=3).test
    each = [unskew.load_predictor(ditto, client_number=k).predict_proba(x) for k in range(3)]
    assert not np.allclose(each[0], each[1])
    assert not np.allclose(each[0], unskew.load_predictor(ditto).predict_proba(x))
    clients = unskew.load_federation("digits", clients=3).clients
    for k, line in enumerate(map(json.loads, (ditto / "clients.jsonl").read_text().splitlines())):
        labels = unskew.load_predictor(ditto, client_number=k).predict(clients[k].x_test)
        right = [label == str(int(true)) for label, true in zip(labels, clients[k].y_test, strict=True)]
        assert np.mean(right) == pytest.approx(line["personal_accuracy"])
    Image.fromarray(x[0, 0].numpy()).save(tmp_path / "0.png")
    (line,) = call(capsys, "predict", ditto, tmp_path / "0.png", "--client-number", "1", "--json").json()
    assert line["p(3)"] == pytest.approx(float(each[1][0, 3]), abs=1e-6)
    found = call(capsys, "export", ditto, "--format", "torchscript", "--client-number", "1", "--json").json()
    assert found["folder"].endswith("export-torchscript-client-1")
    assert np.allclose(ask("torchscript", found["file"], x), each[1], atol=TOLERANCE, rtol=0)
    assert "client 1" in (ditto / "export-torchscript-client-1" / "README.md").read_text()
    with pytest.raises(ConfigError, match=r"no client number 3.*from 0 to 2"):
        unskew.load_predictor(ditto, client_number=3)


def card_of_client(folder, client):
    """The metrics of a client's card, by their names on the hub, its text, and the client's row in ``clients.jsonl``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        text = model_card_text(open_run(folder, client_number=client), "torch")
    front = yaml.safe_load(text.split("---")[1])
    metrics = [m for entry in front.get("model-index", []) for m in entry["results"][0]["metrics"]]
    row = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()][client]
    return {metric["type"]: metric["value"] for metric in metrics}, text, row


@pytest.mark.parametrize("method", ["ditto", "fedavg+ft", "fedper", "fedproto"])
def test_the_card_of_a_personal_model_has_its_own_metrics(tmp_path, method):
    options = {**TINY, "model": "mlp", "method": method, "metrics": ["balanced_accuracy"], "out": tmp_path / "run"}
    summary = unskew.run(**options).summary
    metrics, text, row = card_of_client(tmp_path / "run", 1)
    names = ("accuracy", "loss", "balanced_accuracy")
    assert metrics == {name: pytest.approx(row[f"personal_{name}"], abs=1e-6) for name in names}
    assert f"| Accuracy on {row['num_held_out']} held-out samples | {100 * row['personal_accuracy']:.1f} % |  |" in text
    mean, worst = summary["personal_accuracy_mean"], summary["personal_accuracy_worst"]
    assert f"accuracy was {100 * mean:.1f} % on average and {100 * worst:.1f} % for the worst client" in text
    assert "Test accuracy" not in text


def test_the_card_of_a_client_with_its_own_normalization_statistics_has_its_metrics(tmp_path):
    model = {"name": "mlp", "norm": "batch"}
    unskew.run(**TINY, model=model, buffers="local", out=tmp_path / "run")
    metrics, _, row = card_of_client(tmp_path / "run", 1)
    assert metrics == {name: pytest.approx(row[name], abs=1e-6) for name in ("accuracy", "loss")}


def test_the_card_of_a_client_without_held_out_samples_names_the_test_set(tmp_path):
    unskew.run(**TINY, model="logistic", method="ditto", holdout=0, out=tmp_path / "run")
    metrics, text, row = card_of_client(tmp_path / "run", 1)
    assert metrics["accuracy"] == pytest.approx(row["personal_accuracy"], abs=1e-6)
    assert "This model on the test set, weighted by the client's classes" in text


def test_the_card_of_a_client_that_was_not_evaluated_has_no_metrics(tmp_path):
    options = {**TINY, "model": "logistic", "method": "ditto", "eval_clients": 1, "out": tmp_path / "run"}
    unskew.run(**options)
    rows = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    (left_out, *_) = [row["client"] for row in rows if "accuracy" not in row]
    metrics, text, _ = card_of_client(tmp_path / "run", left_out)
    assert metrics == {}
    assert "No metrics of this model are known." in text


def test_the_card_of_an_initial_model_of_another_architecture_has_no_metrics(tmp_path):
    models = [{"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [12, 8]}]
    options = {**TINY, "clients": 4, "participation": 0.25, "rounds": 1, "model": models, "method": "fedproto"}
    unskew.run(**options, out=tmp_path / "run")
    for client in range(4):
        metrics, text, row = card_of_client(tmp_path / "run", client)
        initial = "This is the initial model of the architecture of client" in text
        assert initial is ("the initial model of its architecture serves it" in text)
        expected = {} if initial else {"accuracy": row["personal_accuracy"], "loss": row["personal_loss"]}
        assert metrics == {name: pytest.approx(value, abs=1e-6) for name, value in expected.items()}


def write_wards(folder):
    """A table of the clients 2, 3 and 1, in this order, and a personal model for each."""
    rows = [f"{(2, 3, 1)[k % 3]},{k % 7},{(3 * k) % 5},{int(k % 4 == k % 3)}" for k in range(90)]
    (folder / "w.csv").write_text("ward,a,b,y\n" + "\n".join(rows) + "\n")
    unskew.run(
        data=f"table:{folder / 'w.csv'}", label="y", partition="natural:ward", method="fedavg+ft", lr=0.5,
        model="logistic", rounds=1, local_steps=3, engine="inline", out=folder / "run",
    )  # fmt: skip
    return folder / "run", folder / "w.csv"


def test_a_client_is_chosen_by_its_name_or_by_its_number_but_never_by_either(tmp_path, capsys):
    run, rows = write_wards(tmp_path)
    names = [json.loads(line)["name"] for line in (run / "clients.jsonl").read_text().splitlines()]
    assert sorted(names) == ["1", "2", "3"]
    for command in ("predict", "evaluate"):
        answers = [call(capsys, command, run, rows, "--json", "--client", name).out for name in names]
        assert len(set(answers)) == 3
        numbered = [call(capsys, command, run, rows, "--json", "--client-number", k).out for k in range(3)]
        assert numbered == answers
    done = call(capsys, "export", run, "--format", "torchscript", "--client", names[2], "--json").json()
    assert done["folder"].endswith("-client-2")
    assert f"client {names[2]} of" in (run / "export-torchscript-client-2" / "README.md").read_text()
    for options, words in (
        (["--client", "0"], "no client '0'. Known: 1, 2, 3."),
        (["--client-number", "3"], "no client number 3. Choose --client-number (client_number) from 0 to 2"),
        (["--client", "1", "--client-number", "1"], "either by its name"),
        (["--client-number", "one"], "--client-number"),
    ):
        failed = call(capsys, "predict", run, rows, *options)
        assert (failed.code, words in " ".join(failed.err.split())) == (2, True), failed.err
    for wrong in ({"client": 1}, {"client_number": "1"}, {"client_number": True}, {"client": 1.0}):
        with pytest.raises(ConfigError, match="either by its name, a string, or by its number, an integer"):
            unskew.load_predictor(run, **wrong)


def test_clients_without_names_are_chosen_by_their_numbers_only(ditto):
    with pytest.raises(ConfigError, match=r"no client .1., because its clients have no names.*from 0 to 2"):
        unskew.load_predictor(ditto, client="1")


def test_what_clients_train_at_the_end_serves_them(tmp_path, capsys, monkeypatch):
    same = {**TINY, "rounds": 1, "model": "logistic", "method": "fedavg+ft"}
    folder = unskew.run(out=tmp_path / "run", **same).folder
    clients = unskew.load_federation("digits", clients=3).clients
    for k, line in enumerate(map(json.loads, (folder / "clients.jsonl").read_text().splitlines())):
        labels = unskew.load_predictor(folder, client_number=k).predict(clients[k].x_test)
        right = [label == str(int(true)) for label, true in zip(labels, clients[k].y_test, strict=True)]
        assert np.mean(right) == pytest.approx(line["personal_accuracy"])
    found = call(capsys, "export", folder, "--format", "torchscript", "--client-number", "2", "--json").json()
    x = clients[0].x[:5]
    own = unskew.load_predictor(folder, client_number=2).predict_proba(x)
    assert np.allclose(ask("torchscript", found["file"], x), own, atol=TOLERANCE, rtol=0)
    assert not np.allclose(own, unskew.load_predictor(folder).predict_proba(x))
    (folder / "personal" / "1.safetensors").write_bytes(b"{")
    with pytest.raises(CheckpointError, match="corrupted"):
        unskew.load_predictor(folder, client_number=1)
    monkeypatch.setattr("unskew.runs.personal_model_files.MOST", 10)
    with pytest.warns(UserWarning, match="are not stored"):
        unskew.run(out=tmp_path / "large", **same)
    with pytest.raises(ConfigError, match="has none of client 0"):
        unskew.load_predictor(tmp_path / "large", client_number=0)


def test_unseen_clients_get_the_global_model_with_a_note_or_an_error(tmp_path, capsys):
    same = {**TINY, "clients": 5, "unseen": 0.4, "rounds": 1, "model": "mlp"}
    done = unskew.run(method="fedper", out=tmp_path / "fedper", **same)
    x = unskew.load_federation("digits", clients=3).test[0][:5]
    words = (
        "Client 4 is unseen: it took no part in training, so the global model serves it. With fedper, 3.64 % of the "
        "parameters stay at the clients; in the global model they have their initial values."
    )
    last = list(done.model.parameters())[-2:]
    share = sum(p.numel() for p in last) / sum(p.numel() for p in done.model.parameters())
    assert f"{100 * share:.3g}" == "3.64"
    with pytest.warns(RuntimeWarning, match=words):
        unseen = unskew.load_predictor(done.folder, client_number=4).predict_proba(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert not np.allclose(unseen, unskew.load_predictor(done.folder, client_number=0).predict_proba(x))
    note = words.partition("serves it. ")[2]
    with pytest.warns(RuntimeWarning, match=f"^{note}"):
        assert np.array_equal(unseen, unskew.load_predictor(done.folder).predict_proba(x))
    with pytest.warns(RuntimeWarning, match=f"^{note}"):
        unskew.export(done.folder, "torchscript")
    Image.fromarray(x[0, 0].numpy()).save(tmp_path / "0.png")
    assert call(capsys, "predict", done.folder, tmp_path / "0.png").err == f"unskew: {note}\n"
    assert call(capsys, "predict", done.folder, tmp_path / "0.png", "--client-number", "4").err == f"unskew: {words}\n"
    assert not call(capsys, "predict", done.folder, tmp_path / "0.png", "--client-number", "0").err
    found = call(capsys, "export", done.folder, "--format", "torchscript", "--client-number", "4", "--json")
    assert words in found.err
    card = (done.folder / "export-torchscript-client-4" / "README.md").read_text()
    assert words in card
    assert "This is the global model" in card
    tuned = unskew.run(method="ft", out=tmp_path / "ft", **same).folder
    with pytest.raises(ConfigError, match=r"Client 3 is unseen.*Omit the client to use the global model"):
        unskew.load_predictor(tuned, client_number=3)


@pytest.mark.parametrize("method", ["local", "fedfomo", "fedprox+fedproto"])
def test_a_global_model_that_no_method_trains_is_neither_loaded_nor_exported(tmp_path, capsys, method):
    folder = unskew.run(**{**TINY, "rounds": 1}, model="logistic", method=method, out=tmp_path / "run").folder
    x = unskew.load_federation("digits", clients=3).test[0][:1]
    Image.fromarray(x[0, 0].numpy()).save(tmp_path / "0.png")
    words = "trains no global model, only one model for each client. Choose a client with --client"
    for use in (unskew.load_predictor, unskew.export):
        with pytest.raises(ConfigError, match=words):
            use(folder)
    for command in ("predict", "evaluate"):
        assert words in call(capsys, command, folder, tmp_path / "0.png").err
    assert not (folder / "export-onnx").exists()
    assert len(unskew.load_predictor(folder, client_number=1).predict(x)) == 1


def test_models_that_nobody_keeps_are_refused(ditto, tmp_path):
    unskew.run(model="logistic", method="fedavg", out=tmp_path / "fedavg", **{**TINY, "rounds": 1})
    with pytest.raises(ConfigError, match="no personal models"):
        unskew.load_predictor(tmp_path / "fedavg", client_number=0)
    shutil.copytree(ditto, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints", "export*"))
    with pytest.raises(CheckpointError, match="last checkpoint"):
        unskew.load_predictor(tmp_path / "bare", client_number=0)
    with pytest.raises(ConfigError, match="no format 'pickle'"):
        unskew.export(ditto, "pickle")
    with pytest.raises(ConfigError, match="supports only text models"):
        unskew.export(ditto, "transformers", out=tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_a_file_that_gives_something_else_is_not_kept(ditto, tmp_path, monkeypatch):
    monkeypatch.setattr("unskew.serving.portable_model._apart", lambda one, other: 1e-3)
    with pytest.raises(ConfigError, match="probabilities differ"):
        unskew.export(ditto, "torchscript", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_reason_of_a_failed_export_has_no_terminal_codes(ditto, tmp_path, monkeypatch):
    def fails(*args):
        raise RuntimeError("\x1b[96m[torch.onnx]\x1b[0m no operation \x1b[1;31mcummax\x1b[0m.\nmore")

    monkeypatch.setitem(portable_model.WRITERS, "torchscript", fails)
    with pytest.raises(ConfigError, match=r"as torchscript: \[torch.onnx\] no operation cummax\. Try another format"):
        unskew.export(ditto, "torchscript", out=tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "onnx", "torchscript"])
def test_a_language_model_of_packed_texts_can_be_exported(tmp_path, kind):
    pytest.importorskip("transformers")
    from support.tiny import OPT, write_jsonl

    path = write_jsonl(tmp_path / "t.jsonl", [{"q": "q", "a": "a" * (1 + n % 5)} for n in range(40)])
    model = {"hf": "opt", "pretrained": False, "config": {**OPT, "max_position_embeddings": 64}}
    unskew.run(
        data=f"text:{path}", text={"prompt": "q", "answer": "a", "block": 30, "tokenizer": "bytes", "pack": True},
        model=model, partition="iid", clients=2, rounds=1, local_steps=1, lr=0.01, engine="inline", out=tmp_path / "run",
    )  # fmt: skip
    done = unskew.export(tmp_path / "run", kind)
    opened = open_run(tmp_path / "run")
    x = example_inputs(opened, 3)
    with torch.no_grad():
        expected = opened.module(x).softmax(-1).numpy()
    assert np.allclose(ask(kind, done.file, x), expected, atol=TOLERANCE, rtol=0)


def test_without_onnx_it_is_said_what_to_install(ditto, tmp_path, monkeypatch):
    monkeypatch.setattr("unskew.serving.portable_model.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"unskew\[export\]"):
        unskew.export(ditto, "onnx", out=tmp_path / "out")


def small(name):
    """Options that make a pretrained model of the catalogue small, with weights drawn at random."""
    if not MODELS[name].pretrained:
        return {}
    from support.tiny import RESNET, VIT

    own = {**RESNET} if name == "resnet-18" else {**VIT}
    return {"pretrained": False, "config": own, "size": 16}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if not entry.texts])
@pytest.mark.parametrize("kind", ["torch", "onnx", "torchscript"])
def test_every_registered_model_can_be_exported(tmp_path, name, kind):
    if MODELS[name].pretrained:
        pytest.importorskip("transformers")
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (60, 3, 32, 32)).astype(np.uint8)
    shape, task = ((60, 32, 32), "segmentation") if MODELS[name].pixels else (60, "classification")
    labels = draws.integers(0, 3, shape)
    parts = [(images[:40], labels[:40])], (images[40:], labels[40:])
    fed = unskew.Federation.from_arrays(parts[0], test=parts[1], classes=3, task=task)
    options = {"rounds": 1, "local_steps": 1, "batch_size": 8, "lr": 0.01, "engine": "inline", "out": tmp_path / "run"}
    unskew.run(fed, model=name, model_options=small(name), **options)
    done = unskew.export(tmp_path / "run", kind)
    x = torch.from_numpy(images[:3])
    assert np.allclose(
        ask(kind, done.file, x), unskew.load_predictor(tmp_path / "run").predict_proba(x), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("loss", ["piecewise", "discrete"])
@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_survival_models_answer_as_predict_does(tmp_path, loss, kind):
    from support.survival_rows import survival_experiment, survival_table

    survival_table(tmp_path / "patients.csv", n=60)
    options = {"precision": "fp32", "loss": loss, "out": tmp_path / "run"}
    unskew.run(**survival_experiment(tmp_path / "patients.csv", **options))
    x = example_inputs(open_run(tmp_path / "run"), 3)
    done = unskew.export(tmp_path / "run", kind)
    expected = unskew.load_predictor(tmp_path / "run").outputs(x)
    assert np.allclose(ask(kind, done.file, x), expected, atol=TOLERANCE, rtol=0)


def test_a_head_that_transformers_lacks_is_not_written_for_it(tmp_path):
    """Loading would replace it by a random one."""
    pytest.importorskip("transformers")
    from support.tiny import opt_folder, rows, write_jsonl

    result = unskew.run(
        data=f"text:{write_jsonl(tmp_path / 't.jsonl', rows())}", text={"columns": ["premise"], "block": 12}, label="label",
        partition="iid", clients=2, rounds=1, local_steps=1, lr=0.01, model=f"hf:{opt_folder(tmp_path / 'opt')}",
        method="fedrod", engine="inline", out=tmp_path / "run",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"replaced 'score' of the model .* Export to onnx"):
        unskew.export(tmp_path / "run", "transformers", out=tmp_path / "hub", client_number=1)
    assert not (tmp_path / "hub").exists()
    with pytest.raises(ConfigError, match="replaced 'score'"):
        result.model.save(tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["language", "classification"])
def test_models_of_texts_are_written_for_transformers(tmp_path, task):
    transformers = pytest.importorskip("transformers")
    from support.tiny import opt_folder, rows, write_jsonl

    labeled = {"label": "label"} if task == "classification" else {}
    unskew.run(
        data=f"text:{write_jsonl(tmp_path / 't.jsonl', rows())}", text={"columns": ["premise"], "block": 12}, **labeled,
        partition="iid", clients=2, rounds=1, local_steps=1, lr=0.01, model=f"hf:{opt_folder(tmp_path / 'opt')}",
        engine="inline", out=tmp_path / "run",
    )  # fmt: skip
    done = unskew.export(tmp_path / "run", "transformers")
    words = transformers.AutoTokenizer.from_pretrained(done.folder)
    kind = "CausalLM" if task == "language" else "SequenceClassification"
    net = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(done.folder).eval()
    ids = words(["the cat sees a bird"], return_tensors="pt")["input_ids"]
    if task == "classification":
        assert net.config.id2label == {0: "no", 1: "yes"}
        loaded = unskew.load_predictor(tmp_path / "run")
        with torch.no_grad():
            own = net(input_ids=ids).logits.softmax(-1).numpy()
        assert np.allclose(own, loaded.predict_proba(ids), atol=TOLERANCE)
        exported = unskew.export(tmp_path / "run", "torchscript")
        x = example_inputs(open_run(tmp_path / "run"), 3)
        assert np.allclose(ask("torchscript", exported.file, x), loaded.predict_proba(x), atol=TOLERANCE, rtol=0)
    else:
        with pytest.raises(ConfigError, match="unskew export"):
            unskew.load_predictor(tmp_path / "run")


def test_a_model_of_token_arrays_is_exported_without_a_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    from support.tiny import OPT

    ids = np.random.default_rng(0).integers(0, 300, (20, 9))
    pair = ids[:, :-1], ids[:, 1:]
    fed = unskew.Federation.from_arrays([pair, pair], test=pair, task="language", classes=300)
    model = {"hf": "opt", "pretrained": False, "config": OPT}
    unskew.run(fed, model=model, rounds=1, local_steps=1, lr=0.01, engine="inline", out=tmp_path / "run")
    done = unskew.export(tmp_path / "run", "transformers")
    assert "the model was trained on arrays of token ids" in (done.folder / "README.md").read_text()
    net = transformers.AutoModelForCausalLM.from_pretrained(done.folder).eval()
    x = torch.from_numpy(ids[:3, :-1])
    with torch.no_grad():
        logits = net(input_ids=x).logits
        assert torch.allclose(logits, open_run(tmp_path / "run").module(x), atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_an_exported_model_of_prompts_and_answers_stops_at_the_end_token_of_training(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    from support.tiny import OPT, opt_folder, write_jsonl

    folder = opt_folder(tmp_path / "opt")  # its tokenizer has the end token 2
    transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=300, eos_token_id=5, **OPT)).save_pretrained(folder)
    rows = [{"q": "the old cat", "a": "a dog"}, {"q": "the red bird", "a": "is new"}] * 5
    unskew.run(
        data=f"text:{write_jsonl(tmp_path / 't.jsonl', rows)}", partition="iid", clients=2, rounds=1, local_steps=1, lr=0.01,
        text={"prompt": "q", "answer": "a", "tokenizer": "bytes" if kind == "bytes" else str(folder), "block": 30},
        model=f"hf:{folder}", engine="inline", out=tmp_path / "run",
    )  # fmt: skip
    done = unskew.export(tmp_path / "run", "transformers")
    again = transformers.AutoModelForCausalLM.from_pretrained(done.folder)
    end = {"bytes": 256, "words": 2}[kind]
    assert again.generation_config.eos_token_id == again.config.eos_token_id == end
    with torch.no_grad():  # every token but the end has a smaller logit
        again.lm_head.weight = torch.nn.Parameter(torch.zeros(300, OPT["hidden_size"]))
        again.lm_head.bias = torch.nn.Parameter(torch.eye(300)[end])
    assert again.generate(torch.tensor([[7, 8, 10]]), max_new_tokens=9, do_sample=False).tolist() == [[7, 8, 10, end]]
    card = (done.folder / "README.md").read_text()
    assert "A prompt is followed by a line break" in card
    assert {"bytes": "ends with the token 256.", "words": "ends with the token `eos_token`"}[kind] in card


@pytest.mark.parametrize("kind", ["torch", "onnx", "torchscript"])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(ditto, tmp_path, monkeypatch, kind):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("unskew.filesystem.write_synced", full)
    with pytest.raises(CheckpointError, match="The disk is full"):
        unskew.export(ditto, kind, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert unskew.export(ditto, kind, out=tmp_path / "out").file.exists()
