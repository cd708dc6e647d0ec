import dataclasses
import inspect
from collections.abc import Sequence

import pytest
from support.federations import blobs

import unskew
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.load import federation_of
from unskew.data.spec import DataSpec, TextSpec


def test_an_experiment_says_its_data_in_one_object():
    config = experiment({"data": "digits", "clients": 3, "partition": "iid", "server_data": 100, "text": {"block": 64}})
    assert config.data_spec == DataSpec("digits", partition="iid", clients=3, server_data=100, text=TextSpec(block=64))
    assert {field.name for field in dataclasses.fields(DataSpec)} < set(Experiment.model_fields)
    assert Experiment().data_spec == DataSpec("digits")  # the same defaults


def test_texts_take_the_tokenizer_of_the_model_unless_one_is_named():
    assert experiment({"data": "sentences", "model": "hf:some/net"}).data_spec.text.tokenizer == "some/net"
    assert experiment({"data": "digits", "model": "hf:some/net"}).data_spec.text == TextSpec()
    named = experiment({"data": "sentences", "model": "hf:some/net", "text": {"tokenizer": "bytes"}})
    assert named.data_spec.text.tokenizer == "bytes"


def test_the_public_function_has_the_defaults_of_the_spec():
    defaults = {name: p.default for name, p in inspect.signature(unskew.load_federation).parameters.items()}
    for field in dataclasses.fields(DataSpec):
        if field.name not in ("data", "text", "clients"):
            assert defaults[field.name] == field.default, field.name
    assert TextSpec(tuple(defaults["text"]), defaults["tokenizer"], defaults["block"]) == TextSpec()


@pytest.mark.parametrize("seed", [0, 3])
def test_both_ways_give_the_same_federation(seed):
    options = {
        "partition": "dirichlet:1",
        "clients": 4,
        "holdout": 0.2,
        "reserve_test_samples": 20,
        "max_train_samples": 900,
    }
    public = unskew.load_federation("digits", seed=seed, **options)
    by_spec = federation_of(DataSpec("digits", **options), seed)
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
