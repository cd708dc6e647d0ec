"""Tensors that are kept per client between rounds: what stays there, and updates on their way.

A client is absent until it first writes something: "never took part" is None, not zeros. Entries beyond ``limit`` bytes of
memory are moved to files, one per client, oldest first; such a file is never changed, only replaced, so a checkpoint can
keep it by a hard link.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save

from unskew.files import writing
from unskew.protocol.messages import Tensors, bytes_of


def encode(tensors: Tensors) -> bytes:
    """Tensors as safetensors; one that lies in the memory of another is written on its own."""
    seen: set[int] = set()
    whole: Tensors = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        whole[name] = (tensor.clone() if memory in seen else tensor).contiguous()
        seen.add(memory)
    return save(whole)


class ClientStore:
    """Tensors per client, by name.

    Args:
        folder: Where entries go that do not fit in memory; None keeps everything in memory.
        limit: Bytes of memory before entries are moved to the folder.
    """

    def __init__(self, folder: Path | None = None, limit: int = 4 << 30):
        self.folder, self.limit = folder, limit
        self._memory: dict[int, Tensors] = {}
        self._disk: set[int] = set()
        self._bytes = 0
        self.close()  # files of a session that was killed belong to nobody: what counts is in the checkpoint

    def close(self) -> None:
        """Remove the files; a checkpoint's own links to them stay."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._memory) + len(self._disk)

    @property
    def bytes(self) -> int:
        """Of all entries, files included."""
        return self._bytes + sum(path.stat().st_size for _, path in self.on_disk())

    def get(self, client: int) -> Tensors:
        """What the client kept; empty if it never wrote."""
        if client in self._disk:
            return load_file(self._path(client))
        return self._memory.get(client, {})

    def put(self, client: int, tensors: Tensors) -> None:
        """Replace what the client keeps. They must not be views of memory that will be written again."""
        if not tensors:
            return
        self._forget(client)
        self._memory[client] = tensors
        self._bytes += bytes_of(tensors.values())
        while self.folder is not None and self._bytes > self.limit and len(self._memory) > 1:
            self._spill(next(iter(self._memory)))

    def take(self, client: int) -> Tensors:
        """What the client kept, which is forgotten."""
        tensors = self.get(client)
        if client in self._disk:
            self._path(client).unlink()
        self._forget(client)
        return tensors

    def in_memory(self) -> Iterator[tuple[int, Tensors]]:
        """Entries that lie in memory."""
        yield from self._memory.items()

    def on_disk(self) -> Iterator[tuple[int, Path]]:
        """Entries that lie in files."""
        for client in sorted(self._disk):
            yield client, self._path(client)

    def _path(self, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client}.safetensors"

    def _forget(self, client: int) -> None:
        old = self._memory.pop(client, None)
        if old is not None:
            self._bytes -= bytes_of(old.values())
        self._disk.discard(client)

    def _spill(self, client: int) -> None:
        path = self._path(client)
        fresh = path.with_suffix(".new")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(encode(self._memory[client]))
            os.replace(fresh, path)
        self._forget(client)
        self._disk.add(client)
