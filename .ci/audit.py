"""Check pinned versions for known vulnerabilities: ``python .ci/audit.py FILE...``, with pip-audit next to Python.

Without a network, or with a package index that has no vulnerability data, it reports that nothing was checked.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

AWAY = (
    "ConnectionError",
    "Connection refused",
    "Max retries",
    "Timeout",
    "timed out",
    "Temporary failure",
    "ProxyError",
)


def looked_up(file: Path) -> tuple[str, str | None]:
    """Return the report of pip-audit on a file, or the reason why there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [
            str(Path(sys.executable).parent / "pip-audit"),
            "--no-deps",
            "--disable-pip",
            "--progress-spinner",
            "off",
        ]
        asked = [*command, "--requirement", str(file), "--format", "json", "--output", str(report)]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        return (report.read_text(), None) if report.is_file() else ("", done.stderr[-2000:])


def verdict(file: str, report: str, problem: str | None) -> tuple[int, str]:
    """Return an exit status and a message."""
    if problem is not None:
        if any(word in problem for word in AWAY):
            return 0, f"pip-audit: {file} was NOT CHECKED, because the network is away."
        return 2, f"pip-audit failed on {file}: {problem.strip() or 'it says nothing'}"
    found = json.loads(report)["dependencies"]
    known = [one for one in found if "skip_reason" not in one]
    faults = [f"{one['name']} {one['version']}: {fault['id']}" for one in known for fault in one["vulns"]]
    if faults:
        return 1, f"pip-audit: known faults in {file}: {'; '.join(faults)}"
    if not known:
        return 0, f"pip-audit: {file} was NOT CHECKED: the index here knows nothing of faults."
    left = f", {len(found) - len(known)} could not be looked up" if len(found) > len(known) else ""
    return 0, f"pip-audit: no known faults in {len(known)} versions of {file}{left}."


def main(files: list[str]) -> int:
    """Audit the files and return the worst exit status."""
    worst = 0
    for file in files:
        status, line = verdict(file, *looked_up(Path(file)))
        print(line)
        worst = max(worst, status)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
