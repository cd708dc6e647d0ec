"""The cryptography of secure aggregation: Flower's keys, shares and sealed messages, and AES for the masks.

Flower's own masks come from a generator with a seed of 32 bits, which a server could find by trying all of them. So here a
mask is the key stream of AES-256 in counter mode, as in the protocol's paper (Bonawitz et al. 2017, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

CHUNK = 1 << 22
"""Numbers of a mask that are made at once."""


class Primitives(Protocol):
    """What the protocol is made of."""

    def pair(self) -> tuple[bytes, bytes]:
        """A new secret key and its public key."""
        ...

    def public(self, secret: bytes) -> bytes:
        """The public key of a secret one."""
        ...

    def agree(self, secret: bytes, public: bytes) -> bytes:
        """The key that two have in common: each makes it of its own secret key and the other's public one."""
        ...

    def shares(self, secret: bytes, threshold: int, count: int) -> list[bytes]:
        """A secret in so many parts, of which ``threshold`` tell it and fewer tell nothing."""
        ...

    def combine(self, shares: Sequence[bytes]) -> bytes:
        """The secret of at least ``threshold`` of its parts; ValueError if they are none."""
        ...

    def seal(self, key: bytes, plain: bytes) -> bytes:
        """A message that only who has the key can read or change."""
        ...

    def unseal(self, key: bytes, sealed: bytes) -> bytes:
        """Inverse of ``seal``; ValueError if it was sealed with another key, or changed."""
        ...

    def stream(self, key: bytes, size: int) -> Iterator[np.ndarray]:
        """So many numbers of 32 bits that only who has the key can tell from chance, in pieces of ``CHUNK``."""
        ...


class Flower:
    """Those that come with Flower: ECDH on P-384, Shamir's shares, Fernet; and AES-256-CTR."""

    def pair(self) -> tuple[bytes, bytes]:
        """See ``Primitives``."""
        from flwr.supercore.primitives import asymmetric

        secret, public = asymmetric.generate_key_pairs()
        return asymmetric.private_key_to_bytes(secret), asymmetric.public_key_to_bytes(public)

    def public(self, secret: bytes) -> bytes:
        """See ``Primitives``."""
        from flwr.supercore.primitives import asymmetric

        return bytes(asymmetric.public_key_to_bytes(asymmetric.bytes_to_private_key(secret).public_key()))

    def agree(self, secret: bytes, public: bytes) -> bytes:
        """See ``Primitives``."""
        from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
        from flwr.supercore.primitives import asymmetric

        try:
            both = asymmetric.bytes_to_private_key(secret), asymmetric.bytes_to_public_key(public)
            return bytes(generate_shared_key(*both))
        except (TypeError, AttributeError) as error:  # a key of another kind
            raise ValueError("this is no key on the curve P-384") from error

    def shares(self, secret: bytes, threshold: int, count: int) -> list[bytes]:
        """See ``Primitives``."""
        from flwr.common.secure_aggregation.crypto.shamir import create_shares

        return list(create_shares(secret, threshold, count))

    def combine(self, shares: Sequence[bytes]) -> bytes:
        """See ``Primitives``."""
        from flwr.common.secure_aggregation.crypto.shamir import combine_shares

        try:
            return bytes(combine_shares(list(shares)))
        except (IndexError, TypeError) as error:
            raise ValueError("these are no shares") from error

    def seal(self, key: bytes, plain: bytes) -> bytes:
        """See ``Primitives``."""
        from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt

        return bytes(encrypt(key, plain))

    def unseal(self, key: bytes, sealed: bytes) -> bytes:
        """See ``Primitives``."""
        from cryptography.fernet import InvalidToken
        from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt

        try:
            return bytes(decrypt(key, sealed))
        except InvalidToken as error:
            raise ValueError("this was sealed with another key, or changed") from error

    def stream(self, key: bytes, size: int) -> Iterator[np.ndarray]:
        """See ``Primitives``."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derived = HKDF(SHA256(), 32, None, b"unskew mask").derive(key)
        cipher = Cipher(algorithms.AES(derived), modes.CTR(bytes(16))).encryptor()  # a key is used once: for one mask
        for start in range(0, size, CHUNK):
            yield np.frombuffer(cipher.update(bytes(4 * min(CHUNK, size - start))), np.uint32)


def apply(into: np.ndarray, stream: Iterator[np.ndarray], add: bool) -> None:
    """Add a mask to numbers of 32 bits, or take it away; sums wrap around."""
    at = 0
    for piece in stream:
        part = into[at : at + len(piece)]
        (np.add if add else np.subtract)(part, piece, out=part)
        at += len(piece)
