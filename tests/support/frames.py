"""Messages as bytes, and mutations of them: single bits, pieces, and values of the header."""

import json
import struct

from support.fuzzing import random_draws
from unskew.deployment.wire.frames import MAGIC, EncodedFrame, Frame

DEEP = b"[" * 3000 + b"]" * 3000
RAW = [
    *(b"null true false 0 1 -1 2 7 1.5 -0.0 1e400 -1e400 NaN Infinity -Infinity".split()),
    *(b"9223372036854775807 9223372036854775808 4294967296 1152921504606846976".split()),
    *(b"1" + b"0" * size for size in (30, 400, 5000)),
    *(b'"" "0" "a" "\\u0000" "\\ud800" "\\u001b[2J" "0:4,2:9" "../../x" "[]" "{}" "[[1]]" "float32" "uint8"'.split()),
    *(b'[] {} [0] [-1] [[]] [null] [1e400] {"a":1} ["a","float32",[1],4] [0,0,0,0,0,0,0,0,0]'.split()),
    *(b'"%s"' % (letter * 3000) for letter in (b"x", b"9")),
    DEEP,
]
"""Values that take the place of another one in a header."""
HOLE = "\ue000"


def to_bytes(frame):
    """Return header and body of a message."""
    encoded = EncodedFrame.of(frame)
    return encoded.header, encoded.body


def from_bytes(header, body):
    """Decode a message."""
    return EncodedFrame(header, body).decode()


def on_the_wire(header, body):
    """Return all bytes of a message."""
    return MAGIC + struct.pack("<QQ", len(header), len(body)) + header + body


class Mutator:
    """Draws mutations of given messages.

    Args:
        frames: Messages.
        seed: Seed of the draws in `make test`.
    """

    def __init__(self, frames: list[Frame], seed: int):
        self.dice = random_draws(seed)
        self.messages = [to_bytes(frame) for frame in frames]

    def draw(self):
        """Return header and body of a mutated message."""
        dice = self.dice
        header, body = dice.choice(self.messages)
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            kind = dice.random()
            if kind < 0.6:
                header = self.with_other_value(header)
            elif kind < 0.8:
                header = self.with_other_bytes(header)
            else:
                body = self.with_other_bytes(body)
        return header, body

    def with_other_bytes(self, data):
        """Flip a bit, or remove, repeat, insert or exchange a piece."""
        dice = self.dice
        at = dice.randrange(len(data) + 1)
        size = min(dice.choice((1, 2, 4, 8, 50)), len(data) - at)
        piece = data[at : at + size]
        other = dice.choice(
            (
                b"",
                piece * 2,
                bytes(byte ^ (1 << dice.randrange(8)) for byte in piece[:1]) + piece[1:],
                dice.randbytes(size),
                b"\xff" * size,
                b"\x00" * size,
            )
        )
        return data[:at] + other + data[at + size :]

    def with_other_value(self, header):
        """Replace, remove, repeat or rename one value of the header, at any depth."""
        dice = self.dice
        try:
            about = json.loads(header)
        except (ValueError, RecursionError):
            return self.with_other_bytes(header)
        places = [(about, key) for key in about] if isinstance(about, dict) else []
        for parent, key in places:
            value = parent[key]
            if isinstance(value, dict | list) and len(places) < 500:
                places += [(value, inner) for inner in (value if isinstance(value, dict) else range(len(value)))]
        if not places:
            return self.with_other_bytes(header)
        parent, key = dice.choice(places)
        way, raw = dice.random(), dice.choice(RAW)
        if way < 0.1:
            del parent[key]
        elif way < 0.2 and isinstance(parent, dict):
            parent[dice.choice(("x", "kind", f"{key}z", "\x1b"))] = parent.pop(key)
        elif way < 0.3 and isinstance(parent, list):
            parent.insert(key, parent[key])
        else:
            parent[key] = HOLE
        return json.dumps(about).encode().replace(json.dumps(HOLE).encode(), raw)
