"""How far the clients' gradients disagree as training goes on: what Fedssyn's theory is about, round by round."""

from __future__ import annotations

from dataclasses import replace

from unskew.data.federation import Federation
from unskew.measures.base import Diagnosis
from unskew.measures.heterogeneity import Scope, measure
from unskew.measures.probe import Probe
from unskew.simulation.server import Server


class Gradients(Diagnosis):
    """Dissimilarity and noise at the server's model after a round.

    ``gradients/zeta2``, ``gradients/norm2`` (of the mean gradient), ``gradients/sigma2_mean`` and ``gradients/sigma2_max``;
    see ``unskew.measures.heterogeneity``. The clients' data are those they train on, so with a method that adds synthetic
    data these are the quantities of the mixture. Of more than 100 clients, 100 are looked at, and 1000 samples of each,
    the same in every round.

    Args:
        server: Of the run.
        federation: What its clients train on.
    """

    def __init__(self, server: Server, federation: Federation):
        super().__init__(server)
        self.federation = federation
        self.scope = replace(Scope(), curvature=False, seed=server.seed)

    def figures(self) -> dict[str, float]:
        """The four figures."""
        server = self.server
        probe = Probe(server.spec, self.federation.objective, self.federation, server.v, server.b)
        figures = measure(probe, self.federation, self.scope).figures
        names = {"zeta2": "zeta2", "norm2": "gradient2", "sigma2_mean": "sigma2_mean", "sigma2_max": "sigma2_max"}
        return {f"gradients/{name}": float(figures[key] or 0.0) for name, key in names.items()}
