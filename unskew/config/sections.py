"""Sections of an experiment configuration."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from unskew.config.trust import CLUSTER
from unskew.config_fields import MACHINE, Section


class NetworkConfig(Section):
    """Simulated network between clients and server."""

    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a client of the cohort fails and sends no update."""
    delay: Annotated[str, MACHINE] = "none"
    """Rounds until an update arrives: ``none``, ``fixed:K``, ``half-normal:S``, ``lognormal:M,S`` or ``trace:FILE``."""
    delay_per: Literal["dispatch", "client"] = "dispatch"
    """Draw a delay per ``dispatch``, or one per ``client``."""
    uplink: str | None = None
    """Bandwidth of a client to the server: a constant such as ``5MB/s``, or a distribution over clients; unlimited if only
    other speeds are set."""
    downlink: str | None = None
    """Bandwidth of a client from the server."""
    latency: str | None = None
    """Time of one way between client and server, such as ``50ms``, or a distribution over clients."""
    compute: str | None = None
    """Time of a local step, such as ``20ms``, or a distribution over clients."""
    deadline: str | None = None
    """Longest duration of a round, such as ``60s``; None waits for the slowest client."""
    trace: str | None = None
    """CSV file with the bandwidths, the latency and the time of a step of each client, instead of the four fields."""

    @property
    def timed(self) -> bool:
        """Return whether the run has a virtual clock."""
        return any(value is not None for value in (self.trace, *self.speeds.values()))

    @property
    def speeds(self) -> dict[str, str | None]:
        """The four constants of a client, as they are configured."""
        return {"uplink": self.uplink, "downlink": self.downlink, "latency": self.latency, "compute": self.compute}

    @pydantic.field_validator("uplink", "downlink", "latency", "compute", "deadline", mode="before")
    @classmethod
    def _check_speed(cls, value: Any, info: pydantic.ValidationInfo) -> str | None:
        from unskew.simulation.clock import parse_quantity, parse_speed

        if value is None:
            return None
        parse = parse_quantity if info.field_name == "deadline" else parse_speed
        parse(str(value), str(info.field_name))
        return str(value)

    @pydantic.model_validator(mode="after")
    def _is_consistent(self) -> NetworkConfig:
        if self.trace is not None and any(value is not None for value in self.speeds.values()):
            raise ValueError("trace replaces uplink, downlink, latency and compute; remove them or the trace")
        if self.deadline is not None and not self.timed:
            raise ValueError("deadline needs the speed of the clients: uplink, downlink, latency, compute or trace")
        if self.timed and self.delay != "none":
            raise ValueError("delay and the speeds of clients are two sources of delays; remove one of them")
        return self

    @pydantic.field_validator("delay", mode="before")
    @classmethod
    def _check_delay(cls, value: Any) -> str:
        from unskew.simulation.delays import parse_delay

        parse_delay(str(value))  # raises an error for everything that is not a delay, including plain numbers
        return str(value)


ADDRESS = r"(local|auto|[A-Za-z0-9.-]{1,253}:[0-9]{1,5}|\[[0-9A-Fa-f:.]{2,45}\]:[0-9]{1,5})"
"""Pattern of cluster addresses: ``local``, ``auto``, ``HOST:PORT`` or ``[IPV6]:PORT``."""


class RayConfig(Section):
    """Options of the engine ``ray``."""

    address: Annotated[str | None, CLUSTER] = None
    """Address: ``local``, ``auto``, or ``HOST:PORT`` of the head node, with which ``engine: auto`` uses ``ray``; None means
    ``local`` for engine ``ray``."""
    cpus_per_worker: Annotated[int, Field(ge=1, le=4096)] = 1
    """Cores and threads of a task, which trains ``clients_per_group`` clients."""
    gpus_per_worker: Annotated[float, Field(ge=0, le=64, allow_inf_nan=False)] = 0.0
    """Number of accelerators per task."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 5
    """Number of times that a client is trained again after its worker or its node died."""
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds without any reply of the cluster after which the run ends; None means no limit."""
    data: Literal["auto", "store", "nodes"] = "auto"
    """``store``: send data through the object store; ``nodes``: nodes load them; ``auto``: nodes load data named by a URL."""
    state: Literal["driver", "nodes"] = "driver"
    """``driver``: send client state with each task; ``nodes``: store it in files that all nodes must see."""

    @pydantic.field_validator("address")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(ADDRESS, value):
            raise ValueError(f"{value!r} is not a cluster address; use local, auto, or HOST:PORT of the head node")
        return value
