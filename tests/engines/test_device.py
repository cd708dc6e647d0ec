"""Settings and memory of CUDA devices, on machines without one: the settings can be changed there, memory is a fake."""

import contextlib
import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.protocol import server_of
from support.recorded_operators import RecordedOperators
from support.tolerance import assert_close

import unskew
from unskew import ModelSpec, method
from unskew.engines import vectorized
from unskew.engines.base import EngineConfig
from unskew.engines.device import device_modes
from unskew.engines.inline import InlineEngine
from unskew.engines.vectorized import VectorizedEngine
from unskew.engines.vmap_trainer import GroupTrainer
from unskew.protocol.messages import finite_flags
from unskew.protocol.training_config import Training
from unskew.tasks.registry import TASKS

CUDA = torch.device("cuda")
BACKENDS = torch.backends


class FakeMemory:
    """Memory in which every client of a group takes ``each`` bytes, of which ``total`` are free."""

    def __init__(self, each, total):
        self.each, self.total, self.released = each, total, 0
        self.last = 0

    def train(self, count):
        self.last = count * self.each
        if self.last > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def peak_of(self, work):
        work()
        return self.last

    def free(self):
        return self.total

    def release(self):
        self.released += 1


def engines(memory=None, model=None, name="fedavg", clients=21, **options):
    sizes = [8 + k % 5 for k in range(clients)]
    federation, what = blobs(sizes, shape=(2, 6, 6)).to(torch.device("cpu")), method(name)  # in one array, as on a GPU
    torch.manual_seed(0)
    spec = ModelSpec(model or SmallBatchNorm(), federation.shape, federation.classes, dtype=torch.float64)
    training = Training(local_epochs=1, batch_size=4, lr=0.1)
    task, cpu = TASKS["classification"], torch.device("cpu")
    setup = EngineConfig(spec, federation, what.client, task, training, 0, cpu)
    server = server_of(what, spec, federation)
    engine = VectorizedEngine(setup, memory, **options)
    return engine, InlineEngine(setup), [server.broadcaster.broadcast(0, k) for k in range(clients)]


def with_memory(monkeypatch, memory, **options):
    """An engine whose groups are recorded and take fake memory."""
    engine, inline, broadcasts = engines(memory, **options)
    groups, mapped, single = [], engine.trainer.mapped, engine.trainer.single.train

    def train(sent):
        groups.append(len(sent))
        memory.train(len(sent))
        return mapped(sent)

    def alone(sent):
        groups.append(1)
        memory.train(1)
        return single(sent)

    monkeypatch.setattr(engine.trainer, "mapped", train)
    monkeypatch.setattr(engine.trainer.single, "train", alone)
    return engine, inline, broadcasts, groups


def assert_same(updates, expected):
    for one, other in zip(updates, expected, strict=True):
        assert one.client == other.client
        assert_close(one.delta, other.delta)


@pytest.mark.parametrize(
    ("total", "width", "trained"),
    [
        (100 * 40, 32, [8, 21]),
        (100 * 21, 16, [8, 16, 5]),
        (100 * 10, 8, [8, 8, 8, 5]),
        (100 * 5, 4, [8, 4, 4, 4, 4, 4, 1]),
        (100 * 1, 1, [8, 4, 2, *[1] * 21]),
        (10**9, 512, [8, 21]),
    ],
)
def test_the_width_follows_from_the_memory_of_a_small_group(total, width, trained, monkeypatch):
    memory = FakeMemory(100, total)
    engine, inline, broadcasts, groups = with_memory(monkeypatch, memory)
    expected = list(inline.train(broadcasts))
    assert_same(engine.train(broadcasts), expected)
    assert (engine.width, groups) == (width, trained)
    groups.clear()
    assert_same(engine.train(broadcasts), expected)
    assert sum(groups) == 21  # measured once


def test_a_round_that_exhausts_the_memory_starts_again_with_half_the_width(monkeypatch, tmp_path):
    memory = FakeMemory(100, 100 * 40)
    engine, inline, broadcasts, groups = with_memory(monkeypatch, memory)
    engine.remember_choices(tmp_path, resume=False)
    expected = list(inline.train(broadcasts))
    list(engine.train(broadcasts))
    assert json.loads((tmp_path / "vectorized.json").read_text()) == {"width": 32, "channels_last": False}
    memory.total, memory.released = 100 * 9, 0
    groups.clear()
    assert_same(engine.train(broadcasts), expected)
    assert groups == [21, 16, 8, 8, 5]
    assert memory.released == 2
    assert json.loads((tmp_path / "vectorized.json").read_text())["width"] == 8
    resumed, _, _, groups = with_memory(monkeypatch, memory)
    resumed.remember_choices(tmp_path, resume=True)
    assert_same(resumed.train(broadcasts), expected)
    assert groups == [8, 8, 5]


def test_a_client_that_does_not_fit_is_an_error(monkeypatch):
    engine, _, broadcasts, groups = with_memory(monkeypatch, FakeMemory(100, 50))
    with pytest.raises(torch.OutOfMemoryError):
        engine.train(broadcasts)
    assert groups == [8, 4, 2, 1]


def test_a_small_cohort_is_not_measured(monkeypatch):
    engine, _, broadcasts, groups = with_memory(monkeypatch, FakeMemory(100, 10**9))
    list(engine.train(broadcasts[:8]))
    assert (engine.width, groups) == (None, [8])


def test_pretrained_models_are_trained_one_by_one(monkeypatch):
    monkeypatch.setattr(SmallBatchNorm, "__module__", "transformers.models.tiny")
    engine, inline, broadcasts, groups = with_memory(monkeypatch, FakeMemory(100, 10**9), clients=9)
    assert_same(engine.train(broadcasts), list(inline.train(broadcasts)))
    assert groups == [1] * 9


def test_the_cpu_keeps_its_width():
    engine, _, _ = engines()
    assert engine.width == vectorized.WIDTH


@pytest.mark.parametrize(
    ("seconds", "channels_last"), [((1.0, 0.8), True), ((1.0, 0.95), False), ((1.0, math.inf), False)]
)
def test_the_faster_form_of_convolutions_is_used_and_resumed(seconds, channels_last, monkeypatch, tmp_path):
    """The network with the channels last must be clearly faster; a resumed run does not measure again."""
    timed = []
    monkeypatch.setattr(
        GroupTrainer, "step_seconds", lambda self, sent: timed.append(len(sent)) or seconds[len(timed) - 1]
    )
    engine, inline, broadcasts = engines(record=RecordedOperators)
    engine.remember_choices(tmp_path, resume=False)
    assert_same(engine.train(broadcasts), list(inline.train(broadcasts)))
    assert (engine.channels_last, engine.trainer.form is not None) == (channels_last, channels_last)
    assert json.loads((tmp_path / "vectorized.json").read_text())["channels_last"] is channels_last
    resumed, _, _ = engines(record=RecordedOperators)
    resumed.remember_choices(tmp_path, resume=True)
    assert_same(resumed.train(broadcasts), list(inline.train(broadcasts)))
    assert resumed.channels_last is channels_last
    assert timed == [21, 21]


def test_a_recorded_step_is_timed_and_discarded():
    engine, inline, broadcasts = engines(record=RecordedOperators)
    assert 0 < engine.trainer.step_seconds(broadcasts) < math.inf
    assert_same(engine.train(broadcasts), list(inline.train(broadcasts)))
    failing, _, _ = engines(record=RecordedOperators)
    failing.trainer.record = lambda work, restore: work  # has no replay
    assert failing.trainer.step_seconds(broadcasts) == math.inf


class Convolutions(torch.nn.Module):
    """Convolutions with strides, dilations, groups and several kinds of padding."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(2, 6, 3, padding=2, stride=2, dilation=2)
        self.norm = torch.nn.BatchNorm2d(6)
        self.second = torch.nn.Conv2d(6, 4, (1, 2), padding=(0, 1), bias=False)
        self.grouped = torch.nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.valid = torch.nn.Conv2d(4, 4, 2, padding="valid")
        self.same = torch.nn.Conv2d(4, 4, 3, padding="same")
        self.fc = torch.nn.LazyLinear(3)
        self.fc(self.body(torch.zeros(2, 2, 6, 6)))

    def body(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.same(self.valid(self.grouped(self.second(x)))).flatten(1)

    def forward(self, x):
        return self.fc(self.body(x))


@pytest.mark.parametrize("name", ["fedavg", "scaffold+fedprox", "moon"])
@pytest.mark.parametrize("make", [SmallBatchNorm, Convolutions])
def test_the_forms_of_convolutions_agree(make, name):
    results = {}
    for form in ("grouped", "channels_last"):
        torch.manual_seed(1)
        engine, inline, broadcasts = engines(model=make(), name=name, clients=5, convolution=form)
        assert (engine.trainer.form is not None) is (form == "channels_last")
        results[form] = list(engine.train(broadcasts))
    results["inline"] = list(inline.train(broadcasts))
    for updates in results.values():
        for one, other in zip(updates, results["grouped"], strict=True):
            torch.testing.assert_close(one.delta, other.delta, rtol=0, atol=1e-10)
            torch.testing.assert_close(one.buffers, other.buffers, rtol=0, atol=1e-10)


def settings():
    newer = [
        getattr(part, "fp32_precision", None)
        for part in (BACKENDS.cuda.matmul, *(getattr(BACKENDS.cudnn, name, None) for name in ("conv", "rnn")))
    ]
    return {
        "newer": newer,
        "benchmark": BACKENDS.cudnn.benchmark,
        "deterministic": BACKENDS.cudnn.deterministic,
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp64"])
def test_a_run_on_cuda_is_deterministic_and_restores_the_settings(precision, monkeypatch):
    monkeypatch.setattr(BACKENDS.cudnn, "benchmark", True)
    monkeypatch.setattr(BACKENDS.cudnn, "allow_tf32", True)  # PyTorch's default, which a measurement may have changed
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = settings()
    with contextlib.suppress(ZeroDivisionError), device_modes(CUDA, precision):
        fast = precision == "tf32"
        assert BACKENDS.cuda.matmul.allow_tf32 is fast
        assert BACKENDS.cudnn.allow_tf32 is fast
        inside = settings()
        assert inside == {**inside, "benchmark": False, "deterministic": True, "algorithms": True, "warn_only": True}
        assert (inside["workspace"], inside["fill"]) == (":4096:8", False)
        raise ZeroDivisionError
    assert settings() == before
    assert BACKENDS.cudnn.allow_tf32
    assert not BACKENDS.cuda.matmul.allow_tf32


@pytest.mark.skipif(not hasattr(BACKENDS.cuda.matmul, "fp32_precision"), reason="before PyTorch 2.9")
def test_settings_of_the_newer_kind_are_restored(monkeypatch):
    monkeypatch.setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32")
    with device_modes(CUDA, "fp32"):
        assert not BACKENDS.cuda.matmul.allow_tf32
    assert BACKENDS.cuda.matmul.fp32_precision == "tf32"


def test_a_workspace_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with device_modes(CUDA, "fp32"):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_the_cpu_is_left_alone():
    before = settings()
    with device_modes(torch.device("cpu"), "tf32"):
        assert settings() == before


def test_tf32_equals_fp32_on_a_cpu():
    vectors = []
    for precision in ("fp32", "tf32"):
        torch.manual_seed(0)
        options = {"rounds": 1, "local_steps": 2, "engine": "inline", "precision": precision}
        vectors.append(unskew.run(blobs([8, 9]), model=SmallBatchNorm(), method="fedavg", **options).vector)
    assert torch.equal(*vectors)


def test_a_run_enters_the_modes_of_its_device(monkeypatch):
    seen = []

    def modes(device, precision):
        seen.append((device.type, precision))
        return device_modes(device, precision)

    monkeypatch.setattr("unskew.runs.run.device_modes", modes)
    unskew.run(blobs([8, 9]), model=SmallBatchNorm(), method="fedavg", rounds=1, local_steps=1, precision="tf32")
    assert seen == [("cpu", "tf32")]


def test_cuda_memory_subtracts_what_was_allocated_before(monkeypatch):
    memory = vectorized.DeviceMemory(CUDA)
    values = {"memory_allocated": 10, "max_memory_allocated": 70, "memory_reserved": 90, "mem_get_info": (500, 1000)}
    fake = SimpleNamespace(**{name: lambda device, value=value: value for name, value in values.items()})
    fake.reset_peak_memory_stats = fake.empty_cache = lambda *args: None
    monkeypatch.setattr(torch, "cuda", fake)
    assert (memory.peak_of(lambda: None), memory.free()) == (60, 580)
    memory.release()


def test_each_tensor_is_checked_for_finite_numbers():
    values = [[1.0, 2.0], [1.0, float("nan")], [3e38, 3e38], [float("inf"), -float("inf")], []]
    assert finite_flags([torch.tensor(value) for value in values]) == [True, False, True, False, True]
    assert finite_flags([torch.tensor([1e300], dtype=torch.float64), torch.tensor([True])]) == [True, True]
    assert finite_flags([]) == []


def test_other_tensors_are_checked_again():
    engine, _, broadcasts = engines(clients=2)
    update, _ = engine.train(broadcasts)
    assert update.known_finite
    assert not replace(update, delta=update.delta * float("nan")).is_finite()
