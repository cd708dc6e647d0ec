"""unskew's outputs on the inputs of ``conformance.trust.inputs``."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from conformance.trust import inputs
from conformance.trust.inputs import Array, Setting
from unskew.attacks.attackers import Attackers
from unskew.attacks.registry import Attack
from unskew.methods.compression.quantized import decode_qsgd, encode_qsgd
from unskew.methods.compression.rules import PowerSGD
from unskew.methods.compression.sparse import decode_topk, encode_topk
from unskew.methods.dp import DP
from unskew.methods.robust import estimators
from unskew.models.spec import ModelSpec
from unskew.privacy import accounting
from unskew.privacy.accounting import GaussianRounds, epsilon, noise_for, split_noise
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import ClientState, Update
from unskew.protocol.payload import UPDATE, UploadContext
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import Tensors
from unskew.protocol.updates import Aggregate, Updates

F = inputs.SUSPECTED
EMPTY = torch.zeros(0, dtype=torch.float64)


def rounds_epsilon(setting: Setting, accountant: str) -> float:
    """Return epsilon of a setting.

    Args:
        setting: Rounds and delta.
        accountant: Accountant, ``rdp`` or ``prv``.
    """
    return epsilon([GaussianRounds(setting.noise, setting.rate, setting.rounds)], setting.delta, accountant)


def integer_order_epsilon(setting: Setting) -> float:
    """Return epsilon of a setting with the integer orders of the Renyi accountant only."""
    per_round = [accounting._rdp_per_step(setting.noise, setting.rate, order) for order in accounting._orders()]
    orders, divergences = zip(
        *(
            (order, setting.rounds * divergence)
            for order, divergence in zip(accounting._orders(), per_round, strict=True)
            if order.is_integer()
        ),
        strict=True,
    )
    spent, _ = accounting._opacus().analysis.rdp.get_privacy_spent(orders=orders, rdp=divergences, delta=setting.delta)
    return max(0.0, float(spent))


def noise_of(target: tuple[float, float, float, int]) -> float:
    """Return the noise multiplier for epsilon, delta, sampling rate and rounds."""
    return noise_for(*target)


def split(case: tuple[float, int]) -> float:
    """Return the noise multiplier of the updates under adaptive clipping, for a noise multiplier and a cohort size."""
    noise, cohort = case
    return split_noise(noise, cohort / 20)


def _model(size: int) -> ModelSpec:
    return ModelSpec(torch.nn.Linear(size, 1, bias=False), (size,), 1, dtype=torch.float64)


def update_of(client: int, delta: Tensor, upload: dict[str, Tensors] | None = None) -> Update:
    """Return an update without buffers and state.

    Args:
        client: Number of the client.
        delta: Update, ``[d]``.
        upload: Uploads by rule.
    """
    return Update(client, 0, 1, 1.0, delta, EMPTY, upload or {}, ClientState(), {}, 0)


class _Ones:
    """Noise source in which every standard normal draw is 1."""

    def normal(self, round: int, number: int, like: Tensor) -> Tensor:
        return torch.ones_like(like)


class PrivateRounds:
    """Rounds of ``dp`` with adaptive clipping, in which all clients send ``inputs.updates()``.

    Args:
        case: Initial clipping norm and quantile.
        noise: Noise multiplier; every standard normal draw is 1.
        inverted: Report that an update was clipped, instead of that it was not.
    """

    def __init__(self, case: tuple[float, float], noise: float = 0.0, inverted: bool = False):
        clip, quantile = case
        self._rule = DP(noise=noise, clip=clip, quantile=quantile, clip_lr=inputs.CLIP_LR)
        self._plan = RoundPlan(rounds=inputs.ROUNDS, clients=inputs.CLIENTS, cohort=inputs.CLIENTS)
        self._sign = -1.0 if inverted else 1.0
        self._v = torch.zeros(3, dtype=torch.float64)
        ones = np.ones(inputs.CLIENTS, int)
        info = FederationInfo(
            inputs.CLIENTS,
            (3,),
            2,
            "classification",
            torch.float64,
            None,
            lambda k: 1,
            lambda: None,
            lambda: ones,
            plan=self._plan,
        )
        self.state = self._rule.server_init(self._v, info)

    @property
    def clip(self) -> float:
        """Clipping norm of the next round."""
        return float(self.state["clip"])

    def step(self) -> Array:
        """Carry out one round and return the combined update, ``[3]``."""
        sums, spec = Aggregate(frozenset()), _model(3)
        for client, update in enumerate(torch.from_numpy(inputs.updates())):
            ctx = UploadContext(0, client, 0, spec, None, self._plan, self._rule.download(self.state, client))
            sent, _ = self._rule.encode({UPDATE: update}, {}, ctx)
            sums.add(update_of(client, sent[UPDATE], {"dp": {"bits": self._sign * sent["dp/bits"]}}))
        updates = Updates(
            0,
            sums,
            [],
            self._v,
            EMPTY,
            spec,
            torch.tensor(0),
            arrivals=inputs.CLIENTS,
            plan=self._plan,
            noise=_Ones(),
        )
        self.state, combined = self._rule.combine(self.state, updates)
        return combined.delta.numpy()


def clipping_norms(case: tuple[float, float], inverted: bool = False) -> list[float]:
    """Return the clipping norms after each round without noise.

    Args:
        case: Initial clipping norm and quantile.
        inverted: Report that an update was clipped, instead of that it was not.
    """
    rounds, sequence = PrivateRounds(case, inverted=inverted), []
    for _ in range(inputs.ROUNDS):
        rounds.step()
        sequence.append(rounds.clip)
    return sequence


def noised(case: tuple[float, float]) -> list[float]:
    """Return the combined update, and the next clipping norm, of a round in which every standard normal draw is 1.

    Args:
        case: Initial clipping norm and quantile.
    """
    rounds = PrivateRounds(case, noise=1.0)
    update = rounds.step()
    return [*update.tolist(), rounds.clip]


def noised_by_the_next_norm(case: tuple[float, float]) -> list[float]:
    """Return ``noised`` with the inverted bit, without clamping its share, and with noise scaled by the next norm.

    Args:
        case: Initial clipping norm and quantile.
    """
    clip, quantile = case
    bit_noise = inputs.CLIENTS / 20
    share = (float((inputs.norms() > clip).sum()) + bit_noise) / inputs.CLIENTS
    next_clip = clip * math.exp(-inputs.CLIP_LR * (share - quantile))
    update = PrivateRounds(case).step() + split_noise(1.0, bit_noise) * next_clip / inputs.CLIENTS
    return [*update.tolist(), next_clip]


def krum(points: Array, f: int, neighbors: int, keep: int = 0) -> Array:
    """Return the point with the smallest score, or the mean of some with small scores.

    Args:
        points: Points, ``[n, d]``.
        f: Number of suspected points.
        neighbors: Number of nearest points that count; ``n - f - 2`` in the paper.
        keep: Number of points to average; 0 for the best one.
    """
    tensor = torch.from_numpy(points)
    if neighbors == len(points) - f - 2:
        order = estimators.krum_order(tensor, f)
    else:
        order = estimators.krum_scores(estimators.squared_distances(tensor), neighbors).argsort(stable=True)
    return (tensor[order[:keep]].mean(0) if keep else tensor[order[0]]).numpy()


def bulyan_with_ties_by_number(points: Tensor) -> Tensor:
    """Return the result of Bulyan whose selections go to the point with the smallest number if scores are equal."""
    n, f = len(points), inputs.SUSPECTED
    distances, remaining, selected = estimators.squared_distances(points), list(range(n)), []
    for _ in range(n - 2 * f):
        scores = estimators.krum_scores(distances[remaining][:, remaining], max(1, len(remaining) - f - 2))
        selected.append(remaining.pop(int(scores.argsort(stable=True)[0])))
    chosen = points[selected].sort(dim=0).values
    nearest = (chosen - estimators.coordinate_median(chosen)).abs().argsort(dim=0, stable=True)[: n - 4 * f]
    return chosen.gather(0, nearest).mean(dim=0)


def robust(rule: Callable[[Tensor], Tensor]) -> Callable[[Array], Array]:
    """Return a rule on tensors as a function of arrays."""
    return lambda points: rule(torch.from_numpy(points)).numpy()


def clipped(points: Tensor) -> Tensor:
    """Return the result of centered clipping around zero."""
    return estimators.centered_clipping(points, torch.zeros_like(points[0]), inputs.TAU, inputs.CLIP_STEPS)


def attacked(attack: type[Attack], **options: float) -> Callable[[Array], Array]:
    """Return what the last of the attackers sends, as a function of all clients' own updates.

    Args:
        attack: Kind of the attack.
        options: Options of the attack.
    """

    def last_update(points: Array) -> Array:
        clients = tuple(range(len(points) - inputs.ATTACKERS, len(points)))
        attackers = Attackers(attack(clients=clients, **options), len(points), seed=0)
        tensor = torch.from_numpy(points)
        broadcasts = [SimpleNamespace(client=client, up=None) for client in range(len(points))]
        client_updates = [update_of(client, delta) for client, delta in enumerate(tensor)]
        *_, last = attackers.replace_updates(0, torch.zeros_like(tensor[0]), broadcasts, client_updates)
        return last.delta.numpy()

    return last_update


def quantized(case: tuple[int, Array]) -> Array:
    """Return a decoded vector of QSGD with one bucket, for the number of the random key and a vector."""
    number, vector = case
    n, v = len(vector), torch.from_numpy(vector)
    code = encode_qsgd(v, inputs.LEVELS, n, torch.tensor(number))
    return decode_qsgd(code, inputs.LEVELS, n, n, v.dtype).numpy()


def sparse(share: float, vector: Array) -> Array:
    """Return a decoded vector of top-k.

    Args:
        share: Share of the entries to send.
        vector: Vector, ``[n]``.
    """
    v = torch.from_numpy(vector)
    return decode_topk(encode_topk(v, share), len(v), v.dtype).numpy()


def _linear_layers(shapes: tuple[tuple[int, ...], ...]) -> ModelSpec:
    """Return a model of linear layers with these shapes of weights and biases."""
    layers = [
        torch.nn.Linear(shape[1], shape[0], bias=following is not None and len(following) == 1)
        for shape, following in zip(shapes, (*shapes[1:], None), strict=True)
        if len(shape) == 2
    ]
    return ModelSpec(torch.nn.Sequential(*layers), (shapes[0][1],), shapes[-1][0], dtype=torch.float64)


def low_rank(case: tuple[tuple[tuple[int, ...], ...], int, int, int]) -> Array:
    """Return the decoded updates of all rounds of ``powersgd`` with error feedback, as one vector.

    Args:
        case: Shapes of the parameters, rank, number of rounds, and random seed of the updates.
    """
    shapes, rank, rounds, seed = case
    rule, spec = PowerSGD(rank=rank), _linear_layers(shapes)
    state: Tensors = {f"{UPDATE}#start": torch.from_numpy(inputs.start(shapes, rank))}
    decoded = []
    for round, vector in enumerate(inputs.matrices(shapes, rounds, seed)):
        ctx = UploadContext(round, 0, 0, spec, None, RoundPlan())
        sent, state = rule.encode({UPDATE: torch.from_numpy(vector)}, state, ctx)
        decoded.append(rule.decode(sent, ctx)[UPDATE])
    return torch.cat(decoded).numpy()
