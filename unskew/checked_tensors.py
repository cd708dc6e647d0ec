"""Files of tensors with a checksum, which detects damaged files.

The file is safetensors. An entry ``about`` of its metadata contains the SHA-256 of the file, computed with zeros in the place
of the checksum, so the checksum survives copying the file alone. It does not detect manipulation: whoever changes the tensors
can change the checksum, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from unskew.errors import CheckpointError
from unskew.filesystem import read_file

Tensors = dict[str, Tensor]

ZEROS = b"0" * 64
CHECKSUM = re.compile(rb'\\"sha256\\": \\"([0-9a-f]{64})\\"')
"""Checksum in the metadata, whose JSON is a string of the header's JSON."""


def encode_checked(tensors: Tensors, about: Mapping[str, object] | None = None) -> bytes:
    """Encode tensors as safetensors with a checksum.

    Args:
        tensors: Tensors by name; none may overlap another in memory.
        about: JSON values that are stored, too; the metadata has one entry, because the order of several is random.
    """
    metadata = {"about": json.dumps({"sha256": ZEROS.decode(), **(about or {})})}
    data = save({name: t.contiguous() for name, t in tensors.items()}, metadata)
    return data.replace(ZEROS, hashlib.sha256(data).hexdigest().encode(), 1)


def load_checked(path: Path) -> Tensors:
    """Load a file that ``encode_checked`` has encoded.

    Args:
        path: File to read.

    Raises:
        CheckpointError: If the file is missing or damaged, or has no checksum.
    """
    try:
        content = read_file(path)
        data = memoryview(content)
        stored = CHECKSUM.search(data[: 8 + int.from_bytes(data[:8], "little")])
        if stored is None:
            raise ValueError("it has no checksum")
        digest = hashlib.sha256(data[: stored.start(1)])
        digest.update(ZEROS)
        digest.update(data[stored.end(1) :])
        if digest.hexdigest().encode() != stored[1]:
            raise ValueError("its content does not match its checksum")
        return load(content)
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is corrupted: {str(error)[:200]}. Copy it again from where it was written, or remove it and "
            "repeat the command that wrote it."
        ) from error
