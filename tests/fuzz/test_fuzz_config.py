"""Configurations as text: fields with any values, nested or written wrongly."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_names import fields_with_values
from support.fuzzing import amounts, fuzz, mutated, nested, texts

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_yaml, read_yaml
from unskew.runs.run import run_experiment

pytestmark = pytest.mark.fuzz


@st.composite
def configurations(draw):
    """The text of a configuration."""
    values = {}
    for name, value in draw(st.lists(fields_with_values(), max_size=3)):
        *sections, last = name.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place.get(section, {}), dict) else {}
        place[last] = value
    if draw(st.integers(0, 9)) == 0:
        values = draw(nested)
    elif draw(st.integers(0, 9)) == 0:
        values[draw(texts | st.none() | st.integers())] = draw(nested)
    text = yaml.safe_dump(values, default_flow_style=draw(st.booleans()), allow_unicode=draw(st.booleans()))
    return draw(mutated(st.just(text))) if draw(st.integers(0, 3)) == 0 else text


@amounts(40, 6000)
def test_configurations(box, examples):
    """What is read is written so that it means the same again."""

    def read_and_written():
        found = experiment(load_yaml(box.here / "config.yaml"))
        assert experiment(read_yaml(found.to_yaml())) == found

    @fuzz(examples)
    @given(configurations())
    def check(text):
        (box.here / "config.yaml").write_bytes(text.encode(errors="surrogatepass"))
        box.python(read_and_written)

    check()


@pytest.mark.usefixtures("unstarted")
@amounts(15, 1000)
def test_runs_of_configurations(box, examples):
    """Up to the place where training would begin."""
    sure = {"data": "table:tiny.csv", "label": "label", "clients": 3, "partition": "iid", "model": "logistic"}

    @fuzz(examples)
    @given(st.lists(fields_with_values(), max_size=2), st.booleans())
    def check(pairs, alone):
        values = sure | {name: value for name, value in pairs if name in Experiment.model_fields}
        box.python(lambda: run_experiment(experiment(values), out="new/run"))

    check()
