"""Training on a device that holds shapes and no numbers: what mixes devices, or reads a number in the loop, fails there.

It is no GPU, but finds on any machine what a GPU would refuse, or wait for at every step. Reads of the device and transfers
to it are counted: a round may take a constant number of them, whatever the number of clients.
"""

import pytest
from support.meta_device import COUNTED, NOT_HERE, Cohort, Counts

from unskew.methods.registry import METHODS

ALL_METHODS = sorted(set(METHODS) - set(NOT_HERE))
CASES = [(name, there) for name in ALL_METHODS for there in (False, True) if not (there and name in COUNTED)]
FEW = [("scaffold", True), ("fedcog", False)]
AT_SERVER = ("center", "dense", "feddf", "feddle", "fedft", "fltrust", "hfcl")
"""Methods that train at the server, for which there is nothing here."""
READING = ("bulyan", "ca2fl", "fedexp", "geomedian", "krum", "multikrum")
"""Methods whose server rule reads numbers of the device."""
WITH_SERVER = sorted(set(ALL_METHODS) - set(AT_SERVER) - set(READING) - set(COUNTED))
MOST_TRANSFERS = 20
"""Transfers of a round of three steps: some for the broadcasts, and three per step if the data are elsewhere."""


@pytest.fixture
def counts(monkeypatch):
    return Counts(monkeypatch)


def train_and_count(counts, *args, **options):
    cohort = Cohort(*args, **options)
    cohort.train(0)  # what a rule reads of a client's data once is not counted
    counts.reads = counts.transfers = 0
    with counts:
        updates = cohort.train(1)
        assert all(update.is_finite() for update in updates)  # which the engine found out for all of them
    assert counts.reads == 1  # the losses, when all is done
    assert {update.delta.device.type for update in updates} == {"meta"}
    assert [update.metrics["steps"] for update in updates] == [3] * len(updates)
    return counts.transfers


@pytest.mark.parametrize(
    ("name", "there"), [pytest.param(*case, marks=[] if case in FEW else pytest.mark.slow) for case in CASES]
)
def test_a_cohort_trains_there_and_is_read_once(name, there, counts):
    transfers = [train_and_count(counts, name, there, clients) for clients in (3, 9)]
    assert transfers[0] == transfers[1] <= MOST_TRANSFERS


@pytest.mark.parametrize("there", [True, False])
def test_augmentation_is_moved_at_once(there, counts):
    transfers = [train_and_count(counts, "fedavg", there, clients, augment=True) for clients in (3, 9)]
    assert transfers[0] == transfers[1] <= MOST_TRANSFERS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "scaffold" else pytest.mark.slow) for name in WITH_SERVER]
)
def test_a_round_of_client_and_server_reads_twice(name, counts):
    for clients in (3, 12):
        cohort = Cohort(name, True, clients, server_device="meta")
        cohort.server.aggregator.step(0, cohort.train(0))
        counts.reads = counts.transfers = 0
        with counts:
            cohort.server.aggregator.step(1, cohort.train(1))
        assert counts.reads <= 2  # the losses, and whether the server's new tensors are finite
        assert counts.transfers <= MOST_TRANSFERS // 2
