"""Diagnoses by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unskew.diagnostics.consensus import Consensus
from unskew.diagnostics.generalization import Generalization
from unskew.diagnostics.local_models import LocalModels
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server


class Diagnosis(Protocol):
    """Watches the updates of a round and makes figures of them."""

    def begin(self) -> None:
        """The next round starts from the server's model; forget the last one."""

    def figures(self) -> dict[str, float]:
        """The figures of the round that has just ended; asked for in rounds that are evaluated."""


def make_diagnoses(names: Sequence[str], evaluator: Evaluator, server: Server) -> list[Diagnosis]:
    """The diagnoses ``local_models``, ``consensus`` and ``generalization``, each once."""
    found: list[Diagnosis] = []
    for name in dict.fromkeys(names):
        if name == "local_models":
            found.append(LocalModels(evaluator, server.federation, server))
        elif name == "consensus":
            found.append(Consensus(server.spec, server))
        else:
            found.append(Generalization(evaluator, server))
    return found
