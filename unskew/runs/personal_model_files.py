"""The models that clients train for themselves at the end of a run, as files of its folder.

They are no part of a checkpoint, since no round begins at them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from unskew.filesystem import disk_errors, make_folder
from unskew.simulation.evaluate import Models

NAME = "personal"
MOST = 1 << 30
"""Bytes: more are not kept unasked."""


def kept_personal_models(models: Models, folder: Path | None, warn: Callable[[str], None]) -> Models:
    """The same models, each written into the run folder before it is given.

    Args:
        models: What clients trained.
        folder: Of the run; without one nothing is written.
        warn: Told if they are too large.
    """
    return models if folder is None else partial(_kept, models, folder / NAME, warn)


def _kept(
    models: Models, folder: Path, warn: Callable[[str], None], clients: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier end of this run
    keeps = False
    for number, (client, (v, b)) in enumerate(zip(clients, models(clients), strict=True)):
        if number == 0:
            size = len(clients) * (v.nbytes + b.nbytes)
            keeps = size <= MOST
            if keeps:
                make_folder(folder)
            else:
                warn(
                    f"The {len(clients)} clients' own models are {size / 1e9:.1f} GB and are not kept; with eval_clients "
                    "fewer clients train one."
                )
        if keeps:
            with disk_errors(_file(folder, client)):
                _file(folder, client).write_bytes(save({"v": v.cpu().contiguous(), "b": b.cpu().contiguous()}))
        yield v, b


def load_personal_model(folder: Path, client: int) -> tuple[Tensor, Tensor] | None:
    """Load the personal model of a client, ``v [d]`` and ``b [m]``; None if it was not stored.

    Args:
        folder: The run folder.
        client: Its number.
    """
    file = _file(folder / NAME, client)
    if not file.is_file():
        return None
    tensors = load(file.read_bytes())
    return tensors["v"], tensors["b"]


def _file(folder: Path, client: int) -> Path:
    return folder / f"{client}.safetensors"
