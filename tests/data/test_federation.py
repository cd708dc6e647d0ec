"""Cost of one more client, column or name: a constant number of calls and bytes, counted instead of timed."""

import cProfile
import pickle
import tracemalloc
import warnings
from collections import Counter

import numpy as np
import pytest
import torch

import unskew
from unskew.config.inference.infer import infer_config
from unskew.config.loader import experiment, read_yaml
from unskew.data import client_arrays, clients, load
from unskew.data.federation import Federation
from unskew.data.sources import registry
from unskew.errors import DataError
from unskew.runs import run_checkpoints
from unskew.tasks.classification import Classification

TEST = (np.ones((4, 3), np.float32), np.arange(4) % 2)


def small_clients(count, n=4):
    draws = np.random.default_rng(0)
    return [(draws.normal(size=(n, 3)).astype("float32"), np.arange(n) % 2) for _ in range(count)]


def calls_of(function):
    """Return the number of calls of functions, of Python and of C."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())


def build(count):
    given = small_clients(count)
    return lambda: unskew.Federation.from_arrays(given, test=TEST)


def test_each_client_adds_few_calls():
    build(10)()
    few, more, most = (calls_of(build(count)) for count in (100, 200, 400))
    assert more - few == pytest.approx((most - more) / 2, rel=0.05)
    assert (most - more) / 200 < 60


def test_the_values_of_small_clients_are_checked_at_once(monkeypatch):
    checks = Counter()
    for place, name in ((client_arrays, "as_targets"), (client_arrays, "check_finite"), (Classification, "check")):
        original = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, n=name, f=original: (checks.update([n]), f(*given))[1])
    build(300)()
    assert checks == {"as_targets": 1, "check_finite": 1, "check": 2}, "the test set is checked on its own"


def test_arrays_that_can_be_written_need_no_filter_of_warnings(monkeypatch):
    monkeypatch.setattr(warnings, "catch_warnings", lambda: pytest.fail("a filter"))
    build(3)()


def test_the_first_of_several_problems_is_reported():
    """Also if a later client has a problem that is found sooner."""
    given = small_clients(300)
    given[299] = (given[0][0],)
    given[250][1][2] = -5
    with pytest.raises(DataError, match=r"^Client 299 must be \(x, y\) or"):
        unskew.Federation.from_arrays(given, test=TEST)
    given[200][0][1, 1] = np.nan
    with pytest.raises(DataError, match=r"^The inputs of client 200 contain NaN"):
        unskew.Federation.from_arrays(given, test=TEST)
    given[200][0][1, 1], given[299] = 0, given[0]
    with pytest.raises(DataError, match=r"^The labels of client 250 contain -5, but with 2 classes"):
        unskew.Federation.from_arrays(given, test=TEST, classes=2)


def test_targets_that_differ_between_clients_are_reported():
    x = np.zeros((4, 3), np.float32)
    three, two = np.zeros((4, 3), np.int64), np.zeros((4, 2), np.int64)
    for last, message in (
        ((x, two), "The labels of client 9 have 2 columns, but there are 3 labels"),
        ((x, three, x, two), "Client 9 has 3 labels in its training data, but 2 in its test data"),
    ):
        with pytest.raises(DataError, match=message):
            unskew.Federation.from_arrays([*[(x, three)] * 9, last], test=(x, three), task="multilabel")


def images(shape, dtype, n=3):
    return torch.arange(n * int(np.prod(shape))).reshape(n, *shape).to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtypes", "task"),
    [
        ((5,), (torch.float32, torch.float64), "classification"),
        ((5,), (torch.int64, torch.float16, torch.float64), "classification"),
        ((4, 4, 3), (torch.uint8,), "classification"),
        ((3, 4, 4), (torch.float32,), "classification"),
        ((6,), (torch.int64,), "language"),
    ],
)
def test_inputs_gathered_for_several_clients_are_those_of_each(shape, dtypes, task):
    """Clients share one array or have their own test array; inputs have several data types."""
    given = []
    for k in range(12):
        x = images(shape, dtypes[k % len(dtypes)]) + 2 * (k % 3)
        y = x if task == "language" else torch.arange(3) % 2
        given.append((x, y) if k % 3 else (x, y, x[:2], y[:2]))
    x = images(shape, dtypes[0])
    test = (x, x if task == "language" else torch.arange(3) % 2)
    federation = unskew.Federation.from_arrays(given, test=test, task=task, holdout=0.4)
    together = list(federation.clients.inputs())
    assert len(together) == 1
    each = clients.concatenate_inputs([x for client in federation.clients for x in (client.x, client.x_test)])
    assert torch.equal(together[0], each)
    assert together[0].dtype == each.dtype
    assert together[0].stride() == each.stride()


def test_inputs_of_many_clients_are_gathered_in_few_chunks(monkeypatch):
    """The first checkpoint reads all inputs."""
    partitioned = unskew.load_federation("digits", partition="iid", clients=400)
    for federation in (build(400)(), partitioned):
        size = federation.clients.like.numel() * federation.clients.like.element_size()
        monkeypatch.setattr(clients, "TOGETHER", 100 * size)
        chunks = list(federation.clients.inputs())
        assert len(chunks) <= 2 * len(federation.clients.y) // 100
        each = [x for client in federation.clients for x in (client.x, client.x_test)]
        assert torch.equal(torch.cat(chunks), torch.cat(each))


def registered(folder, count):
    """Return a federation of clients with one sample each, and the bytes of these samples."""
    path = folder / f"{count}.npz"
    x, y = np.ones((count + 2, 1), np.float32), np.arange(count + 2) % 2
    np.savez(path, x=x[:count], y=y[:count], x_test=x[count:], y_test=y[count:])
    federation = unskew.load_federation(f"npz:{path}", partition="iid", clients=count)
    return federation, count * (4 + 8)


def run_of(federation, out, **options):
    share = 10 / len(federation.clients)
    options = {"rounds": 1, "participation": share, "local_steps": 1, "eval_clients": 0, "engine": "inline"} | options
    return unskew.run(federation=federation, model="logistic", method="scaffold", out=out, **options)


def test_registered_clients_take_few_bytes(tmp_path):
    """At most 100 in the federation, and next to nothing in a run in which they do not take part."""
    run_of(registered(tmp_path, 50)[0], None)
    kept, peaks = [], []
    for count in (20_000, 40_000):
        federation, samples = registered(tmp_path, count)
        kept.append(len(pickle.dumps(federation)) - samples)
        tracemalloc.start()
        result = run_of(federation, tmp_path / f"run-{count}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert [row["client"] for row in result.clients] == sorted(row["client"] for row in result.clients)
        assert len((tmp_path / f"run-{count}" / "clients.jsonl").read_text().splitlines()) == 10
    assert (kept[1] - kept[0]) / 20_000 <= 100
    assert (peaks[1] - peaks[0]) / 20_000 <= 100


def test_the_number_of_calls_does_not_grow_with_registered_clients(tmp_path, monkeypatch):
    """Clients that do not take part cost nothing."""
    checks = Counter()
    for module, name in ((load, "num_training_samples"), (run_checkpoints, "stored_content")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, n=name, f=original: (checks.update([n]), f(*given))[1])
    sizes = Federation.sizes.fget
    monkeypatch.setattr(Federation, "sizes", property(lambda self: (checks.update(["sizes"]), sizes(self))[1]))
    seen = []
    for count in (11_000, 22_000):
        checks.clear()
        federation = registered(tmp_path, count)[0]
        run_of(federation, tmp_path / f"run-{count}", participation=2 * count / 11_000 / count)
        seen.append(dict(checks))
        assert checks["num_training_samples"] == checks["stored_content"] == 1
    assert seen[0] == seen[1]


def test_a_resumed_run_reads_the_data_once(tmp_path, monkeypatch):
    federation = registered(tmp_path, 50)[0]
    run_of(federation, tmp_path / "run")
    read = Counter()
    original = run_checkpoints.stored_content
    monkeypatch.setattr(run_checkpoints, "stored_content", lambda given: (read.update(["once"]), original(given))[1])
    run_of(federation, tmp_path / "run", rounds=2, resume=True)
    assert read["once"] == 1


def growth(function, sizes):
    """Return the calls per unit between the first two sizes and between the last two."""
    function(sizes[0] - 1)
    calls = [calls_of(lambda n=n: function(n)) for n in sizes]
    return [(calls[i + 1] - calls[i]) / (sizes[i + 1] - sizes[i]) for i in (0, 1)]


def write_table(path, columns):
    draws = np.random.default_rng(0).normal(size=(40, columns)).round(3).tolist()
    lines = [",".join([*map(str, row), "ab"[i % 2]]) for i, row in enumerate(draws)]
    path.write_text("\n".join([",".join([*(f"f{c}" for c in range(columns)), "label"]), *lines]))


def test_wide_tables_cost_the_same_per_column(tmp_path, monkeypatch):
    """To load them, also with missing values, to suggest a configuration, to train and to predict."""

    def run(columns):
        path = tmp_path / f"{columns}.csv"
        options = {"data": f"table:{path}", "label": "label", "clients": 4, "rounds": 1, "engine": "inline"}
        result = unskew.run(
            model="logistic", partition="iid", local_steps=1, out=tmp_path / f"run-{columns}", **options
        )
        return unskew.load_predictor(result.folder).predict_file(path)

    def load(columns, missing):
        path = tmp_path / f"{columns}.csv"
        return unskew.load_federation(f"table:{path}", label="label", partition="iid", clients=4, missing=missing)

    sizes = (100, 200, 400)
    for columns in (sizes[0] - 1, *sizes):
        write_table(tmp_path / f"{columns}.csv", columns)
    monkeypatch.setattr(registry, "load_cached", lambda request, stamp: registry.load_uncached(request))
    for act in (
        lambda columns: load(columns, "error"),
        lambda columns: load(columns, "mean"),
        lambda columns: infer_config(f"table:{tmp_path / f'{columns}.csv'}", "label"),
        run,
    ):
        first, second = growth(act, sizes)
        assert second == pytest.approx(first, rel=0.15)


def test_long_lists_of_names_cost_the_same_per_name():
    def configure(names):
        text = "data: table:x.csv\nfeatures:\n" + "".join(f"- column_{name}\n" for name in range(names))
        assert experiment(read_yaml(text)).to_yaml().count("column_") == names

    first, second = growth(configure, (500, 1000, 2000))
    assert second == pytest.approx(first, rel=0.15)


def test_a_client_with_one_row_has_its_own_count_of_missing_values(tmp_path):
    pytest.importorskip("pyarrow")
    rows = [f"{n % 7},{'' if n % 3 == 0 else n % 5},{'yn'[n % 2]},{'b' if n == 18 else 'a'}" for n in range(40)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["age,dose,sick,ward", *rows]))
    fed = unskew.load_federation(
        f"table:{path}", label="sick", missing="mean", partition="natural:ward", clients=None, holdout=0
    )
    sizes = dict(zip(fed.client_names, (len(client.y) for client in fed.clients), strict=True))
    assert sizes.get("b") == 1
    assert fed.missing[list(sizes).index("b")].tolist() == [0, 1]
