"""Composition of methods, and conflicts between their rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unskew.errors import MethodConflictError

if TYPE_CHECKING:
    from unskew.protocol.rules import ClientRule, Method

READ_CHANGES = {"model_changes", "sent_model", "sent_statistics"}
"""Requirements of rules whose server half computes models from updates, or compares updates with models."""


def ordered(rules: Sequence[ClientRule]) -> tuple[ClientRule, ...]:
    """Return client rules in the order in which they act: as written, unless a rule declares another position.

    Args:
        rules: Client rules as written.
    """
    last = [rule for rule in rules if rule.acts_last]
    result: list[ClientRule] = []
    for rule in sorted((rule for rule in rules if not rule.acts_last), key=lambda rule: not rule.poisson_batches):
        index = next((i for i, later in enumerate(result) if rule.acts_before(later)), len(result))
        result.insert(index, rule)
    return (*result, *last)


def compose(parts: Sequence[Method]) -> Method:
    """Combine methods.

    Args:
        parts: Methods, at least one.

    Raises:
        MethodConflictError: If two methods fill the same exclusive slot differently, or cannot be combined.
    """
    from unskew.protocol.rules import ClientRule, Method

    total = parts[0]
    for other in parts[1:]:
        filled: dict[str, object] = {}
        for slot in ("sync", "aggregate", "server", "weights"):
            own_rule, other_rule = getattr(total, slot), getattr(other, slot)
            if own_rule is not None and other_rule is not None and own_rule != other_rule:
                raise MethodConflictError(
                    f"{total.name} and {other.name} both fill the slot {slot!r} with different settings; "
                    "a composition can have only one of them."
                )
            filled[slot] = own_rule if own_rule is not None else other_rule
        total = Method(
            name=f"{total.name}+{other.name}",
            data=total.data + other.data,
            client=ordered(total.client + other.client),
            **filled,  # type: ignore[arg-type]
        )
    slots = ([rule.name for rule in slot] for slot in (total.data, total.client))
    twice = next((n for names in slots for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise MethodConflictError(f"{twice} appears twice in {total.name}; write it once with the options you want.")
    for stage in ("clip", "compress"):
        codecs = [rule.name for rule in total.client if rule.encodes and rule.stage == stage]
        if len(codecs) > 1:
            what = "clip and protect" if stage == "clip" else "compress"
            raise MethodConflictError(f"{codecs[0]} and {codecs[1]} both {what} what a client sends; use one of them.")
    stages = {rule.stage: rule.name for rule in total.client if rule.encodes}
    if {"clip", "compress"} <= stages.keys():
        raise MethodConflictError(
            f"A decoded update may be longer than the one that {stages['clip']} has clipped. Remove {stages['compress']}."
        )
    personal = [rule.name for rule in total.client if rule.has_personal_model or "final_training" in rule.needs]
    if len(personal) > 1:
        raise MethodConflictError(
            f"{personal[0]} and {personal[1]} both define a client's personal model. Remove one of them."
        )
    needing = next((rule.name for rule in total.rules if "whole_updates" in rule.needs), None)
    if needing is not None and total.sync is not None:
        which = "only parts of the model are sent" if total.sync.trains_global_model else "clients send no such updates"
        raise MethodConflictError(
            f"{needing} needs updates of the whole model, but with {total.sync.name} {which}. Remove one of them."
        )
    replacing = next((rule for rule in total.client if not rule.sends_model_changes), None)
    if replacing is not None:
        for rule in total.rules:
            reads_updates = rule in total.client and "individual" in rule.needs
            if rule is not replacing and (reads_updates or READ_CHANGES & set(rule.needs)):
                raise MethodConflictError(
                    f"{rule.name} needs updates that are changes of the model, but with {replacing.name} clients send "
                    "something else. Remove one of them."
                )
    needing = next((rule.name for rule in total.client if "full_gradient" in rule.needs), None)
    changing = next((rule.name for rule in total.client if type(rule).loss is not ClientRule.loss), None)
    if needing is not None and changing is not None:
        remedy = "Use scaffold:option=II" if needing == "scaffold" else "Remove one of them"
        raise MethodConflictError(
            f"{needing} needs the gradient of the task's loss over all data of a client, but {changing} changes the loss "
            f"that is trained. {remedy}."
        )
    for part in (*total.data, *total.client, total.sync, total.aggregate, total.server):
        reason = part.conflict_with(total) if part else None
        if reason is not None:
            raise MethodConflictError(reason)
    return total
