"""Validation that a comparison continues in the folder of an earlier one with the same settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unskew.comparison.references import is_reference
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_yaml
from unskew.config.paths import with_absolute_paths
from unskew.errors import CheckpointError, ConfigError
from unskew.protocol.rules import Method
from unskew.runs.resume import RESUMABLE, check_same, differing_fields

MAY_DIFFER = {*RESUMABLE, "method", "seed"} - {"rounds"}
"""Fields in which the runs of one folder may differ."""


def check_same_settings(
    folder: Path, configs: Mapping[tuple[str, int], Experiment], methods: Mapping[str, Method]
) -> None:
    """Validate, before anything is trained, that the runs of a folder fit a comparison.

    A run of the comparison must have the same settings. If the folder has only runs of other methods or seeds, no setting
    may differ between all of them and all methods of the comparison. Single methods may have settings of their own.

    Args:
        folder: Folder of the comparison.
        configs: Configurations of the comparison, by method expression and seed.
        methods: Methods by expression.

    Raises:
        ConfigError: If a setting differs; the message names all fields that differ.
    """
    stored = []
    continues = False
    for path in sorted(folder.glob("*/seed-*/config.yaml")):
        values = load_yaml(path)
        name = str(values.get("method"))
        if is_reference(name):
            continue
        run = with_absolute_paths(experiment(values, methods.get(name, next(iter(methods.values())))))
        stored.append(run.model_dump(mode="json"))
        config = configs.get((name, run.seed))
        if config is not None:
            continues = True
            try:
                check_same(stored[-1], with_absolute_paths(config))
            except CheckpointError as error:
                raise ConfigError(f"{path.parent} cannot be resumed. {error}") from error
    if continues or not stored:
        return
    by_method = {name: with_absolute_paths(each) for (name, _), each in configs.items()}
    pairs = [differing_fields(values, each) for values in stored for each in by_method.values()]
    names = [name for name in pairs[0] if name not in MAY_DIFFER and all(name in pair for pair in pairs)]
    if names:
        texts = [f"{name}={pairs[0][name][0]!r} instead of {pairs[0][name][1]!r}" for name in names]
        raise ConfigError(
            f"{folder} contains runs with other settings: {', '.join(texts)}. Use the same values, or another folder."
        )
