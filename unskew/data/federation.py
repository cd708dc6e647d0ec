"""Federation: clients with their samples, a test set and optional server data.

Samples stay in the arrays that were passed or loaded, with their dtype. A client is an offset and a length, so even a
million clients cost only two integers each. A client's inputs are gathered when it is sampled. Images are normalized
batch by batch on the training device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.data.client_arrays import check_client_targets, check_shapes, read_clients
from unskew.data.clients import ArrayClients, ClientData, DrawnClients, concatenate_inputs, joined_clients, take_rows
from unskew.data.federation_table import federation_html
from unskew.data.frames import encode_classes, encode_text_labels, frames_to_arrays
from unskew.data.from_arrays import (
    check_client_list,
    check_integer,
    configured_task,
    fit_normalization,
    recode_targets,
    unpack_pair,
    validate_class_names,
    validate_pair,
)
from unskew.data.harmonize import Harmonization
from unskew.data.normalization import Normalization
from unskew.data.readers.column_roles import INPUT, describe_roles
from unskew.data.readers.encoders import Encoder
from unskew.data.shared_copies import shared_copy
from unskew.data.target_scaling import fit_task
from unskew.data.validation import validate_client_names
from unskew.errors import ConfigError, DataError, short_repr, unknown_name
from unskew.tasks.base import Task
from unskew.tasks.registry import TASKS

__all__ = [
    "ArrayClients",
    "ClientData",
    "Federation",
    "ServerData",
    "concatenate_inputs",
    "joined_clients",
    "take_rows",
]


@dataclass(frozen=True)
class ServerData:
    """Samples at the server; ``in_domain`` is true if they have the clients' task and classes."""

    x: Tensor
    y: Tensor
    in_domain: bool = True

    @property
    def classes(self) -> int:
        """Number of classes or labels of the server data, which may differ from the clients' if out of domain."""
        return self.y.shape[1] if self.y.dim() > 1 else int(self.y.max()) + 1


@dataclass(frozen=True)
class Federation:
    """Clients with their data, a test set, and optional server data.

    Attributes:
        clients: Sequence of ``ClientData``; it may load a client's data lazily, when the client is sampled.
        test: Inputs ``[n, ...]`` and targets ``[n]`` (multi-label, language: ``[n, L]``) of the global test set.
        server: Data at the server, or None.
        task: ``"classification"``, ``"multilabel"``, ``"language"``, ``"regression"`` or ``"segmentation"``.
        classes: Number of classes ``C``, labels ``L``, tokens, or regression targets, depending on the task.
        normalization: Normalization applied to every batch on the training device; None leaves inputs unchanged.
        class_names: Names of the classes or labels, in order.
        name: Name of the data set, for tables and records.
        partition: Name of the data partition, for tables and records.
        fingerprint: Hash of the assignment of samples to clients; every run records it.
        text_groups: Training rows per client and group ``[K, G]`` with the group names, if a column decided the partition of
            texts.
        columns: Role of each column of a table: ``"input"``, ``"label"``, ``"left out: text"``, ...
        client_names: Distinct client names, in order; empty if the clients have no names.
        trained_for: Task with parameters from the data, such as the scale of targets; None means the plain task. Read
            it through ``objective``.
        encoders: Fitted encoder of each input of a table with mixed column types.
        stats_traffic: Bytes that each client sent and received for global statistics, ``[K, 2]``; None if there was no
            traffic.
        harmonization: Harmonization of the columns of each site, which was applied to the inputs; None without it.
        missing: Number of missing values of each client in each column of ``encoders``, before they are replaced,
            ``[K, f]``; None if there are no encoders.
        unseen: Clients that take no part in training and are evaluated after it, numbered from 0.
        unseen_complete: The same clients with all of their samples held out, but those of groups (``split_by``) on which
            training clients train; empty if the groups are unknown.
        unseen_names: Names of the unseen clients; empty if they have no names.
        split_group: Column whose values are never split between training and held-out rows (``split_by``); None if there
            is none.
        counts_known: Whether the clients' labels give the class counts of each client; not at a server that sees only sums.
        warnings: Warnings that were logged while the data were loaded; every run records them.
    """

    clients: Sequence[ClientData]
    test: tuple[Tensor, Tensor]
    server: ServerData | None = None
    task: str = "classification"
    classes: int = 10
    normalization: Normalization | None = None
    class_names: tuple[str, ...] = ()
    name: str = "arrays"
    partition: str = "given"
    fingerprint: str = ""
    text_groups: tuple[np.ndarray, tuple[str, ...]] | None = None
    columns: Mapping[str, str] = field(default_factory=dict, compare=False)
    client_names: tuple[str, ...] = ()
    trained_for: Task | None = None
    encoders: tuple[Encoder, ...] = field(default=(), compare=False)
    stats_traffic: np.ndarray | None = field(default=None, compare=False)
    harmonization: Harmonization | None = field(default=None, compare=False)
    missing: np.ndarray | None = field(default=None, compare=False)
    unseen: Sequence[ClientData] = ()
    unseen_complete: Sequence[ClientData] = ()
    unseen_names: tuple[str, ...] = ()
    split_group: str | None = None
    counts_known: bool = True
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_integer(self.classes, "classes", least=1)
        validate_client_names(self.client_names, len(self.clients))

    def __str__(self) -> str:
        """Describe the federation in one line, followed by one line per column of a table."""
        return "\n".join([repr(self), *(f"  {name}: {done}" for name, done in describe_roles(self.columns))])

    def __repr__(self) -> str:
        """Return a one-line description without arrays; does not load any client."""
        about: dict[str, object] = {"name": self.name, "clients": len(self.clients)}
        if isinstance(self.clients, ArrayClients):
            about["samples"] = int(self.sizes.sum())
        about["test"] = len(self.test[1])
        if self.server is not None:
            about["server"] = len(self.server.y)
        about |= {name: getattr(self, name) for name in ("classes", "shape", "partition", "task")}
        return f"Federation({', '.join(f'{name}={value!r}' for name, value in about.items())})"

    def _repr_html_(self) -> str:
        """Return tables of the clients and of the columns for notebooks."""
        counted = "counts" in self.objective.provides and self.counts_known and not self.objective.pixels
        names = self.names if counted else ()
        return federation_html(repr(self), self.clients, self.objective, names, self.client_label, self.columns)

    @property
    def objective(self) -> Task:
        """Task for which a model is trained."""
        return TASKS[self.task] if self.trained_for is None else self.trained_for

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a model's outputs (classes, labels or targets); their indices if they have no names."""
        return self.class_names or tuple(str(c) for c in range(self.classes))

    def client_label(self, client: int) -> str:
        """Return a client's label for messages and plots: its name, or ``client`` and its index."""
        return self.client_names[client] if self.client_names else f"client {client}"

    def client_title(self, client: int) -> str:
        """Return a client's label at the beginning of a message, such as ``The client north`` or ``Client 3``."""
        return f"The client {self.client_names[client]}" if self.client_names else f"Client {client}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input, channels first: ``(C, H, W)`` or ``(f,)``."""
        return tuple(self.test[0].shape[1:])

    @property
    def sizes(self) -> np.ndarray:
        """Number of training samples per client, ``[K]``."""
        if isinstance(self.clients, ArrayClients):
            return np.asarray(self.clients.splits - self.clients.offsets[:-1])
        return np.array([client.num_samples for client in self.clients])

    def num_samples(self, client: int) -> int:
        """Return the number of training samples of a client."""
        if isinstance(self.clients, ArrayClients):
            start, split, _ = self.clients.bounds(client)
            return split - start
        return self.clients[client].num_samples

    def to(self, device: torch.device) -> Federation:
        """Return the same federation on ``device``; clients that are not stored in arrays are not moved."""
        x, y = self.test
        clients = self.clients
        if isinstance(clients, ArrayClients):
            clients = shared_copy(clients, device)
        return replace(self, clients=clients, test=(shared_copy(x, device), y.to(device)))

    def label_distribution(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return samples per client and class ``[K, C]`` and the class names; without labels, per text group."""
        if "counts" in self.objective.provides and self.counts_known:
            return self.class_counts(), self.names
        what = "texts" if self.objective.tokens else "samples"
        return (self.sizes[:, None], (what,)) if self.text_groups is None else self.text_groups

    def class_counts(self) -> np.ndarray:
        """Return the number of training samples per client and class, ``[K, C]``.

        A multi-label sample counts once for each label that it has.
        """
        task = self.objective
        return np.stack([task.counts(c.y.cpu(), self.classes).numpy() for c in self.clients])

    @staticmethod
    def from_arrays(
        clients: Sequence[tuple[object, ...]],
        test: tuple[object, object],
        server: tuple[object, object] | None = None,
        task: str = "classification",
        classes: int | None = None,
        *,
        holdout: float = 0.1,
        seed: int = 0,
        normalize: bool | Normalization | None = None,
        server_in_domain: bool = True,
        class_names: Sequence[str] = (),
        client_names: Sequence[str] = (),
        name: str = "arrays",
        options: Mapping[str, Any] | None = None,
    ) -> Federation:
        """Build a federation from arrays. The arrays are not copied, so do not change them afterwards.

        Arrays that are memory-mapped from files (``np.load(path, mmap_mode="r")``) stay in their files: a client's
        inputs are read and validated when it is sampled. 8-bit inputs are read completely once to compute mean and
        standard deviation, unless ``normalize`` is a ``Normalization`` or False. Inputs keep their dtype, including
        float64; each batch is converted to the model's precision.

        Args:
            clients: One ``(x, y)`` or ``(x, y, x_test, y_test)`` per client (NumPy arrays or tensors). Images are ``[n,
                H, W, C]``, ``[n, C, H, W]`` or (uint8) ``[n, H, W]``. Tables are ``[n, f]``, or pandas data frames,
                whose columns are matched by name. Labels may be numbers, strings or booleans.
            test: ``(x, y)`` of the global test set.
            server: ``(x, y)`` of the server data.
            task: ``"classification"``: ``y`` is one class per sample. ``"multilabel"``: ``y`` is ``[n, L]`` with
                values 0 and 1. ``"regression"``: ``y`` is one number per sample or ``[n, T]``, in original units; the
                federation stores it standardized. ``"language"``: ``x`` and ``y`` are token ids ``[n, L]`` with -1 for
                padding, and ``y`` has the tokens that follow those of ``x``. ``"survival"``: ``y`` is ``[n, 2]``, the
                time, and 1 for an event or 0 if the row is censored. ``"segmentation"``: ``y`` is the class of each
                pixel, ``[n, H, W]`` or for volumes ``x [n, C, D, H, W]`` ``[n, D, H, W]``; 255 has no truth.
            classes: Number of classes; numeric labels are then 0 to ``classes - 1``. If None, the classes are the labels
                that occur at any client or in the test set, in order, unless they are indices of ``class_names``.
            holdout: Share of each client's samples held out for evaluation, for clients without a test set.
            seed: Random seed that determines which samples are held out.
            normalize: True or None: standardize uint8 images per channel and leave floats unchanged. False: do not
                normalize. Or a ``Normalization`` to apply.
            server_in_domain: Whether the server data have the clients' task and classes; if not, they have separate
                classes.
            class_names: Names of the classes, in order.
            client_names: Names of the clients.
            name: Name shown in tables.
            options: Options of the task, as in the section of a configuration with its name.

        Raises:
            ConfigError: If an option is unknown or not valid.
            DataError: If a client is empty, shapes differ, a label is out of range, an input is not finite, there is
                only one class, two clients have the same name, or an argument has the wrong type.

        >>> import numpy as np
        >>> x, y = np.zeros((4, 3), "float32"), np.array([0, 1, 0, 1])
        >>> fed = Federation.from_arrays([(x, y), (x, y)], test=(x, y), holdout=0.25)
        >>> len(fed.clients), fed.classes, fed.sizes.tolist()
        (2, 2, [3, 3])
        """
        if not isinstance(task, str) or task not in TASKS:
            raise DataError(unknown_name("task", task if isinstance(task, str) else short_repr(task), TASKS))
        if not isinstance(name, str):
            raise DataError(f"name must be a string, not {short_repr(name)}.")
        if not isinstance(server_in_domain, bool | np.bool_):
            raise DataError(f"server_in_domain must be True or False, not {short_repr(server_in_domain)}.")
        objective = configured_task(TASKS[task], options)
        one_class = "one_class" in objective.provides
        check_client_list(clients)
        names = validate_client_names(client_names, len(clients))
        check_integer(seed, "seed")
        everyone: list[Any] = [*clients, test, *([] if server is None else [server])]
        columns: tuple[str, ...] = ()
        if all(isinstance(pair, tuple | list) and len(pair) in (2, 4) for pair in everyone):
            whose = [*(f"client {k}" for k in range(len(clients))), "the test set", "the server"]
            everyone, columns = frames_to_arrays(dict(zip(whose, everyone, strict=False)))
            own = len(clients) + 1 + int(server is not None and bool(server_in_domain))
            if options:
                if objective.pixels and class_names and objective.names not in ((), tuple(class_names)):
                    raise ConfigError(f"options name the classes {', '.join(objective.names)}, but class_names others.")
                everyone[:own] = recode_targets(everyone[:own], whose[:own], objective)
            if one_class:
                everyone[:own], class_names = encode_text_labels(everyone[:own], class_names)
            test, server = everyone[len(clients)], (*everyone, None)[len(clients) + 1]
            clients = everyone[: len(clients)]
        readers, ys, splits = read_clients(clients, task, holdout, int(seed))
        pairs = {"the test set": validate_pair(*unpack_pair(test, "test"), "the test set", task)}
        if server is not None:
            pairs["the server"] = validate_pair(*unpack_pair(server, "server"), "the server", task)
        check_shapes(readers, {who: x for who, (x, _) in pairs.items()})
        if classes is None:
            own = server_in_domain or server is None
            in_domain = [*ys, *(pair[1] for who, pair in pairs.items() if own or who != "the server")]
            if one_class:
                indices, class_names, classes = encode_classes(in_domain, validate_class_names(class_names, 0))
                ys, others = indices[: len(ys)], indices[len(ys) :]
                pairs |= {who: (pairs[who][0], y) for who, y in zip(pairs, others, strict=False)}
                if classes < 2:
                    raise DataError(
                        f"All labels are {(class_names or '0')[0]}, but a classifier needs two classes. If there are more "
                        "classes than occur in these data, set classes=."
                    )
            else:
                classes = (len(class_names or objective.names) if objective.pixels else 0) or objective.num_outputs(
                    in_domain
                )
        else:
            check_integer(classes, "classes", least=2 if one_class else 1)
        check_client_targets(readers, ys, classes, task)
        for who, pair in pairs.items():
            own = server_in_domain or who != "the server"
            objective.check(pair[1], classes if own else ServerData(*pair, False).classes, who, pair[0])
        offsets = readers.offsets
        y_all, begins = ys[0], offsets[:-1] + splits
        fingerprint = compute_fingerprint(y_all.numpy(), offsets)
        if objective.pixels:
            objective = objective.named(class_names or objective.names or tuple(map(str, range(classes))))
        trained_for: Task | None = None if objective == TASKS[task] else objective
        stats_traffic = None
        if objective.standardized or objective.fits:
            own_rows = [y_all[start:stop] for start, stop in zip(offsets[:-1], begins, strict=True)]
            trained_for, stats_traffic = fit_task(objective, own_rows, class_names)
        if trained_for is not None:
            y_all = trained_for.standardize(y_all)
            pairs = {who: (x, trained_for.standardize(y)) for who, (x, y) in pairs.items()}
            classes, class_names = len(trained_for.names) or classes, trained_for.names or class_names
        return Federation(
            clients=DrawnClients(readers, readers.like, y_all, offsets, begins, readers.mapped),
            test=pairs["the test set"],
            server=ServerData(*pairs["the server"], server_in_domain) if server is not None else None,
            task=task,
            classes=classes,
            normalization=fit_normalization(normalize, readers.like, readers.all()),
            class_names=validate_class_names(class_names, 0 if objective.tokens else classes),
            client_names=names,
            name=name,
            fingerprint=fingerprint,
            trained_for=trained_for,
            stats_traffic=stats_traffic,
            columns=dict.fromkeys(columns, INPUT),
        )


def compute_fingerprint(values: np.ndarray, offsets: np.ndarray) -> str:
    """Compute a hash of 16 hex digits that changes when a sample moves to another client.

    Args:
        values: Targets or indices of all samples, client by client.
        offsets: Start of each client's samples, ``[K + 1]``.
    """
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes())
    digest.update(np.ascontiguousarray(offsets, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
