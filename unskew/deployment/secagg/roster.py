"""Roster of a deployment: public signing key of each client, exchanged by the operators and not through the server.

A site signs its keys and survivor lists with a separate signing key. The node key is not used, because the SuperNode can read
it and runs any app that the server sends: a malicious server could forge signatures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unskew.deployment.secagg.crypto import check_installed
from unskew.errors import ConfigError

FILE = "roster.txt"
KEY = "ecdsa-sha2-nistp384"


def read_roster(path: Path) -> dict[int, Any]:
    """Read the public keys of all clients.

    Each line contains a client number and its public key as ``ssh-keygen`` writes it: ``0 ecdsa-sha2-nistp384 AAAA...``.
    Empty lines and lines that start with ``#`` are skipped.

    Args:
        path: Text file with one client per line.

    Raises:
        ConfigError: If the file cannot be read, a line is not valid, or a number or key occurs twice.
    """
    check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    keys: dict[int, Any] = {}
    seen: set[str] = set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"The roster {path} cannot be read ({error}).") from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            client = int(words[0])
            kind = words[1]
            encoded = words[2]
            key = load_ssh_public_key(f"{kind} {encoded}".encode())
        except (ValueError, IndexError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"{path}, line {number}: expected a client number and its public key, {KEY} AAAA..."
            ) from error
        if client < 0 or kind != KEY or client in keys or encoded in seen:
            raise ConfigError(
                f"{path}, line {number}: each client needs a different number from 0 and a different {KEY} key."
            )
        keys[client] = key
        seen.add(encoded)
    return keys


def is_signed(keys: Mapping[int, Any], client: int, message: list[Any], signature: object) -> bool:
    """Return whether a client of the roster signed a message.

    Args:
        keys: Public signing key of each client.
        client: Number of the client.
        message: Message that was signed.
        signature: Received signature.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA384

    if client not in keys:
        return False
    try:
        keys[client].verify(bytes.fromhex(str(signature)), json.dumps(message).encode(), ec.ECDSA(SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class SigningIdentity:
    """A site's signing key and the roster.

    Attributes:
        client: Client number of the site.
        key: Private signing key of the site.
        roster: Public signing keys, by client.
    """

    client: int
    key: Any = field(repr=False)
    roster: Mapping[int, Any]

    @staticmethod
    def load(client: int, key: Path, roster: Path) -> SigningIdentity:
        """Read a site's key and the roster.

        Args:
            client: Number of the client.
            key: File of the private key.
            roster: File of the roster.

        Raises:
            ConfigError: If a file cannot be read, or the roster has another key for this client.
        """
        keys = read_roster(roster)
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        try:
            own = load_ssh_private_key(key.read_bytes(), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"The signing key {key} cannot be read ({error}); create it with sh node-key.sh."
            ) from error
        if client not in keys or own.public_key() != keys[client]:
            raise ConfigError(
                f"The roster {roster} does not contain {key.with_suffix('.pub')} as the key of client {client}."
            )
        return SigningIdentity(client, own, keys)

    def sign(self, message: list[Any]) -> str:
        """Sign a message as this site; its first entry names the purpose, so that it cannot be used for another one."""
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA384

        return str(self.key.sign(json.dumps(message).encode(), ec.ECDSA(SHA384())).hex())
