"""The data of a run: loaded as its configuration says, or given in Python."""

from __future__ import annotations
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unskew.runs.model import ModelLike, as_wanted
from unskew.runs.checks import check_method
from unskew.config.experiment import DATA_FIELDS, Experiment
from unskew.config.reading import experiment, load_yaml
from unskew.data.federation import Federation
from unskew.data.load import load_federation
from unskew.engines.catalogue import pick_device
from unskew.errors import CheckpointError, ConfigError
from unskew.files import locked, make_folder, occupied, unmake_folder
from unskew.methods.catalogue import MethodLike, method
from unskew.models.catalogue import HUB
from unskew.runs.preparation import SYNTHETIC, check_given_set, kept_beside, prepare
from unskew.records.recorder import Callback
from unskew.records.result import Result
from unskew.records.trackers import make_trackers
from unskew.runs.session import Session


def check_given(given: dict[str, Any], options: dict[str, Any]) -> None:
    """Options about data that are given already must not say something else.

    Raises:
        ConfigError: They do.
    """
    for name in DATA_FIELDS:
        if name in options and options[name] != given.get(name):
            raise ConfigError(f"{name}={options[name]!r} has no effect on a federation that is given.")


def load_data(config: Experiment) -> Federation:
    """The federation that a configuration describes."""
    return load_federation(
        config.data,
        partition=config.partition,
        clients=config.clients,
        seed=config.seed,
        path=config.data_path,
        label=config.label,
        image=config.image,
        label_separator=config.label_separator,
        image_size=config.image_size,
        keep_classes=config.keep_classes,
        keep_samples=config.keep_samples,
        holdout=config.holdout,
        server=config.server,
        server_path=config.server_path,
        text=config.text.columns,
        tokenizer=tokenizer_of(config),
        block=config.text.block,
        set_aside=config.set_aside,
    )


def tokenizer_of(config: Experiment) -> str | None:
    """The tokeniser of texts: the one asked for, or that of the model; None if neither says any."""
    return config.text.tokenizer or (config.model.removeprefix(HUB) if config.model.startswith(HUB) else None)
