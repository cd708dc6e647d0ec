"""The script of a report's tables, in Node: what "Copy as CSV" writes."""

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import unskew

SCRIPT = Path(unskew.__file__).parent / "reporting" / "templates" / "tables.js"
TEXTS = [
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\tx",
    "\rx",
    "＝1",
    'a "b", c',
    "red",
    "-",
    "-0.5",
    "1e-3",
    "",
]
SAFE = ["'=1+1", "'+cmd|' /C calc'!A0", "'-2+3", "'@SUM(A1)", "'\tx", "'\rx", "'＝1", *TEXTS[7:]]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_no_copied_cell_is_a_formula():
    source = SCRIPT.read_text(encoding="utf-8")
    body = source[source.index("  function csv(table)") : source.index("  function latex(table)")]
    program = f"""
    const texts = {json.dumps(TEXTS)};
    const cell = (text) => ({{ dataset: {{}}, textContent: text }});
    const titles = () => texts;
    const shownRows = () => [{{ cells: texts.map(cell) }}];
    {body}
    process.stdout.write(JSON.stringify(csv(null)));
    """
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    rows = list(csv.reader(io.StringIO(json.loads(done.stdout), newline="")))
    assert rows == [SAFE, SAFE]
