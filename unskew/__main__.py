"""``python -m unskew`` is the command ``unskew``."""

import os
import sys

# Python puts the folder one works in first; a file there that is called like a module of Python's own would be taken for it.
sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]

from unskew.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
