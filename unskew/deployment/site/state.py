"""State of a site between rounds, in files that survive a restart."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from unskew.deployment.wire.digests import BroadcastDigest
from unskew.deployment.wire.frames import EncodedFrame, Frame, FrameError
from unskew.errors import UnskewError
from unskew.filesystem import make_folder, write_atomic
from unskew.json_models import Content, read_model, write_model
from unskew.protocol.client_state_files import encode_tensors
from unskew.protocol.messages import ClientState, Tensors

REPLY = "reply.bin"
"""File with the last reply that has private noise."""
PERSONAL = "personal.safetensors"
"""File with the personal model that was fine-tuned at the end of the run."""


class SiteStateLostError(UnskewError):
    """The state that the server wants to continue from is missing, for example after the site's disk was lost."""


class OutdatedMessageError(UnskewError):
    """The message belongs to an older round than the newest one trained at this site."""


class SiteState:
    """State of one client in one run: one file per round from which the server may resume.

    There are at most two files: the state after the last update that the server accepted, and the state after the update in
    transit. The state of an update that never arrived is deleted.

    Args:
        folder: Folder of the site's states.
        run: Identifier of the run.
        client: Number of the client.

    Raises:
        UnskewError: If the identifier of the run is not valid.
    """

    def __init__(self, folder: Path, run: str, client: int):
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise UnskewError("A run identifier must consist of hexadecimal digits.")
        self.run, self.folder = run, folder / run / f"client-{client}"

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:07d}.safetensors"

    def newest(self) -> int:
        """Return the newest round trained here, from 0; -1 before the first, or if the site's disk was lost."""
        try:
            return int((self.folder / "newest").read_text())
        except (OSError, ValueError):
            return -1

    def check_round(self, round: int, new: bool) -> None:
        """Validate that a message is not older than the newest round trained here, for example a replayed message.

        Args:
            round: Round of the message.
            new: Whether the message starts training; its round is then stored as the newest.

        Raises:
            OutdatedMessageError: If the message is older.
        """
        newest = self.newest()
        if round < newest:
            raise OutdatedMessageError(
                f"this site has trained round {newest + 1} of the run, but the message is of round {round + 1}"
            )
        if new and round > newest:
            make_private_folder(self.folder)
            write_atomic(self.folder / "newest", str(round).encode())

    def reply(self, round: int, request: str) -> Frame | None:
        """Return the stored reply to a broadcast with private noise; None if the site has not replied in this round yet.

        A second reply, or one to another broadcast of the same round, would need more noise than the experiment adds.

        Args:
            round: Number of the round, from 0.
            request: Digest of the broadcast.

        Raises:
            OutdatedMessageError: If the site has replied to another broadcast of this round.
            SiteStateLostError: If the file is corrupted, and may contain a reply of this round.
        """
        try:
            stored = read_reply(self.folder / REPLY)
        except SiteStateLostError:
            if self.newest() >= round:
                raise
            return None
        if stored is None or not stored[0].startswith(f"{round} "):
            return None
        if stored[0] != f"{round} {request}":
            raise OutdatedMessageError(f"this site has trained round {round + 1} of the run from another message")
        return stored[1]

    def keep_reply(self, round: int, request: str, frame: Frame) -> None:
        """Store a reply with private noise, before it is sent.

        Args:
            round: Number of the round, from 0.
            request: Digest of the broadcast.
            frame: The reply.
        """
        write_reply(self.folder / REPLY, f"{round} {request}", frame)

    def keep_personal(self, v: Tensor, b: Tensor) -> None:
        """Store the personal model that was fine-tuned at the end of the run.

        Args:
            v: Parameters, ``[d]``.
            b: Buffers, ``[m]``.
        """
        make_private_folder(self.folder)
        write_atomic(self.folder / PERSONAL, encode_tensors({"v": v.cpu(), "b": b.cpu()}))

    def personal(self) -> tuple[Tensor, Tensor]:
        """Return the personal model that was fine-tuned at the end of the run, ``v [d]`` and ``b [m]``.

        Raises:
            SiteStateLostError: If the file is missing or corrupted.
        """
        try:
            tensors = load((self.folder / PERSONAL).read_bytes())
            return tensors["v"], tensors["b"]
        except (OSError, SafetensorError, KeyError) as error:
            raise SiteStateLostError(f"this site's personal model is not in {self.folder / PERSONAL}") from error

    def check_evaluation(self, round: int, request: str, most: int) -> None:
        """Validate that a request for metrics is the first one after a round, or repeats it.

        From many answers, held-out samples could be reconstructed.

        Args:
            round: Number of finished rounds.
            request: Digest of the request.
            most: Largest number of evaluations in this run.

        Raises:
            OutdatedMessageError: If metrics after this or a later round, or for too many rounds, were requested.
        """
        done, newest, before = self._read("evaluated.json", tuple[int, int, str], (0, -1, ""))
        if (round, request) == (newest, before):
            return
        if round <= newest or done >= most:
            raise OutdatedMessageError(
                f"this site has evaluated the model of round {newest} of the run, {done} time(s) in all, and evaluates one "
                "model per round"
            )
        self._write("evaluated.json", (done + 1, round, request))

    def check_start(self, round: int, digest: BroadcastDigest) -> None:
        """Validate that the site never trains twice from a model, or twice in a round, with another state or weight.

        The difference of two masked sums over the same sites would otherwise reveal what this site has sent. The digest is
        stored before the update leaves the site, because the other sites can open the sum without it.

        Args:
            round: Number of the round, from 0.
            digest: Digests of the broadcast.

        Raises:
            OutdatedMessageError: If the site has trained from the same model, or in this round, with something else.
        """
        newest, start, own = self._read("started.json", tuple[int, str, dict[str, str]], (-1, "", {}))
        if (round == newest and start != digest.start) or own.get(digest.model, digest.individual) != digest.individual:
            raise OutdatedMessageError(
                f"this site has trained round {round + 1} of the run, or the same model, from another state or weight"
            )
        self._write("started.json", (round, digest.start, {**own, digest.model: digest.individual}))

    def known(self, accepted: int | None) -> dict[str, str]:
        """Return the digest of each part of the model as last received, by part, until the round of a state.

        Args:
            accepted: Round of the state that the site continues from; None if there is none.
        """
        return self._read("received.json", dict[str, dict[str, str]], {}).get(str(accepted), {})

    def keep_known(self, accepted: int | None, round: int, parts: Mapping[str, str]) -> None:
        """Store the digest of each part of the model as last received.

        Args:
            accepted: Round of the state that the site has continued from; None if there was none.
            round: Number of the round, from 0.
            parts: Digests, by part.
        """
        if parts:
            self._write("received.json", {str(accepted): self.known(accepted), str(round): dict(parts)})

    def _read(self, name: str, kind: type[Content], missing: Content) -> Content:
        path = self.folder / name
        return read_model(path, kind) if os.path.lexists(path) else missing

    def _write(self, name: str, content: Any) -> None:
        make_private_folder(self.folder)
        write_model(self.folder / name, content)

    def after(self, accepted: int | None, forget: bool = True) -> ClientState:
        """Return the state after the update of round ``accepted``.

        Args:
            accepted: Round of the last update that the server accepted; None if there is none.
            forget: Whether to remove the states of other rounds.

        Raises:
            SiteStateLostError: If the state is missing or corrupted.
        """
        state_file = None if accepted is None else self._path(accepted)
        tensors: Tensors = {}
        if state_file is not None:
            try:
                tensors = load(state_file.read_bytes())
            except (OSError, SafetensorError) as error:
                raise SiteStateLostError(
                    f"this site's state after round {accepted} of the run is not in {state_file}"
                ) from error
        for path in self.folder.glob("round-*.safetensors") if forget else ():
            if path != state_file:
                path.unlink()
        return ClientState.of(tensors)

    def keep(self, round: int, state: ClientState) -> None:
        """Store the state after training, until the server reports whether it accepted the update.

        Args:
            round: Number of the round, from 0.
            state: State after training.
        """
        make_private_folder(self.folder)
        write_atomic(self._path(round), encode_tensors({name: t.cpu() for name, t in state.tensors().items()}))

    def noisy(self, round: int, model: str) -> Tensors | None:
        """Return what the site has sent with noise in this round for a masked sum; None if it has sent nothing yet.

        A repeated message must get the same noise: two sums with different noise would reveal more than one.

        Args:
            round: Number of the round, from 0.
            model: Digest of the broadcast.

        Raises:
            OutdatedMessageError: If the site has sent something in this round for another broadcast.
            SiteStateLostError: If the file is corrupted, and may be of this round.
        """
        path = self.folder / "noisy.safetensors"
        if not path.is_file():
            return None
        try:
            tensors = load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            if self.newest() < round:
                return None
            raise SiteStateLostError(f"the noise that this site has added, {path}, cannot be read") from error
        prefix = f"{round}/{model}/"
        if all(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): t for name, t in tensors.items()}
        if any(name.startswith(f"{round}/") for name in tensors):
            raise OutdatedMessageError(f"this site has added noise to another update of round {round + 1}")
        return None

    def keep_noisy(self, round: int, model: str, tensors: Tensors) -> None:
        """Store what the site sends with noise, before it is sent.

        Args:
            round: Number of the round, from 0.
            model: Digest of the broadcast.
            tensors: What is sent, by name.
        """
        named = {f"{round}/{model}/{name}": t.cpu() for name, t in tensors.items()}
        write_atomic(self.folder / "noisy.safetensors", encode_tensors(named))


def read_reply(path: Path) -> tuple[str, Frame] | None:
    """Read a stored reply and the text that was stored with it; None if there is none.

    Args:
        path: File of the reply.

    Raises:
        SiteStateLostError: If the file is corrupted.
    """
    try:
        stored = io.BytesIO(path.read_bytes())
        about, length = json.loads(stored.readline())
        return str(about), EncodedFrame(stored.read(length), stored.read()).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, FrameError) as error:
        raise SiteStateLostError(f"this site's stored reply, {path}, is corrupted") from error


def write_reply(path: Path, about: str, frame: Frame) -> None:
    """Store a reply, before it is sent.

    Args:
        path: File of the reply.
        about: Text to store with it.
        frame: The reply.
    """
    encoded = EncodedFrame.of(frame)
    line = json.dumps([about, len(encoded.header)]).encode()
    make_private_folder(path.parent)
    write_atomic(path, b"".join([line, b"\n", encoded.header, encoded.body]))


def make_private_folder(folder: Path) -> None:
    """Create a folder that only its owner can access, like its parent."""
    for path in (folder, folder.parent):
        make_folder(path)
        path.chmod(0o700)
