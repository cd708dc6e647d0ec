"""PNG files with 16 bits per channel, which pillow does not write."""

import struct
import zlib

import numpy as np

COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""PNG color type by number of channels: gray, gray with alpha, color, and color with alpha."""


def deep_png(pixels: np.ndarray) -> bytes:
    """Encode pixels ``[H, W, C]`` from 0 to 65535."""
    height, width, channels = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, COLOR_TYPES[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels.astype(">u2"))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
