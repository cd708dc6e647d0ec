"""Diagnoses by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unskew.data.federation import Federation
from unskew.measurements.base import Diagnostic
from unskew.measurements.consensus import Consensus
from unskew.measurements.generalization import Generalization
from unskew.measurements.gradient_dissimilarity import Gradients
from unskew.measurements.local_models import LocalModels
from unskew.measurements.server_cost import ServerCost
from unskew.measurements.update_norms import UpdateNorms
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server


def make_diagnostics(
    names: Sequence[str],
    evaluator: Evaluator,
    server: Server,
    federation: Federation,
    history: Sequence[dict[str, Any]],
) -> list[Diagnostic]:
    """The diagnoses of these names, each once; other names are those of a server rule's own figures.

    Args:
        names: Which.
        evaluator: Of the run.
        server: Whose updates they watch.
        federation: What its clients train on.
        history: The run's rows so far; grows while it runs.
    """
    makers: dict[str, Callable[[], Diagnostic]] = {
        "local_models": lambda: LocalModels(evaluator, server, federation),
        "consensus": lambda: Consensus(server),
        "generalization": lambda: Generalization(evaluator, server, federation, history),
        "server": lambda: ServerCost(server),
        "gradients": lambda: Gradients(server, federation, evaluator.federation),
        "updates": lambda: UpdateNorms(server),
    }
    return [makers[name]() for name in dict.fromkeys(names) if name in makers]
