"""Names of published compositions: the same runs as the compositions that they stand for."""

import pytest
import torch
from support.batch_loop import run
from support.running import call

from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.registry import COMPOSITIONS, METHODS, method
from unskew.tuning.spaces import split_expression


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_name_is_its_composition(name):
    expression, _ = COMPOSITIONS[name]
    assert name not in METHODS
    assert method(name).client == method(expression).client
    assert method(name).expression == name
    assert split_expression(f"{name}+topk") == [*split_expression(expression), ("topk", {})]
    larger = [run(f"{start}+fp16", rounds=2)[0].vector for start in (name, expression)]
    assert torch.equal(*larger)


def test_a_name_has_no_options_and_repeats_no_rule():
    with pytest.raises(ConfigError, match="fedspeed has no options: it stands for fedsam:rho"):
        method("fedspeed:rho=1")
    with pytest.raises(ConfigError, match="mofedsam has no options"):
        method("mofedsam", rho=1.0)
    with pytest.raises(MethodConflictError, match="scaffold appears twice"):
        method("fedgamma+scaffold")


def test_the_command_lists_the_names(capsys):
    out = call(capsys, "methods").out
    rows = {row["name"]: row for row in call(capsys, "methods", "--json").json()}
    for name, (expression, _) in COMPOSITIONS.items():
        assert name in out
        assert expression in out
        assert rows[name]["expression"] == expression
        filled = [slot for slot in ("client", "sync", "aggregate", "server") if getattr(method(name), slot)]
        assert rows[name]["slots"] == filled
        assert rows[name]["needs"] == "sum"
