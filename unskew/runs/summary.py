"""Summary of a finished run, and the metrics of each client."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from unskew.config.experiment import Experiment
from unskew.data.federation import ArrayClients, Federation
from unskew.engines.auto_select import EngineChoice
from unskew.protocol.data_preparation import PreparedData
from unskew.protocol.rules import Method, Weights
from unskew.records.recorder import Recorder, best_value_of, finite_or_none, first_reaching
from unskew.runs.final_evaluation import class_support
from unskew.runs.metrics import RunMetrics
from unskew.simulation.client_scores import ClientScores
from unskew.simulation.run_warnings import divergence_warning
from unskew.simulation.server import Server
from unskew.tasks.primary_metric import WORST

MEASURED = (
    *("setup_seconds", "train_seconds", "local_", "consensus/", "generalization/", "gradients/", "updates/", "server/"),
    "backdoor_success",
)
"""Names, or prefixes of names, of the last round's metrics that are copied to the summary."""


ALL_SAMPLES = "all_"
"""Prefix of the metrics of the final model on all samples of an unseen client, not only the held-out ones."""
MOST_CLIENTS, MOST_CLASSES = 10_000, 1000
"""Limits above which class counts per client are not stored; with more clients, only some are listed."""


def summarize(
    config: Experiment,
    prepared: PreparedData,
    content: str,
    server: Server,
    recorder: Recorder,
    client_scores: dict[str, Any],
    choice: EngineChoice,
    metrics: RunMetrics,
    attackers: Sequence[int] = (),
    closing: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Build ``summary.json``: the run, its final and best metrics, traffic and time.

    Args:
        config: Configuration of the run.
        prepared: Training data after the data rules of the method.
        content: Checksum of the data before these rules, for a run with a folder.
        server: Server after the last round.
        recorder: Recorder with all rounds.
        client_scores: Metrics over clients, and those of early stopping.
        choice: Engine that trained the clients.
        metrics: Metrics of the run.
        attackers: Numbers of the clients that attack.
        closing: Metrics of the final model, if it was changed after the last round.
    """
    federation, spec = prepared.federation, server.setup.spec
    method, info = server.setup.method, server.setup.federation_info
    task, own = federation.objective, {metric.name for metric in server.setup.rule.summary_metrics}
    traffic, history = server.traffic.total, recorder.history
    final, objective = {**history[-1], **closing}, metrics.objective
    if closing:
        final |= {"bytes_up": traffic.up + traffic.buffers_up, "bytes_down": traffic.down + traffic.buffers_down}
        history = [*history, final]  # the last round twice, before and after the change
    best, best_round = best_value_of(history, task.scored)
    other = objective.name != task.scored
    if other:
        best_value, best_round = best_value_of(history, objective.name, objective.lower_is_better)
    scored = [row[task.scored] for row in history if row[task.scored] is not None]
    summary: dict[str, Any] = {
        "method": method.expression or method.name,
        "data": federation.name,
        "partition": federation.partition,
        "partition_hash": federation.fingerprint,
        "data_checksum": content,
        "clients": len(federation.clients),
        "seed": config.seed,
        "rounds": len(recorder.history),
        **({} if method.sync is None or method.sync.trains_global_model else {"global_model": False}),
        "model": config.model,
        "parameters": spec.largest_size,
        **({"model_parameters": [each.size for each in spec.architectures]} if spec.others else {}),
        "buffers": config.buffers if any(each.buffer_sizes for each in spec.architectures) else "none",
        "client_weighting": _weighting(method, info.weights),
        "engine": choice.engine,
        "clients_per_group": choice.clients_per_group,
        "objective": objective.name,
        **({"own_metrics": metrics.own} if metrics.own else {}),
        **({"positive": metrics.positive} if metrics.positive is not None else {}),
        task.scored: final[task.scored],
        f"best_{task.scored}": best,
        "best_round": best_round,
        "best_last_5": max(scored[-5:], default=None),
        "loss": final["loss"],
        **{name: final[name] for name in (*task.extra_metrics, *task.metric_names(metrics.computed))},
        **{f"best_{name}": best_value_of(history, name)[0] for name in task.extra_metrics if name.endswith("f1")},
        **{f"best_{name}": best_value_of(history, name, lowest=True)[0] for name in task.lower_is_better},
        **({objective.name: final[objective.name], f"best_{objective.name}": best_value} if other else {}),
        **client_scores,
        **{name: value for name, value in closing.items() if name.endswith(("_before_closing", "_after_closing"))},
        **{name: value for name, value in final.items() if name.startswith(MEASURED) or name in own},
        "bytes_up": traffic.up + traffic.buffers_up,
        "bytes_down": traffic.down + traffic.buffers_down,
        "buffer_bytes_up": traffic.buffers_up,
        "buffer_bytes_down": traffic.buffers_down,
        "updates_skipped": server.aggregator.skipped.total,
        "seconds": round(recorder.seconds, 3),
        # Total time of a client that takes part in every round.
        "client_seconds": sum((row["setup_seconds"] or 0) + (row["train_seconds"] or 0.0) for row in recorder.history),
    }
    reserved = {*summary}
    if divergence_warning(final):
        summary["diverged"] = True
    if any("retries" in row for row in history):
        summary["retries"] = sum(row.get("retries", 0) for row in recorder.history)
    if traffic.reports:
        summary["report_bytes_up"] = traffic.reports
    if method.data and prepared.training.local_steps is None:
        summary["local_epochs"] = epochs_per_round(prepared)
    for half in sorted(method.halves, key=lambda half: half is not method.aggregate):
        fields = half.report(server.state.rules[half.name], info.plan).summary
        taken = bool(fields.keys() & summary.keys())  # by the rule of the aggregate slot
        summary |= {f"{half.name}_{name}": value for name, value in fields.items()} if taken else fields
    summary |= {name: value for name, value in prepared.summary.items() if name not in reserved}
    if attackers:
        summary["attack"] = None if config.attack is None else config.attack.kind
        summary["attackers"] = list(attackers)
    if config.target is not None:
        row = first_reaching(history, config.target, objective)
        summary["target"] = config.target
        summary["rounds_to_target"] = None if row is None else row["round"]
        summary["bytes_to_target"] = None if row is None else row["bytes_up"] + row["bytes_down"]
        if "seconds_simulated" in final:
            summary["seconds_simulated_to_target"] = None if row is None else row["seconds_simulated"]
    return summary


def _weighting(method: Method, weights: Weights) -> str:
    """Return ``samples`` or ``uniform``; ``computed`` for weights of a rule, and ``none`` if nothing is averaged."""
    if any(rule.averaging == "none" for rule in method.rules):
        return "none"
    if callable(weights) or any(rule.averaging == "computed" for rule in method.rules):
        return "computed"
    return weights


def kept_metrics(
    history: Sequence[dict[str, Any]], round: int, metrics: RunMetrics, closing: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the round of the model that a run kept, and its test metrics.

    Args:
        history: Rows of the run.
        round: Round of the best model, from 1; 0 keeps the last one because no round had a finite objective.
        metrics: Metrics of the run.
        closing: Metrics of that model, if it was changed after the last round.
    """
    row = {**history[round - 1], **closing}
    return {"kept_round": row["round"], **{f"kept_{metric.name}": row[metric.name] for metric in metrics.judging}}


def client_metrics(
    scores: ClientScores, own: ClientScores | None, metrics: RunMetrics, names: Sequence[str], unseen: bool = False
) -> dict[str, Any]:
    """Return the summary metrics over the evaluated clients.

    Args:
        scores: Scores of the final model.
        own: Scores of personal models, or None.
        metrics: Metrics of the run; the primary metric and the objective are summarized.
        names: Names of all clients; may be empty.
        unseen: Whether they are the unseen clients.
    """
    whose, personal, evaluated = "client", "personal", "clients_evaluated"
    if unseen:
        whose, personal, evaluated = "unseen", "unseen_personal", "unseen_evaluated"
    values: dict[str, Any] = {}
    for metric in (metric for metric in metrics.judging if metric.name != WORST):
        values |= scores.metrics(whose, metric, names)
        values |= {} if own is None else own.metrics(personal, metric, names)
    return values | {evaluated: len(scores.accuracies), f"{evaluated}_on": scores.measured_on}


def add_rule_fields(rows: Iterable[dict[str, Any]], server: Server) -> None:
    """Add the fields that rules report about clients to the rows of ``clients.jsonl``.

    Args:
        rows: Rows of clients, which are changed in place.
        server: Server after the last round.
    """
    plan = server.setup.federation_info.plan
    known = [half.report(server.state.rules[half.name], plan).clients for half in server.setup.method.halves]
    for row in rows:
        for fields in known:
            row |= finite_or_none(dict(fields.get(row["client"], {})))


def epochs_per_round(prepared: PreparedData) -> float:
    """Return the mean over clients of local epochs per round; below the configured number if steps were matched."""
    training, sizes = prepared.training, prepared.federation.sizes.tolist()
    epochs = [training.steps(n, k) / len(training.cuts(n)) for k, n in enumerate(sizes)]
    return round(sum(epochs) / len(epochs), 3)


def counted_class_names(federation: Federation) -> tuple[str, ...]:
    """Return the classes that ``clients.jsonl`` counts per client; empty if there are too many classes or clients."""
    if "counts" not in federation.objective.provides:
        names = () if federation.text_groups is None else federation.text_groups[1]
    else:
        names = federation.class_names or tuple(map(str, range(federation.classes)))
    return tuple(names) if len(names) <= MOST_CLASSES and len(federation.clients) <= MOST_CLIENTS else ()


def client_rows(
    federation: Federation,
    scores: ClientScores,
    personal: ClientScores | None,
    took_part: Iterable[int] = (),
    attackers: Collection[int] = (),
    constants: Mapping[int, Mapping[str, float]] | None = None,
    complete: ClientScores | None = None,
) -> list[dict[str, Any]]:
    """Build the rows of ``clients.jsonl``, one per client.

    Clients that are loaded one by one are listed only if they were evaluated. With more than ``MOST_CLIENTS`` clients,
    only those are listed that took part or were evaluated.

    Args:
        federation: Data before the method changed them.
        scores: Scores of the final model on the evaluated clients.
        personal: Scores of personal models, or None.
        took_part: Clients whose updates were aggregated.
        attackers: Clients that attack; their rows are marked.
        constants: Metrics of a constant prediction by client, with their prefix, or None.
        complete: Scores of the final model on all samples of clients that train on none, or None.
    """
    values_by_client = scores.by_client()
    further = [other.by_client(prefix) for prefix, other in (("personal_", personal), (ALL_SAMPLES, complete)) if other]
    for k, values in chain.from_iterable(metrics.items() for metrics in (*further, constants or {})):
        values_by_client.setdefault(k, {}).update(values)
    clients, names = federation.clients, federation.client_names
    in_memory = isinstance(clients, ArrayClients)
    has_support = in_memory and "support" in class_support(federation)
    classes = [str(c) for c in range(federation.classes)]

    def support(client: int) -> dict[str, int]:
        return federation.objective.named_counts(clients[client].y_test, classes)

    holds: dict[int, dict[str, int]] = {}
    if isinstance(clients, ArrayClients) and counted_class_names(federation):
        counts = enumerate(federation.label_distribution()[0])
        holds = {k: {str(c): int(row[c]) for c in row.nonzero()[0]} for k, row in counts}
    if isinstance(clients, ArrayClients):
        num_samples, held_out = federation.sizes, clients.offsets[1:] - clients.splits
        few = len(clients) <= MOST_CLIENTS
        listed = range(len(clients)) if few else sorted({*took_part, *values_by_client})
        sizes = {k: (int(num_samples[k]), int(held_out[k])) for k in listed}
    else:
        sizes = {k: (clients[k].num_samples, len(clients[k].y_test)) for k in values_by_client}
    return [
        {
            "client": k,
            **({"name": names[k]} if names else {}),
            **({"attacker": True} if k in attackers else {}),
            "samples": samples,
            "num_held_out": num_held_out,
            **({"class_counts": holds[k]} if k in holds else {}),
            **({"support": support(k)} if has_support and k in values_by_client and num_held_out else {}),
            **(federation.objective.client_fields(clients[k].y_test) if in_memory and num_held_out else {}),
            **finite_or_none(values_by_client.get(k, {})),
        }
        for k, (samples, num_held_out) in sizes.items()
    ]
