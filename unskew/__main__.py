"""Entry point of ``python -m unskew``, equivalent to the command ``unskew``."""

import os
import sys

# Python puts the working directory first; a file there with the name of a standard module would shadow that module.
sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]

from unskew.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
