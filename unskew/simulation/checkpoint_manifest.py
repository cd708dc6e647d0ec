"""Schema of a checkpoint's manifest, which is external input and validated before use."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from unskew.errors import first_problem

LARGEST = 1 << 62
Count = Annotated[int, Field(strict=True, ge=0, lt=LARGEST)]
Amount = Annotated[float, Field(strict=True, ge=0, lt=LARGEST)]
Client = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
"""Client number as a string, because JSON keys are strings."""
FileName = Annotated[str, StringConstraints(pattern=r"^[a-z]+(-[0-9]+)?\.safetensors$")]


class ManifestPart(BaseModel):
    """Base class of manifest sections, which forbid unknown fields."""

    model_config = ConfigDict(extra="forbid")


class UpdateFields(ManifestPart):
    """Fields of an update that are not tensors, see ``unskew.protocol.messages``."""

    client: Count
    origin_round: Count
    num_samples: Count
    weight: Amount
    metrics: dict[str, Annotated[float, Field(strict=True)]]
    arrived: Annotated[int, Field(strict=True, ge=-1, lt=LARGEST)]
    version: Count
    sent_bytes: Count | None


class WaitingUpdates(ManifestPart):
    """Updates in the server rule's buffer, see ``unskew.simulation.update_buffer``."""

    count: Count
    weight: Amount
    num_samples: Count
    updates: list[UpdateFields]


class TrafficBytes(ManifestPart):
    """Traffic counters, see ``unskew.simulation.traffic``."""

    up: Count
    down: Count
    buffers_up: Count
    buffers_down: Count
    reports: Count
    clients: dict[Client, tuple[Count, Count]]


class ClockState(ManifestPart):
    """State of the virtual clock, see ``unskew.simulation.clock``."""

    now: Amount
    arrivals: dict[Client, Amount]


class RunExtra(ManifestPart):
    """Additional values of a run, see ``unskew.runs.session``."""

    config: dict[str, Any]
    data: str
    seconds: Amount
    before: Count = 0
    content: str | None = None
    frozen: str = ""
    delays: str = ""
    speeds: str = ""
    best: tuple[Count, Annotated[float, Field(strict=True, allow_inf_nan=False)]] | None = None


class Manifest(ManifestPart):
    """Complete manifest."""

    format: int
    round: Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
    rules: list[str]
    skipped: Count
    last: dict[Client, Count]
    version: Count
    sent: dict[Client, tuple[Count, Count]]
    traffic: TrafficBytes
    waiting: WaitingUpdates
    in_flight: list[UpdateFields]
    clock: ClockState | None
    extra: RunExtra
    files: dict[FileName, str]


def check_manifest(manifest: dict[str, Any]) -> None:
    """Validate that a manifest is complete and consistent (raises ``ValueError`` otherwise)."""
    try:
        parsed = Manifest.model_validate(manifest)
    except pydantic.ValidationError as error:
        raise ValueError(first_problem(error)) from None
    if "server.safetensors" not in parsed.files:
        raise ValueError("files: server.safetensors is missing")
    rounds = [*parsed.last.values(), *(origin_round for _, origin_round in parsed.sent.values())]
    if max([*rounds, *(update.origin_round for update in parsed.in_flight)], default=-1) >= parsed.round:
        raise ValueError("an entry is of a later round than the checkpoint")
    flying = [update.client for update in parsed.in_flight]
    if len(set(flying)) < len(flying):
        raise ValueError("in_flight: a client has two updates in flight")
    if parsed.clock is not None and {*parsed.clock.arrivals} != {*map(str, flying)}:
        raise ValueError("clock: its arrivals are not those of the updates in flight")
