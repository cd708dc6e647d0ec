"""Entry point of ``python -m unskew``, equivalent to the command ``unskew``."""

import os
import sys

# Python puts the working directory first; a file there with the name of a standard module would shadow that module.
try:
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
except FileNotFoundError:
    sys.exit("unskew: the working directory was removed. Change to another one.")

from unskew.cli.app import main

if __name__ == "__main__":
    main()
