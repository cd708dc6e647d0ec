"""Client state in files, written atomically by the process that trained the client."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from safetensors.torch import load_file, save

from unskew.errors import DataError
from unskew.filesystem import make_folder, write_atomic
from unskew.protocol.messages import Broadcast, ClientState, Tensors, Update, replace_fields


def encode_tensors(tensors: Tensors) -> bytes:
    """Encode tensors as safetensors; tensors that share memory are copied first."""
    seen: set[int] = set()
    encoded: Tensors = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        encoded[name] = (tensor.clone() if memory in seen else tensor).contiguous()
        seen.add(memory)
    return save(encoded)


def write_state_file(path: Path, tensors: Tensors) -> tuple[str, str]:
    """Write a client's state.

    Args:
        path: File to write.
        tensors: Tensors of the state by name.

    Returns:
        Path and SHA-256 of the file.
    """
    data = encode_tensors(tensors)
    make_folder(path.parent)
    write_atomic(path, data)
    return str(path), hashlib.sha256(data).hexdigest()


def load_client_state(broadcast: Broadcast) -> Broadcast:
    """Return the broadcast with the client's state, loaded from its file if it has one.

    Args:
        broadcast: Message to the client; unchanged if the state is in memory.

    Raises:
        DataError: If the file is not accessible on this machine.
    """
    if broadcast.state_files is None:
        return broadcast
    read, write = map(Path, broadcast.state_files)
    stored = bool(broadcast.state_files[0])
    expected = read if stored else write.parents[1]
    if not (expected.is_file() if stored else expected.is_dir()):
        raise DataError(
            f"{os.uname().nodename} does not see {expected}, where clients' state "
            "is stored: put the run folder on a file system that all nodes share, or use ray.state=driver."
        )
    return replace_fields(broadcast, state=ClientState.of(load_file(read)) if stored else ClientState())


def store_client_state(broadcast: Broadcast, update: Update) -> Update:
    """Write the client's new state to its file and return the update without it; non-finite updates are unchanged.

    Args:
        broadcast: Message from the server.
        update: Message from the client.
    """
    if broadcast.state_files is None or not update.is_finite():
        return update
    tensors = broadcast.state.updated(update.state).tensors()
    reference = write_state_file(Path(broadcast.state_files[1]), tensors) if tensors else None
    return replace_fields(update, state=ClientState(), state_file=reference)
