"""State of a site between rounds, in files that survive a restart."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from unskew.errors import UnskewError
from unskew.filesystem import make_folder, write_atomic
from unskew.protocol.messages import ClientState, Tensors
from unskew.protocol.client_state_files import encode_tensors


class SiteStateLostError(UnskewError):
    """The state that the server goes on from is not here, as after the site's disk was lost."""


class OutdatedMessageError(UnskewError):
    """The message belongs to an older round than the newest one that this site has trained."""


class SiteState:
    """State of one client in one run: one file per round from which the server may resume.

    There are two at most: that of the last update that the server took in, and that of the one which is on its way. So an
    update that was trained but never arrived is forgotten.

    Args:
        folder: Of the site's states.
        run: The run's identity.
        client: The client's number.

    Raises:
        UnskewError: The name of the run is not valid.
    """

    def __init__(self, folder: Path, run: str, client: int):
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise UnskewError("A run's identity is made of hexadecimal digits.")
        self.run, self.folder = run, folder / run / f"client-{client}"

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:07d}.safetensors"

    def check_round(self, round: int, new: bool) -> None:
        """Validate that a message is not older than the newest round trained here, such as a replayed one.

        Args:
            round: Round of the message.
            new: Whether the message starts a training; its round is stored then.

        Raises:
            OutdatedMessageError: If the message is older.
        """
        path = self.folder / "newest"
        try:
            newest = int(path.read_text())
        except (OSError, ValueError):  # the first round, or the site's disk was lost
            newest = -1
        if round < newest:
            raise OutdatedMessageError(
                f"this site has trained round {newest + 1} of the run, but the message is of round {round + 1}"
            )
        if new and round > newest:
            make_private_folder(self.folder)
            write_atomic(path, str(round).encode())

    def after(self, accepted: int | None, forget: bool = True) -> ClientState:
        """Return what was kept after the update of the round ``accepted``.

        Args:
            accepted: Round of the last update that the server accepted; None if there is none.
            forget: Whether to remove the states of other rounds.

        Raises:
            SiteStateLostError: The state is missing or damaged.
        """
        state_file = None if accepted is None else self._path(accepted)
        tensors: Tensors = {}
        if state_file is not None:
            try:
                tensors = load(state_file.read_bytes())
            except (OSError, SafetensorError) as error:
                raise SiteStateLostError(f"what this site kept after round {accepted} of the run is not in {state_file}") from error
        for path in self.folder.glob("round-*.safetensors") if forget else ():
            if path != state_file:
                path.unlink()
        return ClientState.of(tensors)

    def keep(self, round: int, state: ClientState) -> None:
        """Keep what a training left, until it is known whether its update was taken in.

        Args:
            round: Number of the round, from 0.
            state: State after training.
        """
        make_private_folder(self.folder)
        write_atomic(self._path(round), encode_tensors({name: t.cpu() for name, t in state.tensors().items()}))

    def prepared(self) -> Path:
        """Return the folder for data generated before the first round."""
        return self.folder / "prepared.safetensors"


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter, like its parent."""
    for path in (folder, folder.parent):
        make_folder(path)
        path.chmod(0o700)


def remove_run_state(folder: Path, run: str) -> None:
    """Remove all that a run left.

    Args:
        folder: Folder of the site's states.
        run: Name of the run.
    """
    shutil.rmtree(folder / run, ignore_errors=True)
