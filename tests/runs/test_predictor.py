"""Predictors in notebooks: the inputs that they need, with all text escaped."""

import warnings

import pytest
import torch
from support.federations import QUICK, blobs
from support.html_cells import Cells

import unskew
from unskew.errors import ConfigError
from unskew.runs.input_spec import InputColumn, InputSpec
from unskew.runs.predictor import Predictor


def shown(**inputs):
    spec = InputSpec(task="classification", classes=2, class_names=("<b>", "yes"), **inputs)
    return Cells(Predictor(torch.nn.Linear(2, 2), spec, torch.float32)._repr_html_())


def test_a_predictor_shows_its_columns_and_outputs():
    columns = (InputColumn(name="age", kind="number"), InputColumn(name="ward", kind="category", values=("a", "b&c")))
    page = shown(shape=(2,), kind="float", columns=columns, features=("ward", "age"))
    assert page.paragraphs == ["Model with 6 parameters, task classification, outputs: <b>, yes."]
    assert page.rows == [["input", "kind", "values"], ["age", "number", ""], ["ward", "category", "a, b&c"]]


def test_a_predictor_of_images_shows_their_shape():
    assert shown(shape=(1, 8, 8), kind="uint8").rows == [["input", "kind"], ["1 x 8 x 8", "uint8"]]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ["local", "fedproto", "fedfomo"])
def test_a_result_without_a_global_model_predicts_only_for_clients(method):
    fed = blobs([9, 8])
    result = unskew.run(fed, method=QUICK.get(method, method), model="mlp", rounds=1, local_steps=1, engine="inline")
    with pytest.raises(ConfigError, match="trains no global model, only one model for each client"):
        result.predict(fed.test[0])


def test_a_result_says_which_part_of_the_global_model_no_client_sends():
    fed = blobs([9, 8])
    given = {"model": "mlp", "rounds": 1, "local_steps": 1, "engine": "inline"}
    with pytest.warns(RuntimeWarning, match="With fedrep, .* of the parameters stay at the clients") as caught:
        unskew.run(fed, method="fedrep", **given).predict(fed.test[0])
    assert [w.filename for w in caught if w.category is RuntimeWarning] == [__file__]
    result = unskew.run(fed, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(result.predict(fed.test[0])) == len(fed.test[1])
