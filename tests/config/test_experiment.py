"""Fields of the configuration that name several models."""

import pytest

from unskew.config.loader import experiment
from unskew.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "options", "stored"),
    [
        (["cnn", "mlp"], None, {}),
        ("cnn,mlp", {"norm": "group"}, {"norm": "group"}),
        (["cnn", {"name": "mlp", "hidden": [84]}], None, ({}, {"hidden": [84]})),
        (["cnn", "mlp"], [{}, {"hidden": [84]}], ({}, {"hidden": [84]})),
    ],
)
def test_a_list_of_models_is_stored_as_names_and_options(model, options, stored):
    given = {} if options is None else {"model_options": options}
    config = experiment({"model": model, "method": "local", **given})
    assert (config.model, config.model_options) == ("cnn,mlp", stored)
    assert experiment(config.model_dump(mode="json")) == config


def test_a_list_of_one_model_is_that_model():
    config = experiment({"model": [{"name": "mlp", "hidden": [84]}]})
    assert (config.model, config.model_options) == ("mlp", {"hidden": [84]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": []}, "must not be empty"),
        ({"model": ["cnn,mlp", "cnn"]}, "each entry of a list of models must be one name"),
        ({"model": ["cnn", 3]}, "each entry of a list of models must be one name"),
        ({"model": ["cnn", {"hidden": [3]}]}, "a mapping must contain the model"),
        ({"model": "cnn,mlp", "model_options": [{}]}, "a list of 1 for 2 models"),
        ({"model": [{"name": "mlp", "hidden": [3]}, "cnn"], "model_options": {"norm": "group"}}, "either in the list"),
    ],
)
def test_lists_that_do_not_fit_are_rejected(values, message):
    with pytest.raises(ConfigError, match=message):
        experiment(values)
