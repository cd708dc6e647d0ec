"""Data partitioning: ``make_partition("dirichlet:0.1", labels, clients=10, seed=0, classes=10)``.

``make_partition`` describes partition expressions, ``name[:value][,option=value...]``. Random numbers depend only on
the seed, never on global state.
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
from unskew.data.readers.names import with_clean_names
from unskew.errors import ConfigError, DataError, unknown_name


@dataclass(frozen=True)
class Partition:
    """Assignment of samples to clients.

    Attributes:
        order: Sample ids ``[n]``, grouped by client.
        offsets: Offsets ``[K + 1]``; client ``k`` has the samples ``order[offsets[k]:offsets[k + 1]]``.
        name: Partition expression, or name of the function or partitioner.
        names: Client names, if each client has all samples of some values of a column; otherwise empty.
    """

    order: np.ndarray
    offsets: np.ndarray
    name: str
    names: tuple[str, ...] = ()

    @staticmethod
    def from_owner(owner: np.ndarray, clients: int, name: str) -> Partition:
        """Build a partition from the client of each sample.

        Args:
            owner: Client of each sample, ``[n]``; -1 for samples without a client.
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
        """Number of samples per client, ``[K]``."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Hash of 16 hex digits of the assignment of samples to clients; independent of the order within a client."""
        client = np.repeat(np.arange(self.clients), self.sizes)
        return compute_fingerprint(self.order[np.lexsort((self.order, client))].astype(np.int64), self.offsets)

    def indices(self, k: int) -> np.ndarray:
        """Return the sample ids of client ``k``."""
        if not 0 <= k < self.clients:
            raise IndexError(f"There is no client {k}; this partition has {self.clients} clients.")
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
    """Assign samples to clients.

    Args:
        spec: Partition expression in one of the forms below, a partitioner of ``flwr_datasets``, or a function
            ``(labels, clients, rng) -> [ids of client 0, ids of client 1, ...]``.
        labels: Class of each sample, ``[n]``; multi-label, ``[n, L]`` of 0 and 1; or None without labels. Partitions by
            label require one class per sample.
        clients: Number of clients. None is supported only for ``natural`` and for Flower partitioners, which determine
            it.
        seed: Random seed; equal seeds give equal partitions. (A Flower partitioner uses its own seed.)
        classes: Number of classes.
        columns: Other columns, for partitions by a column.
        samples: Number of samples, if ``labels`` is None.

    The forms:
        ``iid`` shuffles and splits equally. ``sorted[:COLUMN]`` sorts by label or column and splits equally.

        ``dirichlet:ALPHA[,min=10][,balanced=true][,blocks=B]`` splits each class by shares drawn from a Dirichlet
        distribution over the clients, and draws again until each client has at least ``min`` samples (``min=half``:
        half of ``n / clients``). With ``balanced``, clients that have ``n / clients`` samples receive no more;
        ``balanced=false,min=1`` is the plain draw. ``blocks=B`` distributes each class evenly over blocks of ``B``
        clients and splits each block separately; with this, every one of a thousand clients can get ``min`` samples.

        With ``by=COLUMN``, ``dirichlet`` and ``classes`` use the values of a column instead of the labels.

        ``classes:S`` assigns to client ``i`` the classes ``S*(i mod G) .. +S-1``, with ``G = classes/S``.
        ``classes:S,alpha=A`` draws ``S`` classes for each client and splits each class among its clients by a Dirichlet
        draw.

        ``quantity:ALPHA[,min=1]`` assigns ``min`` samples to each client and splits the rest by one Dirichlet draw.

        ``natural:COLUMN[,min=1]`` makes one client per value (in sorted order) with at least ``min`` samples. If
        ``clients`` is smaller than the number of values, that many values are sampled, and the samples of other values
        are not used.

        A partition of another package is a function as above that also receives the value after the colon as ``value``
        and the options by name, all as strings.

    All partitions use every sample exactly once, except ``natural``, ``iid,each=N`` and Flower partitioners.

    Raises:
        ConfigError: If the partition expression is not valid or does not fit the labels.
        DataError: If the samples cannot be partitioned in this way.

    >>> labels = np.array([0, 1, 0, 1, 0, 1])
    >>> make_partition("classes:1", labels, clients=2, seed=0, classes=2).indices(1).tolist()
    [1, 3, 5]
    """
    # Without labels, use a matrix with zero columns.
    labels = np.zeros((samples or 0, 0), np.int64) if labels is None else validate_labels(labels, classes)
    if seed < 0:
        raise ConfigError(f"The seed must not be negative; it is {seed}.")
    if clients is not None and clients < 1:
        raise ConfigError(f"A federation needs at least one client, but clients is {clients}.")
    if clients is not None and len(labels) < clients:
        raise DataError(f"{clients} clients cannot share {len(labels)} samples. Use fewer clients.")
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
        "A partition must be a string such as 'dirichlet:0.1' or a function, not an object of type "
        f"{type(spec).__name__}."
    )


def validate_labels(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return class indices as int64, or multi-label targets unchanged, after validation.

    Args:
        labels: Labels, ``[n]``, or ``[n, L]`` with one column of 0 and 1 per class.
        classes: Number of classes.

    Raises:
        DataError: If the labels are neither, or a class index is out of range.
    """
    labels = np.asarray(labels)
    if labels.ndim == 2 and len(labels) and labels.shape[1] == classes:
        return labels
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iu":
        raise DataError(
            f"A partition requires one integer label per sample, but the labels have shape {labels.shape} and type "
            f"{labels.dtype}."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"The labels range from {labels.min()} to {labels.max()}. With {classes} classes they must be 0 to "
            f"{classes - 1}."
        )
    return labels.astype(np.int64)


def owners_from_text(
    spec: str, labels: np.ndarray, clients: int | None, rng: Generator, classes: int, columns: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return the client of each sample for a partition expression.

    Args:
        spec: Partition expression.
        labels: Labels, ``[n]`` or ``[n, L]``.
        clients: Number of clients; None, if supported, means that the data determine it.
        rng: Random number generator.
        classes: Number of classes.
        columns: Other columns of the data by name.
    """
    name, value, options = parse_partition(spec)
    if name not in PARTITIONS:
        return call_plugin(spec, labels, clients, rng)
    if name == "natural":
        smallest = parse_count(options.get("min", "1"), f"min in {spec!r}")
        return schemes.natural(
            get_column(columns, value, f"partition={spec}"), clients, rng, smallest=smallest, column=value
        )
    if clients is None:
        raise ConfigError(
            f"The partition {spec!r} requires the number of clients; only natural:COLUMN determines it automatically."
        )
    if "by" in options:
        values, codes = np.unique(get_column(columns, options["by"], f"partition={spec}"), return_inverse=True)
        labels, classes = codes.reshape(-1), len(values)
    if labels.ndim > 1 and (name in ("dirichlet", "classes") or (name == "sorted" and not value)):
        what = "may have several labels" if labels.shape[1] else "has no label"
        raise ConfigError(
            f"The partition {spec!r} requires one label per sample, but here a sample {what}. Use iid, quantity:ALPHA, "
            "natural:COLUMN or sorted:COLUMN, or partition by a column: dirichlet:0.1,by=COLUMN."
        )
    if name == "iid":
        each = parse_count(options["each"], f"each in {spec!r}") if "each" in options else None
        return schemes.iid(labels, clients, rng, each=each)
    if name == "sorted":
        return schemes.equal_runs(get_column(columns, value, f"partition={spec}") if value else labels, clients)
    if name == "classes":
        each = parse_count(value, f"the number of classes in {spec!r}")
        if "alpha" in options:
            alpha = parse_positive(options["alpha"], f"alpha in {spec!r}")
            return schemes.classes_by_dirichlet(labels, clients, rng, each=each, alpha=alpha, classes=classes)
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
    """Return the client of each sample from a partition function of another package.

    Args:
        spec: Partition expression.
        labels: Labels, ``[n]`` or ``[n, L]``.
        clients: Number of clients.
        rng: Random number generator.
    """
    name, value, options = parse_partition(spec)
    plugin = plugins.find_plugin(plugins.PARTITIONS, "partition", name, PARTITIONS)
    function = plugin.load_callable()
    arguments: dict[str, str] = {**({"value": value} if value else {}), **options}
    partition_function = functools.update_wrapper(functools.partial(function, **arguments), function)
    return custom.call_partition_function(partition_function, labels, clients, rng).owner


def client_names_from_column(
    spec: str, owner: np.ndarray, clients: int, columns: Mapping[str, np.ndarray]
) -> tuple[str, ...]:
    """Name each client after its values of the column that decides the partition.

    More than four values are written as the first and the last. The result is empty if there is no such column, or
    several clients share a value or a name.

    Args:
        spec: Partition expression.
        owner: Client of each sample, ``[n]``; -1 for samples without a client.
        clients: Number of clients.
        columns: Other columns of the data by name.

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
    values, owner = get_column(columns, by, f"partition={spec}")[assigned], owner[assigned]
    if name == "natural":  # all samples of a client have the same value
        return tuple(str(v) for v in values[np.unique(owner, return_index=True)[1]].tolist())
    kinds, codes = np.unique(values, return_inverse=True)
    pairs = np.unique(codes.reshape(-1).astype(np.int64) * clients + owner)
    if len(pairs) > len(kinds):
        return ()
    of: list[list[str]] = [[] for _ in range(clients)]
    for pair in pairs.tolist():
        of[pair % clients].append(str(kinds[pair // clients]))
    names = tuple(", ".join(own) if len(own) <= 4 else f"{own[0]} … {own[-1]}" for own in of)
    return names if len(set(names)) == clients else ()


def get_column(columns: Mapping[str, np.ndarray], name: str, option: str) -> np.ndarray:
    """Return a column without missing values by name; names are clean, and whole numbers are integers.

    Args:
        columns: Columns of the data by name.
        name: Name of the column.
        option: Option that names the column, for errors.

    Raises:
        DataError: If the column does not exist or has missing values, or two names differ only by spaces or accents.
    """
    if not columns:
        raise DataError(f"{option} requires the column {name!r}, but this data has no columns besides its labels.")
    if name not in columns:
        raise DataError(unknown_name("column", name, columns))
    values = np.asarray(columns[name])
    missing = np.array([v is None or v != v for v in values]) if values.dtype.kind == "O" else values != values
    if missing.any():
        raise DataError(f"Column {name!r} has {int(missing.sum())} missing values. Fill them or remove those rows.")
    if values.dtype.kind == "f" and (values == np.round(values)).all() and np.abs(values).max(initial=0) < 2**53:
        return values.astype(np.int64)  # as pandas writes integers with gaps
    if values.dtype.kind == "M":
        coarser = (
            values.astype(f"datetime64[{unit}]") for unit in ("D", "s", "us")
        )  # nanoseconds have no readable names
        return next((times for times in coarser if (times == values).all()), values)
    if values.dtype.kind not in "OU":
        return values
    return with_clean_names(values, f"The column {name!r}").astype(str)
