"""The public interface changes only on purpose; see docs/compatibility.md."""

import copy
import json

from support.public_api import FILE, breaking, interface

COMMAND = "PYTHONPATH=tests python -m support.public_api"


def test_the_public_interface_is_the_recorded_one():
    recorded, now = json.loads(FILE.read_text()), json.loads(json.dumps(interface()))
    problems = breaking(recorded, now)
    assert not problems, (
        f"These changes break code of users: {problems}. Deprecate first, as docs/compatibility.md says; if the change is "
        f"necessary, describe it in CHANGELOG.md and run: {COMMAND}"
    )
    del recorded["methods"], now["methods"]  # recorded at a release
    assert recorded == now, f"The interface has grown. Record it with: {COMMAND}"


def test_breaking_changes_are_detected_and_additions_are_not():
    old = {"python": {"run": {"()": ["data", "seed*"]}}, "commands": {"run": ["--out", "--seed"]}, "plugins": ["a"]}
    for change, expected in [
        (lambda new: new["python"].pop("run"), "/python/run is gone"),
        (lambda new: new["python"]["run"].update({"()": ["data"]}), "other parameters"),
        (lambda new: new["python"]["run"].update({"()": ["data", "seed"]}), "requires seed"),
        (lambda new: new["python"]["run"].update({"()": ["data", "seed*", "more"]}), "requires more"),
        (lambda new: new["python"]["run"].update({"()": ["seed*", "data"]}), "other parameters"),
        (lambda new: new["commands"]["run"].remove("--seed"), "/commands/run/--seed is gone"),
        (lambda new: new["plugins"].clear(), "/plugins/a is gone"),
    ]:
        new = copy.deepcopy(old)
        change(new)
        problems = breaking(old, new)
        assert any(expected in text for text in problems), problems
    more = copy.deepcopy(old)
    more["python"]["run"]["()"] = ["data", "seed*", "out*"]
    more["python"]["tune"] = {"()": []}
    more["commands"]["run"].append("--json")
    assert breaking(old, more) == []
