"""What server and sites must agree on before a run: the experiment, and what its inputs and classes are."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from unskew.config.experiment import Experiment
from unskew.config.paths import wherever
from unskew.data.federation import Federation
from unskew.data.normalisation import Normalisation
from unskew.deployment.arrays import DTYPES, NAMES, Nonsense
from unskew.deployment.messages import text, whole
from unskew.errors import ConfigError
from unskew.runs.continuation import RESUMABLE

PROTOCOL = 2
"""Of the messages between server and sites; both must have the same."""


def digest_of(config: Experiment) -> str:
    """Changes with everything of an experiment that decides what a site trains, wherever its data lie."""
    values = {k: v for k, v in wherever(config.model_dump(mode="json")).items() if k not in RESUMABLE}
    if config.training.schedule.ends:
        values["rounds"] = config.rounds
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Reference:
    """What every site's inputs and classes must be: those of the data that the experiment names at the server.

    Attributes:
        shape: Of one input.
        classes: Number of classes, labels or tokens.
        class_names: Their names in order, if they have any.
        task: The task's name.
        dtype: The type that inputs are stored in.
        normalisation: How inputs are standardised.
    """

    shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...]
    task: str
    dtype: torch.dtype
    normalisation: Normalisation | None

    @staticmethod
    def of(federation: Federation) -> Reference:
        """That of a federation."""
        return Reference(
            federation.shape,
            federation.classes,
            federation.class_names,
            federation.task,
            federation.test[0].dtype,
            federation.normalisation,
        )

    def config(self) -> dict[str, Any]:
        """It as part of a message."""
        normalisation = None
        if self.normalisation is not None:
            one = self.normalisation
            normalisation = [list(one.mean), list(one.std), one.scale]
        return {
            "shape": json.dumps(self.shape),
            "classes": self.classes,
            "class_names": json.dumps(self.class_names),
            "task": self.task,
            "dtype": NAMES[self.dtype],
            "normalisation": json.dumps(normalisation),
        }

    @staticmethod
    def read(config: dict[str, Any]) -> Reference:
        """Inverse of ``config``.

        Raises:
            Nonsense: It is none.
        """
        try:
            shape, names, given = (json.loads(text(config, n)) for n in ("shape", "class_names", "normalisation"))
            normalisation = None if given is None else Normalisation(tuple(given[0]), tuple(given[1]), float(given[2]))
            return Reference(
                tuple(int(n) for n in shape),
                whole(config, "classes"),
                tuple(str(name) for name in names),
                text(config, "task"),
                DTYPES[text(config, "dtype")],
                normalisation,
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Nonsense(f"what it says of the data cannot be read ({type(error).__name__})") from error

    def check(self, other: Reference, who: str) -> None:
        """Refuse data of another kind.

        Raises:
            ConfigError: They are.
        """
        for name in ("task", "shape", "classes", "class_names", "dtype"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ConfigError(f"{who} has data with {name} {theirs}, but the server's have {mine}.")
