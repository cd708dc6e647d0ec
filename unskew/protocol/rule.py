"""Base class of all rules, and of rules with state at the server."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from unskew.errors import UnskewError
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo, Weights
from unskew.protocol.messages import Tensors
from unskew.protocol.report import Report
from unskew.protocol.returns import wrap_hooks
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.updates import Updates

Shape = tuple[int | range, ...]
"""Shape of a tensor; a range lists the sizes that a dimension may have."""

IdleOptions = Sequence[tuple[Mapping[str, object], Sequence[str]]]
"""Values of options, and the names of other options that have no effect with them."""


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
    """Client weighting with ``client_weighting=auto``: ``samples``, ``uniform``, or a method
    ``weights(federation_info, cohort)`` that computes the weights of a round's
    clients; None if the rule does not choose one."""

    averaging: Literal["given", "computed", "none"] = "given"
    """Weights with which the server averages updates: those of the run (``given``), or weights that the rule computes from
    the updates (``computed``); ``none`` if it averages no updates."""

    tasks_reason: ClassVar[str] = ""
    """Reason why tasks that do not provide what ``needs`` names are not supported: a clause that follows "because". By
    default, that it needs this."""

    supports_delays: ClassVar[bool] = True
    """False if the rule needs all updates of a round in the same round, so that it conflicts with ``network.delay``."""

    supports_several_models: ClassVar[bool] = False
    """True if clients may have models of different architectures: the rule exchanges nothing that is as long as a model, and
    its server half does not read the model."""

    successive_models_differ: ClassVar[bool] = False
    """True if clients receive another model, or another part of it, in every round, so that rules cannot compare the models
    that a client receives one after the other."""

    trains_global_model: ClassVar[bool] = True
    """False if only clients' own models are trained, so that the global model stays the initial one and is not judged."""

    spaces: ClassVar[Mapping[str, object]] = {}
    """Search spaces of ``unskew tune`` for the options that are worth tuning, by option: ``{"mu": "0.001:1:log"}``.

    Each is written as for ``--space``: ``"0.001:1:log"``, ``"0:0.9"``, ``"16|32|64"`` or a list of values. Or it is made by
    ``log_range``, ``uniform_range`` or ``one_of`` of ``unskew.protocol.search_space``."""

    idle_options: ClassVar[IdleOptions] = ()
    """Options that have no effect with certain values of others: ``(({"beta": 0}, ("tau",)),)``. A run then raises an error
    if they differ from their defaults, and ``unskew tune`` does not tune them."""

    needs: Collection[str] = ()
    """Requirements of the rule, see ``unskew.protocol.requirements``."""

    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Smallest and largest value of uploads, by name. The server rejects other values, which a hostile client may send."""

    draws_secretly: bool = False
    """True if the guarantee of the rule relies on draws that nobody can compute, so that the run needs a secret key."""

    slots: Mapping[str, Rule] | None = None
    """Rules that fill the slots of the method, by slot, if options decide; by default this rule fills the slots of its
    base classes."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        wrap_hooks(cls)

    def conflict_with(self, method: Any) -> str | None:
        """Return the reason why this rule cannot be part of a composition, as a sentence.

        Args:
            method: The composition with all its rules, an ``unskew.protocol.method.Method``.

        Returns:
            The sentence, or None if there is no conflict.
        """
        return None

    def check_sent(self, sent: Tensors, like: Tensors | None, spec: ModelSpec) -> None:
        """Validate at the server what one client sent for this rule, after decoding; the client may be hostile.

        By default, uploads must have the names, dtypes and shapes of ``like`` and values in ``upload_ranges``. Infinite
        values pass: such updates are skipped, as those of a training that diverged. Override this hook if a shape depends on
        the client's data, or for payloads before the first round: the hooks of the server read only what has passed it.

        Args:
            sent: Tensors of the client by name.
            like: Uploads of a client with other data from the same broadcast; None before the first round.
            spec: Layout of the model.

        Raises:
            UnskewError: If the tensors are invalid.
        """
        layouts = [{name: (t.dtype, t.shape) for name, t in tensors.items()} for tensors in (sent, like or {})]
        if like is not None and layouts[0] != layouts[1]:
            raise UnskewError(f"The uploads of {self.name} differ in name, dtype or shape from those of the method.")
        for name, (lowest, highest) in self.upload_ranges.items():
            if name in sent and bool((((sent[name] < lowest) | (sent[name] > highest)) & sent[name].isfinite()).any()):
                raise UnskewError(f"The upload {name} of {self.name} is not from {lowest:g} to {highest:g}.")

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

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return the rule's metrics of a finished round for ``metrics.jsonl``: numbers, or lists of numbers.

        Args:
            state: State of the server for server rules, otherwise of the rule's server half.
            round: Number of the round, from 0.
            spec: Layout of the model.
        """
        return {}


class WithServerHalf(Rule):
    """Base class of rules that run at clients and may also have state at the server."""

    continued: ClassVar[tuple[str, ...]] = ()
    """Entries of the server half's state that a run takes from the run that it starts from, also if the rule's options
    differ; that run must then have the rule, too. They also remain if the server step of a round overflows and the round is
    discarded."""

    planned: ClassVar[tuple[str, ...]] = ()
    """Entries of the server half's state that follow from the plan of a run and its clients, such as a noise that is computed
    for a number of rounds. A run that starts from another one computes them again."""

    hidden_metrics: Collection[str] = ()
    """Metrics of a round that are not recorded, such as the clients' training loss."""

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Return the initial state of the rule's server half, by name.

        Args:
            v: Initial model, ``[d]``.
            federation_info: Server's information about the federation.
        """
        return {}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shapes of everything that ``download`` may return, by name.

        A real site rejects other names, shapes and dtypes, which a hostile server may send. They follow from what the site
        has agreed to: the options of the rule, the model and the schedule.

        Args:
            spec: Layout of the client's model.
            plan: Schedule of the run.
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

    def report(self, state: Tensors, plan: RoundPlan) -> Report:
        """Return fields of the run's records, and the reason to end the run if there is one.

        It is called at the end of the run, and for rules of the aggregate slot also before every round.

        Args:
            state: State of the server half.
            plan: Schedule of the run.
        """
        return Report()
