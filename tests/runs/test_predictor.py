"""Predictors in notebooks: the inputs that they need, with all text escaped."""

import torch
from support.html_cells import Cells

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
