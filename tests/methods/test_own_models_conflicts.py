"""Methods whose clients have models of their own, and send something else."""

import pytest
from support.batch_loop import run, two_layers

from unskew.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.* exchanges no model")


@pytest.mark.parametrize("name", ["fedamp", "fedgh", "fedproto", "fedtgp"])
def test_delays_are_rejected(name):
    with pytest.raises(ConfigError, match=r"network\.delay"):
        run(name, model=two_layers(), network={"delay": "fixed:1"})


@pytest.mark.parametrize("name", ["fedamp", "fedgh", "fedtgp"])
def test_secure_aggregation_is_rejected_if_the_server_reads_single_uploads(name):
    with pytest.raises(ConfigError, match="secure_aggregation"):
        run(name, model=two_layers(), secure_aggregation="required")
