"""Cryptography of the standard library in the place of Flower's, which is not installed here: no secrecy."""

import hashlib
import json
import secrets

import numpy as np

PRIME = (1 << 521) - 1


class Toys:
    def pair(self):
        secret = secrets.token_bytes(32)
        return secret, self.public(secret)

    def public(self, secret):
        return pow(3, int.from_bytes(secret), PRIME).to_bytes(66)

    def agree(self, secret, public):
        return hashlib.sha256(pow(int.from_bytes(public), int.from_bytes(secret), PRIME).to_bytes(66)).digest()

    def shares(self, secret, threshold, count):
        terms = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
        return [
            json.dumps([x, sum(term * x**power for power, term in enumerate(terms)) % PRIME]).encode()
            for x in range(1, count + 1)
        ]

    def combine(self, shares):
        points, total = [json.loads(share) for share in shares], 0
        for x, y in points:
            for other, _ in points:
                if other != x:
                    y = y * other * pow(other - x, -1, PRIME) % PRIME
            total += y
        found = total % PRIME
        if found >> 256:
            raise ValueError("these are too few shares")
        return found.to_bytes(32)

    def seal(self, key, plain):
        pad = hashlib.shake_256(key).digest(len(plain))
        return hashlib.sha256(key + plain).digest() + bytes(a ^ b for a, b in zip(plain, pad, strict=True))

    def unseal(self, key, sealed):
        pad = hashlib.shake_256(key).digest(len(sealed) - 32)
        plain = bytes(a ^ b for a, b in zip(sealed[32:], pad, strict=True))
        if hashlib.sha256(key + plain).digest() != sealed[:32]:
            raise ValueError("changed")
        return plain

    def stream(self, key, size):
        yield np.frombuffer(hashlib.shake_256(b"mask" + key).digest(4 * size), np.uint32)
