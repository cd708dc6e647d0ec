import dataclasses
from collections.abc import Sequence

import pytest
from support.federations import blobs

import unskew
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, read_yaml, set_field
from unskew.data.load import federation_of
from unskew.data.spec import DataSpec, TextSpec
from unskew.errors import ConfigError
from unskew.protocol.training_config import Training


def test_an_experiment_says_its_data_in_one_object():
    config = experiment({"data": "digits", "clients": 3, "partition": "iid", "server_data": 100, "text": {"block": 64}})
    assert config.data_spec == DataSpec(
        data="digits", partition="iid", clients=3, server_data=100, text=TextSpec(block=64)
    )
    assert Experiment().data_spec == DataSpec()


def test_training_has_the_defaults_of_the_configuration():
    assert Experiment().training == Training(rounds=Experiment().rounds)


def test_texts_take_the_tokenizer_of_the_model_unless_one_is_named():
    assert experiment({"data": "sentences", "model": "hf:some/net"}).data_spec.text.tokenizer == "some/net"
    assert experiment({"data": "digits", "model": "hf:some/net"}).data_spec.text == TextSpec()
    named = experiment({"data": "sentences", "model": "hf:some/net", "text": {"tokenizer": "bytes"}})
    assert named.data_spec.text.tokenizer == "bytes"


@pytest.mark.parametrize("seed", [0, 3])
def test_spec_and_function_give_the_same_federation(seed):
    options = {
        "partition": "dirichlet:1",
        "clients": 4,
        "holdout": 0.2,
        "reserve_test_samples": 20,
        "max_train_samples": 900,
    }
    public = unskew.load_federation("digits", seed=seed, **options)
    by_spec = federation_of(DataSpec(data="digits", **options), seed)
    assert public.fingerprint == by_spec.fingerprint
    assert public.clients.x.equal(by_spec.clients.x)
    assert public.test[0].equal(by_spec.test[0])


def test_a_federation_is_shown_in_a_line_and_no_client_is_loaded_for_it():
    fed = blobs([6, 9])
    about = "classes=3, shape=(2, 6, 6), partition='given', task='classification'"
    assert str(fed) == repr(fed) == f"Federation(name='arrays', clients=2, samples=15, test=60, server=13, {about})"
    assert repr(fed.clients[1]) == "ClientData(id=1, samples=9, held_out=0)"

    class OnDisk(Sequence):
        def __len__(self):
            return 1_000_000

        def __getitem__(self, k):
            raise AssertionError("a client was loaded")

    assert "clients=1000000, test=60" in repr(dataclasses.replace(fed, clients=OnDisk()))


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [
        ("label: 3", "label", "3"),
        ("label: 2020-01-01", "label", "2020-01-01"),
        ('label: "yes"', "label", "yes"),
        ("label: 007", "label", "007"),
        ("label:", "label", None),
        ("label: ~", "label", None),
        ("features: [3, 1.0, 'on', null]", "features", ("3", "1.0", "on", "null")),
        ("exclude: 2", "exclude", ("2",)),
        ("split_by: 2", "split_by", "2"),
        ("text: {columns: [1, 2], block: 16}", "text", TextSpec(columns=("1", "2"), block=16)),
        ("text: 1", "text", TextSpec(columns=("1",))),
        ("seed: 010", "seed", 10),
        ("seed: 08", "seed", 8),
        ("seed: 1_000", "seed", 1000),
        ("seed: 0x10", "seed", 16),
        ("model_options: {label: 3}", "model_options", {"label": 3}),
        ("base_run: yes", "base_run", True),
    ],
)
def test_names_of_columns_are_read_as_written_and_numbers_as_decimals(written, field, value):
    assert getattr(experiment({"data": "table:t.csv", **read_yaml(written)}), field) == value
    values = {"data": "table:t.csv"}
    set_field(values, written.replace(":", "=", 1))
    assert getattr(experiment(values), field) == value


@pytest.mark.parametrize(
    "written", ["label: yes", "features: [age, on]", "split_by: no", "text: {columns: off}", "image: true"]
)
def test_true_and_false_as_the_name_of_a_column_must_be_quoted(written):
    with pytest.raises(ValueError, match="as true or false; write it in quotes if it is the name of a column"):
        read_yaml(written)
    with pytest.raises(ConfigError, match="write it in quotes"):
        set_field({}, written.replace(": ", "=", 1))


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ('features="a, mean"', ("a, mean",)),
        ('features="a, mean", b', ("a, mean", "b")),
        ('features=["a, mean", " b"]', ("a, mean", "b")),
        ("features=a,b", ("a", "b")),
        ("features='\"a, mean\"'", ("a, mean",)),
    ],
)
def test_names_with_commas_are_quoted_in_assignments(assignment, value):
    values = {"data": "table:t.csv"}
    set_field(values, assignment)
    assert experiment(values).features == value
