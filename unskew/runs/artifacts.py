"""Files that a finished run writes into its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unskew.checked_tensors import encode_checked
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
    more: dict[str, dict[str, Any]],
) -> None:
    """Write the model, its input specification, the metrics of each client, and last the summary.

    Args:
        folder: Run folder.
        config: Configuration of the run.
        federation: Data before the method changed them.
        server: Server after the last round.
        clients: One row per client.
        summary: Summary of the run; its file marks the run as finished.
        more: Contents of further files by name; empty ones are not written.
    """
    spec: ModelSpec = server.setup.spec
    v, b = server.selection.evaluated
    weights = {**spec.parameters(v), **spec.buffers(b)}
    # Frozen parameters are not stored: they belong to the model named in config.yaml; `frozen` detects if it changed.
    about = {"model": config.model, "frozen": spec.frozen} if spec.frozen else {}
    about |= {"inputs": write_inputs(folder, federation, config)}
    write_atomic(folder / "model.safetensors", encode_checked(weights, about))
    write_clients(folder, clients)
    for name, content in more.items():
        if content:
            write_atomic(folder / name, (json.dumps(content) + "\n").encode())
    write_summary(folder, summary)
