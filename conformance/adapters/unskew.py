"""Adapter of unskew: ``unskew.run`` with a client rule that only observes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

import unskew
from conformance.problem import CLASSES, Array, Case, Trace
from unskew.simulation.sampler import Sampler

REQUIREMENTS: tuple[str, ...] = ()
SPELLINGS = {
    "fedavg": "fedavg",
    "fedprox": "fedprox:mu={mu}",
    "scaffold": "scaffold",
    "scaffold-1": "scaffold:option=I",
    "fedprox+scaffold": "fedprox:mu={mu}+scaffold",
    "scaffold+fedavgm": "scaffold+fedavgm:beta={beta}",
    "feddyn": "feddyn:alpha={alpha}",
    "fedcm": "fedcm:alpha={alpha}",
    "mimelite": "mimelite:beta={beta}",
    "fedsmoo": "fedsmoo:rho={rho},lam={lam}",
    "qfedavg": "qfedavg:q={q}",
    "pfedme": "pfedme:lam={lam},K={K},eta_p={eta_p},beta={beta},decay={decay}",
    "mime": "mime:beta=0",
    "mime-momentum": "mime:beta={beta}",
    "fednova": "fednova",
    "fedavgm": "fedavgm:beta={beta}",
    "fedadagrad": "fedadagrad:eta={eta},tau={tau}",
    "fedyogi": "fedyogi:eta={eta},tau={tau},beta2={beta2}",
    "fedadam": "fedadam:eta={eta},tau={tau},beta2={beta2}",
    "fedexp": "fedexp:epsilon={epsilon},evaluate=last",
    "fedsam": "fedsam:rho={rho}",
    "fedntd": "fedntd:beta={beta},tau={temperature}",
    "fedbuff": "fedbuff:buffer_size={size}",
    "ca2fl": "ca2fl:buffer_size={size}",
    "fedasync": "fedasync:alpha0={alpha},staleness=constant",
    "fedpvr": "fedpvr",
    "ditto": "ditto",
    "apfl": "apfl",
    "fedbn": "fedbn",
    "fedavg+ft": "fedavg+ft",
}
METHODS = tuple(SPELLINGS)


@dataclass(frozen=True)
class Onlooker(unskew.ClientRule):
    """Records the initial model of each round without changing anything."""

    name, summary, paper = "onlooker", "looks on", "-"
    seen: dict[int, Array] = field(default_factory=dict)

    def begin(self, ctx: unskew.Context) -> dict[str, torch.Tensor]:
        """Record the model of a client before its first step."""
        self.seen.setdefault(ctx.round, ctx.v_global.numpy().copy())
        return {}


def run(case: Case) -> Trace:
    """Run the case on the engine that trains one client after another."""
    problem = case.make()
    pairs = list(zip(problem.x, problem.y, strict=True))
    fed = unskew.Federation.from_arrays(pairs, test=pairs[0], classes=CLASSES, holdout=0)
    linear = nn.Linear(problem.x[0].shape[1], CLASSES, bias=False)
    nn.init.zeros_(linear.weight)
    onlooker = Onlooker()
    budget = {"local_epochs": 1, "batch_size": 1} if case.steps is None else {"local_steps": case.steps}
    result = unskew.run(
        fed,
        model=nn.Sequential(linear),
        method=[onlooker, SPELLINGS[case.method].format(**case.options)],
        **{"batch_size": max(problem.sizes), **budget},
        rounds=case.rounds,
        lr=case.lr,
        client_weighting=case.weights,
        participation=case.participation,
        precision="fp64",
        engine="inline",
        eval_every=case.rounds,
        eval_clients=0,
    )
    vectors = [onlooker.seen[t] for t in range(1, case.rounds)] + [result.vector.numpy()]
    sampler = Sampler(problem.clients, case.participation, 0)
    return Trace([v.reshape(problem.start().shape) for v in vectors], [sampler.draw(t) for t in range(case.rounds)])


def version() -> str:
    """Return the version of the library."""
    return unskew.__version__
