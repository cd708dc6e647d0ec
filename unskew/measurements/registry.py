"""Registry of diagnostics."""

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
from unskew.measurements.update_cosines import UpdateCosines
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server


def make_diagnostics(
    names: Sequence[str],
    evaluator: Evaluator,
    server: Server,
    federation: Federation,
    history: Sequence[dict[str, Any]],
) -> list[Diagnostic]:
    """Create diagnostics, each once; ignore other names, which are metrics of server rules.

    Args:
        names: Names of the diagnostics.
        evaluator: Evaluator of the run.
        server: Server of the run, whose updates are collected.
        federation: Data that the clients train on.
        history: Rows of the run so far, which is extended during the run.
    """
    makers: dict[str, Callable[[], Diagnostic]] = {
        "local_models": lambda: LocalModels(evaluator, server, federation),
        "consensus": lambda: Consensus(server),
        "generalization": lambda: Generalization(evaluator, server, federation, history),
        "server": lambda: ServerCost(server),
        "gradients": lambda: Gradients(server, federation, evaluator.federation),
        "updates": lambda: UpdateCosines(server),
    }
    return [makers[name]() for name in dict.fromkeys(names) if name in makers]
