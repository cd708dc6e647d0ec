"""Methods whose clients have models of their own, and send something else."""

import pytest
from support.batch_loop import run, two_layers

import unskew
from unskew.errors import ConfigError, MethodConflictError

pytestmark = pytest.mark.filterwarnings("ignore:With .*, clients send")


@pytest.mark.parametrize("name", ["fedamp", "fedgh", "fedproto", "fedtgp"])
def test_delays_are_rejected(name):
    with pytest.raises(ConfigError, match=r"network\.delay"):
        run(name, model=two_layers(), network={"delay": "fixed:1"})


@pytest.mark.parametrize("name", ["fedamp", "fedgh", "fedtgp"])
def test_secure_aggregation_is_rejected_if_the_server_reads_single_uploads(name):
    with pytest.raises(ConfigError, match="secure_aggregation"):
        run(name, model=two_layers(), secure_aggregation="required")


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        ("fedproto", "clients send the mean features of their classes and receive common ones, but no model"),
        ("fedtgp", "clients send the mean features of their classes and receive common ones, but no model"),
        ("fedgh", "clients send the mean features of their classes and receive a head that the server trains on them"),
        ("fedamp", "clients send their own models to the server and receive mixtures of all clients' models"),
        ("fedfomo", "clients send their own models to the server and receive models of other clients"),
    ],
)
def test_warnings_and_errors_say_what_leaves_a_client_and_what_it_receives(name, exchange):
    with pytest.warns(UserWarning, match=f"With {name}, {exchange}"):
        result = run(name, model=two_layers(), rounds=1)[0]
    sent = result.summary["bytes_up"] / result.summary["clients"] / result.vector.element_size()
    assert (sent >= len(result.vector)) == ("their own models" in exchange)
    with pytest.raises(MethodConflictError, match=f"but with {name}, {exchange}"):
        unskew.method(f"{name}+topk")
    with pytest.raises(MethodConflictError, match=f"but with {name} clients send no such updates"):
        unskew.method(f"{name}+fedala")
