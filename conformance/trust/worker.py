"""Run one library in its own interpreter: ``python -m conformance.trust.worker NAME OUT``."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main(name: str, out: str) -> None:
    """Write the version and the outputs of a library.

    Args:
        name: Name of the adapter.
        out: File to write.
    """
    library = importlib.import_module(f"conformance.trust.adapters.{name}")
    Path(out).write_text(json.dumps({"version": library.version(), "values": library.run()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
