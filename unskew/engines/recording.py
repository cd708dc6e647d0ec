"""Work on fixed tensors that is recorded once as a CUDA graph and then replayed without Python.

Launching a kernel from Python takes ten times as long as from a graph, and small models are bound by launches. A graph
repeats its kernels on the same memory, with the Python numbers of the recording. So whatever changes from use to use must
be in tensors, nothing may be read from the device, and nothing may be copied from the host. ``CaptureCheck`` finds out
before the recording, because a failed one can make the device unusable for the process.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unskew.engines.client_axis import Tree

USES = 2
"""Number of times that work is executed from Python before it is recorded; the last one is checked."""
LEAST_REPLAYS = 16
"""Number of further uses in a round from which work that computes with the number of the round is recorded in each round."""
READS = frozenset({"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "masked_select", "unique"})
"""Operators whose result is a value, or has a shape, that the host must read."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Execute the work again, on the same memory."""


Recorder = Callable[[Callable[[], None], Callable[[], None]], Graph]
"""Records work. The second function restores the tensors that it overwrites, so that a recording changes nothing."""


class CudaGraphs:
    """Records work as CUDA graphs, which share their memory.

    Args:
        device: CUDA device.
    """

    WARMUP = 3

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None], restore: Callable[[], None]) -> Graph:
        """Record work after a few executions, in which libraries allocate their workspaces."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(self.WARMUP):
                    work()
                    restore()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                work()
        return graph


class WatchedRound:
    """Number of a round that notes what recorded work finds out about it.

    A comparison is noted with its result, so the recording is valid in all rounds with the same results. Any other use makes
    it valid in this round only.

    Args:
        value: Number of the round.

    Attributes:
        used: Whether the number itself was used.
    """

    def __init__(self, value: int):
        self.value = value
        self.used = False
        self._compared: list[tuple[Callable[[int, Any], bool], Any, bool]] = []

    def holds(self, round: int) -> bool:
        """Return whether a recording with this number is valid in a round."""
        if self.used:
            return round == self.value
        return all(compare(round, other) == result for compare, other, result in self._compared)

    def _number(self) -> int:
        self.used = True
        return self.value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Class ``int``, for rules that test the type."""
        return int

    def __getattr__(self, name: str) -> Any:
        return getattr(self._number(), name)


def _comparison(compare: Callable[[int, Any], bool]) -> Callable[[WatchedRound, Any], bool]:
    def method(watched: WatchedRound, other: Any) -> bool:
        result = compare(watched.value, other)
        watched._compared.append((compare, other, result))
        return result

    return method


def _use(function: Callable[..., Any], reverse: bool = False) -> Callable[..., Any]:
    def method(watched: WatchedRound, *args: Any) -> Any:
        operands = (watched._number(), *args)
        return function(*(operands[::-1] if reverse else operands))

    return method


for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(WatchedRound, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in (*("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"),):
    setattr(WatchedRound, f"__{_name.strip('_')}__", _use(getattr(operator, _name)))
    setattr(WatchedRound, f"__r{_name.strip('_')}__", _use(getattr(operator, _name), reverse=True))
for _function in (int, float, operator.index, bool, hash, str, repr, format, operator.neg, abs, round, divmod):
    setattr(WatchedRound, f"__{_function.__name__}__", _use(_function))


class _Creations(TorchFunctionMode):
    """Notes tensors that are created on a device from Python numbers, which copies them from the host."""

    def __init__(self, device: torch.device, reasons: dict[str, None]):
        super().__init__()
        self.device, self.reasons = device, reasons

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor) and device and torch.device(device).type == self.device.type:
            self.reasons[f"{function.__name__} creates a tensor from Python numbers"] = None
        return function(*args, **kwargs)


class CaptureCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Executes work from Python and finds the reasons why it cannot be recorded.

    Args:
        device: Device of the work.

    Attributes:
        reasons: Descriptions of operators that wait for the device or copy from the host.
    """

    def __init__(self, device: torch.device):
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.reasons: dict[str, None] = {}
        self._creations = _Creations(device, self.reasons)

    def __enter__(self) -> CaptureCheck:
        self._creations.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._creations.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operator and check it."""
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        here = any(self._is_here(t) for t in given)
        there = any(self._is_here(t) for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
        if name in READS and here:
            self.reasons[f"{name} reads the device"] = None
        if there and any(not self._is_here(t) and (t.dim() or name in ("copy_", "_to_copy")) for t in given):
            self.reasons[f"{name} copies a tensor of the host"] = None
        if here and not there and name == "_to_copy":
            self.reasons["a tensor is copied to the host"] = None
        return result

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type


class Static:
    """Tensors with fixed addresses, which the values of a round are copied into.

    Args:
        tree: Values of the first round.
    """

    def __init__(self, tree: Tree):
        leaves, self.layout = pytree.tree_flatten(tree)
        self.leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tree = pytree.tree_unflatten(self.leaves, self.layout)
        self.signature = signature(tree)

    def fits(self, tree: Tree) -> bool:
        """Return whether a tree has the same layout, shapes and data types."""
        return signature(tree) == self.signature

    def load(self, tree: Tree) -> None:
        """Copy values of the same layout into the tensors."""
        overwrite(self.leaves, pytree.tree_leaves(tree))


def overwrite(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, except those that are there already.

    Args:
        tensors: Tensors to overwrite; other objects are ignored.
        values: New values.
    """
    pairs = zip(tensors, values, strict=True)
    changed = [(own, new) for own, new in pairs if isinstance(own, Tensor) and not _same_memory(own, new)]
    if changed:
        torch._foreach_copy_([own for own, _ in changed], [new for _, new in changed])


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether a tensor was overwritten in place."""
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.stride() == other.stride()
    )


def signature(tree: Tree) -> str:
    """Return a key that is equal for trees with the same structure, shapes, data types and devices."""
    leaves, layout = pytree.tree_flatten(tree)
    return repr(([(tuple(t.shape), t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves], layout))


class RuleWatch:
    """Finds out whether the hooks of rules change attributes of the rules, which a graph does not repeat.

    Attributes may change when work is executed for the first time, such as values that are computed once.

    Args:
        rules: Rules of the run.

    Attributes:
        changed: Whether attributes have changed later.
    """

    def __init__(self, rules: Sequence[object]):
        self.rules = rules
        self.changed = False
        self._known = self._content()

    def settle(self) -> None:
        """Accept the changes of a first execution."""
        self._known = self._content()

    def check(self) -> bool:
        """Return whether no attribute has changed since the last first execution."""
        self.changed = self.changed or self._content() != self._known
        return not self.changed

    def _content(self) -> list[Any]:
        try:
            return [pickle.dumps([vars(rule) for rule in self.rules])]
        except Exception:  # values that cannot be compared are compared by identity
            return [{name: id(value) for name, value in vars(rule).items()} for rule in self.rules]


class Recording:
    """Work that is executed from Python at first, and replayed from then on.

    Args:
        work: Function of the number of the round, which reads and writes tensors with fixed addresses.
        device: Device of the work.
        watch: Watches the attributes of the rules.
        overwritten: Returns the tensors that the work reads and overwrites, whose values a recording must not change.

    Attributes:
        reasons: Reasons why the work cannot be recorded.
    """

    def __init__(
        self,
        work: Callable[[Any], None],
        device: torch.device,
        watch: RuleWatch,
        overwritten: Callable[[], Sequence[Tensor]] = tuple,
    ):
        self.work, self.device, self.watch, self.overwritten = work, device, watch, overwritten
        self.reasons: list[str] = []
        self._uses = 0
        self._graph: Graph | None = None
        self._seen = WatchedRound(0)

    def run(self, round: int, record: Recorder, left: int = LEAST_REPLAYS) -> None:
        """Execute the work once.

        Args:
            round: Number of the round, from 0.
            record: Records work.
            left: Number of further executions in this round.
        """
        if self._graph is not None and not self._seen.holds(round):
            self._graph = None
            if not self._seen.used:  # it does something else from now on, which is checked first
                self._uses = 0
        pays = not self._seen.used or left >= LEAST_REPLAYS
        if self.watch.changed:
            self._graph, self.reasons = None, ["a hook changes an attribute of its rule"]
        if self._graph is None and self._uses >= USES and not self.reasons and pays:
            self._seen = WatchedRound(round)
            with kept(self.overwritten()) as restore:
                self._graph = record(lambda: self.work(self._seen), restore)
        if self._graph is not None:
            self._graph.replay()
            return
        self._uses += 1
        if self._uses != USES:
            self.work(round)
            if self._uses == 1:
                self.watch.settle()
            return
        with CaptureCheck(self.device) as check:
            self.work(round)
        self.watch.check()
        self.reasons = [*check.reasons]


@contextmanager
def kept(tensors: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Context manager with a function that restores the present values of tensors."""
    before = [tensor.clone() for tensor in tensors]

    def restore() -> None:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)

    yield restore
