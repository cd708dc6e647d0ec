"""Data that a site received before the first round, stored in files to survive a restart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from unskew.data.federation import ClientData
from unskew.deployment.site.state import SiteStateLostError, make_private_folder
from unskew.deployment.wire.tensor_codec import InvalidMessageError, channels_last_images, encode_tensor
from unskew.filesystem import write_atomic
from unskew.json_models import read_model, write_model
from unskew.protocol.client_state_files import encode_tensors
from unskew.protocol.messages import Tensors
from unskew.protocol.rules import DataRule

DIGESTS = "received.sha256.json"
"""File with the SHA-256 of the received data of each rule."""


@dataclass
class ReceivedData:
    """Received data for each data rule of the method, in order.

    Attributes:
        folder: Folder of the files.
        rules: The data rules.
        shares: Tensors for this client only, by position of the rule.
        common: Tensors for all clients, by name of the rule.
        digests: SHA-256 of the file of each rule, by its position.
    """

    folder: Path
    rules: tuple[DataRule, ...]
    shares: dict[int, Tensors] = field(default_factory=dict)
    common: dict[str, Tensors] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Identifier of the received data, which changes with their content."""
        return json.dumps([str(self.folder), sorted(self.digests.items())])

    def _path(self, rule_index: int) -> Path:
        return self.folder / f"received-{rule_index}.safetensors"

    def load(self) -> ReceivedData:
        """Load the stored data; without those of a corrupted file, which the server can send again."""
        for index, rule in enumerate(self.rules):
            try:
                encoded = self._path(index).read_bytes()
                tensors = load(encoded)
            except (OSError, SafetensorError):
                continue
            self._take(index, rule, {name: channels_last_images(t) for name, t in tensors.items()}, encoded)
        return self

    def _take(self, rule_index: int, rule: DataRule, held: Tensors, encoded: bytes) -> None:
        parts = {k: {n.removeprefix(k): t for n, t in held.items() if n.startswith(k)} for k in ("share/", "common/")}
        self.shares[rule_index] = parts["share/"]
        if parts["common/"]:
            self.common[rule.name] = parts["common/"]
        self.digests[rule_index] = hashlib.sha256(encoded).hexdigest()

    def _first_digests(self) -> dict[str, str]:
        """Return the digests of what was received, which remain if a file is corrupted."""
        path = self.folder / DIGESTS
        return read_model(path, dict[str, str]) if path.is_file() else {}

    def take(self, rule_index: int, share: Tensors, common: Tensors, trained: bool) -> None:
        """Store the data for one rule and delete the data for later rules; a repeated message changes nothing.

        Args:
            rule_index: Position of the data rule.
            share: Tensors for this client.
            common: Tensors that all clients receive.
            trained: Whether the site has trained in this run.

        Raises:
            InvalidMessageError: If the site has trained with other data.
        """
        named = {**{f"share/{n}": t for n, t in share.items()}, **{f"common/{n}": t for n, t in common.items()}}
        path, encoded, first = self._path(rule_index), encode_tensors(named), self._first_digests()
        if path.is_file() and path.read_bytes() == encoded:
            return
        digest = hashlib.sha256(encoded).hexdigest()
        if trained and first.get(str(rule_index)) != digest:
            raise InvalidMessageError("this site has trained with other data, which do not change during a run")
        for later in () if trained else range(rule_index, len(self.rules)):
            self.shares.pop(later, None)
            self.digests.pop(later, None)
            self.common.pop(self.rules[later].name, None)
            self._path(later).unlink(missing_ok=True)
        make_private_folder(self.folder)
        write_model(self.folder / DIGESTS, {**first, str(rule_index): digest})
        write_atomic(path, encoded)
        self._take(rule_index, self.rules[rule_index], named, encoded)

    def digest(self) -> str:
        """Return a digest of the data that all clients received."""
        entries = []
        for index in sorted(self.shares):
            for name, tensor in sorted(self.common.get(self.rules[index].name, {}).items()):
                entries.append([index, name, encode_tensor(tensor).digest()])
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def applied(self, data: ClientData, before: int | None = None) -> ClientData:
        """Apply received data to the client's data.

        Args:
            data: Data of the client.
            before: Position of a data rule; only data of earlier rules are applied. None applies all.

        Raises:
            SiteStateLostError: If data of an earlier message are missing.
        """
        for index in range(len(self.rules) if before is None else before):
            if index not in self.shares:
                raise SiteStateLostError(
                    "the data that this site received before the first round are lost; when the run is resumed, the server "
                    "sends them again"
                )
            if self.shares[index]:
                data = self.rules[index].apply_payload(data, self.shares[index])
        return data
