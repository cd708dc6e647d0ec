"""Devices and engines, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unskew.engines.base import Engine, EngineConfig
from unskew.engines.inline import InlineEngine
from unskew.engines.names import BUILT_IN, parse_engine
from unskew.engines.processes import ProcessesEngine
from unskew.engines.stacked import make_vectorized
from unskew.errors import ConfigError
from unskew.plugins import ENGINES, find_plugin


def available_devices() -> list[str]:
    """Return the values of ``device`` that are available on this machine."""
    several = {"cuda": torch.cuda, "xpu": torch.xpu}
    devices = [f"{kind}:{i}" for kind, module in several.items() for i in range(module.device_count())]
    return ["auto", "cpu", *devices, *(["mps"] if torch.backends.mps.is_available() else [])]


def pick_device(name: str) -> torch.device:
    """Return the device for ``name``; ``auto`` is CUDA if available, otherwise the CPU.

    Args:
        name: Name of the device, as in PyTorch, or ``auto``.

    Raises:
        ConfigError: If the device is not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"The device {name!r} is not available here: {reason}. Available devices: {', '.join(available_devices())}."
        ) from error
    return device


def make_engine(
    engine: str,
    setup: EngineConfig,
    workers: int | None = None,
    clients_per_group: int = 1,
    ray: Mapping[str, Any] | None = None,
    threads: int | None = None,
) -> Engine:
    """Create an engine.

    Args:
        engine: Name of the engine, not ``auto``; for a plugin, optionally with options: ``name:key=value,key=value``.
        setup: Configuration of the engine.
        workers: Number of processes of ``processes``, or of concurrent tasks of ``ray``; None or 0 for one per core.
        clients_per_group: Number of clients that are trained at once.
        ray: Options of the engine ``ray``.
        threads: Number of threads of ``inline``; None for PyTorch's.

    Raises:
        ConfigError: If the engine does not exist, an option is not valid, or clients with models of different architectures
            would be trained together.
        EngineError: If the engine is not available on this machine.
    """
    if setup.spec.others and (engine == "vectorized" or clients_per_group > 1):
        raise ConfigError(
            "Clients with models of different architectures are trained one at a time. Use engine=inline, processes or ray, "
            "and clients_per_group=1."
        )
    if engine == "inline":
        return InlineEngine(setup, clients_per_group, threads)
    if engine == "processes":
        return ProcessesEngine(setup, workers, clients_per_group)
    if engine == "vectorized":
        return make_vectorized(setup)
    name, options = parse_engine(engine)
    create = find_plugin(ENGINES, "engine", name, BUILT_IN).load_callable()
    plugin_engine: Engine = create(setup, workers or None, clients_per_group, {**(ray or {}), **options})
    return plugin_engine
