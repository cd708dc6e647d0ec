"""Partitioning: ``make_partition("dirichlet:0.1", labels, clients=10, seed=0, classes=10)``.

A partition is written ``name[:value][,option=value...]``; see ``make_partition``. Every draw comes from the seed given,
never from global state.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from unskew import plugins
from unskew.data.federation import compute_fingerprint
from unskew.data.partition import custom, schemes
from unskew.data.partition.parsing import PARTITIONS, parse_bool, parse_count, parse_partition, parse_positive
from unskew.errors import ConfigError, DataError, unknown_name


@dataclass(frozen=True)
class Partition:
    """Assignment of samples to clients.

    Attributes:
        order: Sample ids ``[n]``, grouped by client.
        offsets: Client ``k`` holds ``order[offsets[k]:offsets[k + 1]]``; ``[K + 1]``.
        name: How the partition was specified.
        names: The clients' names, where each holds all samples of some values of a column; else empty.
    """

    order: np.ndarray
    offsets: np.ndarray
    name: str
    names: tuple[str, ...] = ()

    @staticmethod
    def from_owner(owner: np.ndarray, clients: int, name: str) -> Partition:
        """Build a partition from the client of each sample; -1 marks a sample that nobody holds.

        Args:
            owner: Client of each sample, ``[n]``; -1: none.
            clients: Number of clients.
            name: Partition expression.

        >>> Partition.from_owner(np.array([1, 0, -1, 1]), 2, "given").indices(1).tolist()
        [0, 3]
        """
        sizes = np.bincount(owner[owner >= 0], minlength=clients)
        if len(sizes) != clients or not sizes.all():
            raise DataError(f"The partition {name} leaves client {int(np.argmin(sizes))} without samples.")
        order = np.argsort(owner, kind="stable")[int((owner < 0).sum()) :]
        return Partition(order.astype(np.int64), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), name)

    @property
    def clients(self) -> int:
        """Number of clients ``K``."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Samples per client, ``[K]``."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that depend on who holds which sample, not on the order inside a client."""
        client = np.repeat(np.arange(self.clients), self.sizes)
        return compute_fingerprint(self.order[np.lexsort((self.order, client))].astype(np.int64), self.offsets)

    def indices(self, k: int) -> np.ndarray:
        """Sample ids of client ``k``."""
        if not 0 <= k < self.clients:
            raise IndexError(f"There is no client {k}; this partition has {self.clients}.")
        return self.order[self.offsets[k] : self.offsets[k + 1]]


def make_partition(
    spec: str | object,
    labels: np.ndarray | None,
    clients: int | None,
    seed: int,
    *,
    classes: int,
    columns: Mapping[str, np.ndarray] | None = None,
    samples: int | None = None,
) -> Partition:
    """Decide which client holds which sample.

    Args:
        spec: One of the forms below, a partitioner of ``flwr_datasets``, or a function
            ``(labels, clients, rng) -> [ids of client 0, ids of client 1, ...]``.
        labels: Class of each sample, ``[n]``; or ``[n, L]`` of 0 and 1 where a sample may have several labels. Then only
            partitions that do not divide by label are possible; so it is without labels (None).
        clients: Number of clients; None only for ``natural`` and for a Flower partitioner, which know it.
        seed: Decides every draw; equal seeds give equal partitions. (A Flower partitioner keeps its own seed.)
        classes: Number of classes.
        columns: Further columns, for ``sorted:COLUMN`` and ``natural:COLUMN``.
        samples: How many there are, where labels is None.

    The forms:
        ``iid`` shuffles and cuts. ``sorted[:COLUMN]`` sorts by label or column and cuts.

        ``dirichlet:ALPHA[,min=10][,balanced=true][,blocks=B]`` cuts each class by a Dirichlet draw over the clients,
        and draws again until each has ``min`` samples (``min=half``: half of the even share). ``balanced`` gives
        nothing more to a client that holds its even share already; ``balanced=false,min=1`` is the plain draw.
        ``blocks=B`` deals each class evenly over blocks of ``B`` clients and cuts every block by its own draws, which
        is how a thousand clients can each get ``min`` samples.

        With ``by=COLUMN`` both ``dirichlet`` and ``classes`` divide by the values of a column in place of the labels.

        ``classes:S`` gives client ``i`` the classes ``S*(i mod G) .. +S-1``, with ``G = classes/S``.

        ``quantity:ALPHA[,min=1]`` gives everyone ``min`` samples and cuts the rest by one Dirichlet draw.

        Another package's partition is a function ``(labels, clients, rng)`` as above, which gets the value after its colon
        as ``value`` and its options by their names, all as text.

        ``natural:COLUMN[,min=1]`` makes a client of each value (in sorted order) that has ``min`` samples. If
        ``clients`` is smaller than the number of values, that many are drawn by the seed: then the samples of the
        other values belong to nobody. A Flower partitioner may leave samples out too; everything else uses every
        sample exactly once.

    Raises:
        ConfigError: The spec is wrong.
        DataError: The samples cannot be divided as asked.

    >>> labels = np.array([0, 1, 0, 1, 0, 1])
    >>> make_partition("classes:1", labels, clients=2, seed=0, classes=2).indices(1).tolist()
    [1, 3, 5]
    """
    # Nothing to divide by: a matrix without columns.
    labels = np.zeros((samples or 0, 0), np.int64) if labels is None else validate_labels(labels, classes)
    if seed < 0:
        raise ConfigError(f"The seed must not be negative; it is {seed}.")
    if clients is not None and clients < 1:
        raise ConfigError(f"A federation needs at least one client; clients is {clients}.")
    if clients is not None and len(labels) < clients:
        raise DataError(f"{clients} clients cannot share {len(labels)} samples; use fewer clients.")
    rng = np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(b"unskew/partition")]))
    columns = columns or {}
    if isinstance(spec, str):
        owner = owners_from_text(spec, labels, clients, rng, classes, columns)
        parts = Partition.from_owner(owner, int(owner.max()) + 1 if clients is None else clients, spec)
        return replace(parts, names=client_names_from_column(spec, owner, parts.clients, columns))
    if type(spec).__module__.split(".")[0] == "flwr_datasets":
        return Partition.from_owner(*custom.call_flower_partitioner(spec, labels, clients, columns))
    if callable(spec):
        return Partition.from_owner(*custom.call_partition_function(spec, labels, clients, rng))
    raise ConfigError(
        f"A partition is text such as 'dirichlet:0.1', or a function, not an object of type {type(spec).__name__}."
    )


def validate_labels(labels: np.ndarray, classes: int) -> np.ndarray:
    """Labels as int64, refused unless they are one class index per sample, or one column of 0 and 1 per class.

    Args:
        labels: Labels, ``[n]`` or ``[n, L]``.
        classes: Number of classes.
    """
    labels = np.asarray(labels)
    if labels.ndim == 2 and len(labels) and labels.shape[1] == classes:
        return labels
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iu":
        raise DataError(
            f"A partition needs one whole-number label per sample; these have shape {labels.shape} and type {labels.dtype}."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"The labels run from {labels.min()} to {labels.max()}; with {classes} classes they must be below it."
        )
    return labels.astype(np.int64)


def owners_from_text(
    spec: str,
    labels: np.ndarray,
    clients: int | None,
    rng: Generator,
    classes: int,
    columns: Mapping[str, np.ndarray],
) -> np.ndarray:
    """The owner of each sample, for a partition written as text.

    Args:
        spec: Partition expression.
        labels: Labels, ``[n]`` or ``[n, L]``.
        clients: Number of clients; None: decided by the data.
        rng: Random number generator.
        classes: Number of classes.
        columns: Further columns of the data by name.
    """
    name, value, options = parse_partition(spec)
    if name not in PARTITIONS:
        return call_plugin(spec, labels, clients, rng)
    if name == "natural":
        smallest = parse_count(options.get("min", "1"), f"min in {spec!r}")
        return schemes.natural(get_column(columns, value, spec), clients, rng, smallest=smallest, column=value)
    if clients is None:
        raise ConfigError(
            f"The partition {spec!r} needs the number of clients; only natural:COLUMN finds it by itself."
        )
    if "by" in options:
        values, codes = np.unique(get_column(columns, options["by"], spec), return_inverse=True)
        labels, classes = codes.reshape(-1), len(values)
    if labels.ndim > 1 and (name in ("dirichlet", "classes") or (name == "sorted" and not value)):
        what = "may have several" if labels.shape[1] else "has none"
        raise ConfigError(
            f"The partition {spec!r} divides samples by their one label, but here a sample {what}; use iid, "
            "quantity:ALPHA, natural:COLUMN or sorted:COLUMN, or divide by a column: dirichlet:0.1,by=COLUMN."
        )
    if name == "iid":
        each = parse_count(options["each"], f"each in {spec!r}") if "each" in options else None
        return schemes.iid(labels, clients, rng, each=each)
    if name == "sorted":
        return schemes.equal_runs(get_column(columns, value, spec) if value else labels, clients)
    if name == "classes":
        each = parse_count(value, f"the number of classes in {spec!r}")
        return schemes.classes_per_client(labels, clients, rng, each=each, classes=classes)
    alpha = parse_positive(value, f"ALPHA in {spec!r}")
    if name == "quantity":
        smallest = parse_count(options.get("min", "1"), f"min in {spec!r}")
        return schemes.quantity(labels, clients, rng, alpha=alpha, smallest=smallest)
    half = options.get("min") == "half"
    smallest = (
        math.ceil(len(labels) / clients / 2) if half else parse_count(options.get("min", "10"), f"min in {spec!r}")
    )
    return schemes.dirichlet(
        labels,
        clients,
        rng,
        alpha=alpha,
        classes=classes,
        smallest=smallest,
        balanced=parse_bool(options.get("balanced", "true"), f"balanced in {spec!r}"),
        block=parse_count(options.get("blocks", str(clients)), f"blocks in {spec!r}"),
        draws=parse_count(options.get("draws", str(schemes.DRAWS)), f"draws in {spec!r}"),
    )


def call_plugin(spec: str, labels: np.ndarray, clients: int | None, rng: Generator) -> np.ndarray:
    """The owner of each sample, as a function of another package has it.

    Args:
        spec: Partition expression.
        labels: Labels, ``[n]`` or ``[n, L]``.
        clients: Number of clients; None: decided by the function.
        rng: Random number generator.
    """
    name, value, options = parse_partition(spec)
    plugin = plugins.find_plugin(plugins.PARTITIONS, "partition", name, PARTITIONS)
    function = plugin.load_callable()
    said: dict[str, str] = {**({"value": value} if value else {}), **options}
    divided = functools.update_wrapper(functools.partial(function, **said), function)
    return custom.call_partition_function(divided, labels, clients, rng).owner


def client_names_from_column(
    spec: str, owner: np.ndarray, clients: int, columns: Mapping[str, np.ndarray]
) -> tuple[str, ...]:
    """The clients' names: the values of the partition's column that each of them holds, if no value has two clients.

    More than four values are written as the first and the last.

    Args:
        spec: Partition expression.
        owner: Client of each sample, ``[n]``; -1: none.
        clients: Number of clients.
        columns: Further columns of the data by name.

    >>> columns = {"ward": np.array(["b", "a", "c", "a"])}
    >>> owner = np.array([0, 0, 1, 0])
    >>> [client_names_from_column(name, owner, 2, columns) for name in ("sorted:ward", "iid")]
    [('a, b', 'c'), ()]
    """
    name, value, options = parse_partition(spec)
    by = options.get("by", value if name in ("natural", "sorted") else "")
    if not by:
        return ()
    assigned = owner >= 0
    values, owner = np.asarray(columns[by])[assigned], owner[assigned]
    if name == "natural":  # all samples of a client have its value
        return tuple(str(v) for v in values[np.unique(owner, return_index=True)[1]].tolist())
    kinds, codes = np.unique(values.astype(str) if values.dtype.kind == "O" else values, return_inverse=True)
    pairs = np.unique(codes.reshape(-1).astype(np.int64) * clients + owner)
    if len(pairs) > len(kinds):
        return ()
    of: list[list[str]] = [[] for _ in range(clients)]
    for pair in pairs.tolist():
        of[pair % clients].append(str(kinds[pair // clients]))
    names = tuple(", ".join(own) if len(own) <= 4 else f"{own[0]} … {own[-1]}" for own in of)
    return names if len(set(names)) == clients else ()


def get_column(columns: Mapping[str, np.ndarray], name: str, spec: str) -> np.ndarray:
    """A column by name, refused when it is unknown or has missing values.

    Args:
        columns: Columns of the data by name.
        name: Name of the column.
        spec: Partition expression, for errors.
    """
    if not columns:
        raise DataError(
            f"The partition {spec!r} needs the column {name!r}, but this data has no columns besides its labels."
        )
    if name not in columns:
        raise DataError(unknown_name("column", name, columns))
    values = np.asarray(columns[name])
    missing = np.array([v is None or v != v for v in values]) if values.dtype.kind == "O" else values != values
    if missing.any():
        raise DataError(f"Column {name!r} has {int(missing.sum())} missing values; fill them or remove those rows.")
    return values.astype(str) if values.dtype.kind == "O" else values
