"""Cryptography of secure aggregation: P-384 keys, verifiable secret sharing, authenticated encryption, and masks.

Key agreement, encryption (Fernet) and mask streams (AES-256-CTR) come from the ``cryptography`` package, which Flower
depends on. No library offers verifiable secret sharing, so Feldman's scheme (1987) is implemented here: in addition to the
shares, the dealer publishes its polynomial's coefficients times the curve's base point, with which anyone can check a share.

Flower's own masks are not used, because their generator has a 32-bit seed: a server can try all of them.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from unskew.errors import ConfigError

CHUNK = 1 << 22
"""Number of mask integers generated at once."""
FIELD = 2**384 - 2**128 - 2**96 + 2**32 - 1
"""Prime field of P-384."""
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973
"""Number of points of P-384, a prime; secrets and shares are integers below it."""
Point = tuple[int, int] | None
"""Affine coordinates of a point; None is the neutral element."""


def check_installed() -> None:
    """Validate that the ``cryptography`` package is installed.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError("Secure aggregation needs Flower here: pip install 'unskew[flower]'.") from error


def random_secret() -> int:
    """Return a random secret key."""
    return 1 + secrets.randbelow(ORDER - 1)


def public_key(secret: int) -> bytes:
    """Return the public key of a secret key: the point ``secret`` times the base point, uncompressed."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = ec.derive_private_key(secret, ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def shared_key(secret: int, other: bytes) -> bytes:
    """Return the 32-byte key that two sites share, from one's secret key and the other's public key.

    Args:
        secret: Secret key of one site.
        other: Public key of the other site.

    Raises:
        ValueError: If ``other`` is not a point of the curve.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), other)
    shared = ec.derive_private_key(secret, ec.SECP384R1()).exchange(ec.ECDH(), key)
    return _derived(shared, b"unskew agreement")


def _derived(key: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, None, purpose).derive(key)


def share_secret(secret: int, needed: int, count: int) -> tuple[list[int], list[bytes]]:
    """Share a secret (Shamir 1979) and commit to the shares (Feldman 1987).

    Args:
        secret: Integer below ``ORDER``.
        needed: Number of shares that determine the secret; fewer reveal nothing.
        count: Number of shares.

    Returns:
        The shares at positions 1 to ``count``, and the commitments, of which the first is the secret's public key.
    """
    terms = [secret, *(random_secret() for _ in range(needed - 1))]
    shares = [sum(term * pow(x, i, ORDER) for i, term in enumerate(terms)) % ORDER for x in range(1, count + 1)]
    return shares, [public_key(term) for term in terms]


def verify_share(share: int, position: int, commitments: Sequence[bytes]) -> bool:
    """Return whether the share at a position is the one that the dealer committed to.

    Args:
        share: The share.
        position: Position at which the polynomial was evaluated, from 1.
        commitments: Commitments of the dealer.
    """
    total: Point = None
    for commitment in reversed(commitments):
        total = _add(_times(position, total), decode_point(commitment))
    return 0 < share < ORDER and total is not None and decode_point(public_key(share)) == total


def combine_shares(shares: Mapping[int, int]) -> int:
    """Recover the secret from at least ``needed`` of its shares, by position."""
    total = 0
    for x, share in shares.items():
        for other in shares:
            if other != x:
                share = share * other * pow(other - x, -1, ORDER) % ORDER
        total += share
    return total % ORDER


def decode_point(encoded: bytes) -> Point:
    """Decode a public key or commitment, an uncompressed point.

    Args:
        encoded: Bytes of the point.

    Raises:
        ValueError: If the point is not on the curve.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    numbers = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), encoded).public_numbers()
    return numbers.x, numbers.y


def _add(one: Point, other: Point) -> Point:
    """Add two points of P-384. The points are public, so the running time does not need to be constant."""
    if one is None or other is None:
        return other if one is None else one
    (x, y), (u, w) = one, other
    if x == u and (y + w) % FIELD == 0:
        return None
    slope = (3 * x * x - 3) * pow(2 * y, -1, FIELD) if one == other else (w - y) * pow(u - x, -1, FIELD)
    z = (slope * slope - x - u) % FIELD
    return z, (slope * (x - z) - y) % FIELD


def _times(factor: int, point: Point) -> Point:
    """Multiply a point by a small positive integer."""
    total: Point = None
    for bit in bin(factor)[2:]:
        total = _add(total, total)
        if bit == "1":
            total = _add(total, point)
    return total


def seal(key: bytes, plain: bytes) -> bytes:
    """Encrypt and authenticate a message.

    Args:
        key: Key, 32 bytes.
        plain: Message.
    """
    from cryptography.fernet import Fernet

    return Fernet(base64.urlsafe_b64encode(key)).encrypt(plain)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Decrypt and verify a message of ``seal``.

    Args:
        key: Key, 32 bytes.
        sealed: Encrypted message.

    Raises:
        ValueError: If the message was encrypted with another key, or modified.
    """
    from cryptography.fernet import Fernet, InvalidToken

    try:
        return Fernet(base64.urlsafe_b64encode(key)).decrypt(sealed)
    except InvalidToken as error:
        raise ValueError("the message was encrypted with another key, or modified") from error


def mask_stream(key: bytes | int, size: int) -> Iterator[np.ndarray]:
    """Yield ``size`` pseudorandom 64-bit integers in arrays of at most ``CHUNK``; use a key for one mask only.

    Args:
        key: Key, 32 bytes, or a secret integer.
        size: Number of integers.

    Yields:
        Arrays of 64-bit integers.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    derived = _derived(key.to_bytes(48) if isinstance(key, int) else key, b"unskew mask")
    cipher = Cipher(algorithms.AES(derived), modes.CTR(bytes(16))).encryptor()
    for start in range(0, size, CHUNK):
        yield np.frombuffer(cipher.update(bytes(8 * min(CHUNK, size - start))), np.uint64)


def apply_mask(into: np.ndarray, stream: Iterator[np.ndarray], add: bool) -> None:
    """Add a mask to 64-bit integers, or subtract it, modulo 2**64.

    Args:
        into: Integers to change in place, uint64.
        stream: Arrays of the mask.
        add: Whether to add the mask instead of subtracting it.
    """
    at = 0
    for block in stream:
        part = into[at : at + len(block)]
        (np.add if add else np.subtract)(part, block, out=part)
        at += len(block)
