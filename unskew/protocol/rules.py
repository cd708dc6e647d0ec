"""The four slots of a method.

A method decides one or two of four questions, one slot each: ``data`` (what a client holds before training), ``client`` (how
it trains: a sequence of rules), ``sync`` (which slices of the model travel in which round) and ``server`` (how updates become
the next model). Rules are pure functions of tensors: state comes in, state goes out, so every engine can run them.

What passes between server and client is in ``unskew.protocol.messages``, what client rules work with in
``unskew.protocol.context``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from unskew.data.federation import Federation
from unskew.models.trainable import Batch, GradFn, LossFn
from unskew.models.vector import ModelSpec
from unskew.protocol.context import Context as Context
from unskew.protocol.messages import Aggregate as Aggregate
from unskew.protocol.messages import Broadcast as Broadcast
from unskew.protocol.messages import Slices as Slices
from unskew.protocol.messages import Tensors as Tensors
from unskew.protocol.messages import Update as Update
from unskew.protocol.messages import Updates as Updates
from unskew.protocol.workspace import NOWHERE, PreparedData, Workspace

Weights = Literal["samples", "uniform"]


class Rule:
    """What everything that fills a slot has in common. Subclasses are frozen dataclasses: their fields are options."""

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    weights: ClassVar[Weights | None] = None

    tasks: ClassVar[tuple[str, ...]] = ("classification", "multilabel", "language")
    """The tasks it can be trained for."""

    tasks_reason: ClassVar[str] = ""
    """Why no other: the end of a sentence that begins with "because"."""

    makes_inputs: ClassVar[bool] = False
    """Whether it learns or draws inputs, which then must be numbers: there is nothing between two tokens of a text."""

    synchronous: ClassVar[bool] = False
    """Whether all updates of a round must have been sent out in that round."""

    def build(self) -> Method:
        """The method made of this part alone; a part that fills several slots fills them all."""
        return Method(
            name=self.name,
            data=(self,) if isinstance(self, DataRule) else (),
            client=(self,) if isinstance(self, ClientRule) else (),
            sync=self if isinstance(self, Sync) else None,
            server=self if isinstance(self, ServerRule) else None,
            weights=self.weights,
        )

    def refuses(self, whole: Method) -> str | None:
        """Why this part cannot be in the sum ``whole``, as a sentence, if it cannot."""
        return None


class DataRule(Rule):
    """``data`` slot: changes what clients hold, once, before training."""

    makes: bool = False  # whether prepare takes long and makes what another run may be given

    def prepare(self, federation: Federation, seed: int, workspace: Workspace = NOWHERE) -> PreparedData:
        """The new federation, and the bytes (up, down) it cost each client; it works in ``workspace``."""
        raise NotImplementedError

    def check_data(self, federation: Federation) -> None:
        """Raise a ``DataError`` for data that ``prepare`` cannot work with, before anything is made."""

    def local_epochs(self, epochs: int, before: Federation, after: Federation) -> int:
        """The local epochs on the new federation, where the run asks for ``epochs``."""
        return epochs


class ClientRule(Rule):
    """``client`` slot: changes how a client trains; also holds the server half that the rule needs."""

    tunes: ClassVar[bool] = False
    """Whether clients train once more from the final model, and are served by what they then have."""
    needs: ClassVar[Literal["sum", "individual"]] = "sum"
    """Whether the server half (``collect``) reads single updates; sums work under secure aggregation."""

    needs_class_counts: ClassVar[bool] = False
    """Whether ``ctx.class_counts`` must be there."""

    sends_model: ClassVar[bool] = True
    """Whether clients send the model back; if not, only the rule's upload counts as traffic."""

    def check(self, federation: Federation, plain_sgd: bool) -> None:
        """Refuse what the rule cannot work with, before anything is trained.

        Args:
            federation: The data.
            plain_sgd: Whether a local step is exactly ``v - lr * g``.

        Raises:
            ConfigError: The rule, with its options, does not fit the data or the optimizer.
        """

    def warning(self, rounds: int) -> str | None:
        """What a user should be told before a run of so many rounds, if anything."""
        return None

    def adapt(self, module: nn.Module, head: str) -> tuple[nn.Module, str]:
        """Change the model before training (a projection head): the new model and the name of its head."""
        return module, head

    @property
    def needs_full_gradient(self) -> bool:
        """Whether ``ctx.full_gradient`` must be computed (a pass over all of the client's data)."""
        return False

    def begin(self, ctx: Context) -> Tensors:
        """What the rule carries through local training, computed before the first step."""
        return {}

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Wrap the loss ``(v, batch) -> scalar``; may not write to ``carry``."""
        return loss_fn

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Wrap the gradient ``(v, batch) -> g [d]``; may replace entries of ``carry``."""
        return grad_fn

    def moves(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor | None:
        """Which parameters may move in this step, boolean ``[d]`` (None: all); the others keep also their momentum."""
        return None

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """After the last step at ``v``: write ``ctx.state`` (stays at the client) and ``ctx.upload`` (is sent)."""

    def samples(self, carry: Tensors) -> tuple[Tensor, Tensor] | None:
        """Inputs ``[n, ...]`` that the client made in ``begin``, and their targets ``[n]``, for a picture of them."""
        return None

    def packed(self, upload: Tensors) -> Tensors:
        """What is really sent of what ``end`` wrote into ``ctx.upload``; its shapes may depend on the values.

        Only rules that need single updates may send tensors of different shapes: others are added up.
        """
        return upload

    @property
    def needs_exemplars(self) -> int:
        """How many inputs of each class ``ctx.exemplars`` must hold."""
        return 0

    @property
    def needs_label_pairs(self) -> bool:
        """Whether ``ctx.label_pairs`` must be there."""
        return False

    def personal(self, state: Tensors) -> Tensor | None:
        """The model ``[d]`` that serves a client with this state, where that is not the global one."""
        return None

    def server_init(self, v: Tensor, federation: Federation) -> Tensors:
        """State of the rule's server half."""
        return {}

    def extras(self, state: Tensors, client: int) -> Tensors:
        """What a client downloads beside the model."""
        return {}

    def collect(self, state: Tensors, updates: Updates) -> Tensors:
        """New state of the server half after the updates of a round."""
        return state


class Sync(Rule):
    """``sync`` slot: which slices of the model travel. A slice that does not travel stays at the client.

    Normalisation statistics travel with the layer before them.
    """

    synchronous: ClassVar[bool] = True
    keeps_optimizer: ClassVar[bool] = False
    """Whether momentum stays at the client from round to round, neither averaged nor reset."""

    evaluates_mean: ClassVar[bool] = False
    """Whether what is evaluated is the mean of the clients' whole models, slices that did not travel included."""

    def travels(self, round: int, client: int, last: int | None, spec: ModelSpec) -> tuple[Slices, Slices]:
        """Slices to download and to upload in ``round``, for a client that last took part in ``last`` (None: never)."""
        raise NotImplementedError

    observes: ClassVar[bool] = False
    """Whether ``observe`` must be told the consensus distances."""

    def init(self, spec: ModelSpec) -> Tensors:
        """What the rule keeps at the server."""
        return {}

    def now(self, state: Tensors) -> Sync:
        """The rule as it is in the round at hand."""
        return self

    def observe(self, state: Tensors, round: int, distances: Tensor, spec: ModelSpec) -> Tensors:
        """New state after a round, given each layer group's ``sum_k p_k ||theta_k - mean||^2`` before averaging."""
        return state

    def numbers(self, spec: ModelSpec) -> int:
        """How many numbers each client sends for that."""
        return 0

    def too_short(self, rounds: int, spec: ModelSpec) -> str | None:
        """What a user should be told before a run of so many rounds, if anything."""
        return None

    def own(self, spec: ModelSpec) -> Slices:
        """Slices that are each client's own for good: its personal model is the global one with its values there."""
        return ()


class ServerRule(Rule):
    """``server`` slot: how the updates of a round become the next model, ``state["v"]``."""

    needs: ClassVar[Literal["sum", "individual"]] = "sum"

    def check_server(self, federation: Federation, spec: ModelSpec) -> None:
        """Refuse what the rule cannot work with, before anything is trained; ``methods.at_server`` helps.

        Raises:
            ConfigError: The rule does not fit the data or the model.
        """

    def init(self, v: Tensor, federation: Federation) -> Tensors:
        """Server state before the first round; holds at least ``"v"``."""
        return {"v": v}

    remembers: ClassVar[bool] = False
    """Whether each update comes with the model that its client was sent (``update.start``)."""

    caches: ClassVar[bool] = False
    """Whether the server keeps each client's last update (``updates.cached``); such a rule needs individual updates."""

    remembers_statistics: ClassVar[bool] = False
    """Whether it comes with the statistics that its client was sent (``update.b_start``), where these are averaged.

    Then sums of updates tell how far statistics moved (``aggregate.moved``). Not where only slices of the model travel.
    """

    without_updates: ClassVar[bool] = False
    """Whether ``step`` is also called in rounds without any update; ``updates.aggregate`` is then empty."""

    without_clients: ClassVar[bool] = False
    """Whether no client takes part at all; then ``without_updates`` is true."""

    def takes(self, born: int, round: int) -> bool:
        """Whether an update that was sent out in round ``born`` counts in ``round``."""
        return True

    def portions(self, state: Tensors) -> Iterator[int]:
        """How many consecutive updates each sum in ``updates.portions`` is of; by default there are none."""
        return iter(())

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Server state after the updates of a round (at least one, unless the rule is ``without_updates``).

        An entry ``"b"`` is the model's new statistics ``[m]`` and is taken out of the state; by default they are the
        weighted mean of the clients'.
        """
        raise NotImplementedError

    def evaluated(self, state: Tensors) -> Tensor:
        """The model that is evaluated and returned, ``[d]``; by default the one that is broadcast."""
        return state["v"]

    def metrics(self, state: Tensors) -> dict[str, Any]:
        """The method's own figures for the round's line in ``metrics.jsonl``: numbers, or lists of them."""
        return {}


@dataclass(frozen=True)
class Method:
    """A method: what fills each of the four slots."""

    name: str
    data: tuple[DataRule, ...] = ()
    client: tuple[ClientRule, ...] = ()
    sync: Sync | None = None
    server: ServerRule | None = None
    weights: Weights | None = None
    spelling: str = field(default="")
