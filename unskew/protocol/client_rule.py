"""Slot ``client``: rules that change local training and what clients send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from torch import Tensor, nn

from unskew.models.execution import Batch, GradFn, LossFn
from unskew.models.spec import ModelOutput, ModelSpec
from unskew.protocol.context import Context
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.messages import Tensors
from unskew.protocol.payload import Stage, UploadContext
from unskew.protocol.rule import WithServerHalf
from unskew.protocol.training_config import Training

SurveyTime = Literal["received", "trained", "final", "asked"]
"""Time of a survey: before the first step, after the last step, after the last round, or before the broadcasts of a round."""

Forward = Callable[[Tensor, Tensor], ModelOutput]
"""Function ``(v [d], x [n, ...]) -> ModelOutput`` in eval mode, without gradients."""


class ClientRule(WithServerHalf):
    """``client`` slot: changes how a client trains; may include a server half."""

    uploads: ClassVar[bool] = False
    """True if ``end`` writes to ``ctx.upload``; robust rules of the aggregate slot do not combine uploads."""

    private: ClassVar[Mapping[str, Callable[[Training], float]]] = {}
    """Scale of each upload ``[d]`` that differential privacy may clip and add noise to, as a function of the training
    configuration: times the scale, the upload has the unit of an update. Other uploads conflict with ``dp``."""

    stage: ClassVar[Stage] = "transform"
    """Stage at which ``encode`` runs, see ``unskew.protocol.payload``."""

    survey_at: ClassVar[SurveyTime | tuple[SurveyTime, ...] | None] = None
    """Model that ``survey`` evaluates on the samples of the client, or several in a tuple; None for no survey."""

    validation: float = 0.0
    """Share of a client's training samples that its batches omit, and that ``survey`` sees instead of all samples; 0 for
    none. They are the same in all rounds."""

    final_steps: ClassVar[int | None] = None
    """Largest number of local steps in the training after the last round; None for as many as in a round. With 0, the model
    that ``begin`` returns serves the client, with the buffers of the final model."""

    poisson_batches: ClassVar[bool] = False
    """True if clients train on Poisson batches, whose rows have weights (``batch.weight``), and ``gradient`` computes the
    gradient of the loss from single samples; the rule then acts before all other client rules."""

    num_parts: int = 1
    """Number of equal parts into which ``gradient`` splits each batch."""

    noise_for_rounds: ClassVar[bool] = False
    """True if clients add noise that is computed for the number of rounds; real sites then need the same number."""

    acts_last: ClassVar[bool] = False
    """True if ``loss`` evaluates the loss at other parameters, or ``transform_update`` uploads the update; the rule then acts
    after all other client rules, so that the terms of all rules are computed there, and the update is the final one."""

    changes_start: ClassVar[bool] = False
    """True if ``begin`` may return ``START``; it then runs before ``begin`` of rules without it, which find the model that
    training starts from in ``ctx.v_global`` in any order."""

    class_targets: ClassVar[bool] = False
    """True if ``loss`` needs the class of each sample in ``batch.y``, and does not support probabilities of classes."""

    scales_loss: ClassVar[bool] = False
    """True if ``loss`` multiplies the loss that it wraps; rules that replace the task's loss then act before it."""

    shifts_gradient: ClassVar[bool] = False
    """True if ``gradient`` adds a vector that does not depend on the parameters. It belongs to the step of the local model,
    so rules that compute differences of gradients, or gradients of other models, act before."""

    trains_alone: ClassVar[bool] = False
    """True if hooks depend on values of tensors, or ``client_info`` differs in shape between clients: no engine then trains
    several clients as one network."""

    sends_model: ClassVar[bool] = True
    """True if clients send the model back; if not, they send only the rule's upload and the normalization buffers."""

    sends_model_changes: ClassVar[bool] = True
    """False if ``transform_update`` returns something else than a client's model minus the received one, such as a momentum;
    the rule then conflicts with rules that compute models from updates or compare updates with models."""

    sums_over_rounds: ClassVar[bool] = False
    """True if the server adds up what a client sends in all rounds, and the client keeps the exact sum: errors of codes then
    accumulate, unless the client sends them later."""

    preserves_norms: ClassVar[bool] = False
    """True for a rule that encodes updates if decoding returns them up to rounding, so that their norms hardly change."""

    has_personal_model: ClassVar[bool] = False
    """True if ``end`` writes the client's personal model to ``ctx.state[PERSONAL]``; clients that never took part, and
    all clients without such a rule, use the global model."""

    def acts_before(self, other: ClientRule) -> bool:
        """Return whether the rule acts before another one, whatever the order in which they are written.

        Args:
            other: Client rule of the same composition.
        """
        return False

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

        Rules with ``validation`` see only the samples that the client's batches omit.

        ``survey_at`` names the model: the ``received`` one before the first step, the ``trained`` one after the last step,
        or the ``final`` one, for which all clients are asked once after the last round. The sums are in ``ctx.survey``: from
        ``begin`` on for the received model, and in ``end`` for the others. With ``("received", "trained")``, the second
        survey finds the sums of the first in ``ctx.survey``, and ``end`` those of the second; ``begin`` returns in the carry
        what ``end`` needs of the first. With ``asked``, the clients of a round first answer without training: ``end`` runs
        with an empty carry, and ``server_update`` with its uploads, before the broadcasts of the round. Only simulations
        support this.

        Args:
            ctx: Context of the client in this round.
            v: The model, ``[d]``.
            forward: Function ``(v, x) -> ModelOutput`` in eval mode, without gradients.
            batch: Samples of the client, ``x [n, ...]`` and ``y [n]``.
        """
        return {}

    def begin(self, ctx: Context) -> Tensors:
        """Return the carry of local training, computed before the first step.

        An entry ``START`` of the carry, ``[d]``, is the model that training starts from instead of the received one; it
        becomes ``ctx.v_global`` of this rule's other hooks and of all rules whose ``begin`` runs later, see
        ``changes_start``. The update is then the difference to it.

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


def survey_times(rule: ClientRule) -> tuple[SurveyTime, ...]:
    """Return the times at which a rule takes surveys.

    Args:
        rule: The rule.
    """
    times = rule.survey_at
    return () if times is None else (times,) if isinstance(times, str) else times


def most_final_steps(rules: Sequence[ClientRule]) -> int | None:
    """Return the largest number of local steps in the training after the last round; None for as many as in a round."""
    return min((rule.final_steps for rule in rules if rule.final_steps is not None), default=None)


def changes_updates(rules: Sequence[ClientRule]) -> bool:
    """Return whether some rule sends something other than the local update, computed from the received model."""
    return any(rule.encodes or type(rule).transform_update is not ClientRule.transform_update for rule in rules)
