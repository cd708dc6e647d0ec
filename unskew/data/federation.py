"""A federation: who holds which samples.

The samples of all clients lie in one array, ordered by client, so a client's data is a view (an offset and a
length) and a million registered clients cost two integers each. Images stay uint8, channels-last, and are
normalised batch by batch on the device that trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unskew.data.checks import as_inputs, as_names, as_targets, check_targets
from unskew.data.normalisation import Normalisation
from unskew.errors import DataError, unknown
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
    client_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        as_names(self.client_names, len(self.clients))

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
            DataError: A client is empty, shapes differ, a label is out of range, an input is not finite, two clients have
                one name, or there is no such task.

        >>> import numpy as np
        >>> x, y = np.zeros((4, 3), "float32"), np.array([0, 1, 0, 1])
        >>> fed = Federation.from_arrays([(x, y), (x, y)], test=(x, y), holdout=0.25)
        >>> len(fed.clients), fed.classes, fed.sizes.tolist()
        (2, 2, [3, 3])
        """
        if task not in TASKS:
            raise DataError(unknown("task", task, TASKS))
        if not clients:
            raise DataError("A federation needs at least one client; 'clients' is empty.")
        for who, pair in (("test", test), ("server", server)):
            if not (isinstance(pair, tuple | list) and len(pair) == 2) and not (who == "server" and pair is None):
                raise DataError(f"{who} must be a pair (x, y), not {type(pair).__name__}.")
        if isinstance(clients, dict):
            raise DataError("clients must be a list with one (x, y) per client, not a dictionary; give its values.")
        names = as_names(client_names, len(clients))
        xs, ys, splits = [], [], []
        for k, arrays in enumerate(clients):
            if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 4):
                raise DataError(f"Client {k} must be (x, y) or (x, y, x_test, y_test).")
            x, y = as_inputs(arrays[0], f"client {k}", task), as_targets(arrays[1], f"client {k}", task)
            if len(x) != len(y):
                raise DataError(f"Client {k} has {len(x)} inputs but {len(y)} labels.")
            if len(arrays) == 4:
                who = f"client {k} (test)"
                xt, yt = as_inputs(arrays[2], who, task), as_targets(arrays[3], who, task)
                if len(xt) != len(yt):
                    raise DataError(f"Client {k} has {len(xt)} test inputs but {len(yt)} test labels.")
                if y.shape[1:] != yt.shape[1:]:
                    raise DataError(f"Client {k} has {y.shape[1]} labels to train on but {yt.shape[1]} to test on.")
                splits.append(len(x))
                x, y = torch.cat([x, xt]), torch.cat([y, yt])
            else:
                order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed * 1_000_003 + k))
                x, y = x[order], y[order]
                splits.append(training_size(len(y), holdout))
            xs.append(x)
            ys.append(y)
        named = {f"client {k}": x for k, x in enumerate(xs)}
        pairs = {"the test set": (as_inputs(test[0], "the test set", task), as_targets(test[1], "the test set", task))}
        if server is not None:
            pairs["the server"] = (as_inputs(server[0], "the server", task), as_targets(server[1], "the server", task))
        named |= {who: pair[0] for who, pair in pairs.items()}
        shape = tuple(xs[0].shape[1:])
        for who, inputs in named.items():
            if tuple(inputs.shape[1:]) != shape:
                raise DataError(f"{who} has inputs of shape {tuple(inputs.shape[1:])}, client 0 of {shape}.")
        if classes is None:
            own = server_in_domain or server is None
            in_domain = [*ys, *(pair[1] for who, pair in pairs.items() if own or who != "the server")]
            classes = ys[0].shape[1] if task == "multilabel" else max(int(y.max()) for y in in_domain if len(y)) + 1
        for who, pair in [*((f"client {k}", (xs[k], ys[k])) for k in range(len(xs))), *pairs.items()]:
            own = server_in_domain or who != "the server"
            check_targets(pair[1], classes if own else ServerData(*pair, False).classes, who, task, pair[0])
            if len(pair[0]) != len(pair[1]):
                raise DataError(f"{who} has {len(pair[0])} inputs but {len(pair[1])} labels.")
        offsets = np.concatenate([[0], np.cumsum([len(y) for y in ys])])
        x_all, y_all = cat_inputs(xs), torch.cat(ys)
        if not isinstance(normalise, Normalisation):
            wanted = normalise is not False and x_all.dtype == torch.uint8
            normalise = Normalisation.fit(x_all) if wanted else None
        return Federation(
            clients=ArrayClients(x_all, y_all, offsets, offsets[:-1] + np.array(splits)),
            test=pairs["the test set"],
            server=ServerData(*pairs["the server"], server_in_domain) if server is not None else None,
            task=task,
            classes=classes,
            normalisation=normalise,
            class_names=tuple(class_names),
            client_names=names,
            name=name,
            fingerprint=fingerprint_of(y_all.numpy(), offsets),
        )


def training_size(n: int, holdout: float) -> int:
    """How many of a client's ``n`` samples it trains on; at least one is held out when there are two or more."""
    if not 0 <= holdout < 1:
        raise DataError(f"holdout must be a share from 0 to below 1, not {holdout}.")
    if holdout == 0 or n < 2:
        return n
    return n - min(n - 1, max(1, round(n * holdout)))


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
