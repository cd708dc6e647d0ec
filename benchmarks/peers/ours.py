"""unskew, with worker processes and as many clients together as it finds by a trial."""

from __future__ import annotations

import sys

import torch

from benchmarks.baselines import CnnA
from benchmarks.peers.work import Ended, Work
from benchmarks.speed import UnskewLoop, federation_of

REQUIREMENTS: tuple[str, ...] = ()
SETTING = "processes, one for each core, `clients_per_group: auto`"


class Cohorts:
    """The cohorts that all libraries have."""

    def __init__(self, work: Work):
        self.work, self.size = work, len(work.cohorts[0])

    def draw(self, t: int, busy: frozenset[int]) -> list[int]:
        """The clients of a round."""
        return sorted(self.work.cohorts[t])


def main(folder: str) -> None:
    """Rounds as long as there are turns."""
    work = Work(folder)
    fed = federation_of(work.x, work.y, work.clients, work.per_client)
    loop = UnskewLoop(
        fed, len(work.cohorts[0]), work.steps, work.batch, work.lr, 1, "processes", clients_per_group="auto"
    )
    vector = torch.cat([torch.from_numpy(part).flatten() for part in work.start()])
    assert [tuple(p.shape) for p in CnnA().parameters()] == [tuple(s) for s in loop.server.spec.shapes]
    loop.server.state["v"] = vector
    loop.sampler = Cohorts(work)  # type: ignore[assignment]
    try:
        for t in range(len(work.cohorts)):
            work.begin()
            loop.round(t)
            work.end()
    except Ended:
        pass
    work.finish([loop.server.v.numpy()])
    loop.close()


if __name__ == "__main__":
    main(sys.argv[1])
