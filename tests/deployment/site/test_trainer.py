"""Replies of a site to a server that asks for more than the method does."""

from dataclasses import replace

import pytest
from support.sites import TINY, LoopLink, LoopPlace, crossed, deployed

from unskew.deployment.server import round_requests


class CuriousLink(LoopLink):
    """Sends each site a changed copy of every message that lets it train, and remembers the replies."""

    def __init__(self, sites, change):
        super().__init__(sites)
        self.change, self.replies = change, []

    def push(self, node, frame, round, seconds):
        if frame.kind == "train":
            config = {name: value for name, value in {**frame.config, **self.change}.items() if value is not None}
            self.replies.append(self.sites[node - 100].answer(crossed(replace(frame, config=config))))
        return super().push(node, frame, round, seconds)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("fedproto", {"report": True}),  # the site's own model
        ("fedproto", {"up": None}),
        ("fedrep", {"report": True}),  # its own head
        ("fedrep", {"up": None}),
        ("fedavg", {"report": True}),
    ],
)
def test_a_site_does_not_send_what_its_method_never_sends(method, change, monkeypatch, tmp_path):
    monkeypatch.setattr(round_requests, "POLL", 0.01)
    values = {**TINY, "model": "mlp", "method": method}
    place = LoopPlace(tmp_path, values)
    place.link = CuriousLink(place.sites, change)
    deployed(tmp_path, place, **values)
    assert len(place.link.replies) == 6
    for reply in place.link.replies:
        assert reply.kind == "refused"
        assert "never sends" in reply.config["reason"]
        assert not reply.arrays
