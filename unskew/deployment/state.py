"""What stays at a site between rounds: files of its own that survive a restart."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from unskew.errors import UnskewError
from unskew.files import make_folder, write_atomic
from unskew.protocol.messages import ClientState, Tensors
from unskew.simulation.store import encode


class Forgotten(UnskewError):
    """The state that the server goes on from is not here, as after the site's disk was lost."""


class SiteState:
    """What one client of one run keeps: a file for each round after which the server may go on.

    There are two at most: that of the last update that the server took in, and that of the one which is on its way. So an
    update that was trained but never arrived is forgotten.

    Args:
        folder: Of the site's states.
        run: The run's identity.
        client: The client's number.

    Raises:
        UnskewError: The identity is none.
    """

    def __init__(self, folder: Path, run: str, client: int):
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise UnskewError("A run's identity is made of hexadecimal digits.")
        self.run, self.folder = run, folder / run / f"client-{client}"

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:07d}.safetensors"

    def after(self, accepted: int | None) -> ClientState:
        """What was kept after the update of the round ``accepted``; states of other rounds are forgotten.

        Raises:
            Forgotten: It is not here, or damaged.
        """
        kept = None if accepted is None else self._path(accepted)
        found: Tensors = {}
        if kept is not None:
            try:
                found = load(kept.read_bytes())
            except (OSError, SafetensorError) as error:
                raise Forgotten(f"what this site kept after round {accepted} of the run is not in {kept}") from error
        for path in self.folder.glob("round-*.safetensors"):
            if path != kept:
                path.unlink()
        return ClientState.of(found)

    def keep(self, round: int, state: ClientState) -> None:
        """Keep what a training left, until it is known whether its update was taken in."""
        for path in (self.folder, self.folder.parent):
            make_folder(path)
            path.chmod(0o700)
        write_atomic(self._path(round), encode({name: t.cpu() for name, t in state.tensors().items()}))

    def prepared(self) -> Path:
        """Where the site keeps what was made before the first round."""
        return self.folder / "prepared.safetensors"


def forget(folder: Path, run: str) -> None:
    """Remove all that a run left."""
    shutil.rmtree(folder / run, ignore_errors=True)
