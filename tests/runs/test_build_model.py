"""Models of a run that are passed in Python, next to the options of its configuration."""

import pytest
from support.fuzz_folder import TINY, federation

import unskew
from unskew.config.loader import experiment
from unskew.errors import ConfigError
from unskew.runs.build_model import initial_spec

SEVERAL = {
    "data": "digits",
    "model": "mlp,mlp",
    "model_options": [{"hidden": [3]}, {"hidden": [4]}],
    "method": "fedproto",
}


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ([], "The list of models is empty. Pass one model"),
        (["mlp"] * 3, "model_options is a list of 2 for 3 models. Pass as many"),
    ],
)
def test_models_of_another_number_than_their_options_are_rejected(models, reason):
    config = experiment(SEVERAL)
    assert len(initial_spec(config, federation(), None, unskew.method("fedproto")).others) == 1
    with pytest.raises(ConfigError, match=reason):
        initial_spec(config, federation(), models, unskew.method("fedproto"))


def test_resume_rejects_an_empty_list_of_models(tmp_path):
    unskew.run(federation(), **TINY, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="The list of models is empty"):
        unskew.resume(tmp_path / "run", federation=federation(), model=[], rounds=2)
