"""Checkpoints of a site's unfinished local training, from which it continues after a restart."""

from __future__ import annotations

import hashlib
import json
import time
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from unskew.deployment.common.agreement import software_versions
from unskew.deployment.site.config import SiteConfig
from unskew.deployment.site.state import make_private_folder
from unskew.deployment.wire.digests import request_digest
from unskew.deployment.wire.frames import Frame
from unskew.filesystem import write_atomic
from unskew.protocol.client_state_files import encode_tensors
from unskew.protocol.messages import ClientState, Tensors

FILE = "unfinished.safetensors"


class SiteCheckpoint:
    """Checkpoint of the training that one broadcast asks for. A site has at most one in each run.

    With secret draws, later steps use new noise and batches: each step still has its own, and nothing has left the site.

    Args:
        site: Configuration of the site.
        folder: Folder of the run's state at this site.
        request: Message with the broadcast.
        before: Client state that the training starts from.
    """

    def __init__(self, site: SiteConfig, folder: Path, request: Frame, before: ClientState):
        self.site, self.path, self.request, self.before = site, folder / FILE, request, before
        self.stored = time.monotonic()

    @cached_property
    def _prefix(self) -> str:
        """Digest of all that the training depends on, except for the samples."""
        start = hashlib.sha256(encode_tensors(self.before.tensors())).hexdigest()
        values = [request_digest(self.request), start, software_versions(), self.site.device, self.site.threads]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest() + "/"

    def load(self) -> Tensors:
        """Return the stored tensors; empty if there are none of this training, or the file is corrupted."""
        try:
            stored = load(self.path.read_bytes())
        except (OSError, SafetensorError):
            return {}
        tensors = {n.removeprefix(self._prefix): t for n, t in stored.items() if n.startswith(self._prefix)}
        if not tensors:
            self.remove()
        return tensors

    def remove(self) -> None:
        """Remove the file, if there is one."""
        self.path.unlink(missing_ok=True)

    def is_due(self) -> bool:
        """Return whether ``checkpoint_minutes`` have passed since the start or the last checkpoint."""
        return time.monotonic() - self.stored >= 60 * self.site.checkpoint_minutes

    def save(self, tensors: Tensors) -> None:
        """Store tensors instead of the previous ones."""
        make_private_folder(self.path.parent)
        write_atomic(self.path, encode_tensors({self._prefix + name: t for name, t in tensors.items()}))
        self.stored = time.monotonic()
