"""Run several commands of Flower's command line in one process.

``python -m unskew.deployment.flower.app.flwr_batch '[["ls"]]'``.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points


def main(commands: list[list[str]]) -> None:
    """Run the commands in turn; the first one that fails ends the process with its exit code."""
    (program,) = entry_points(group="console_scripts", name="flwr")
    run = program.load()
    for command in commands:
        sys.argv = ["flwr", *command]
        try:
            run()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
