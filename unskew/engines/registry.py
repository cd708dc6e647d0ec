"""The devices and the engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unskew.engines.base import Engine, EngineConfig
from unskew.engines.inline import InlineEngine
from unskew.engines.processes import ProcessesEngine
from unskew.engines.vectorized import VectorizedEngine
from unskew.errors import ConfigError


def available_devices() -> list[str]:
    """Return the values of ``device`` that are available on this machine."""
    several = {"cuda": torch.cuda, "xpu": torch.xpu}
    devices = [f"{kind}:{i}" for kind, module in several.items() for i in range(module.device_count())]
    return ["auto", "cpu", *devices, *(["mps"] if torch.backends.mps.is_available() else [])]


def pick_device(name: str) -> torch.device:
    """The device that ``name`` means; ``auto`` is CUDA where there is one.

    Raises:
        ConfigError: There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"The device {name!r} is not available here: {reason}. There is: {', '.join(available_devices())}."
        ) from error
    return device


def make_engine(
    name: str,
    setup: EngineConfig,
    workers: int | None = None,
    clients_per_group: int = 1,
    cluster: Mapping[str, Any] | None = None,
) -> Engine:
    """The engine ``name`` (not ``auto``), ready to train.

    Args:
        name: Which.
        setup: The run.
        workers: Processes of ``processes``, tasks at a time of ``ray``; None or 0: as many as there are cores.
        clients_per_group: Clients that are trained as one network.
        cluster: Where that of ``ray`` is.
    """
    if name == "ray":
        from unskew.engines.ray.cluster import ClusterConfig
        from unskew.engines.ray.engine import RayEngine

        settings = {key: value for key, value in (cluster or {}).items() if value is not None and key != "state"}
        return RayEngine(setup, workers or None, ClusterConfig(**settings), clients_per_group)
    if name == "processes":
        return ProcessesEngine(setup, workers, clients_per_group)
    return VectorizedEngine(setup) if name == "vectorized" else InlineEngine(setup, clients_per_group)
