from collections.abc import Sequence

import numpy as np
import pytest

from unskew.data.partition import schemes as partitioners
from unskew.data.partition.parsing import PARTITIONS
from unskew.data.partition.partitioner import Partition, make_partition
from unskew.errors import ConfigError, DataError


def labels_of(n: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, n)


def even_labels(per_class: int, classes: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), per_class))


def counts_of(partition: Partition, labels: np.ndarray, classes: int) -> np.ndarray:
    return np.stack([np.bincount(labels[partition.indices(k)], minlength=classes) for k in range(partition.clients)])


def users(n: int, count: int, seed: int = 0) -> np.ndarray:
    return np.array([f"user{u:02d}" for u in np.random.default_rng(seed).integers(0, count, n)], dtype=object)


# Every partition

SPECS = [
    "iid",
    "dirichlet:0.3,min=1",
    "dirichlet:0.5,min=half",
    "dirichlet:0.5,balanced=false,min=1",
    "dirichlet:0.3,min=2,blocks=2",
    "classes:1",
    "classes:2",
    "sorted",
    "sorted:user",
    "quantity:0.4",
    "quantity:0.4,min=3",
    "natural:user",
]


@pytest.mark.parametrize("spec", SPECS)
def test_every_sample_has_exactly_one_client(spec):
    for seed in range(12):
        n = 400 + 37 * seed
        labels = labels_of(n, 4, seed)
        columns = {"user": users(n, 9, seed)}
        for clients in (4, 6, 10):
            partition = make_partition(
                spec, labels, None if spec.startswith("natural") else clients, seed, classes=4, columns=columns
            )
            assert partition.clients == (9 if spec.startswith("natural") else clients)
            assert np.array_equal(np.sort(partition.order), np.arange(n))
            assert partition.offsets[0] == 0
            assert partition.offsets[-1] == n
            assert partition.sizes.min() >= 1
            assert partition.order.dtype == partition.offsets.dtype == np.int64


@pytest.mark.parametrize("spec", SPECS)
def test_partition_depends_on_its_seed_only(spec):
    labels, columns = labels_of(600, 4), {"user": users(600, 9)}
    clients = 6

    def make(seed: int) -> Partition:
        return make_partition(spec, labels, clients, seed, classes=4, columns=columns)

    np.random.seed(0)  # noqa: NPY002  (global state must not matter)
    first = make(1)
    np.random.seed(1)  # noqa: NPY002
    again = make(1)
    assert np.array_equal(first.order, again.order)
    assert first.fingerprint == again.fingerprint
    if not spec.startswith("sorted"):
        assert first.fingerprint != make(2).fingerprint


def test_the_fingerprint_ignores_the_order_inside_a_client():
    a = Partition(np.array([2, 0, 1, 3]), np.array([0, 2, 4]), "a")
    b = Partition(np.array([0, 2, 3, 1]), np.array([0, 2, 4]), "b")
    c = Partition(np.array([0, 1, 2, 3]), np.array([0, 2, 4]), "c")
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert len(a.fingerprint) == 16


def test_indices_refuses_an_unknown_client():
    partition = make_partition("iid", labels_of(10, 2), 2, 0, classes=2)
    with pytest.raises(IndexError, match="no client 2"):
        partition.indices(2)


def test_every_partition_is_described():
    assert {spec.partition(":")[0].partition(",")[0] for spec in SPECS} == set(PARTITIONS)
    assert all(text.startswith(name) for name, text in PARTITIONS.items())


# iid, sorted, quantity


def test_iid_sizes_differ_by_at_most_one_and_labels_are_even():
    labels = even_labels(1000)
    partition = make_partition("iid", labels, 7, 0, classes=10)
    assert np.ptp(partition.sizes) <= 1
    assert np.abs(counts_of(partition, labels, 10) / (1000 / 7) - 1).max() < 0.3


def test_sorted_cuts_runs_of_the_stable_sort():
    labels = np.array([2, 0, 1, 0, 2, 1, 0])
    partition = make_partition("sorted", labels, 3, 5, classes=3)
    assert [partition.indices(k).tolist() for k in range(3)] == [[1, 3, 6], [2, 5], [0, 4]]
    genre = np.array(["b", "a", "b", "a", "a", "b", "b"])
    partition = make_partition("sorted:genre", labels, 2, 5, classes=3, columns={"genre": genre})
    assert [partition.indices(k).tolist() for k in range(2)] == [[0, 1, 3, 4], [2, 5, 6]]


def test_quantity_skews_sizes_but_not_labels():
    labels = even_labels(2000)
    partition = make_partition("quantity:0.3,min=20", labels, 10, 0, classes=10)
    assert partition.sizes.min() >= 20
    assert partition.sizes.max() > 3 * np.median(partition.sizes)
    large = counts_of(partition, labels, 10)[partition.sizes > 1000]
    assert len(large)
    assert np.abs(large / large.sum(1, keepdims=True) - 0.1).max() < 0.03


def test_quantity_shares_are_even_in_expectation():
    labels = labels_of(1000, 2)
    mean = np.mean([make_partition("quantity:0.5", labels, 5, s, classes=2).sizes for s in range(300)], axis=0)
    assert np.abs(mean - 200).max() < 45  # the standard deviation of the mean is about 12


# classes:S


@pytest.mark.parametrize(("each", "clients"), [(1, 10), (2, 10), (2, 13), (5, 4), (10, 3)])
def test_classes_follow_the_formula(each, clients):
    labels, groups = even_labels(130), 10 // each
    counts = counts_of(make_partition(f"classes:{each}", labels, clients, 0, classes=10), labels, 10)
    for i in range(clients):
        held = each * (i % groups) + np.arange(each)
        assert np.flatnonzero(counts[i]).tolist() == held.tolist()
        sharing = len(range(i % groups, clients, groups))
        assert np.abs(counts[i, held] - 130 / sharing).max() < 1
    assert np.ptp(counts.sum(1)[: clients // groups * groups : groups]) <= 1


def test_classes_partition_rejects_impossible_counts():
    labels = even_labels(20)
    with pytest.raises(ConfigError, match=r"classes:3 does not divide the 10 classes.*1, 2, 5, 10"):
        make_partition("classes:3", labels, 10, 0, classes=10)
    with pytest.raises(ConfigError, match="5 groups of classes, but with only 4 clients"):
        make_partition("classes:2", labels, 4, 0, classes=10)
    with pytest.raises(DataError, match="shares class 0 among 30 clients, but it has only 20"):
        make_partition("classes:10", labels, 30, 0, classes=10)


# dirichlet


def test_dirichlet_respects_the_minimum():
    labels = even_labels(500)
    for seed in range(20):
        assert make_partition("dirichlet:0.1", labels, 10, seed, classes=10).sizes.min() >= 10
        assert make_partition("dirichlet:0.1,min=60", labels, 10, seed, classes=10).sizes.min() >= 60
        assert make_partition("dirichlet:0.1,min=half", labels, 10, seed, classes=10).sizes.min() >= 250


def test_dirichlet_balanced_gives_nothing_more_to_a_full_client():
    # Classes come one after the other; a client may pass its share by its last class only.
    rng, sizes = np.random.default_rng(0), np.full((200, 10), 100)
    counts = partitioners.draw_class_counts(sizes, 5, rng, 0.2, balanced=True)
    before = np.cumsum(counts, axis=1) - counts
    assert (counts.sum(2) == 100).all()
    assert (counts[before >= 200] == 0).all()
    plain = partitioners.draw_class_counts(sizes, 5, rng, 0.2, balanced=False)
    assert (plain[np.cumsum(plain, axis=1) - plain >= 200] > 0).any()
    assert (plain.sum(2) == 100).all()


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_plain_dirichlet_has_the_moments_of_its_distribution(alpha):
    clients, draws = 5, 4000
    counts = partitioners.draw_class_counts(
        np.full((draws, 1), 10_000), clients, np.random.default_rng(1), alpha, False
    )
    shares = counts[:, 0] / 10_000
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert np.abs(shares.mean(0) - 1 / clients).max() < 5 * np.sqrt(variance / draws)
    assert np.abs(shares.var(0) / variance - 1).max() < 0.15


def test_dirichlet_is_even_in_expectation_over_seeds():
    labels = even_labels(100)
    counts = [
        counts_of(make_partition("dirichlet:0.5,min=1", labels, 4, s, classes=10), labels, 10) for s in range(300)
    ]
    assert np.abs(np.mean(counts, axis=0) - 25).max() < 8  # the standard deviation of a mean is about 1.4
    assert np.abs(np.mean(counts, axis=(0, 2)) - 25).max() < 2


def test_a_large_alpha_is_nearly_even_and_a_small_one_is_not():
    labels = even_labels(1000)
    even = counts_of(make_partition("dirichlet:1e5", labels, 10, 0, classes=10), labels, 10)
    assert np.abs(even - 100).max() < 6
    skewed = counts_of(make_partition("dirichlet:0.05,min=1", labels, 10, 0, classes=10), labels, 10)
    assert (skewed < 10).mean() > 0.5


@pytest.mark.parametrize("alpha", ["1e-3", "1e-9", "1e-300", "5e-324", "1e300"])
def test_extreme_alphas_are_finite(alpha):
    labels = even_labels(50)
    with np.errstate(all="raise", under="ignore"):
        partition = make_partition(f"dirichlet:{alpha},min=1", labels, 5, 0, classes=10)
    assert np.array_equal(np.sort(partition.order), np.arange(500))


def test_absent_classes_do_no_harm():
    labels = np.repeat([0, 3], 50)
    for balanced in ("true", "false"):
        partition = make_partition(f"dirichlet:1,min=5,balanced={balanced}", labels, 4, 0, classes=6)
        assert partition.sizes.min() >= 5


def test_plain_dirichlet_for_five_hundred_clients_leaves_nobody_empty():
    partition = make_partition("dirichlet:0.1,balanced=false,min=1", even_labels(5000), 500, 0, classes=10)
    assert partition.clients == 500
    assert partition.sizes.min() >= 1


def test_blocks_make_a_thousand_clients_possible():
    labels = even_labels(5000)
    partition = make_partition("dirichlet:0.1,blocks=10", labels, 1000, 0, classes=10)
    assert partition.sizes.min() >= 10
    by_block = counts_of(partition, labels, 10).reshape(100, 10, 10).sum(1)
    assert (by_block == 50).all()  # each class is spread evenly over the blocks


def test_blocks_stay_even_when_nothing_divides():
    labels = labels_of(1013, 4)
    partition = make_partition("dirichlet:0.5,min=1,blocks=3", labels, 12, 0, classes=4)
    by_block = counts_of(partition, labels, 4).reshape(4, 3, 4).sum(1)
    assert np.ptp(by_block, axis=0).max() <= 1
    assert np.ptp(by_block.sum(1)) <= 1


def test_more_draws_find_what_a_thousand_do_not():
    labels = even_labels(2500)
    spec = "dirichlet:0.1,min=half"
    with pytest.raises(DataError, match="in 1000 draws"):
        make_partition(spec, labels, 20, 0, classes=10)
    assert make_partition(f"{spec},draws=100000", labels, 20, 0, classes=10).sizes.min() >= 625


def test_dirichlet_gives_up_with_a_sentence():
    labels = even_labels(500)
    with pytest.raises(DataError) as caught:
        make_partition("dirichlet:0.01,balanced=false", labels, 100, 0, classes=10)
    text = str(caught.value)
    for part in ("ALPHA 0.01", "1000 draws", "100 clients", "5000 samples", "at least 10"):
        assert part in text
    for remedy in ("a larger ALPHA", "fewer clients", "min=1", "balanced=true", "blocks=10", "draws=20000"):
        assert remedy in text
    with pytest.raises(DataError, match="need 6000 samples, but there are 5000"):
        make_partition("dirichlet:1,min=60", labels, 100, 0, classes=10)
    with pytest.raises(ConfigError, match="blocks=7 does not divide 100 clients"):
        make_partition("dirichlet:1,blocks=7", labels, 100, 0, classes=10)


# natural


def test_natural_makes_one_client_per_value_in_sorted_order():
    column = np.array(["b", "a", "c", "a", "b", "b"], dtype=object)
    labels = np.zeros(6, int)
    partition = make_partition("natural:who", labels, None, 0, classes=1, columns={"who": column})
    assert [partition.indices(k).tolist() for k in range(3)] == [[1, 3], [0, 4, 5], [2]]
    partition = make_partition("natural:who,min=2", labels, 2, 0, classes=1, columns={"who": column})
    assert [partition.indices(k).tolist() for k in range(2)] == [[1, 3], [0, 4, 5]]


def test_natural_draws_the_clients_asked_for():
    column, labels = users(500, 30), labels_of(500, 2)
    seen = set()
    for seed in range(10):
        partition = make_partition("natural:user", labels, 5, seed, classes=2, columns={"user": column})
        assert partition.clients == 5
        held = [set(column[partition.indices(k)]) for k in range(5)]
        assert all(len(values) == 1 for values in held)
        values = [next(iter(v)) for v in held]
        assert values == sorted(set(values))
        assert len(partition.order) == np.isin(column, values).sum()
        seen |= set(values)
    assert len(seen) > 15


def test_natural_works_on_numbers_and_dates():
    labels = np.zeros(4, int)
    for column in (np.array([7, 3, 7, 3]), np.array(["2024-01-02", "2023-05-05"] * 2, dtype="datetime64[D]")):
        partition = make_partition("natural:c", labels, None, 0, classes=1, columns={"c": column})
        assert partition.indices(0).tolist() == [1, 3]


def test_natural_partition_rejects_missing_and_too_few_values():
    labels, columns = labels_of(6, 2), {"user": np.array(["a", "a", "b", "b", "c", None], dtype=object)}
    with pytest.raises(DataError, match="'user' has 1 missing"):
        make_partition("natural:user", labels, None, 0, classes=2, columns=columns)
    columns = {"user": np.array(list("aabbcc"))}
    with pytest.raises(DataError, match=r"has 3 values \(of 3\), but clients=4"):
        make_partition("natural:user", labels, 4, 0, classes=2, columns=columns)
    with pytest.raises(DataError, match=r"has 0 values with at least 3 samples \(of 3\)"):
        make_partition("natural:user,min=3", labels, None, 0, classes=2, columns=columns)
    with pytest.raises(DataError, match=r"no column 'usr'.*Did you mean 'user'"):
        make_partition("natural:usr", labels, None, 0, classes=2, columns=columns)
    with pytest.raises(DataError, match="no columns besides its labels"):
        make_partition("natural:user", labels, None, 0, classes=2)
    with pytest.raises(DataError, match="'f' has 1 missing"):
        make_partition("sorted:f", labels, 2, 0, classes=2, columns={"f": np.array([1, 2, np.nan, 3, 4, 5])})


# What users write wrong


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("dirichlt:0.1", "no partition 'dirichlt'. Did you mean 'dirichlet'"),
        ("", "no partition ''"),
        ("dirichlet", "dirichlet requires a value, for example dirichlet:0.1"),
        ("natural", "natural requires a value, for example natural:user"),
        ("dirichlet:abc", "ALPHA in 'dirichlet:abc' must be a number, not 'abc'"),
        ("dirichlet:0", "must be a positive number, not 0"),
        ("dirichlet:-1", "must be a positive number"),
        ("dirichlet:nan", "must be a positive number"),
        ("dirichlet:inf", "must be a positive number"),
        ("quantity:0", "must be a positive number"),
        (
            "dirichlet:1,mim=3",
            "The partition dirichlet has no option 'mim'; it has balanced, blocks, by, draws, min. Did you mean 'min'?",
        ),
        ("dirichlet:1,min", "'min' is not of the form option=value"),
        ("dirichlet:1,min=", "'min=' is not of the form option=value"),
        ("dirichlet:1,min=2,min=3", "sets min twice"),
        ("dirichlet:1,min=0", "must be at least 1, not 0"),
        ("dirichlet:1,min=some", "must be an integer, not 'some'"),
        ("dirichlet:1,balanced=maybe", "must be true or false, not 'maybe'"),
        ("dirichlet:1,blocks=0", "must be at least 1"),
        ("quantity:1,min=half", "must be an integer"),
        ("iid,min=2", "The partition iid has no option 'min'; it has each."),
        ("sorted,min=2", "sorted does not take options"),
        ("iid:3", "iid does not take a value"),
        ("classes:two", "must be an integer, not 'two'"),
        ("classes:0", "must be at least 1"),
    ],
)
def test_a_wrong_spec_is_a_sentence(spec, sentence):
    with pytest.raises(ConfigError) as caught:
        make_partition(spec, labels_of(100, 4), 5, 0, classes=4)
    assert sentence in str(caught.value)


def test_partition_rejects_invalid_arguments():
    labels = labels_of(10, 4)
    with pytest.raises(ConfigError, match="at least one client, but clients is 0"):
        make_partition("iid", labels, 0, 0, classes=4)
    with pytest.raises(DataError, match="11 clients cannot share 10 samples"):
        make_partition("iid", labels, 11, 0, classes=4)
    with pytest.raises(ConfigError, match="requires the number of clients"):
        make_partition("iid", labels, None, 0, classes=4)
    with pytest.raises(ConfigError, match="seed must not be negative"):
        make_partition("iid", labels, 2, -1, classes=4)
    with pytest.raises(ConfigError, match="not an object of type int"):
        make_partition(3, labels, 2, 0, classes=4)
    with pytest.raises(DataError, match="one integer label per sample"):
        make_partition("iid", labels / 2, 2, 0, classes=4)
    with pytest.raises(DataError, match="With 2 classes"):
        make_partition("iid", np.array([0, 1, 2]), 2, 0, classes=2)
    with pytest.raises(DataError, match="need 20 samples, but there are 10"):
        make_partition("quantity:1,min=10", labels, 2, 0, classes=4)


# Functions and Flower's partitioners


def test_a_function_is_a_partition():
    def halves(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Sequence[np.ndarray]:
        return np.array_split(rng.permutation(len(labels)), clients)

    labels = labels_of(30, 2)
    partition = make_partition(halves, labels, 4, 0, classes=2)
    assert partition.name == "halves"
    assert np.array_equal(np.sort(partition.order), np.arange(30))
    assert partition.fingerprint == make_partition(halves, labels, 4, 0, classes=2).fingerprint
    assert partition.fingerprint != make_partition(halves, labels, 4, 1, classes=2).fingerprint


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([[0, 1], [2]], "omits 1 of 4 samples"),
        ([[0, 1, 2], [2, 3]], "assigns sample 2 more than once"),
        ([[0, 1, 2, 3]], "made 1 parts for 2 clients"),
        ([[0, 1, 2, 3], []], "leaves client 1 without samples"),
        ([[0, 1, 2, 4], [3]], "integers from 0 to 3"),
        ([[0, 1, 2, -1], [3]], "integers from 0 to 3"),
        ([[True, True, False, False], [False, False, True, True]], "integers from 0 to 3"),
    ],
)
def test_a_function_that_is_wrong(parts, sentence):
    with pytest.raises(DataError) as caught:
        make_partition(lambda *_: [np.array(p) for p in parts], np.zeros(4, int), 2, 0, classes=1)
    assert sentence in str(caught.value)


class FlowerLike:
    """Behaves as the partitioners of flwr_datasets do: the data set is set once, partitions are loaded by id."""

    __module__ = "flwr_datasets.partitioner.fake"

    def __init__(self, partitions: int, by: str | None = None, drop: bool = False):
        self._count, self._partition_by, self._drop, self._dataset = partitions, by, drop, None

    @property
    def num_partitions(self):
        return self._count

    @property
    def dataset(self):
        return self._dataset

    @dataset.setter
    def dataset(self, value):
        assert self._dataset is None, "The dataset should be assigned only once"
        self._dataset = value

    def load_partition(self, k):
        keys = np.asarray(self.dataset[self._partition_by or "label"])
        rows = np.flatnonzero(keys % self._count == k)
        return self.dataset.select(rows[1:] if self._drop else rows)


def test_flower_partitioners_are_accepted():
    pytest.importorskip("datasets")
    labels = labels_of(60, 6)
    for by in (None, "target"):
        partitioner = FlowerLike(3, by)
        for _ in range(2):  # the caller's object stays usable
            partition = make_partition(partitioner, labels, 3, 0, classes=6)
            assert partition.name == "FlowerLike"
            assert np.array_equal(np.sort(partition.order), np.arange(60))
            assert all((labels[partition.indices(k)] % 3 == k).all() for k in range(3))
    writer = np.arange(60) % 4
    partition = make_partition(FlowerLike(4, "writer"), labels, None, 0, classes=6, columns={"writer": writer})
    assert all((writer[partition.indices(k)] == k).all() for k in range(4))
    assert len(make_partition(FlowerLike(3, drop=True), labels, 3, 0, classes=6).order) == 57
    with pytest.raises(ConfigError, match="makes 3 partitions, but clients=5"):
        make_partition(FlowerLike(3), labels, 5, 0, classes=6)
