"""Partition schemes: functions of arrays and a random generator that return the client of each sample, ``owner [n]``.

``-1`` in ``owner`` means that the sample is not used (only ``natural`` and ``iid`` with ``each`` omit samples).
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from unskew.errors import ConfigError, DataError

DRAWS = 1000  # maximum number of Dirichlet draws
LEAST = 20  # minimum number of Dirichlet draws before WORK limits them
WORK = 5 * 10**7  # maximum number of gamma variates in total (a few seconds)
CELLS = 2 * 10**6  # maximum number of gamma variates in memory at once


def iid(labels: np.ndarray, clients: int, rng: Generator, each: int | None = None) -> np.ndarray:
    """Shuffle and split equally, so that sizes differ by at most one.

    Args:
        labels: Labels, ``[n]``.
        clients: Number of clients.
        rng: Random number generator.
        each: Number of samples per client, the rest is not used; None uses all samples.

    Raises:
        DataError: If there are fewer than ``each`` samples per client.
    """
    if each is None:
        return rng.permutation(np.arange(len(labels)) % clients)
    if each * clients > len(labels):
        raise DataError(
            f"{clients} clients with {each} samples each need {each * clients} samples, but there are only "
            f"{len(labels)}."
        )
    owner = np.full(len(labels), -1, np.int64)
    owner[: each * clients] = np.arange(each * clients) % clients
    return rng.permutation(owner)


def equal_runs(keys: np.ndarray, clients: int) -> np.ndarray:
    """Sort by ``keys`` (stable) and split into contiguous chunks whose sizes differ by at most one.

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
    """Assign ``S`` classes to each client.

    Client ``i`` gets the classes ``S*(i mod G) .. S*(i mod G) + S-1`` with ``G = C/S`` groups. The clients of a group
    share each of its classes equally, up to one sample.

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
            f"classes:{each} does not divide the {classes} classes into equal groups. Use one of {fitting}."
        )
    groups = classes // each
    if clients < groups:
        raise ConfigError(
            f"classes:{each} makes {groups} groups of classes, but with only {clients} clients some classes would "
            f"not be used. Use at least {groups} clients or a larger number of classes per client."
        )
    members = (clients - np.arange(groups) + groups - 1) // groups
    counts = np.bincount(labels, minlength=classes)
    short = np.flatnonzero(counts < np.repeat(members, each))
    if len(short):
        c = int(short[0])
        raise DataError(
            f"classes:{each} shares class {c} among {members[c // each]} clients, but it has only {counts[c]} samples. "
            "Use fewer clients."
        )
    # Within a group, assign samples sorted by class round-robin, so that the shares of a class differ by at most one.
    order = shuffled_by_class(labels, rng)
    group = labels[order] // each
    starts = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=groups))[:-1]])
    turn = np.arange(len(labels)) - starts[group]
    owner = np.empty(len(labels), np.int64)
    owner[order] = group + groups * (turn % members[group])
    return owner


def classes_by_dirichlet(
    labels: np.ndarray, clients: int, rng: Generator, *, each: int, alpha: float, classes: int
) -> np.ndarray:
    """Assign ``S`` classes to each client and split each class among its clients by a Dirichlet draw.

    This is ExDir of Li and Lyu 2023, arXiv:2311.03154, except that each client gets at least one sample of each of its
    classes. Clients choose classes one after the other, at random among the classes with the fewest clients, so that the
    numbers of clients per class differ by at most one.

    Args:
        labels: Labels, ``[n]``.
        clients: Number of clients.
        rng: Random number generator.
        each: Number ``S`` of classes per client.
        alpha: Concentration of the Dirichlet distribution.
        classes: Number ``C`` of classes.
    """
    if each > classes:
        raise ConfigError(f"classes:{each} is more than the {classes} classes. Use at most {classes}.")
    if clients * each < classes:
        raise ConfigError(
            f"classes:{each} assigns {clients * each} classes to {clients} clients, but there are {classes}, so some would "
            "not be used. Use more clients or a larger number of classes per client."
        )
    has = np.zeros((classes, clients), bool)
    for k in range(clients):
        fewest_first = np.lexsort((rng.random(classes), has.sum(1)))
        has[fewest_first[:each], k] = True
    members, counts = has.sum(1), np.bincount(labels, minlength=classes)
    short = np.flatnonzero(counts < members)
    if len(short):
        c = int(short[0])
        raise DataError(
            f"classes:{each} shares class {c} among {members[c]} clients, but it has only {counts[c]} samples. "
            "Use fewer clients."
        )
    weights = np.where(has, log_gamma(rng, alpha, has.shape), -np.inf)
    shares = has + proportional_counts(weights, counts - members)
    owner = np.empty(len(labels), np.int64)
    owner[shuffled_by_class(labels, rng)] = np.repeat(np.tile(np.arange(clients), classes), shares.ravel())
    return owner


def quantity(labels: np.ndarray, clients: int, rng: Generator, *, alpha: float, smallest: int) -> np.ndarray:
    """Skew client sizes but not labels: each client gets ``smallest`` samples, and one Dirichlet draw splits the rest.

    Args:
        labels: Labels, ``[n]``.
        clients: Number of clients.
        rng: Random number generator.
        alpha: Concentration of the Dirichlet distribution.
        smallest: Minimum number of samples per client.
    """
    n = len(labels)
    check_enough_samples(n, clients, smallest)
    rest = proportional_counts(log_gamma(rng, alpha, (1, clients)), np.array([n - clients * smallest]))[0]
    return rng.permutation(np.repeat(np.arange(clients), smallest + rest))


def natural(values: np.ndarray, clients: int | None, rng: Generator, *, smallest: int, column: str) -> np.ndarray:
    """Make one client per value, in sorted order; values with fewer than ``smallest`` samples are dropped.

    If there are fewer clients than values, values are sampled at random, and the samples of the others are not used
    (-1).

    Args:
        values: Value of each sample, ``[n]``.
        clients: Number of clients; None means one per value.
        rng: Random number generator.
        smallest: Minimum number of samples per client.
        column: Name of the column, for errors.
    """
    names, value, sizes = np.unique(values, return_inverse=True, return_counts=True)
    large = np.flatnonzero(sizes >= smallest)
    if not len(large) or (clients is not None and clients > len(large)):
        least = f" with at least {smallest} samples" if smallest > 1 else ""
        request = "" if clients is None else f", but clients={clients}"
        remedy = "Lower min or choose another column" if clients is None else "Use fewer clients or lower min"
        raise DataError(f"Column {column!r} has {len(large)} values{least} (of {len(names)}){request}. {remedy}.")
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
    """Split each class by a Dirichlet draw over the clients, repeated until each client has enough samples.

    Args:
        labels: Class of each sample, ``[n]``.
        clients: Number of clients.
        rng: Random number generator.
        alpha: Concentration of the Dirichlet distribution; smaller means more skew.
        classes: Number of classes.
        smallest: Minimum number of samples per client.
        balanced: Whether clients with ``n / clients`` samples receive no more.
        block: Number of clients per block; each class is first distributed evenly over the blocks, which are then split
            separately.
        draws: Maximum number of draws per block.
    """
    n = len(labels)
    check_enough_samples(n, clients, smallest)
    if not 1 <= block <= clients or clients % block:
        raise ConfigError(f"blocks={block} does not divide {clients} clients into equal blocks. Use a divisor.")
    blocks = clients // block
    order = shuffled_by_class(labels, rng)
    client_of = np.empty(n, np.int64)
    client_of[order] = np.arange(n) % blocks  # block of each sample; class and total counts differ by at most one
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
    """Draw counts for each block until every client has at least ``smallest`` samples.

    Args:
        sizes: Samples per class of each block, ``[M, C]``.
        clients: Number of clients per block.
        rng: Random number generator.
        alpha: Concentration of the Dirichlet distribution.
        smallest: Minimum number of samples per client.
        balanced: Whether clients with an equal share receive no more samples.
        draws: Maximum number of draws.

    Returns:
        Counts ``[M, C, clients]``, or None if no draw was accepted for some block; and the number of draws per block.
    """
    rows, classes = sizes.shape
    cells = classes * clients
    counts = np.empty((rows, classes, clients), np.int64)
    pending = np.arange(rows)
    drawn = 0
    wanted = 1
    work = 0
    while len(pending) and drawn < draws and (drawn < LEAST or work < WORK):
        times = max(1, min(wanted, draws - drawn, CELLS // (len(pending) * cells)))
        tried = draw_class_counts(np.repeat(sizes[pending], times, axis=0), clients, rng, alpha, balanced)
        tried = tried.reshape(len(pending), times, classes, clients)
        good = tried.sum(2).min(2) >= smallest
        first, settled = good.argmax(1), good.any(1)
        counts[pending[settled]] = tried[settled, first[settled]]
        drawn += times
        wanted *= 2
        work += len(pending) * times * cells
        pending = pending[~settled]
    return (None if len(pending) else counts), drawn


def draw_class_counts(sizes: np.ndarray, clients: int, rng: Generator, alpha: float, balanced: bool) -> np.ndarray:
    """Draw once per block and class how many samples each client gets, ``[M, C, clients]``.

    Args:
        sizes: Samples per class of each block, ``[M, C]``.
        clients: Number of clients per block.
        rng: Random number generator.
        alpha: Concentration of the Dirichlet distribution.
        balanced: Whether clients with an equal share receive no more samples.
    """
    weights = log_gamma(rng, alpha, (*sizes.shape, clients))
    if not balanced:
        return proportional_counts(weights, sizes)
    share = sizes.sum(1, keepdims=True) / clients
    counts = np.empty(weights.shape, np.int64)
    drawn = np.zeros((len(sizes), clients), np.int64)
    for c in range(sizes.shape[1]):
        # While samples remain, some client is below its share, so at least one weight is finite.
        counts[:, c] = proportional_counts(np.where(drawn >= share, -np.inf, weights[:, c]), sizes[:, c])
        drawn += counts[:, c]
    return counts


def log_gamma(rng: Generator, alpha: float, shape: tuple[int, ...]) -> np.ndarray:
    """Draw logarithms of Gamma(alpha) variates, whose normalized exponentials are a Dirichlet draw.

    Uses ``Gamma(a) = Gamma(a + 1) * U**(1/a)``, so that nothing underflows even if alpha is very small.

    Args:
        rng: Random number generator.
        alpha: Shape of the Gamma distribution.
        shape: Shape of the result.
    """
    alpha = max(alpha, 1e-12)
    return np.asarray(np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha)


def proportional_counts(log_weights: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Split ``totals`` in proportion to ``exp(log_weights)``, as integers ``[..., K]`` that add up exactly.

    Args:
        log_weights: Logarithms of the weights, ``[..., K]``.
        totals: Numbers to split, ``[...]``.
    """
    top = log_weights.max(-1, keepdims=True)
    edges = np.cumsum(np.exp(log_weights - np.where(np.isfinite(top), top, 0)), -1)
    last = edges[..., -1:]
    # Division by the last edge makes it exactly one, so the counts add up to the total.
    edges = np.floor(edges / np.where(last > 0, last, 1) * totals[..., None]).astype(np.int64)
    return np.diff(edges, axis=-1, prepend=0)


def shuffled_by_class(labels: np.ndarray, rng: Generator) -> np.ndarray:
    """Return sample ids sorted by class and shuffled within each class.

    Args:
        labels: Labels, ``[n]``.
        rng: Random number generator.
    """
    order = rng.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


def check_enough_samples(n: int, clients: int, smallest: int) -> None:
    """Validate that there are enough samples for the minimum of every client.

    Args:
        n: Number of samples.
        clients: Number of clients.
        smallest: Minimum number of samples per client.

    Raises:
        DataError: If there are fewer samples.
    """
    if n < clients * smallest:
        raise DataError(
            f"{clients} clients with at least {smallest} samples each need {clients * smallest} samples, but there are "
            f"{n}. Use fewer clients or a smaller min."
        )


def dirichlet_failure_message(
    n: int, clients: int, alpha: float, smallest: int, balanced: bool, block: int, drawn: int
) -> str:
    """Return the error message for a Dirichlet partition that was not found, with remedies.

    Args:
        n: Number of samples.
        clients: Number of clients.
        alpha: Concentration of the Dirichlet distribution.
        smallest: Minimum number of samples per client.
        balanced: Whether clients with an equal share receive no more samples.
        block: Number of clients per block.
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
