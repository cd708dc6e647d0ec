"""Files that a finished run writes into its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.filesystem import write_atomic
from unskew.models.spec import ModelSpec
from unskew.records.recorder import write_clients, write_summary
from unskew.runs.input_spec import write_inputs
from unskew.simulation.server import Server


def write_artifacts(
    folder: Path,
    config: Experiment,
    federation: Federation,
    server: Server,
    clients: list[dict[str, Any]],
    summary: dict[str, Any],
    curves: dict[str, Any],
) -> None:
    """Write the model, what it expects, what it is worth to each client, and last the summary.

    Args:
        folder: The run folder.
        config: Of the run.
        federation: The data before the method changed them.
        server: After the last round.
        clients: A line for each client.
        curves: Curves of a classifier, empty without any.
        summary: Its presence says that the run came to its end.
    """
    spec: ModelSpec = server.spec
    weights = {**spec.parameters(server.evaluated), **spec.buffers(server.evaluated_b)}
    # What is not trained is in the model that config.yaml names; its mark says whether that is still the same.
    about = {"base": json.dumps({"model": config.model, "frozen": spec.frozen})} if spec.frozen else None
    data = save({name: t.contiguous() for name, t in weights.items()}, about)
    write_atomic(folder / "model.safetensors", data)
    write_inputs(folder, federation, config)
    write_clients(folder, clients)
    if curves:
        write_atomic(folder / "curves.json", (json.dumps(curves) + "\n").encode())
    write_summary(folder, summary)
