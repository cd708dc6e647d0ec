"""Run several commands of Flower's command line in one process.

``python -m unskew.deployment.flower.app.flwr_batch '[["ls"]]'``.
"""

from __future__ import annotations

import json
import sys

from flwr.cli.app import app


def main(commands: list[list[str]]) -> None:
    """Run the commands in turn; the first one that fails ends the process with its exit code."""
    for command in commands:
        try:
            app(command, prog_name="flwr", standalone_mode=False)
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
