"""Requirements of rules, by name."""

from typing import Any

from unskew.tasks.base import PROVIDED

NEEDS = {
    **PROVIDED,
    "unweighted": "the loss has no class weights, because terms of the rule train the classifier without them or correct it, "
    "too, so that dividing probabilities by the weights would make them wrong",
    "individual": "the server half reads single updates; without it sums suffice, as under secure aggregation",
    "sent_model": "each update comes with the model that its client received, as update.start",
    "sent_statistics": "each update comes with the buffers that its client received, as update.b_start, if buffers are "
    "averaged and the whole model is exchanged; aggregate.buffer_change is then their mean change",
    "last_update": "each update comes with the client's previous update, as update.last",
    "whole_updates": "clients send updates of the whole model, so the rule conflicts with all rules of the slot sync",
    "equal_slices": "all clients upload the same slices of the model in a round, so that the entries that change do not show "
    "who took part",
    "model_changes": "updates are the clients' models minus the received ones, so the rule conflicts with client rules that "
    "send something else (sends_model_changes = False)",
    "same_round": "updates that were sent out in an earlier round are discarded",
    "full_gradient": "ctx.full_gradient, which takes a pass over all of the client's data; it is that of the task's loss, so "
    "the rule conflicts with client rules that change the loss",
    "optimizer": "the optimizer's state stays at the client from round to round, neither averaged nor reset",
    "mean_model": "the evaluated model is the mean of the clients' whole models, including slices that were not exchanged",
    "logits_of_head": "the model returns the output of its head, because the rule computes the head alone or replaces it; "
    "with one class per sample, log-softmax may follow the head",
    "final_training": "clients train once more from the final model and use the result as their personal models",
}
"""What a rule may need: the names of ``PROVIDED`` of the task, the others of the simulation."""


def single_reads(rule: Any) -> str:
    """Return what a rule reads of single updates, as a clause with a verb; empty if sums of updates suffice."""
    needs = {*rule.needs}
    if needs & {"individual", "last_update"}:
        return "reads single updates"
    return "reads the change of normalization buffers in each update" if "sent_statistics" in needs else ""


def why_tasks(rule: Any) -> str:
    """Return the reason why a rule does not support all tasks, as a clause that follows "because"."""
    return rule.tasks_reason or f"it needs {next((NEEDS[what] for what in rule.needs if what in PROVIDED), '')}"
