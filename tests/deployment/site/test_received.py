"""Data that a site received before the first round: they do not change in a run, and can be repaired."""

import pytest
import torch

from unskew.deployment.site.received import ReceivedData
from unskew.deployment.site.state import SiteStateLostError
from unskew.deployment.wire.tensor_codec import InvalidMessageError
from unskew.methods.registry import method


def received(folder):
    return ReceivedData(folder / "run" / "client-0", method("vhl").data).load()


def test_other_data_have_another_identity_and_damaged_ones_are_taken_again(tmp_path):
    first, other = {"x": torch.zeros(3)}, {"x": torch.ones(3)}
    data = received(tmp_path)
    data.take(0, {}, first, trained=False)
    before = data.identity, data.digest()
    assert (received(tmp_path).identity, received(tmp_path).digest()) == before
    data.take(0, {}, other, trained=False)
    assert data.identity != before[0]
    assert data.digest() != before[1]

    [path] = (tmp_path / "run" / "client-0").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:20])
    data = received(tmp_path)
    with pytest.raises(SiteStateLostError, match="when the run is resumed, the server sends them again"):
        data.applied(None)
    with pytest.raises(InvalidMessageError, match="has trained with other data"):
        data.take(0, {}, first, trained=True)
    data.take(0, {}, other, trained=True)
    assert received(tmp_path).common["vhl"]["x"].tolist() == [1, 1, 1]
