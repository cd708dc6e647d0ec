"""Storage of tensors per client between rounds: client state, and updates in flight.

A client without an entry has never stored anything: a client that never took part has None, not zeros. Entries beyond
``limit`` bytes of memory are moved to files, one per client, oldest first. A file is never changed, only replaced, so a
checkpoint can keep it through a hard link.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from unskew.engines.device import send
from unskew.filesystem import create_file, disk_errors, temporary_path
from unskew.protocol.client_state_files import encode_tensors, write_state_file
from unskew.protocol.messages import ClientState, Tensors, flatten_records, num_bytes


class ClientStore:
    """Tensors per client, by name.

    Args:
        folder: Folder for entries that do not fit in memory; None keeps everything in memory.
        limit: Bytes of memory above which entries are moved to the folder.
    """

    def __init__(self, folder: Path | None = None, limit: int = 4 << 30):
        self.folder = folder
        self.limit = limit
        self._memory: dict[int, Tensors] = {}
        self._disk: set[int] = set()
        self._bytes = 0
        self._tables: Tensors = {}
        self._tabled: dict[int, set[str]] = {}  # names of a client's tensors that are rows of the tables
        self.close()  # remove files of a killed session: the valid state is in the checkpoint

    def close(self) -> None:
        """Remove the files; links to them in checkpoints remain."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._memory) + len(self._disk)

    @property
    def bytes(self) -> int:
        """Size of all entries in bytes, including files."""
        return self._bytes + sum(path.stat().st_size for _, path in self.on_disk())

    def get(self, client: int) -> Tensors:
        """Return the client's state; empty if there is none."""
        if client in self._disk:
            return load_file(self._path(client))
        return self._memory.get(client, {})

    def put(self, client: int, tensors: Tensors) -> None:
        """Replace the client's tensors.

        Args:
            client: Client number.
            tensors: Tensors by name; must not be views of memory that is overwritten later.
        """
        if not tensors:
            return
        self._forget(client)
        self._memory[client] = tensors
        self._bytes += num_bytes(tensors.values())
        while self.folder is not None and self._bytes > self.limit and len(self._memory) > 1:
            self._spill(next(iter(self._memory)))

    def state_or_file(self, client: int) -> tuple[ClientState, tuple[str, str] | None]:
        """Return the client's state at the start of a round, or a reference to its file."""
        return ClientState.of(self.get(client)), None

    def keep(self, client: int, newer: ClientState, file: tuple[str, str] | None) -> None:
        """Store the client's new state, in memory or as a file with a checksum.

        Args:
            client: Client number.
            newer: New state of the client.
            file: Path and checksum of a file that already contains the state.
        """
        self.put(client, ClientState.of(self.get(client)).updated(newer).tensors())

    def keep_rows(self, clients: Sequence[int], state: dict[str, Tensors], num_clients: int) -> None:
        """Store the new states of several clients as rows of one table per tensor, if the tables fit in memory.

        Args:
            clients: Client numbers.
            state: New state of each rule, with a row per client; it is copied.
            num_clients: Number of clients of the run.
        """
        tensors = flatten_records("rules", state)
        if num_clients * num_bytes(rows[:1] for rows in tensors.values()) > self.limit:
            for index, client in enumerate(clients):
                own = {name: rows[index].clone() for name, rows in tensors.items()}
                self.keep(client, ClientState.of(own), None)
            return
        rows_of = torch.tensor(clients)
        for name, rows in tensors.items():
            table = self._tables.get(name)
            if (
                table is None
                or table.shape[1:] != rows.shape[1:]
                or (table.dtype, table.device) != (rows.dtype, rows.device)
            ):
                table = self._tables[name] = rows.new_zeros(num_clients, *rows.shape[1:])
                for names in self._tabled.values():
                    names.discard(name)
            rows_of = send(rows_of, table.device)
            table.index_copy_(0, rows_of, rows)
        written = tuple(f"rules/{rule}/" for rule, kept in state.items() if kept)
        for client in clients if tensors else ():
            if self._tabled.get(client) != tensors.keys():
                others = {name: t for name, t in self.get(client).items() if not name.startswith(written)}
                self.put(client, {**others, **{name: self._tables[name][client] for name in tensors}})
                self._tabled[client] = set(tensors)

    def checksum(self, client: int) -> str | None:
        """Return the SHA-256 of a client's file, if known."""
        return None

    def take(self, client: int) -> Tensors:
        """Remove and return the client's state."""
        tensors = self.get(client)
        if client in self._disk:
            self._path(client).unlink()
        self._forget(client)
        return tensors

    def in_memory(self) -> Iterator[tuple[int, Tensors]]:
        """Iterate over entries in memory."""
        yield from self._memory.items()

    def on_disk(self) -> Iterator[tuple[int, Path]]:
        """Iterate over entries in files."""
        for client in sorted(self._disk):
            yield client, self._path(client)

    def _path(self, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client}.safetensors"

    def _forget(self, client: int) -> None:
        old = self._memory.pop(client, None)
        if old is not None:
            self._bytes -= num_bytes(old.values())
        self._disk.discard(client)
        self._tabled.pop(client, None)

    def _spill(self, client: int) -> None:
        path = self._path(client)
        fresh = temporary_path(path)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with create_file(fresh) as file:
                file.write(encode_tensors(self._memory[client]))
            os.replace(fresh, path)
        self._forget(client)
        self._disk.add(client)


class SharedStore(ClientStore):
    """Client state in files that the training processes read and write, so that none of it passes through this process.

    Args:
        folder: Folder that all processes see under the same path; has a subfolder for every thousand clients.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, limit=0)
        self._files: dict[int, tuple[Path, str]] = {}
        self._number = 0
        self.root = folder.absolute()
        self.root.mkdir(parents=True, exist_ok=True)

    def state_or_file(self, client: int) -> tuple[ClientState, tuple[str, str] | None]:
        """Return a reference to the client's state file.

        Every version has a new file name, so that no cache can return an old one.
        """
        return ClientState(), (str(self._path(client)) if client in self._disk else "", str(self._fresh(client)))

    def keep(self, client: int, newer: ClientState, file: tuple[str, str] | None) -> None:
        """Store the client's new state."""
        if file is not None:
            self._forget(client)
            self._files[client] = (Path(file[0]), file[1])
            self._disk.add(client)

    def put(self, client: int, tensors: Tensors) -> None:
        """Store tensors for a client."""
        if tensors:
            self.keep(client, ClientState(), write_state_file(self._fresh(client), tensors))

    def checksum(self, client: int) -> str | None:
        """Return the checksum of a client's state file."""
        return self._files[client][1]

    def _fresh(self, client: int) -> Path:
        self._number += 1
        return self.root / f"{client // 1000:06d}" / f"{client}-{self._number}.safetensors"

    def _path(self, client: int) -> Path:
        return self._files[client][0]

    def _forget(self, client: int) -> None:
        if client in self._disk:
            self._path(client).unlink(missing_ok=True)
        super()._forget(client)
