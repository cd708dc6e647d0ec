"""Files of the personal models that clients train at the end of a run.

Checkpoints do not contain these models, because no later round starts from them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from unskew.checked_tensors import encode_checked, load_checked
from unskew.filesystem import create_file, disk_errors, make_folder
from unskew.simulation.evaluate import Models

NAME = "personal"
MOST = 1 << 30
"""Personal models are not stored if they need more than this many bytes in total."""


def kept_personal_models(models: Models, folder: Path | None, warn: Callable[[str], None]) -> Models:
    """Wrap ``models`` so that each model is also written to the run folder.

    Args:
        models: Personal models.
        folder: Run folder; None writes nothing.
        warn: Called with a message if the models are too large to be stored.
    """
    return models if folder is None else partial(_kept, models, folder / NAME, warn)


def _kept(
    models: Models, folder: Path, warn: Callable[[str], None], clients: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    shutil.rmtree(folder, ignore_errors=True)  # written when this run ended before
    keeps = False
    for number, (client, (v, b)) in enumerate(zip(clients, models(clients), strict=True)):
        if number == 0:
            size = len(clients) * (v.nbytes + b.nbytes)
            keeps = size <= MOST
            if keeps:
                make_folder(folder)
            else:
                warn(
                    f"The personal models of {len(clients)} clients need {size / 1e9:.1f} GB and are not stored. Set a "
                    "smaller eval_clients to train fewer of them."
                )
        if keeps:
            with disk_errors(_file(folder, client)), create_file(_file(folder, client)) as file:
                file.write(encode_checked({"v": v.cpu(), "b": b.cpu()}))
        yield v, b


def load_personal_model(folder: Path, client: int) -> tuple[Tensor, Tensor] | None:
    """Load the personal model of a client, ``v [d]`` and ``b [m]``; None if it was not stored.

    Args:
        folder: Run folder.
        client: Number of the client.
    """
    file = _file(folder / NAME, client)
    if not file.is_file():
        return None
    tensors = load_checked(file)
    return tensors["v"], tensors["b"]


def _file(folder: Path, client: int) -> Path:
    return folder / f"{client}.safetensors"
