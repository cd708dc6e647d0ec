"""Options that scripts read are options that their parsers define."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    path.relative_to(ROOT)
    for folder in ("speed", "conformance")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ".venv" not in path.parts and "parse_args()" in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_option_that_is_read_is_defined(script):
    text = (ROOT / script).read_text()
    read = set(re.findall(r"\b(?:args|arguments|options)\.(\w+)", text))
    defined = {name.replace("-", "_") for name in re.findall(r"add_argument\(\s*\"(?:--)?([\w-]+)\"", text)}
    assert read
    assert read - {"get"} <= defined
