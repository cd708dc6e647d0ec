"""unskew, with the engine and the number of clients per group that it chooses by default."""

from __future__ import annotations

import sys

import numpy as np
import torch

from speed.peers.work import Ended, Work
from speed.speed import UnskewLoop
from speed.speed import federation_of as federation_of_images
from unskew import Federation
from unskew.data.federation import ArrayClients

REQUIREMENTS: tuple[str, ...] = ()
SETTING = "the defaults: `engine: auto`"


class Cohorts:
    """The cohorts of all libraries."""

    candidates = None

    def __init__(self, work: Work):
        self.work, self.size = work, len(work.cohorts[0])

    def draw(self, t: int, busy: frozenset[int]) -> list[int]:
        """Return the clients of a round."""
        return sorted(self.work.cohorts[t])


def federation_of(work: Work) -> Federation:
    """Return the clients' data as a federation."""
    if work.workload.images:
        return federation_of_images(work.x, work.y, work.clients, work.per_client)
    x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
    offsets = np.arange(work.clients + 1) * work.per_client
    return Federation(ArrayClients(x, y, offsets, offsets[1:]), test=(x[:100], y[:100]), classes=10)


def main(folder: str) -> None:
    """Run rounds as long as there are turns."""
    work = Work(folder)
    fed = federation_of(work)
    loop = UnskewLoop(
        fed, len(work.cohorts[0]), work.steps, work.batch, work.lr, 1, "auto", work.workload.unskew_model,
        clients_per_group="auto", model_options=work.workload.unskew_options,
    )  # fmt: skip
    start = work.start()
    assert [part.shape for part in start] == [tuple(shape) for shape in loop.server.setup.spec.shapes]
    loop.server.state.server_rule["v"] = torch.cat([torch.from_numpy(part).flatten() for part in start])
    loop.sampler = Cohorts(work)  # type: ignore[assignment]
    try:
        for t in range(len(work.cohorts)):
            work.begin()
            loop.round(t)
            work.end()
    except Ended:
        pass
    work.finish([loop.server.state.v.numpy()])
    loop.close()


if __name__ == "__main__":
    main(sys.argv[1])
