"""Base classes of rules, which fill the five slots of a method.

A method fills one or more slots: ``data`` (change client data before training), ``client`` (change local training;
several rules run in sequence), ``sync`` (select the slices of the model that are exchanged in a round), ``aggregate``
(combine the updates of a round into one) and ``server`` (compute the next model from the combined update). Rules are
pure functions of tensors: they take state and return new state, so every engine can run them.

``unskew.protocol.messages`` defines the messages between server and client, ``unskew.protocol.context`` the context of
client rules, and ``unskew.protocol.updates`` the input of the server half.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from unskew.data.federation import ClientData
from unskew.models.execution import Batch, GradFn, LossFn, ModelOutput
from unskew.models.spec import ModelSpec
from unskew.protocol.context import Context as Context
from unskew.protocol.data_preparation import NOWHERE, ClientPayloads, PreparedData, ServerPayload, Workspace
from unskew.protocol.federation_info import ClientDataView, FederationInfo
from unskew.protocol.messages import Slices as Slices
from unskew.protocol.messages import Tensors as Tensors
from unskew.protocol.payload import Stage as Stage
from unskew.protocol.payload import UploadContext as UploadContext
from unskew.protocol.returns import wrap_hooks
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space
from unskew.protocol.training_config import Training
from unskew.protocol.updates import Combined as Combined
from unskew.protocol.updates import Updates as Updates

Weights = Literal["samples", "uniform"]
START = "v"
"""Entry of the carry that ``begin`` returns: the model ``[d]`` that training starts from."""

SurveyTime = Literal["received", "trained", "final"]
Forward = Callable[[Tensor, Tensor], ModelOutput]


@dataclass(frozen=True)
class MetricSpec:
    """Metric of a rule that is repeated in the run summary.

    Attributes:
        name: Key of the metric in the rule's ``metrics``.
        title: Label in tables and plots.
        diagnosis: Entry of ``diagnose`` that enables the metric; None if it is always computed.
    """

    name: str
    title: str
    diagnosis: str | None = None


class Rule:
    """Base class of all rules. Subclasses are frozen dataclasses whose fields are the rule's options."""

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    weights: ClassVar[Weights | None] = None

    tasks: ClassVar[tuple[str, ...]] = ("classification", "multilabel", "language", "regression")
    """Tasks that the rule supports."""

    tasks_reason: ClassVar[str] = ""
    """Reason why other tasks are not supported: a clause that follows "because"."""

    spaces: ClassVar[Mapping[str, Space]] = {}
    """Search spaces of ``unskew tune`` for the options that are worth tuning."""

    needs: Collection[str] = ()
    """Requirements of the rule, see ``unskew.protocol.requirements``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        wrap_hooks(cls, __name__)

    def build(self) -> Method:
        """Return the method that consists of this rule alone; a rule that fits several slots fills all of them.

        Override it if options decide which slots are filled.
        """
        return Method(
            name=self.name,
            data=(self,) if isinstance(self, DataRule) else (),
            client=(self,) if isinstance(self, ClientRule) else (),
            sync=self if isinstance(self, SyncRule) else None,
            aggregate=self if isinstance(self, AggregateRule) else None,
            server=self if isinstance(self, ServerRule) else None,
            weights=self.weights,
        )

    def conflict_with(self, method: Method) -> str | None:
        """Return the reason why this rule cannot be part of a composition, as a sentence.

        Args:
            method: The composition, with all its rules.

        Returns:
            The sentence, or None if there is no conflict.
        """
        return None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the rule fits the run, before anything is trained.

        Args:
            run: Configuration, federation and model of the run, with helpers for common checks.

        Returns:
            Warnings for the user.

        Raises:
            ConfigError: If the rule, with its options, does not fit the data, the model, the budget or the network.
            DataError: If the rule does not support the data.
        """
        return ()


class DataRule(Rule):
    """``data`` slot: changes client data once before training (client payload, server payload, apply)."""

    generates_data: bool = False
    """True if the first step is slow and its output can be reused by other runs."""

    def client_payload(self, prepared: PreparedData, seed: int, workspace: Workspace) -> ClientPayloads:
        """Compute what every client sends to the server, once before training.

        Args:
            prepared: Federation, server's information about it, and training budget.
            seed: Seed of the run; pass it to ``unskew.seeding`` with your own purpose string.
            workspace: Folder, device, warnings and progress reports of the run.

        Returns:
            Tensors of each client by name, and facts about them for the run summary.
        """
        return ClientPayloads()

    def for_client(self, client: int, clients: int, mean_size: int) -> DataRule | None:
        """Return the rule with which ``client`` computes its payload from its data alone; None if it sends nothing.

        Args:
            client: Client number.
            clients: Number of clients.
            mean_size: Mean number of samples per client, including held-out samples.

        Raises:
            ConfigError: If clients cannot compute the payload from their own data only.
        """
        return self

    def server_payload(self, sent: dict[int, Tensors], facts: FederationInfo, seed: int) -> ServerPayload:
        """Compute what the server sends back to the clients.

        Args:
            sent: Tensors that the clients sent, by client and name.
            facts: Server's information about the federation.
            seed: Seed of the run.

        Returns:
            Tensors for single clients, and tensors for all clients.
        """
        return ServerPayload()

    def apply_payload(self, client: ClientData, share: Tensors) -> ClientData:
        """Return a client's data after it has received its share.

        Args:
            client: The client's data before.
            share: Tensors that the server sent to this client, by name.
        """
        return client

    def prepare(self, prepared: PreparedData, seed: int, workspace: Workspace = NOWHERE) -> PreparedData:
        """Run the three steps for all clients and count their traffic.

        Args:
            prepared: The federation and the training budget before.
            seed: Seed of the run.
            workspace: Folder, device, warnings and progress reports of the run.

        Returns:
            The federation and the budget that training uses.
        """
        payloads = self.client_payload(prepared, seed, workspace)
        return prepared.received(
            self.name, payloads, self.server_payload(payloads.sent, prepared.federation_info, seed), self.apply_payload
        )


class WithServerHalf(Rule):
    """Base class of rules that run at clients and may also have state at the server."""

    continued: ClassVar[tuple[str, ...]] = ()
    """Entries of the server half's state that a run takes from the run that it starts from, also if the rule's options
    differ; that run must then have the rule, too."""

    hidden_metrics: Collection[str] = ()
    """Metrics of a round that are not recorded, such as the clients' training loss."""

    def server_init(self, v: Tensor, facts: FederationInfo) -> Tensors:
        """Return the initial state of the rule's server half, by name.

        Args:
            v: Initial model, ``[d]``.
            facts: Server's information about the federation.
        """
        return {}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Return what a client downloads in addition to the model.

        Args:
            state: State of the server half.
            client: Client number.
        """
        return {}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Return the new state of the server half after a round.

        Args:
            state: State before the round.
            updates: Updates of the round, at least one.
        """
        return state

    def record_clients(self, state: Tensors, clients: Sequence[int], plan: RoundPlan) -> Tensors:
        """Return the new state of the server half after updates have arrived, including those that are discarded.

        Args:
            state: State before the round.
            clients: Clients whose updates arrived in this round, at least one.
            plan: Schedule of the run.
        """
        return state

    def summary_fields(self, state: Tensors, plan: RoundPlan) -> dict[str, Any]:
        """Return fields of the run summary, such as a guarantee of the finished run.

        Args:
            state: State of the server half.
            plan: Schedule of the run.
        """
        return {}

    def client_fields(self, state: Tensors) -> dict[int, dict[str, Any]]:
        """Return fields of the rows of ``clients.jsonl``, by client number.

        Args:
            state: State of the server half.
        """
        return {}


class ClientRule(WithServerHalf):
    """``client`` slot: changes how a client trains; may include a server half."""

    uploads: ClassVar[bool] = False
    """True if ``end`` writes to ``ctx.upload``; robust rules of the aggregate slot do not combine uploads."""

    private: ClassVar[Mapping[str, Callable[[Training], float]]] = {}
    """Scale of each upload ``[d]`` that differential privacy may clip and add noise to, as a function of the training
    configuration: times the scale, the upload has the unit of an update. Other uploads conflict with ``dp``."""

    stage: ClassVar[Stage] = "transform"
    """Stage at which ``encode`` runs, see ``unskew.protocol.payload``."""

    survey_at: ClassVar[SurveyTime | None] = None
    """Model that ``survey`` evaluates on all samples of the client; None for no survey."""

    poisson_batches: ClassVar[bool] = False
    """True if clients train on Poisson batches, whose rows have weights (``batch.weight``), and ``gradient`` computes the
    gradient of the loss from single samples; the rule then acts before all other client rules."""

    sends_model: ClassVar[bool] = True
    """True if clients send the model back; if not, they send only the rule's upload and the normalization buffers."""

    def adapt(self, module: nn.Module, head: str) -> tuple[nn.Module, str]:
        """Change the model before training, for example by adding a projection head.

        Args:
            module: The model; it may be changed in place.
            head: Name of the module that is its head.

        Returns:
            The new model and the name of its head.
        """
        return module, head

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return statistics of a client's data that the rule needs in training, available as ``ctx.client_info``.

        Args:
            data: View of the client's training data and of the federation's normalization.
        """
        return {}

    def survey(self, ctx: Context, v: Tensor, forward: Forward, batch: Batch) -> Tensors:
        """Return sums over the samples of a batch; the engine adds them up over all training samples of the client.

        ``survey_at`` names the model: the ``received`` one before the first step, the ``trained`` one after the last step,
        or the ``final`` one, for which all clients are asked once after the last round. The sums are in ``ctx.survey``, from
        ``begin`` on for the received model and in ``end`` for the others.

        Args:
            ctx: Context of the client in this round.
            v: The model, ``[d]``.
            forward: Function ``(v, x) -> ModelOutput`` in eval mode, without gradients.
            batch: Samples of the client; ``batch.x [n, ...]`` and ``batch.y [n]``.
        """
        return {}

    def begin(self, ctx: Context) -> Tensors:
        """Return the carry of local training, computed before the first step.

        An entry ``"v"`` of the carry, ``[d]``, is the model that training starts from instead of the received one; one rule
        of a method may return it. The update is then the difference to it.

        Args:
            ctx: Context of the client in this round: model, broadcast, state, key.
        """
        return {}

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Wrap the loss of local training.

        Args:
            loss_fn: Function ``(v, batch) -> scalar`` of the parameters ``v [d]``.
            ctx: Context of the client in this round.
            carry: Carry of local training; do not write to it.

        Returns:
            A function of the same kind.
        """
        return loss_fn

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Wrap the gradient of local training.

        Args:
            grad_fn: Function ``(v, batch) -> g`` with ``g [d]``.
            ctx: Context of the client in this round.
            carry: Carry of local training; its entries may be replaced.

        Returns:
            A function of the same kind.
        """
        return grad_fn

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor | None:
        """Return a mask of the parameters to update in this step, boolean ``[d]``, or None for all.

        Other parameters keep their values and momentum.

        Args:
            ctx: Context of the client in this round.
            carry: Carry of local training.
            batch: The mini-batch of the step.
        """
        return None

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Finish local training: write ``ctx.state`` (stays at the client) and ``ctx.upload`` (is sent).

        Args:
            ctx: Context of the client in this round.
            carry: Carry of local training.
            v: Local model after the last step, ``[d]``.
        """

    def transform_update(self, ctx: Context, carry: Tensors, delta: Tensor) -> Tensor:
        """Transform the update before upload.

        Args:
            ctx: Context of the client in this round.
            carry: Carry of local training.
            delta: Local model minus broadcast model, ``[d]``.

        Returns:
            The vector ``[d]`` that is sent.
        """
        return delta

    def generated_samples(self, carry: Tensors) -> tuple[Tensor, Tensor] | None:
        """Return samples that ``begin`` generated, to be plotted.

        Args:
            carry: Carry of local training.

        Returns:
            Inputs ``[n, ...]`` and targets ``[n]``, or None.
        """
        return None

    @property
    def encodes(self) -> bool:
        """Return whether the rule encodes what a client sends."""
        return type(self).encode is not ClientRule.encode

    def encode(self, payload: Tensors, state: Tensors, ctx: UploadContext) -> tuple[Tensors, Tensors]:
        """Encode all that a client sends, after training.

        Only rules that need single updates may send tensors whose shapes differ between clients: other uploads are
        summed.

        Args:
            payload: Streams by name, see ``unskew.protocol.payload``.
            state: State of this rule at this client.
            ctx: Upload: round, client, slices and what the server half sent.

        Returns:
            The encoded streams, and the new state, which is kept if the server accepts the update.
        """
        return payload, state

    def decode(self, payload: Tensors, ctx: UploadContext) -> Tensors:
        """Decode at the server what ``encode`` returned; it may have been sent by a hostile client.

        Args:
            payload: Encoded streams by name.
            ctx: Upload: round, client and slices.

        Raises:
            UnskewError: If the payload is invalid.
        """
        return payload

    @property
    def compresses_broadcast(self) -> bool:
        """Return whether the server calls ``compress_broadcast``; one rule of a method may."""
        return False

    def compress_broadcast(
        self, state: Tensors, v: Tensor, before: Tensor, round: int, seed: int, spec: ModelSpec
    ) -> tuple[Tensors, Tensor, int]:
        """Compress the model that the server broadcasts in a round.

        Args:
            state: State of the rule's server half.
            v: Model of the server, ``[d]``.
            before: Model that clients have after the last broadcast, ``[d]``; first the initial model.
            round: Number of the round, from 0.
            seed: Seed of the run.
            spec: Layout of the model.

        Returns:
            The new state, the model ``[d]`` that clients have after decoding, and the number of bytes for a client that
            has received the last broadcast.
        """
        raise NotImplementedError

    def personal(self, state: Tensors) -> Tensor | None:
        """Return the personal model of a client, ``[d]``, or None if the global model serves it.

        Args:
            state: State of the rule at the client; empty if the client never took part.
        """
        return None


class SyncRule(WithServerHalf):
    """``sync`` slot: selects the slices of the model that are exchanged; other slices stay at the client.

    Normalization buffers are exchanged together with the layer before them.
    """

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Return the slices of the model that a client downloads and uploads in a round.

        If clients upload different slices, each entry of the model is averaged over the clients that upload it.

        Args:
            state: State of the rule's server half.
            round: Number of the round, from 0.
            client: Client number.
            last: Last round in which the client took part; None if it never did.
            spec: Layout of the model.

        Returns:
            Slices to download and slices to upload, each in ascending order, with explicit start and stop, without
            overlap.
        """
        raise NotImplementedError

    def round_metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return metrics of a finished round for ``metrics.jsonl``: numbers, or lists of numbers.

        Args:
            state: State of the rule's server half.
            round: Number of the round, from 0.
            spec: Layout of the model.
        """
        return {}

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices that always stay at each client, whose personal model has its own values there.

        Args:
            spec: Layout of the model.
        """
        return ()

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the run has no delays, because slices of different rounds cannot be combined.

        Args:
            run: Configuration, federation and model of the run.

        Raises:
            ConfigError: If the run has delays.
        """
        run.need_no_delays(self.name)
        return ()


class AggregateRule(WithServerHalf):
    """``aggregate`` slot: combines the updates of a round into one; without such a rule it is their weighted mean."""

    combines_empty: ClassVar[bool] = False
    """True if ``combine`` is also called in rounds without updates, and the server rule applies its result."""

    def combine(self, state: Tensors, updates: Updates) -> tuple[Tensors, Combined]:
        """Combine updates.

        Args:
            state: State of the rule's server half.
            updates: Updates, at least one unless ``combines_empty``; iterate over them if ``needs`` includes
                ``individual``.

        Returns:
            The new state, and the combined update that the server rule applies.
        """
        raise NotImplementedError

    def metrics(self, state: Tensors) -> dict[str, Any]:
        """Return the rule's metrics of the round for ``metrics.jsonl``: numbers, or lists of numbers.

        Args:
            state: State of the rule's server half.
        """
        return {}

    def stop_reason(self, state: Tensors) -> str | None:
        """Return the reason why no further round may follow, as a sentence; None to continue.

        Args:
            state: State of the rule's server half.
        """
        return None


class ServerRule(Rule):
    """``server`` slot: computes the next model, ``state["v"]``, from updates."""

    steps_without: ClassVar[Literal["updates", "clients"] | None] = None
    """``"updates"``: ``step`` is also called in rounds without updates; ``"clients"``: no client takes part at all."""

    summary_metrics: ClassVar[tuple[MetricSpec, ...]] = ()
    """Metrics of the method that the run summary repeats."""

    def buffer(self) -> int | None:
        """Return the number of updates to collect, over several rounds if necessary, before ``step`` is called.

        Returns:
            The number, or None to call ``step`` with the updates of each round.
        """
        return None

    def init(self, v: Tensor, facts: FederationInfo) -> Tensors:
        """Return the server state before the first round; it contains at least ``"v"``.

        Args:
            v: Initial model, ``[d]``.
            facts: Server's information about the federation.
        """
        return {"v": v}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Return the server state after applying updates.

        An entry ``"b"`` sets the model's new buffers ``[m]`` and is removed from the state. By default, the new buffers
        are the weighted mean of the clients' buffers.

        Args:
            state: Current state; ``state["v"]`` is the model.
            updates: Updates, at least one unless ``steps_without`` is set.
        """
        raise NotImplementedError

    def evaluated(self, state: Tensors) -> Tensor:
        """Return the model to evaluate and to save, ``[d]``; by default the broadcast model.

        Args:
            state: State of the server.
        """
        return state["v"]

    def metrics(self, state: Tensors) -> dict[str, Any]:
        """Return the method's metrics of the round for ``metrics.jsonl``: numbers, or lists of numbers.

        Args:
            state: State of the server.
        """
        return {}

    def draw(self, history: Sequence[dict[str, Any]], folder: Path) -> None:
        """Draw plots of all rounds into the run folder.

        Args:
            history: Metrics of each round.
            folder: Run folder.
        """


def changes_updates(rules: Sequence[ClientRule]) -> bool:
    """Return whether some rule sends something other than the local update, computed from the received model."""
    return any(rule.encodes or type(rule).transform_update is not ClientRule.transform_update for rule in rules)


@dataclass(frozen=True)
class Method:
    """Federated method: the rules in each of the five slots."""

    name: str
    data: tuple[DataRule, ...] = ()
    client: tuple[ClientRule, ...] = ()
    sync: SyncRule | None = None
    aggregate: AggregateRule | None = None
    server: ServerRule | None = None
    weights: Weights | None = None
    expression: str = field(default="")

    @property
    def halves(self) -> tuple[WithServerHalf, ...]:
        """Rules that may have state at the server besides the server rule."""
        others: list[WithServerHalf] = [part for part in (self.sync, self.aggregate) if part is not None]
        return (*self.client, *(part for part in others if not any(part is rule for rule in self.client)))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules of the method, each once."""
        filled = [*self.data, *self.client, *filter(None, (self.sync, self.aggregate, self.server))]
        return tuple(rule for index, rule in enumerate(filled) if not any(rule is other for other in filled[:index]))

    def needs(self, what: str) -> bool:
        """Return whether some rule needs ``what``."""
        return any(what in rule.needs for rule in self.rules)
