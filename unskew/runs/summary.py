"""The summary of a finished run."""

from __future__ import annotations

from typing import Any

from unskew.config.experiment import Experiment
from unskew.protocol.workspace import Prepared
from unskew.records.recorder import Recorder
from unskew.simulation.server import Server
from unskew.tasks import TASKS

MEASURED = ("begin_seconds", "train_seconds", "local_", "consensus/", "generalization/", "gradients/", "server/")
"""Figures of the last round that the summary repeats: these, and those that begin so; and the method's own."""


def summarise(
    config: Experiment,
    prepared: Prepared,
    server: Server,
    recorder: Recorder,
    client_scores: dict[str, Any],
    engine: str,
) -> dict[str, Any]:
    """What ``summary.json`` holds: the run, its last and best figures, its traffic and its time.

    Args:
        config: The run.
        prepared: What its clients trained with.
        server: After the last round.
        recorder: Of all rounds.
        client_scores: What the models are worth to single clients.
        engine: The engine's name.
    """
    federation, spec = prepared.federation, server.spec
    task, own = TASKS[federation.task], {figure.name for figure in server.rule.figures}
    traffic, history = server.traffic, recorder.history
    best, best_round = recorder.best()
    final = history[-1]
    scored = [row["accuracy"] for row in history if row["accuracy"] is not None]
    summary: dict[str, Any] = {
        "method": server.method.spelling or server.method.name,
        "data": federation.name,
        "partition": federation.partition,
        "partition_hash": federation.fingerprint,
        "clients": len(federation.clients),
        "seed": config.seed,
        "rounds": len(history),
        "model": config.model,
        "parameters": spec.size,
        "buffers": config.buffers if spec.buffer_sizes else "none",
        "weights": server.weights,
        "engine": engine,
        "accuracy": final["accuracy"],
        "best_accuracy": best,
        "best_round": best_round,
        "best_of_last_five": max(scored[-5:]),
        "loss": final["loss"],
        **{name: final[name] for name in task.figures},
        **{f"best_{name}": recorder.best(name)[0] for name in task.figures if name.endswith("f1")},
        **{f"best_{name}": recorder.best(name, lowest=True)[0] for name in task.lower_is_better},
        **client_scores,
        **{name: value for name, value in final.items() if name.startswith(MEASURED) or name in own},
        "bytes_up": traffic.up + traffic.buffers_up,
        "bytes_down": traffic.down + traffic.buffers_down,
        "buffer_bytes_up": traffic.buffers_up,
        "buffer_bytes_down": traffic.buffers_down,
        "updates_skipped": server.skipped,
        "seconds": round(recorder.seconds, 3),
        # A client that takes part in every round spends this much in all.
        "client_seconds": sum(row["begin_seconds"] + row["train_seconds"] for row in history),
    }
    if traffic.reports:
        summary["report_bytes_up"] = traffic.reports
    if server.method.data and prepared.training.local_steps is None:
        summary["local_epochs"] = prepared.training.local_epochs
    summary |= prepared.about
    if config.target is not None:
        summary["target"] = config.target
        summary["rounds_to_target"] = recorder.rounds_to(config.target)
        summary["bytes_to_target"] = recorder.bytes_to(config.target)
    return summary
