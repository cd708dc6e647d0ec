"""Oort: clients with large losses and short times, next to clients that have not taken part yet.

Lai, Zhu, Madhyastha, Chowdhury, "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021,
arXiv:2010.06081. In round ``t`` (from 1), with the utility ``U_k``, the time ``s_k`` and the round ``t_k`` of client ``k``'s
last participation, and a preferred time ``T``::

    U_k     = n_k sqrt(mean loss^2)
    score_k = ((min(U_k, U_clip) - min U) / (max U - min U) + sqrt(0.1 log t / t_k)) (T / s_k)^(alpha [s_k > T])

A share ``max(explore decay^(t - 1), least)`` of the cohort are clients that have never taken part, as long as there are some.
The others are drawn with probabilities proportional to their scores, from the clients whose score is at least ``cutoff``
times the smallest score that would be chosen without randomness. ``U_clip`` is a quantile of the utilities. ``T`` is a
percentile of the clients' times, which rises by ``pace`` whenever the summed utilities of ``window`` rounds stay within 10 %
of those of the rounds before. If the difference is at least five times those, it falls by ``pace``, but not below ``pace``.

Formulas and constants are those of the authors' code (``thirdparty/oort/oort.py`` of SymbioticLab/FedScale), with these
differences:

- The cutoff is the paper's. There, ``cutoff`` is 0.05, relative to the best client that would not be chosen, and clients with
  smaller scores are left out only beyond ten times as many as are drawn.
- The mean of the squared losses is the square of the mean training loss, which is what clients report.
- The share of clients that have never taken part is ``explore`` in the first round. There, it decays before it is first used,
  so that it is ``explore decay``. Its number of clients is rounded at random, there down.
- Clients that have never taken part are drawn uniformly; there, larger and faster ones are preferred.
- ``T`` is a percentile of the times of clients whose time is known, interpolated. There, it is one of the times of all
  registered clients, which the server knows before they take part.
- ``min U``, ``max U`` and the quantile, which is interpolated, are over all clients that have taken part. There, they are
  over all clients that can be drawn, with initial utilities of those that have not taken part, and ``min U`` is multiplied by
  0.999.
- Clients that took part often are not excluded.

As there, a client whose update is lost counts as having taken part: it gets the mean utility of the updates that arrived in
the round, and the time after which its own would have arrived. Only simulated time has times of clients; without it, all
scores lack the last factor, and ``alpha``, ``percentile``, ``pace`` and ``window`` have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.protocol.client_sampler import ClientReport, ClientSampler, CohortDraws
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors
from unskew.protocol.round_plan import RoundPlan

Share = Annotated[float, Field(ge=0, le=1)]
Percentage = Annotated[float, Field(gt=0, le=100)]


@dataclass(frozen=True)
class Oort(ClientSampler):
    """Prefers clients with large losses and short times.

    Attributes:
        alpha: Exponent of the penalty of clients that are slower than the preferred time.
        explore: Share of the cohort for clients that have never taken part, in the first round.
        decay: Factor of this share per round.
        least: Smallest value of this share.
        clip: Quantile above which utilities are clipped.
        cutoff: Score, relative to that of the last client among the best, from which clients may be drawn.
        percentile: Percentile of the times that is preferred at first; 100 for no preference.
        pace: Increase and decrease of the percentile.
        window: Number of rounds after which the percentile may change.
    """

    name: ClassVar[str] = "oort"
    reads_reports: ClassVar[bool] = True
    timed_options: ClassVar[tuple[str, ...]] = ("alpha", "percentile", "pace", "window")

    alpha: Annotated[float, Field(ge=0)] = 2.0
    explore: Share = 0.9
    decay: Annotated[float, Field(gt=0, le=1)] = 0.98
    least: Share = 0.3
    clip: Share = 0.9
    cutoff: Share = 0.95
    percentile: Percentage = 30.0
    pace: Percentage = 5.0
    window: Annotated[int, Field(ge=1, le=100_000)] = 20

    def init(self, info: FederationInfo) -> Tensors:
        """Return the state of clients that have never taken part.

        Its entries are the utility, the time in seconds (NaN if unknown) and the round (0 for none) of each client, ``[K]``,
        the mean utility of the known clients in each of the last rounds, ``[2 window]``, and the percentile.
        """
        zeros = torch.zeros(info.clients, dtype=torch.float64)
        return {
            "utility": zeros,
            "seconds": torch.full_like(zeros, math.nan),
            "last": torch.zeros(info.clients, dtype=torch.int64),
            "history": torch.zeros(2 * self.window, dtype=torch.float64),
            "percentile": torch.tensor(self.percentile, dtype=torch.float64),
        }

    def scores(self, state: Tensors, round: int) -> np.ndarray:
        """Return the scores of the clients that have taken part, ``[K]``; 0 for the others.

        Args:
            state: State of the sampler.
            round: Number of the round, from 0.
        """
        utility, seconds, last = (state[name].numpy() for name in ("utility", "seconds", "last"))
        known = np.flatnonzero(last)
        scores = np.zeros(len(last))
        if not len(known):
            return scores
        own = utility[known]
        span = max(own.max() - own.min(), 1e-12)
        gain = (np.minimum(own, np.quantile(own, self.clip)) - own.min()) / span
        scores[known] = gain + np.sqrt(0.1 * math.log(round + 1) / last[known])
        times = seconds[~np.isnan(seconds)]
        percentile = float(state["percentile"])
        if len(times) and percentile < 100:
            preferred = np.percentile(times, percentile)
            slow = np.flatnonzero(seconds > preferred)  # False for NaN
            scores[slow] *= (preferred / seconds[slow]) ** self.alpha
        return scores

    def draw(self, state: Tensors, round: int, idle: np.ndarray, plan: RoundPlan, draws: CohortDraws) -> np.ndarray:
        """Draw clients that have never taken part, and known ones by their scores."""
        last = state["last"].numpy()
        known, fresh = idle[last[idle] > 0], idle[last[idle] == 0]
        share = max(self.explore * self.decay**round, self.least)
        size = min(plan.cohort, len(idle))
        num_explored = int(share * size + draws.generator.random())  # the share on average, also in small cohorts
        num_known = min(size - num_explored, len(known))
        num_fresh = min(size - num_known, len(fresh))
        num_known = size - num_fresh
        explored = draws.generator.choice(fresh, size=num_fresh, replace=False)
        if not num_known:
            return explored
        scores = np.maximum(self.scores(state, round)[known], 1e-12)
        limit = self.cutoff * np.sort(scores)[-num_known]
        pool = known[scores >= limit]
        weights = scores[scores >= limit]
        exploited = draws.generator.choice(pool, size=num_known, replace=False, p=weights / weights.sum())
        return np.concatenate([explored, exploited])

    def record(self, state: Tensors, round: int, reports: Sequence[ClientReport]) -> Tensors:
        """Note utilities and times; raise the percentile if the utility no longer changes, lower it if it changes much.

        Clients whose updates are lost get the mean utility of the updates that arrived, 0 if none did.
        """
        utility, seconds, last = (state[name].clone() for name in ("utility", "seconds", "last"))
        utilities = []
        arrived = []
        for report in reports:
            if report.seconds is not None:
                seconds[report.client] = report.seconds
            if report.loss is None:
                continue
            # A loss that is not a number counts as smallest.
            value = report.num_samples * abs(report.loss) if math.isfinite(report.loss) else 0.0
            if last[report.client] > 0:
                utilities.append(value)
            arrived.append(value)
            utility[report.client] = value
            last[report.client] = round + 1
        for report in reports:
            if report.lost:
                utility[report.client] = float(np.mean(arrived)) if arrived else 0.0
                last[report.client] = round + 1
        mean = torch.tensor([float(np.mean(utilities)) if utilities else 0.0], dtype=torch.float64)
        history, percentile = torch.cat([state["history"][1:], mean]), state["percentile"]
        done = round + 1
        if done >= 2 * self.window and done % self.window == 0:
            before, now = history[: self.window].sum(), history[self.window :].sum()
            if abs(now - before) <= 0.1 * before:
                percentile = (percentile + self.pace).clamp(max=100.0)
            elif abs(now - before) >= 5 * before:
                percentile = (percentile - self.pace).clamp(min=self.pace)
        return {"utility": utility, "seconds": seconds, "last": last, "history": history, "percentile": percentile}
