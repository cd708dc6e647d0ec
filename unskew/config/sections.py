"""Sections of a run's description."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from unskew.data.spec import CsvSpec
from unskew.errors import ConfigError
from unskew.provenance import Named


class Section(BaseModel):
    """Options that are checked: an unknown key is an error, and true is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("must not be a boolean")
        return value


class NetworkConfig(Section):
    """Network between clients and server."""

    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a client of the cohort fails and sends nothing."""
    delay: str = "none"
    """Rounds until an update arrives: ``none``, ``fixed:K``, ``half-normal:S``, ``lognormal:M,S`` or ``trace:FILE``."""
    delay_per: Literal["dispatch", "client"] = "dispatch"
    """Whether a delay is drawn for every dispatch, or once for each client."""

    @pydantic.field_validator("delay", mode="before")
    @classmethod
    def _delay_is_known(cls, value: Any) -> str:
        from unskew.simulation.delays import parse_delay as parse_delay

        parse_delay(str(value))  # a bare number is refused as every other text that is not a delay
        return str(value)


class TextConfig(Section):
    """Tokenization of texts."""

    columns: tuple[str, ...] = ()
    """Columns of the text, one or a pair; ``text``, or the source's own, if none is given."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """A name at the hub, a folder, or ``bytes``; None takes the model's own."""
    block: Annotated[int, Field(ge=2, le=1_000_000)] = 128
    """At most so many tokens a text."""

    @pydantic.field_validator("columns", mode="before")
    @classmethod
    def _columns_as_text(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class CsvConfig(Section):
    """Format of CSV files; what is not given is detected in each file."""

    separator: str | None = None
    """Character between columns, or its name: ``comma``, ``semicolon``, ``tab``, ``pipe`` or ``space``."""
    decimal: str | None = None
    """Decimal mark: ``point`` or ``comma``."""
    encoding: str | None = None
    """Encoding, such as ``latin-1``."""

    @property
    def spec(self) -> CsvSpec:
        """The same for the readers."""
        return CsvSpec(self.separator, self.decimal, self.encoding)

    @pydantic.model_validator(mode="after")
    def _is_valid(self) -> CsvConfig:
        try:
            self.spec  # noqa: B018
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from error
        return self


ADDRESS = r"(local|auto|[A-Za-z0-9.-]{1,253}:[0-9]{1,5}|\[[0-9A-Fa-f:.]{2,45}\]:[0-9]{1,5})"


class RayConfig(Section):
    """A Ray cluster."""

    address: Named | None = None
    """``local``, ``auto``, or ``HOST:PORT`` of its head; None is ``local`` where ``engine`` is ``ray``."""
    cpus_per_worker: Annotated[int, Field(ge=1, le=4096)] = 1
    """Cores, and threads, of a task, which trains one client, or ``together``."""
    gpus_per_worker: Annotated[float, Field(ge=0, le=64, allow_inf_nan=False)] = 0.0
    """Accelerators of a task."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 5
    """Number of times that a client is trained again after its worker or its node died."""
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds without any answer of the cluster after which the run ends; None waits on."""
    data: Literal["auto", "store", "nodes"] = "auto"
    """Whether data are sent through the object store, or nodes open them; ``auto``: what a URL names, nodes open."""
    state: Literal["driver", "nodes"] = "driver"
    """Whether what clients keep travels with them, or lies in files of the run folder that all nodes see."""

    @pydantic.field_validator("address")
    @classmethod
    def _address_is_one(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(ADDRESS, value):
            raise ValueError(f"{value!r} is not an address of a cluster: local, auto, or HOST:PORT of its head")
        return value
