"""Recorded work: when it is recorded, the rounds in which a recording is valid, and operations that forbid one."""

import pytest
import torch
from support.recorded_operators import RecordedOperators

from unskew.engines.recording import LEAST_REPLAYS, CaptureCheck, Recording, RuleWatch, Static, WatchedRound, overwrite

CPU = torch.device("cpu")


def counted(function):
    """Work on two fixed tensors, and the number of its executions from Python."""
    total, calls = torch.zeros(2), []

    def work(round):
        calls.append(round)
        overwrite([total], [function(total, round)])

    return Recording(work, CPU, RuleWatch([]), lambda: [total]), total, calls


def test_work_is_recorded_in_its_third_use_and_then_repeated():
    recording, total, calls = counted(lambda total, round: total + 1)
    for use in range(1, 7):
        recording.run(0, RecordedOperators)
        assert total.tolist() == [use, use]
    assert len(calls) == 3  # twice from Python, once for the recording


def test_a_comparison_with_the_round_keeps_the_recording_valid_while_it_holds():
    recording, total, calls = counted(lambda total, round: total + (1 if round < 5 else 100))
    for round in range(9):
        recording.run(round, RecordedOperators)
    assert total.tolist() == [405, 405]
    assert len(calls) == 6  # in rounds 0, 1 and 2, and again in 5, 6 and 7


@pytest.mark.parametrize(("left", "recordings"), [(LEAST_REPLAYS, 3), (LEAST_REPLAYS - 1, 1)])
def test_work_that_computes_with_the_round_is_recorded_in_each_round_if_that_pays(left, recordings):
    recording, total, calls = counted(lambda total, round: total + 0.5**round)
    for round in range(3):
        for _ in range(4):
            recording.run(round, RecordedOperators, left)
    assert total.tolist() == [7, 7]
    assert sum(isinstance(call, WatchedRound) for call in calls) == recordings


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1, lambda t: 1 - t, lambda t: 2**t, lambda t: t**2, float, int, str, bool, hash, repr, "{}".format,
        lambda t: -t, lambda t: range(9)[t], lambda t: t % 2, lambda t: 7 // t, lambda t: t.bit_length(),
        lambda t: f"{t:03d}", lambda t: t & 1, lambda t: 1 | t, lambda t: t << 2, lambda t: divmod(t, 2), abs, round,
    ],
)  # fmt: skip
def test_every_use_of_the_number_is_noted(use):
    watched = WatchedRound(3)
    assert use(watched) == use(3)
    assert watched.used
    assert (watched.holds(3), watched.holds(4)) == (True, False)


def test_the_number_is_an_integer_for_rules_that_ask():
    watched = WatchedRound(3)
    assert isinstance(watched, int)
    match watched:
        case int():
            assert not watched.used
        case _:
            pytest.fail("not an integer")


class Rule:
    """A rule with an attribute that a hook may change."""

    def __init__(self):
        self.count = 0


@pytest.mark.parametrize(("changes", "recorded"), [(1, True), (2, False), (99, False)])
def test_work_that_changes_attributes_of_a_rule_is_not_recorded(changes, recorded):
    """A hook may store a value that it computes once, in the first execution."""
    rule, total = Rule(), torch.zeros(2)

    def work(round):
        if rule.count < changes:
            rule.count += 1
        overwrite([total], [total + rule.count])

    recording = Recording(work, CPU, RuleWatch([rule]), lambda: [total])
    expected = 0
    for use in range(1, 7):
        recording.run(0, RecordedOperators)
        expected += min(use, changes)
        assert total.tolist() == [expected, expected]
    assert (recording.reasons == []) is recorded


def test_other_work_of_the_rule_is_not_repeated_either():
    rule, total = Rule(), torch.zeros(2)
    watch = RuleWatch([rule])

    def begin(round):
        rule.count += 1

    first = Recording(begin, CPU, watch)
    step = Recording(lambda round: overwrite([total], [total + rule.count]), CPU, watch, lambda: [total])
    for round in range(3):
        first.run(round, RecordedOperators)
        for _ in range(4):
            step.run(round, RecordedOperators)
    assert total.tolist() == [4 * (1 + 2 + 3)] * 2


def test_comparisons_are_noted_with_their_results():
    watched = WatchedRound(3)
    assert [watched < 4, watched >= 4, watched == 3, watched != 2, watched > 2, watched <= 3] == [
        *(True, False, True, True, True, True)
    ]
    assert watched > 2
    assert min(watched, 9) is watched
    assert not watched.used
    assert [watched.holds(round) for round in (2, 3, 4)] == [False, True, False]
    other = WatchedRound(3)
    assert other < 10
    assert [other.holds(round) for round in (0, 9, 10)] == [True, True, False]


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x: x.nonzero(), "nonzero reads the device"),
        (lambda x: x.sum().item(), "_local_scalar_dense reads the device"),
        (lambda x: torch.tensor([1.0], device=x.device), "tensor creates a tensor from Python numbers"),
        (lambda x: torch.as_tensor(1.0, device="cpu"), "as_tensor creates a tensor from Python numbers"),
        (lambda x: torch.zeros(2, device=x.device) + torch.arange(2), None),
        (lambda x: x.clone().add_(2.0).relu(), None),
    ],
)
def test_reads_of_the_device_and_tensors_from_python_forbid_a_recording(work, reason):
    with CaptureCheck(CPU) as check:
        work(torch.ones(3))
    assert list(check.reasons) == ([] if reason is None else [reason])


def test_tensors_of_the_host_are_found_on_another_device():
    there = torch.ones(3, device="meta")
    with CaptureCheck(there.device) as check:
        there + torch.tensor(2.0)  # a number of the recording
        torch.ones(3).to("meta")
        there.clone().copy_(torch.zeros(3))
    assert list(check.reasons) == ["_to_copy copies a tensor of the host", "copy_ copies a tensor of the host"]


def test_fixed_tensors_keep_their_memory():
    fixed = Static({"a": torch.zeros(2), "b": [torch.ones(3), None]})
    before = fixed.tree["a"].data_ptr(), fixed.tree["b"][0].data_ptr()
    fixed.load({"a": torch.full((2,), 5.0), "b": [fixed.tree["b"][0].mul_(2), None]})
    assert fixed.tree["a"].tolist() == [5, 5]
    assert fixed.tree["b"][0].tolist() == [2, 2, 2]
    assert (fixed.tree["a"].data_ptr(), fixed.tree["b"][0].data_ptr()) == before
    assert fixed.fits({"a": torch.ones(2), "b": [torch.ones(3), None]})
    assert not fixed.fits({"a": torch.ones(3), "b": [torch.ones(3), None]})
    assert not fixed.fits({"a": torch.ones(2, dtype=torch.float64), "b": [torch.ones(3), None]})
