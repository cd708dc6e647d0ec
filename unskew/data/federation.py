"""A federation: who holds which samples.

The samples of all clients lie in one array, ordered by client, so a client's data is a view (an offset and a
length) and a million registered clients cost two integers each. Images stay uint8, channels-last, and are
normalised batch by batch on the device that trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from unskew.data.arrays import (
    check_clients,
    checked_names,
    checked_pair,
    client_samples,
    fitting,
    given_pair,
    whole_number,
)
from unskew.data.checks import as_names, check_differ, check_targets
from unskew.data.normalisation import Normalisation
from unskew.data.reading.columns import described
from unskew.errors import DataError, shown, unknown
from unskew.tasks import TASKS


@dataclass(frozen=True)
class ClientData:
    """What one client holds: ``x [n, ...]`` and ``y [n]`` to train on, and its own held-out ``x_test, y_test``.

    With several labels a sample, ``y`` is ``[n, L]`` of 0 and 1.
    """

    id: int
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def examples(self) -> int:
        """Number of training samples."""
        return len(self.y)

    def __repr__(self) -> str:
        return f"ClientData(id={self.id}, samples={self.examples}, held_out={len(self.y_test)})"


class ArrayClients(Sequence[ClientData]):
    """Clients as slices of shared arrays: ``k`` trains on ``offsets[k]:splits[k]``, holds out up to ``offsets[k+1]``."""

    def __init__(self, x: Tensor, y: Tensor, offsets: np.ndarray, splits: np.ndarray):
        self.x, self.y, self.offsets, self.splits = x, y, offsets, splits

    def __len__(self) -> int:
        return len(self.splits)

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        if not 0 <= k < len(self):
            raise IndexError(f"There is no client {k}; this federation has {len(self)}.")
        start, split, stop = int(self.offsets[k]), int(self.splits[k]), int(self.offsets[k + 1])
        x, y = self.x, self.y
        return ClientData(k, x[start:split], y[start:split], x[split:stop], y[split:stop])

    def __iter__(self) -> Iterator[ClientData]:
        return (self[k] for k in range(len(self)))


def joined_clients(clients: Sequence[ClientData]) -> ArrayClients:
    """Clients, in order, with all their samples in one array."""
    trained = np.array([client.examples for client in clients])
    offsets = np.concatenate([[0], np.cumsum(trained + [len(client.y_test) for client in clients])])
    xs, ys = [t for c in clients for t in (c.x, c.x_test)], [t for c in clients for t in (c.y, c.y_test)]
    return ArrayClients(cat_inputs(xs), torch.cat(ys), offsets, offsets[:-1] + trained)


@dataclass(frozen=True)
class ServerData:
    """Samples at the server; ``in_domain`` says whether they come from the clients' task."""

    x: Tensor
    y: Tensor
    in_domain: bool = True

    @property
    def classes(self) -> int:
        """Number of its classes or labels; out of domain it is not the clients'."""
        return self.y.shape[1] if self.y.dim() > 1 else int(self.y.max()) + 1


@dataclass(frozen=True)
class Federation:
    """Clients with their data, a test set, and (optionally) data at the server.

    Attributes:
        clients: A sequence of ``ClientData``; it may load a client only when it is drawn.
        test: Inputs ``[n, ...]`` and targets ``[n]`` (multi-label, language: ``[n, L]``) to evaluate the global model on.
        server: Data at the server, or None.
        task: ``"classification"``, ``"multilabel"`` or ``"language"``.
        classes: Number of classes ``C``, of labels ``L``, or of tokens.
        normalisation: Applied to every batch, on the device; None leaves inputs as they are.
        class_names: Names of the classes or labels, in order.
        name: The data set and partition, for tables.
        fingerprint: Hash of the partition (which sample sits where); every run records it.
        kinds: Rows of each kind at each client ``[K, G]`` and the kinds' names, where a column decided the partition.
        columns: Of a table, what is done to each column: ``"input"``, ``"label"``, ``"left out: text"``, ...
        client_names: The clients' names, distinct and in order; empty if they have none.
    """

    clients: Sequence[ClientData]
    test: tuple[Tensor, Tensor]
    server: ServerData | None = None
    task: str = "classification"
    classes: int = 10
    normalisation: Normalisation | None = None
    class_names: tuple[str, ...] = ()
    name: str = "arrays"
    partition: str = "given"
    fingerprint: str = ""
    kinds: tuple[np.ndarray, tuple[str, ...]] | None = None
    columns: Mapping[str, str] = field(default_factory=dict, compare=False)
    client_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole_number(self.classes, "classes", least=1)
        as_names(self.client_names, len(self.clients))

    def __str__(self) -> str:
        """A line on who holds what, and of a table a line for each column."""
        return "\n".join([repr(self), *(f"  {name}: {done}" for name, done in described(self.columns))])

    def __repr__(self) -> str:
        """What there is in a line, not the arrays; no client is loaded for it."""
        about: dict[str, object] = {"name": self.name, "clients": len(self.clients)}
        if isinstance(self.clients, ArrayClients):
            about["samples"] = int(self.sizes.sum())
        about["test"] = len(self.test[1])
        if self.server is not None:
            about["server"] = len(self.server.y)
        about |= {name: getattr(self, name) for name in ("classes", "shape", "partition", "task")}
        return f"Federation({', '.join(f'{name}={value!r}' for name, value in about.items())})"

    def who(self, client: int) -> str:
        """What messages and figures call a client: its name, or else its number."""
        return self.client_names[client] if self.client_names else f"client {client}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input, channels first: ``(C, H, W)`` or ``(f,)``."""
        return tuple(self.test[0].shape[1:])

    @property
    def sizes(self) -> np.ndarray:
        """Training samples per client, ``[K]``."""
        if isinstance(self.clients, ArrayClients):
            return np.asarray(self.clients.splits - self.clients.offsets[:-1])
        return np.array([client.examples for client in self.clients])

    def to(self, device: torch.device) -> Federation:
        """The same federation with its arrays on ``device``, if they are arrays; else the clients stay where they are."""
        x, y = self.test
        clients = self.clients
        if isinstance(clients, ArrayClients):
            clients = ArrayClients(clients.x.to(device), clients.y.to(device), clients.offsets, clients.splits)
        return replace(self, clients=clients, test=(x.to(device), y.to(device)))

    def holdings(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """What tables and plots show of each client: samples per class ``[K, C]``, or of texts without labels per kind."""
        if self.task != "language":
            return self.class_counts(), self.class_names or tuple(str(c) for c in range(self.classes))
        return (self.sizes[:, None], ("texts",)) if self.kinds is None else self.kinds

    def class_counts(self) -> np.ndarray:
        """What each client holds to train on: counts ``[K, C]``. A sample counts once for each of its labels."""
        task = TASKS[self.task]
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
        normalise: bool | Normalisation | None = None,
        server_in_domain: bool = True,
        class_names: Sequence[str] = (),
        client_names: Sequence[str] = (),
        name: str = "arrays",
    ) -> Federation:
        """Build a federation from arrays.

        Args:
            clients: One ``(x, y)`` or ``(x, y, x_test, y_test)`` per client (NumPy arrays or tensors). Images are
                ``[n, H, W, C]``, ``[n, C, H, W]`` or (uint8) ``[n, H, W]``; tables are ``[n, f]``.
            test: ``(x, y)`` of the global test set.
            server: ``(x, y)`` held by the server.
            task: ``"classification"``, where ``y`` is one class index per sample; ``"multilabel"``, where ``y`` is
                ``[n, L]`` of 0 and 1; or ``"language"``, where ``x`` and ``y`` are token ids ``[n, L]`` with -1 for padding
                and ``y`` holds the tokens that follow those of ``x``.
            classes: Number of classes; found from the labels if None.
            holdout: Share of each client's samples kept for its own evaluation (when it brings no test set).
            seed: Decides which samples are held out.
            normalise: True or None: uint8 images are standardised per channel, floats are left alone; False:
                nothing is normalised; or a ``Normalisation``.
            server_in_domain: Whether the server's samples come from the clients' task; if not, it has classes of its own.
            class_names: Names of the classes.
            client_names: Names of the clients.
            name: Name shown in tables.

        Raises:
            DataError: A client is empty, shapes differ, a label is out of range, an input is not finite, there is one class
                only, two clients have one name, or an argument is of the wrong kind.

        >>> import numpy as np
        >>> x, y = np.zeros((4, 3), "float32"), np.array([0, 1, 0, 1])
        >>> fed = Federation.from_arrays([(x, y), (x, y)], test=(x, y), holdout=0.25)
        >>> len(fed.clients), fed.classes, fed.sizes.tolist()
        (2, 2, [3, 3])
        """
        if not isinstance(task, str) or task not in TASKS:
            raise DataError(unknown("task", task if isinstance(task, str) else shown(task), TASKS))
        if not isinstance(name, str):
            raise DataError(f"name must be text, not {shown(name)}.")
        check_clients(clients)
        names = as_names(client_names, len(clients))
        whole_number(seed, "seed")
        xs, ys, splits = zip(
            *(client_samples(k, one, task, holdout, seed) for k, one in enumerate(clients)), strict=True
        )
        pairs = {"the test set": checked_pair(*given_pair(test, "test"), "the test set", task)}
        if server is not None:
            pairs["the server"] = checked_pair(*given_pair(server, "server"), "the server", task)
        shape = tuple(xs[0].shape[1:])
        for who, inputs in [*((f"client {k}", x) for k, x in enumerate(xs)), *((w, x) for w, (x, _) in pairs.items())]:
            if tuple(inputs.shape[1:]) != shape:
                raise DataError(f"{who} has inputs of shape {tuple(inputs.shape[1:])}, client 0 of {shape}.")
        if classes is None:
            own = server_in_domain or server is None
            in_domain = [*ys, *(pair[1] for who, pair in pairs.items() if own or who != "the server")]
            classes = ys[0].shape[1] if task == "multilabel" else max(int(y.max()) for y in in_domain) + 1
            check_differ(in_domain, task)
        else:
            whole_number(classes, "classes", least=2 if task == "classification" else 1)
        for who, pair in [*((f"client {k}", (xs[k], ys[k])) for k in range(len(xs))), *pairs.items()]:
            own = server_in_domain or who != "the server"
            check_targets(pair[1], classes if own else ServerData(*pair, False).classes, who, task, pair[0])
        offsets = np.concatenate([[0], np.cumsum([len(y) for y in ys])])
        x_all, y_all = cat_inputs(xs), torch.cat(ys)
        return Federation(
            clients=ArrayClients(x_all, y_all, offsets, offsets[:-1] + np.array(splits)),
            test=pairs["the test set"],
            server=ServerData(*pairs["the server"], server_in_domain) if server is not None else None,
            task=task,
            classes=classes,
            normalisation=fitting(normalise, x_all),
            class_names=checked_names(class_names, 0 if task == "language" else classes),
            client_names=names,
            name=name,
            fingerprint=fingerprint_of(y_all.numpy(), offsets),
        )


def cat_inputs(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate inputs; images keep their channels-last memory."""
    if parts[0].dim() != 4:
        return torch.cat(list(parts))
    return torch.cat([p.permute(0, 2, 3, 1) for p in parts]).permute(0, 3, 1, 2)


def take(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``; images ``[n, C, H, W]`` keep their channels-last memory, which convolutions on CPU prefer."""
    if x.dim() != 4:
        return x.index_select(0, index)
    return x.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)


def fingerprint_of(values: np.ndarray, offsets: np.ndarray) -> str:
    """Sixteen hex digits that change when any sample moves to another client."""
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes())
    digest.update(np.ascontiguousarray(offsets, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
