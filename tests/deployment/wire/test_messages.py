"""One hostile site: its reply harms only itself, with every method and every way to spoil a reply."""

import json
import math
import shutil
from dataclasses import replace
from statistics import median_high

import pytest
import torch
from support.deployed_runs import BODY, FULL_BATCHES, QUICK, SERVER_DATA
from support.federations import LORA
from support.sites import TINY, LoopPlace, Told, deployed
from support.slow import slow_but

from unskew.deployment.server import round_requests
from unskew.deployment.server.config import Deployment, RoundPolicy
from unskew.deployment.server.run import resume
from unskew.deployment.wire.frames import Blob, Frame
from unskew.deployment.wire.tensor_codec import decode_tensor, encode_tensor
from unskew.methods.registry import METHODS

pytestmark = pytest.mark.fuzz

HOSTILE, FAULTS = 1, 2
SCAFFOLD = {"method": "scaffold", "rounds": 4, "eval_clients": 0}
OTHER_TYPE = {"float32": "int32", "int32": "float32", "uint8": "int8", "int8": "uint8", "int16": "bfloat16"}
OTHER_TYPE |= {"bfloat16": "int16", "float64": "int64", "int64": "float64", "bool": "uint8"}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(round_requests, "POLL", 0.001)
    monkeypatch.setattr(round_requests, "PAUSE", 0.001)


# ---- ways to spoil a reply ---------------------------------------------------------------------------------------------


def renamed(frame, name):
    arrays = {f"{key}z" if key == name else key: blob for key, blob in frame.arrays.items()}
    return replace(frame, arrays=arrays)


def reshaped(frame, name):
    blob = frame.arrays[name]
    return replace(frame, arrays={**frame.arrays, name: Blob(blob.dtype, (1, *blob.shape), blob.data)})


def retyped(frame, name):
    blob = frame.arrays[name]
    return replace(frame, arrays={**frame.arrays, name: Blob(OTHER_TYPE[blob.dtype], blob.shape, blob.data)})


def filled(value):
    def spoil(frame, name):
        tensor = decode_tensor(frame.arrays[name])
        if not tensor.is_floating_point() or not tensor.numel():
            return None  # other values of integers may be valid
        return replace(frame, arrays={**frame.arrays, name: encode_tensor(torch.full_like(tensor, value))})

    return spoil


def without(frame, name):
    return replace(frame, arrays={key: blob for key, blob in frame.arrays.items() if key != name})


def doubled(frame, name):
    return replace(frame, arrays={**frame.arrays, f"upload/{name.partition('/')[2]}": frame.arrays[name]})


SPOILS = {
    "wrong name": renamed,
    "wrong shape": reshaped,
    "wrong type": retyped,
    "not finite": filled(math.nan),
    "infinite": filled(math.inf),
    "huge": filled(1e30),
    "missing": without,
}


class Runs:
    """Runs of one experiment over the same sites, each under a name of its own."""

    def __init__(self, folder, values, **policy):
        self.folder, self.values, self.number = folder, values, 0
        self.place = LoopPlace(folder, {**TINY, **values})
        self.policy = RoundPolicy(**{"max_invalid_replies": FAULTS, **policy})

    def __call__(self, spoil=lambda client, asked, answer: answer):
        self.number += 1
        for state in self.folder.glob("sites/*/state"):  # a second run would otherwise open no masked sums
            shutil.rmtree(state)
        self.told, link = Told(), self.place.link
        link.spoil, link.answers, link.sent, link.received = spoil, {}, [], []
        deployment = Deployment(run=f"{self.number:016x}", startup_timeout=30, round_policy=self.policy)
        result, _ = deployed(self.folder / str(self.number), self.place, deployment, self.told, **self.values)
        self.folder_of_run = self.folder / str(self.number) / "run"
        return result

    @property
    def blamed(self):
        """Sites that a fault was counted for."""
        return {
            text.split(" ")[0]
            for text in self.told.warnings
            if "then it is excluded" in text or "is excluded from" in text
        }


def trains(client, asked):
    return client == HOSTILE and asked.kind == "train"


def missing(client, asked, answer):
    """The hostile site sends no updates."""
    return None if trains(client, asked) else answer


def assert_same_result(result, expected, ignored=()):
    assert torch.equal(result.vector, expected.vector)
    for mine, theirs in zip(result.history, expected.history, strict=True):
        for name in theirs:
            if "seconds" not in name and not name.startswith("sites_") and name not in ignored:
                assert mine[name] == theirs[name] or theirs[name] != theirs[name], name


def values_of(name):
    more = {"server_data": 60} if name in SERVER_DATA else {"model": "mlp"} if name in BODY else {}
    more = {**FULL_BATCHES, "perfedavg": {"drop_last": True}}.get(name, more)
    few = {"krum": "krum:share=0", "multikrum": "multikrum:share=0", "bulyan": "bulyan:share=0"}
    method = {**QUICK, **few}.get(name, name)
    return {"method": method, "clients": 4, "eval_clients": 0, **more}


ALL = sorted(set(METHODS) - {"mime", *LORA})


QUICKLY = [(name, "last array") for name in ("scaffold", "fedproto", "topk")]
"""Methods that cover the kinds of uploads, with only one array spoilt."""


@pytest.mark.parametrize(("name", "which"), slow_but(QUICKLY, [*QUICKLY, *((name, "every array") for name in ALL)]))
def test_a_spoilt_update_changes_nothing_but_the_exclusion_of_its_site(name, which, tmp_path):
    """The result is that of a run in which the site sends no update, bit for bit; every array is spoilt in every way."""
    runs = Runs(tmp_path, values_of(name), round_timeout=0.01, on_timeout="continue")
    expected = runs(missing)
    assert runs.blamed == set()
    honest = runs()
    replies = [frame for client, frame in runs.place.link.received if client == HOSTILE and frame.kind == "update"]
    assert replies or name == "center"  # which trains at the server
    arrays = list(dict.fromkeys(key for frame in replies for key in frame.arrays))
    for way, spoil in SPOILS.items():
        for array in arrays if which == "every array" else arrays[-1:]:
            spoilt = []

            def spoils(client, asked, answer, array=array, spoil=spoil, spoilt=spoilt):
                other = spoil(answer, array) if trains(client, asked) and array in answer.arrays else None
                if other is None:
                    return missing(client, asked, answer)
                spoilt.append(asked)
                return other

            result = runs(spoils)
            if not spoilt:
                continue
            skipped = ("skipped", "bytes_up", "arrivals") if way in ("not finite", "infinite") else ()
            assert_same_result(result, expected, skipped)
            if way in ("not finite", "infinite"):  # a training that diverged is no fault of a site
                assert runs.blamed == set(), (way, array)
            else:
                assert runs.blamed == {f"site-{HOSTILE}"}, (way, array)
                assert (result.history[-1].get("sites_excluded") == 1) == (len(spoilt) >= FAULTS), (way, array)

    previous = {}

    def late(client, asked, answer):
        if not trains(client, asked):
            return answer
        runs.place.link.answers.update(previous)
        previous.clear()
        previous[f"m{len(runs.place.link.sent)}"] = answer
        return None

    assert_same_result(runs(late), expected)
    pull = runs.place.link.pull
    runs.place.link.pull = lambda identities: [reply for reply in pull(identities) for _ in range(2)]
    assert_same_result(runs(), honest)
    assert runs.blamed == set()


@pytest.mark.parametrize(
    ("method", "upload", "value"),
    [
        ("dp:noise=0,clip=0.05", "upload/dp/bits", 7.0),
        ("ifca", "upload/ifca/group", 2.0),
        ("ifca", "upload/ifca/group", -1.0),
        ("qfedavg", "upload/qfedavg/h", -1.0),
        ("fednova", "upload/fednova/length", -1.0),
        ("fedexp", "upload/fedexp/square", -1.0),
        ("fedcm", "upload/fedcm/rates", -1.0),
        ("fedgen:gen_steps=1", "upload/fedgen/counts", -1.0),
        ("fedproto", "upload/fedproto/present", 2.0),
        ("ccvr", "upload/ccvr/counts", -1.0),
    ],
)
def test_an_upload_out_of_the_range_of_its_method_is_rejected(method, upload, value, tmp_path):
    """A group that is not there would be an index, and a negative divisor would change the sign of the step."""
    runs = Runs(tmp_path, {"method": method, "clients": 4, "eval_clients": 0, "rounds": 1})
    spoilt = []

    def spoils(client, asked, answer):
        if not trains(client, asked) or upload not in answer.arrays:
            return answer
        spoilt.append(client)
        tensor = torch.full_like(decode_tensor(answer.arrays[upload]), value)
        return replace(answer, arrays={**answer.arrays, upload: encode_tensor(tensor)})

    runs(spoils)
    assert spoilt
    assert runs.blamed == {"site-1"}
    assert "is not from" in " ".join(runs.told.warnings)


@pytest.mark.parametrize("way", ["wrong shape", "missing"])
def test_a_spoilt_update_of_an_asynchronous_run_harms_only_its_site(way, tmp_path):
    place, told = LoopPlace(tmp_path, {**TINY, **SCAFFOLD, "clients": 4}), Told()
    place.link.spoil = lambda client, asked, answer: (
        SPOILS[way](answer, "upload/scaffold/change") if trains(client, asked) else answer
    )
    deployment = Deployment(run="0123456789abcdef", startup_timeout=30, asynchronous=True)
    result, _ = deployed(tmp_path, place, deployment, told, **SCAFFOLD, clients=4)
    assert result.history[-1]["sites_excluded"] == 1
    assert all("site-1 (client 1)" in text for text in told.warnings)


@pytest.mark.parametrize("array", ["update/delta", "upload/scaffold/change"])
def test_finite_numbers_whose_squares_overflow_are_a_fault_of_their_site(array, tmp_path):
    runs = Runs(tmp_path, {**SCAFFOLD, "precision": "fp64"}, round_timeout=0.01, on_timeout="continue")
    expected = runs(missing)
    for value in (1e160, 1e308):
        spoil = filled(value)
        result = runs(lambda c, asked, answer, spoil=spoil: spoil(answer, array) if trains(c, asked) else answer)
        assert_same_result(result, expected)
        assert runs.blamed == {f"site-{HOSTILE}"}


MASKED = {"secure_aggregation": "required", "clients": 5, "eval_clients": 0}


def relaid(change):
    """Change the layout that a site states for its masked update."""

    def spoil(frame, name):
        parts = change(json.loads(frame.config["parts"]))
        return replace(frame, config={**frame.config, "parts": json.dumps(parts)})

    return spoil


LAYOUTS = {
    "wrong name": relaid(lambda parts: [[f"{p[0]}z", *p[1:]] for p in parts]),
    "wrong shape": relaid(lambda parts: [*parts[:-2], *([p[0], p[1], [1, *p[2]]] for p in parts[-2:])]),
    "wrong type": relaid(lambda parts: [[p[0], "int32", *p[2:]] for p in parts]),
    "huge": relaid(lambda parts: [[*p[:2], [2**40, *p[2]]] for p in parts]),
    "missing": relaid(lambda parts: parts[1:]),
    "another order": relaid(lambda parts: parts[::-1]),
    "twice": relaid(lambda parts: [*parts, parts[-1]]),
    "no list": relaid(lambda parts: {"a": 1}),
    "no fields": lambda frame, name: replace(
        frame, config={"run": frame.config["run"], "attempt": frame.config["attempt"]}
    ),
}


WAYS = [("scaffold", ("wrong shape", "another order"))]
"""A few ways for the quick suite, as masked runs take longer."""


@pytest.mark.parametrize(
    ("name", "ways"),
    slow_but(WAYS, [*WAYS, *((name, (*LAYOUTS,)) for name in ("fedavg", "scaffold", "fednova", "ccvr", "fedproto"))]),
)
def test_a_spoilt_masked_update_changes_nothing_but_the_exclusion_of_its_site(name, ways, tmp_path):
    runs = Runs(tmp_path, {**MASKED, "method": name}, round_timeout=0.01)
    expected = runs(missing)
    for way in ways:
        spoilt = runs(lambda c, asked, answer, spoil=LAYOUTS[way]: spoil(answer, "") if trains(c, asked) else answer)
        assert_same_result(spoilt, expected, ("masking_error",))
        assert runs.blamed == {f"site-{HOSTILE}"}, way
        assert spoilt.history[-1]["sites_excluded"] == 1


def test_a_masked_sum_of_times_that_cannot_be_is_not_recorded(tmp_path):
    """Masks hide who has spoilt it, so it changes neither the model nor the end of the run."""
    runs = Runs(tmp_path, MASKED)
    honest, masks = runs(), runs.place.sites[HOSTILE].masks
    begin, wrong = masks.begin, {"loss": 1.0, "setup_seconds": -1e5, "train_seconds": 1.0}
    masks.begin = lambda session, update, *rest: begin(session, replace(update, metrics=wrong), *rest)
    result = runs()
    assert torch.equal(result.vector, honest.vector)
    assert [row["setup_seconds"] for row in result.history] == [None, None]
    assert all(row["train_seconds"] > 0 for row in result.history)
    assert math.isfinite(result.summary["client_seconds"])
    assert runs.blamed == set()
    assert "The sum of setup_seconds is invalid" in " ".join(runs.told.warnings)


# ---- numbers of a reply ------------------------------------------------------------------------------------------------

NUMBERS = [math.nan, math.inf, -math.inf, 1e308, -1e308, -1.0, 10**30, "1", None, True, [1.0]]


@pytest.mark.parametrize(
    "name", slow_but(["train_seconds", "loss"], ["train_seconds", "setup_seconds", "steps", "loss"])
)
def test_a_metric_out_of_range_is_rejected_and_the_run_finishes(name, tmp_path):
    """A loss may be negative, or not finite as in a training that diverged."""
    runs = Runs(tmp_path, {"clients": 4, "eval_clients": 0, "rounds": 1}, round_timeout=0.01, on_timeout="continue")
    expected = runs(missing)
    for number in NUMBERS:
        result = runs(
            lambda c, asked, answer, number=number: (
                replace(answer, metrics={**answer.metrics, name: number}) if trains(c, asked) else answer
            )
        )
        assert math.isfinite(result.summary["client_seconds"])
        assert result.summary["client_seconds"] < 1e6
        if name == "loss" and number in (-1.0, 10**30):
            assert runs.blamed == set(), number
        elif name == "loss" and isinstance(number, float) and not math.isfinite(number):
            assert runs.blamed == set(), number
            assert result.history[0]["train_loss"] is None
        else:
            assert runs.blamed == {"site-1"}, number
            assert torch.equal(result.vector, expected.vector)


def test_metrics_that_the_method_does_not_have_are_rejected(tmp_path):
    runs = Runs(tmp_path, {"clients": 4, "eval_clients": 0, "rounds": 1}, round_timeout=0.01, on_timeout="continue")
    expected = runs(missing)
    for metrics in ({}, {"bytes_up": 1.0}, {f"x{i}": 1.0 for i in range(100)}):
        result = runs(
            lambda c, asked, answer, metrics=metrics: (
                replace(answer, metrics={**(answer.metrics if metrics else {}), **metrics})
                if trains(c, asked)
                else answer
            )
        )
        assert runs.blamed == {"site-1"}
        assert_same_result(result, expected)


def test_a_run_whose_times_are_not_numbers_finishes_and_is_resumed(tmp_path, monkeypatch):
    """Whatever the source of such a time is."""
    from unskew.deployment.wire import messages

    monkeypatch.setattr(messages, "read_number", lambda metrics, name, *bounds: float(metrics[name]))
    runs = Runs(tmp_path, {"clients": 3, "eval_clients": 0})

    def spoils(client, asked, answer):
        return (
            replace(answer, metrics={**answer.metrics, "train_seconds": math.nan}) if trains(client, asked) else answer
        )

    result = runs(spoils)
    assert result.history[-1]["train_seconds"] is None
    assert math.isfinite(result.summary["client_seconds"])
    for site in runs.place.sites:  # their administrators agree to a further round
        further = {
            digest: config.model_copy(update={"rounds": 3}) for digest, config in site.experiments.configs.items()
        }
        site.experiments.configs, site.experiments._trainer = further, None
    resumed = resume(runs.folder_of_run, location=runs.place, tell=lambda text: None, rounds=3)
    assert resumed.summary["rounds"] == 3


@pytest.mark.parametrize("number", [math.nan, -1.0, 1.5, "1", None])
def test_an_accuracy_out_of_range_is_rejected_and_a_loss_of_a_diverged_model_is_not(number, tmp_path):
    runs = Runs(tmp_path, {"clients": 3, "holdout": 0.3})
    for name in ("accuracy", "loss"):
        result = runs(
            lambda c, asked, answer, name=name: (
                replace(answer, metrics={**answer.metrics, name: number})
                if c == HOSTILE and asked.kind == "evaluate"
                else answer
            )
        )
        rejected = name == "accuracy" or number in ("1", None)
        assert runs.blamed == ({"site-1"} if rejected else set())
        assert result.summary["clients_evaluated"] == (2 if rejected else 3)


# ---- outliers, floods, repetitions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.0, 1e-6, 2e3, 1e6, -1.0])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_one_site_in_ten_cannot_get_honest_ones_discarded(factor, method, tmp_path):
    """Neither by zeros, which lower the median, nor by large norms; five honest norms are 40 times the four others."""
    runs = Runs(tmp_path, {"clients": 10, "eval_clients": 0, "method": method, "max_train_samples": 300, "rounds": 1})

    def spoils(client, asked, answer):
        if asked.kind != "train":
            return answer
        norm = 100.0 * (factor if client == HOSTILE else 40.0 if client < 6 else 1.0)
        tensors = {name: decode_tensor(blob) for name, blob in answer.arrays.items() if name != "update/buffers"}
        scaled = {name: encode_tensor(norm * tensor / tensor.norm()) for name, tensor in tensors.items()}
        return replace(answer, arrays={**answer.arrays, **scaled})

    runs(spoils)
    assert runs.blamed <= {f"site-{HOSTILE}"}
    assert (runs.blamed != set()) == (abs(factor) > 1)


def test_no_single_norm_lowers_the_limit_of_another_client():
    from unskew.deployment.server.engine import norm_outliers

    draws = torch.Generator().manual_seed(0)
    for count in range(2, 12):
        for _ in range(200):
            honest = dict(enumerate((10 ** (4 * torch.rand(count, generator=draws))).tolist()))
            for norm in (0.0, 1.0, 50.0, 1e9):
                for k in norm_outliers({**honest, count: norm}, floor=0.0).keys() - {count}:
                    others = [other for j, other in honest.items() if j != k]
                    assert honest[k] > 30 * median_high(others)


@pytest.mark.parametrize("kind", ["outdated", "forgotten", "failed", "refused", "update", "\x1b[2J", "x" * 900])
def test_a_site_that_replies_something_else_in_every_round_changes_nothing(kind, tmp_path):
    runs = Runs(tmp_path, {**SCAFFOLD, "clients": 4}, round_timeout=0.01, on_timeout="continue")
    expected = runs(missing)
    reason = "\x1b]0;x\x07" + "y" * 5000

    def replies(client, asked, answer):
        return Frame(kind, {"reason": reason}) if trains(client, asked) else answer

    result = runs(replies)
    assert_same_result(result, expected)
    assert runs.blamed <= {"site-1"}
    assert len(runs.told.warnings) <= 2 * len(result.history)
    assert all(text.isprintable() and len(text) < 1500 for text in runs.told.warnings)


@pytest.mark.parametrize("field", ["client", "round", "attempt", "run", "num_samples", "weight"])
def test_a_reply_with_another_number_or_name_is_rejected(field, tmp_path):
    runs = Runs(tmp_path, {"clients": 4, "eval_clients": 0, "rounds": 1}, round_timeout=0.01, on_timeout="continue")
    expected = runs(missing)
    for value in (3, -1, 1 << 80, 1.5, math.nan, "0", None, [0], *([0] if field != "round" else [])):
        result = runs(
            lambda c, asked, answer, value=value: (
                replace(answer, config={**answer.config, field: value}) if trains(c, asked) else answer
            )
        )
        assert runs.blamed == {"site-1"}, value
        assert_same_result(result, expected)


# ---- before the first round --------------------------------------------------------------------------------------------

FEDSSYN = {"method": "fedssyn:generator=vae-small,epochs=1,n_syn=10", "clients": 3, "eval_clients": 0, "rounds": 1}


@pytest.mark.parametrize("way", ["wrong name", "wrong shape", "wrong type", "missing", "labels", "config"])
def test_a_spoilt_contribution_excludes_its_site_and_the_run_finishes(way, tmp_path):
    def spoils(client, asked, answer):
        if client != HOSTILE or asked.kind != "contribute":
            return answer
        if way == "config":
            return replace(answer, config={})
        if way == "labels":
            blob = answer.arrays["sent/y"]
            return replace(answer, arrays={**answer.arrays, "sent/y": replace(blob, data=b"\xff" * len(blob.data))})
        return SPOILS[way](answer, "sent/x")

    runs = Runs(tmp_path, FEDSSYN)
    result = runs(spoils)
    assert runs.blamed == {"site-1"}
    assert result.history[-1]["updates"] == 2
    assert result.history[-1]["sites_excluded"] == 1


@pytest.mark.parametrize("client", [0, HOSTILE])
@pytest.mark.parametrize(
    "metrics",
    [
        {"synthetic_images": 10.0, "synthetic_seconds": 0.1, "best_round": 7.0},
        {"synthetic_images": 10.0, "synthetic_seconds": 0.1, "kept_accuracy": 1.0},
        {"synthetic_images": 10.0, "synthetic_seconds": 0.1, "epsilon": 0.1},
        {"synthetic_images": 10.0},
        {"synthetic_images": math.nan, "synthetic_seconds": 0.1},
        {"synthetic_images": -1e9, "synthetic_seconds": 0.1},
    ],
)
def test_a_site_that_describes_its_images_otherwise_is_excluded(client, metrics, tmp_path):
    runs = Runs(tmp_path, FEDSSYN)
    result = runs(
        lambda c, asked, answer: (
            replace(answer, metrics=metrics) if c == client and asked.kind == "contribute" else answer
        )
    )
    assert runs.blamed == {f"site-{client}"}
    assert result.summary["synthetic_images"] == 20
    assert result.summary["best_round"] == 1
    assert not {"kept_accuracy", "epsilon"} & result.summary.keys()


def test_texts_of_a_contribution_are_ignored(tmp_path):
    runs = Runs(tmp_path, FEDSSYN)
    result = runs(
        lambda c, asked, answer: (
            replace(
                answer, config={**answer.config, "about.privacy": "(epsilon=0.1)", "about.synthetic_images": "many"}
            )
            if asked.kind == "contribute"
            else answer
        )
    )
    assert "privacy" not in result.summary
    assert result.summary["synthetic_images"] == 30


@pytest.mark.parametrize(
    "said", [{"held_out": 1 << 61}, {"num_samples": 1 << 61}, {"clock": math.inf}, {"name": None}, {"client": [1]}]
)
def test_an_invalid_report_keeps_only_its_site_out(said, tmp_path):
    place, told = LoopPlace(tmp_path, {**TINY, "clients": 4}), Told()
    place.link.spoil = lambda client, asked, answer: (
        replace(answer, config={**answer.config, **said}) if client == HOSTILE and asked.kind == "hello" else answer
    )
    deployment = Deployment(run="0123456789abcdef", startup_timeout=30, quorum=3)
    result, _ = deployed(tmp_path, place, deployment, told, clients=4, rounds=1)
    assert result.history[0]["updates"] == 3
