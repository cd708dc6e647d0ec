"""Pictures of reports in the documentation: ``python -m speed.screenshots`` runs what they show and takes them again.

``report.png`` shows the report of the demo, ``hospitals.png`` that of ``examples/hospitals.py``. Takes about a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from speed.demo import ASSETS, OUT, ROOT, run_demo, take_screenshot


def main() -> None:
    """Run the demo and the example of the hospitals, and take screenshots of their reports."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_demo(folder)
        take_screenshot(folder / OUT / "report.html", ASSETS / "report.png")
        example = [sys.executable, ROOT / "examples" / "hospitals.py", "--out", "hospitals", "--seeds", "3"]
        for command in (example, [sys.executable, "-m", "unskew", "report", "hospitals"]):
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        take_screenshot(folder / "hospitals" / "report.html", ASSETS / "hospitals.png", size=(1280, 1000))
    print("report.png and hospitals.png in docs/assets were taken again.")


if __name__ == "__main__":
    main()
