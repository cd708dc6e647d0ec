"""The rules behind ``unskew.data.partition.partitioner``: each returns the client that owns each sample, ``owner [n]``.

A rule is a function of arrays and an explicit generator; nothing here parses text or keeps state. ``-1`` in
``owner`` means that no client holds the sample (only ``natural`` leaves samples out).
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from unskew.errors import ConfigError, DataError

DRAWS = 1000  # Dirichlet draws before giving up ...
LEAST = 20  # ... or fewer, but not fewer than these, when that many draws ...
WORK = 5 * 10**7  # ... would take more gamma variates than these (a few seconds)
CELLS = 2 * 10**6  # gamma variates held in memory at once


def iid(labels: np.ndarray, clients: int, rng: Generator, each: int | None = None) -> np.ndarray:
    """Shuffle and cut: sizes differ by at most one; or ``each`` samples per client, the others belong to nobody.

    Args:
        labels: Labels, ``[n]``.
        clients: Number of clients.
        rng: Random number generator.
        each: Samples per client; None: all samples are used.

    Raises:
        DataError: There are fewer than ``each`` samples per client.
    """
    if each is None:
        return rng.permutation(np.arange(len(labels)) % clients)
    if each * clients > len(labels):
        raise DataError(f"{clients} clients with {each} samples each need {each * clients}; there are {len(labels)}.")
    owner = np.full(len(labels), -1, np.int64)
    owner[: each * clients] = np.arange(each * clients) % clients
    return rng.permutation(owner)


def equal_runs(keys: np.ndarray, clients: int) -> np.ndarray:
    """Sort by ``keys`` (stable) and cut into equal runs: sizes differ by at most one.

    Args:
        keys: Value by which samples are sorted, ``[n]``.
        clients: Number of clients.
    """
    n = len(keys)
    owner = np.empty(n, np.int64)
    sizes = n // clients + (np.arange(clients) < n % clients)
    owner[np.argsort(keys, kind="stable")] = np.repeat(np.arange(clients), sizes)
    return owner


def classes_per_client(labels: np.ndarray, clients: int, rng: Generator, *, each: int, classes: int) -> np.ndarray:
    """Client ``i`` holds the classes ``S*(i mod G) .. S*(i mod G) + S-1`` with ``S = each`` and ``G = C/S`` groups.

    The clients of a group share each of its classes equally (within one sample).

    Args:
        labels: Labels, ``[n]``.
        clients: Number of clients.
        rng: Random number generator.
        each: Number ``S`` of classes per client.
        classes: Number ``C`` of classes.
    """
    if not 1 <= each <= classes or classes % each:
        fitting = ", ".join(str(s) for s in range(1, classes + 1) if classes % s == 0)
        raise ConfigError(
            f"classes:{each} does not divide the {classes} classes into equal groups; use one of {fitting}."
        )
    groups = classes // each
    if clients < groups:
        raise ConfigError(
            f"classes:{each} makes {groups} groups of classes, but there are only {clients} clients, so some classes "
            f"would belong to nobody; use at least {groups} clients or a larger number of classes per client."
        )
    members = (clients - np.arange(groups) + groups - 1) // groups
    counts = np.bincount(labels, minlength=classes)
    short = np.flatnonzero(counts < np.repeat(members, each))
    if len(short):
        c = int(short[0])
        raise DataError(
            f"classes:{each} shares class {c} among {members[c // each]} clients, but it has only {counts[c]} samples; "
            "use fewer clients."
        )
    # Within a group, samples ordered by class are dealt out like cards, so each class is split within one sample.
    order = shuffled_by_class(labels, rng)
    group = labels[order] // each
    starts = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=groups))[:-1]])
    turn = np.arange(len(labels)) - starts[group]
    owner = np.empty(len(labels), np.int64)
    owner[order] = group + groups * (turn % members[group])
    return owner


def quantity(labels: np.ndarray, clients: int, rng: Generator, *, alpha: float, smallest: int) -> np.ndarray:
    """Sizes skewed, labels not: every client gets ``smallest`` samples, the rest is cut by one Dirichlet draw.

    Args:
        labels: Labels, ``[n]``.
        clients: Number of clients.
        rng: Random number generator.
        alpha: Concentration of the Dirichlet distribution.
        smallest: Smallest number of samples of a client.
    """
    n = len(labels)
    check_enough_samples(n, clients, smallest)
    rest = proportional_counts(log_gamma(rng, alpha, (1, clients)), np.array([n - clients * smallest]))[0]
    return rng.permutation(np.repeat(np.arange(clients), smallest + rest))


def natural(values: np.ndarray, clients: int | None, rng: Generator, *, smallest: int, column: str) -> np.ndarray:
    """One client per value, in sorted order; values with fewer than ``smallest`` samples are dropped.

    When fewer clients are asked for than there are values, that many are drawn at random, and the samples of the
    others belong to nobody (-1).

    Args:
        values: Value of each sample, ``[n]``.
        clients: Number of clients; None: all values.
        rng: Random number generator.
        smallest: Smallest number of samples of a client.
        column: Name of the column, for errors.
    """
    names, value, sizes = np.unique(values, return_inverse=True, return_counts=True)
    large = np.flatnonzero(sizes >= smallest)
    if not len(large) or (clients is not None and clients > len(large)):
        least = f" with at least {smallest} samples" if smallest > 1 else ""
        request = "" if clients is None else f", but {clients} clients are asked for"
        remedy = "lower min or choose another column" if clients is None else "ask for fewer clients or lower min"
        raise DataError(f"Column {column!r} has {len(large)} values{least} (of {len(names)}){request}; {remedy}.")
    if clients is not None and clients < len(large):
        large = np.sort(rng.choice(large, clients, replace=False))
    client_of = np.full(len(names), -1, np.int64)
    client_of[large] = np.arange(len(large))
    return client_of[value.reshape(-1)]


def dirichlet(
    labels: np.ndarray,
    clients: int,
    rng: Generator,
    *,
    alpha: float,
    classes: int,
    smallest: int,
    balanced: bool,
    block: int,
    draws: int = DRAWS,
) -> np.ndarray:
    """Label skew: each class is cut by a Dirichlet draw over the clients, until every client has enough samples.

    Args:
        labels: Class of each sample.
        clients: Number of clients.
        rng: Source of every draw.
        alpha: Concentration; small is skewed.
        classes: Number of classes.
        smallest: Samples that each client must have.
        balanced: Give nothing more to a client that already holds its even share.
        block: Clients in a block; each class is first dealt evenly over the blocks, which are then cut separately.
        draws: How often a block is drawn at most.
    """
    n = len(labels)
    check_enough_samples(n, clients, smallest)
    if not 1 <= block <= clients or clients % block:
        raise ConfigError(f"blocks={block} does not divide {clients} clients into equal blocks; use a divisor.")
    blocks = clients // block
    order = shuffled_by_class(labels, rng)
    client_of = np.empty(n, np.int64)
    client_of[order] = np.arange(n) % blocks  # each class, and the whole, is spread over the blocks within one sample
    order = order[np.argsort(client_of[order], kind="stable")]
    sizes = np.bincount(client_of * classes + labels, minlength=blocks * classes).reshape(blocks, classes)
    counts, drawn = rejection_sample_counts(sizes, block, rng, alpha, smallest, balanced, draws)
    if counts is None:
        raise DataError(dirichlet_failure_message(n, clients, alpha, smallest, balanced, block, drawn))
    ids = np.broadcast_to(np.arange(clients).reshape(blocks, 1, block), counts.shape)
    owner = np.empty(n, np.int64)
    owner[order] = np.repeat(ids.ravel(), counts.ravel())
    return owner


def rejection_sample_counts(
    sizes: np.ndarray, clients: int, rng: Generator, alpha: float, smallest: int, balanced: bool, draws: int = DRAWS
) -> tuple[np.ndarray | None, int]:
    """For each row of class sizes ``[M, C]`` the first draw ``[C, clients]`` that leaves no client short.

    Args:
        sizes: Samples per class of each block, ``[M, C]``.
        clients: Number of clients of a block.
        rng: Random number generator.
        alpha: Concentration of the Dirichlet distribution.
        smallest: Smallest number of samples of a client.
        balanced: Whether full clients receive no more samples.
        draws: Largest number of draws.

    Returns:
        Counts ``[M, C, clients]``, or None when a row found no acceptable draw; and how often each row was drawn.
    """
    rows, classes = sizes.shape
    cells = classes * clients
    counts = np.empty((rows, classes, clients), np.int64)
    pending, drawn, wanted, work = np.arange(rows), 0, 1, 0
    while len(pending) and drawn < draws and (drawn < LEAST or work < WORK):
        times = max(1, min(wanted, draws - drawn, CELLS // (len(pending) * cells)))
        tried = draw_class_counts(np.repeat(sizes[pending], times, axis=0), clients, rng, alpha, balanced)
        tried = tried.reshape(len(pending), times, classes, clients)
        good = tried.sum(2).min(2) >= smallest
        first, settled = good.argmax(1), good.any(1)
        counts[pending[settled]] = tried[settled, first[settled]]
        drawn, wanted, work = drawn + times, 2 * wanted, work + len(pending) * times * cells
        pending = pending[~settled]
    return (None if len(pending) else counts), drawn


def draw_class_counts(sizes: np.ndarray, clients: int, rng: Generator, alpha: float, balanced: bool) -> np.ndarray:
    """One Dirichlet draw per row and class: how many samples each client gets, ``[M, C, clients]``.

    Args:
        sizes: Samples per class of each block, ``[M, C]``.
        clients: Number of clients of a block.
        rng: Random number generator.
        alpha: Concentration of the Dirichlet distribution.
        balanced: Whether full clients receive no more samples.
    """
    weights = log_gamma(rng, alpha, (*sizes.shape, clients))
    if not balanced:
        return proportional_counts(weights, sizes)
    share = sizes.sum(1, keepdims=True) / clients
    counts = np.empty(weights.shape, np.int64)
    drawn = np.zeros((len(sizes), clients), np.int64)
    for c in range(sizes.shape[1]):
        # Some client is below its share while samples are left, so the open weights are never all empty.
        counts[:, c] = proportional_counts(np.where(drawn >= share, -np.inf, weights[:, c]), sizes[:, c])
        drawn += counts[:, c]
    return counts


def log_gamma(rng: Generator, alpha: float, shape: tuple[int, ...]) -> np.ndarray:
    """Logarithms of Gamma(alpha) variates, which normalize to a Dirichlet draw; finite also where the variate is not.

    Uses ``Gamma(a) = Gamma(a + 1) * U**(1/a)``, so the largest share survives at any concentration.

    Args:
        rng: Random number generator.
        alpha: Shape of the Gamma distribution.
        shape: Shape of the result.
    """
    alpha = max(alpha, 1e-12)
    return np.asarray(np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha)


def proportional_counts(log_weights: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Cut ``totals [...]`` in proportion to ``exp(log_weights) [..., K]``; integers that add up exactly.

    Args:
        log_weights: Logarithms of the weights, ``[..., K]``.
        totals: Numbers to divide, ``[...]``.
    """
    top = log_weights.max(-1, keepdims=True)
    edges = np.cumsum(np.exp(log_weights - np.where(np.isfinite(top), top, 0)), -1)
    last = edges[..., -1:]
    # Dividing by the last edge makes it exactly one: the final client with a share closes the cut.
    edges = np.floor(edges / np.where(last > 0, last, 1) * totals[..., None]).astype(np.int64)
    return np.diff(edges, axis=-1, prepend=0)


def shuffled_by_class(labels: np.ndarray, rng: Generator) -> np.ndarray:
    """Sample ids ordered by class, shuffled inside each class.

    Args:
        labels: Labels, ``[n]``.
        rng: Random number generator.
    """
    order = rng.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


def check_enough_samples(n: int, clients: int, smallest: int) -> None:
    """Raise at once when the samples cannot give every client its minimum.

    Args:
        n: Number of samples.
        clients: Number of clients.
        smallest: Smallest number of samples of a client.
    """
    if n < clients * smallest:
        raise DataError(
            f"{clients} clients with at least {smallest} samples each need {clients * smallest} samples, but there are "
            f"{n}; use fewer clients or a smaller min."
        )


def dirichlet_failure_message(
    n: int, clients: int, alpha: float, smallest: int, balanced: bool, block: int, drawn: int
) -> str:
    """The sentence for a Dirichlet split that was not found, with what would help.

    Args:
        n: Number of samples.
        clients: Number of clients.
        alpha: Concentration of the Dirichlet distribution.
        smallest: Smallest number of samples of a client.
        balanced: Whether full clients receive no more samples.
        block: Number of clients of a block.
        drawn: Number of draws that were tried.
    """
    remedies = ["a larger ALPHA", "fewer clients"]
    if smallest > 1:
        remedies.append("min=1")
    if not balanced:
        remedies.append("balanced=true")
    if drawn >= DRAWS:
        remedies.append(f"draws={20 * drawn}")
    if block == clients > 10:
        divisor = next((b for b in range(10, 1, -1) if clients % b == 0), 1)
        remedies.append(f"blocks={divisor} (separate draws for each block of {divisor} clients)")
    return (
        f"No Dirichlet split with ALPHA {alpha:g} was found in {drawn} draws: {clients} clients share {n} samples and "
        f"each needs at least {smallest}. Use {', '.join(remedies[:-1])} or {remedies[-1]}."
    )
