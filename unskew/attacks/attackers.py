"""Attackers of a run: which clients attack, what they train on and what they send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from unskew.attacks import update_attacks
from unskew.attacks.data_attacks import (
    Predict,
    backdoor_success,
    flipped_labels,
    with_backdoor,
    with_flipped_labels,
)
from unskew.attacks.registry import (
    Attack,
    Backdoor,
    FreeRide,
    GaussianNoise,
    InnerProduct,
    LabelFlip,
    LittleIsEnough,
    Mimic,
    SignFlip,
)
from unskew.data.federation import Federation
from unskew.errors import ConfigError
from unskew.models.spec import slices_mask
from unskew.protocol.messages import Broadcast, Slices, Tensors, Update, replace_fields
from unskew.seeding import numpy_generator

SUCCESS = "backdoor_success"
"""Name of the metric of a backdoor."""


def draw_attackers(attack: Attack, clients: int, seed: int) -> tuple[int, ...]:
    """Return the numbers of the attackers in order: the named ones, or a share drawn by the seed.

    Args:
        attack: Options of the attack.
        clients: Number of clients.
        seed: Seed of the run.

    Raises:
        ConfigError: If a client does not exist, or there would be no attacker or no honest client.
    """
    if attack.clients is not None:
        unknown = next((k for k in attack.clients if k >= clients), None)
        if unknown is not None:
            raise ConfigError(
                f"attack.clients names client {unknown}, but there are {clients} clients, numbered from 0 to "
                f"{clients - 1}. Name existing clients."
            )
        if len(attack.clients) == clients:
            raise ConfigError("attack.clients names all clients, so none is honest. Name fewer clients.")
        return tuple(sorted(attack.clients))
    assert attack.share is not None
    count = round(attack.share * clients)
    if not 0 < count < clients:
        what, remedy = ("no attacker", "larger") if count == 0 else ("no honest client", "smaller")
        raise ConfigError(
            f"attack.share={attack.share:g} of {clients} clients leaves {what}. Use a {remedy} share, more clients, or "
            "name the attackers with attack.clients."
        )
    draws = numpy_generator(seed, "attackers")
    return tuple(sorted(draws.choice(clients, count, replace=False).tolist()))


def check_attack(attack: Attack, federation: Federation, seed: int, cohort: int) -> list[str]:
    """Validate that an attack fits the data.

    Args:
        attack: Options of the attack.
        federation: Data of all clients.
        seed: Seed of the run.
        cohort: Number of clients of a round.

    Returns:
        Warnings about attacks without an effect.

    Raises:
        ConfigError: If the attackers cannot be drawn, or the attack does not support the task, inputs or classes.
    """
    attackers = draw_attackers(attack, len(federation.clients), seed)
    if isinstance(attack, LittleIsEnough):
        return alie_warnings(attack, cohort, cohort * len(attackers) / len(federation.clients))
    if not isinstance(attack, LabelFlip | Backdoor):
        return []
    if "one_class" not in federation.objective.provides:
        raise ConfigError(
            f"The attack {attack.kind} needs one class per sample, but the task is {federation.task}. Use another kind, "
            "such as signflip."
        )
    labels = {"target": attack.target} if isinstance(attack, Backdoor) else attack.model_dump(include={"from_class"})
    labels |= attack.model_dump(include={"to_class"})
    for name, label in labels.items():
        if label is not None and label >= federation.classes:
            raise ConfigError(
                f"attack.{name}={label} is not a class: there are {federation.classes}, numbered from 0. Use a smaller "
                "number."
            )
    if isinstance(attack, Backdoor):
        shape = federation.shape
        if len(shape) != 3:
            raise ConfigError(
                "The attack backdoor puts a patch on images, but the inputs are not images. Use labelflip."
            )
        if attack.patch > min(shape[1:]):
            raise ConfigError(
                f"attack.patch={attack.patch} is larger than the images of {shape[1]} x {shape[2]} pixels. Use a "
                "smaller patch."
            )
    if isinstance(attack, LabelFlip):
        labels_of = (federation.clients[k].y for k in attackers)
        if all(torch.equal(flipped_labels(y, federation.classes, attack), y) for y in labels_of):
            return [
                "The attack labelflip changes nothing, because the attackers have no sample of a class whose label changes. "
                "Use another from_class, or name attackers with attack.clients."
            ]
    return []


def alie_warnings(attack: LittleIsEnough, cohort: int, expected: float) -> list[str]:
    """Return a warning if attackers would send the mean of the honest updates, without a deviation.

    Args:
        attack: Options of the attack.
        cohort: Number of clients of a round.
        expected: Expected number of attackers among them.
    """
    if attack.z == 0:
        return ["With attack.z=0, alie sends the mean of the honest updates, which does no harm. Use a z above 0."]
    attackers = min(max(1, round(expected)), cohort - 1)
    if attack.z is not None or attackers < 1 or update_attacks.alie_z(cohort, attackers) > 0:
        return []
    return [
        f"With {attackers} of the {cohort} clients of a round attacking, alie computes z=0 and sends the mean of the "
        "honest updates, which does no harm. Use more clients or attackers, or set attack.z."
    ]


class Attackers:
    """Attackers of a run.

    Args:
        attack: Options of the attack.
        clients: Number of clients.
        seed: Seed of the run.
        eta: Learning rate of the server, for the default boost of a backdoor.

    Attributes:
        clients: Numbers of the attackers, in order.
        state: Tensors that persist between rounds and are stored in checkpoints.
    """

    def __init__(self, attack: Attack, clients: int, seed: int, eta: float = 1.0):
        self.attack = attack
        self.clients = draw_attackers(attack, clients, seed)
        self.state: Tensors = {}
        self._seed = seed
        self._eta = eta

    @property
    def poisons_data(self) -> bool:
        """True if attackers train on changed data."""
        return isinstance(self.attack, LabelFlip | Backdoor)

    def poisoned(self, federation: Federation) -> Federation:
        """Return the data on which clients train once the attack has started."""
        if isinstance(self.attack, LabelFlip):
            return with_flipped_labels(federation, self.clients, self.attack)
        if isinstance(self.attack, Backdoor):
            return with_backdoor(federation, self.clients, self.attack, self._seed)
        return federation

    def metrics(self, predict: Predict | None, federation: Federation) -> dict[str, float | None]:
        """Return the metrics of a round on the success of the attack.

        Args:
            predict: Returns the class that the model predicts for stored inputs; None if the round is not evaluated.
            federation: Data with the test samples.
        """
        if not isinstance(self.attack, Backdoor):
            return {}
        return {SUCCESS: None if predict is None else backdoor_success(predict, federation, self.attack)}

    def replace_updates(
        self, round: int, v: Tensor, broadcasts: Sequence[Broadcast], updates: Iterable[Update]
    ) -> Iterable[Update]:
        """Replace the updates of the attackers, after local training and before delivery.

        Only ``delta`` changes, on the slices that the client uploads, and the reported model with it. Uploads of rules,
        buffers, weight, metrics and client state remain those of honest training.

        Args:
            round: Number of the round, from 0.
            v: Model that the server broadcast, ``[d]``.
            broadcasts: Messages to the clients that train in this round.
            updates: Updates of these clients, in order.

        Returns:
            Updates of all clients, in the same order. If the attack reads the honest updates, all updates are collected
            first; otherwise they are passed on one by one.
        """
        last_change = self._last_change(v)
        if round + 1 < self.attack.from_round or isinstance(self.attack, LabelFlip):
            return updates
        masks = {broadcast.client: broadcast.up for broadcast in broadcasts if broadcast.client in self.clients}
        if self.attack.reads_honest:
            return self._after_all(updates, masks)
        return (
            replace_delta(update, self._own(round, update, len(broadcasts), last_change), masks[update.client])
            if update.client in masks
            else update
            for update in updates
        )

    def _own(self, round: int, update: Update, cohort: int, last_change: Tensor | None) -> Tensor:
        """Return what an attacker sends in an attack that does not read other updates, ``[d]``."""
        attack, delta = self.attack, update.delta
        if isinstance(attack, SignFlip):
            return -attack.scale * delta
        if isinstance(attack, GaussianNoise):
            return update_attacks.gaussian(delta, attack.sigma, self._seed, round, update.client)
        if isinstance(attack, Backdoor):
            return delta * (cohort / self._eta if attack.boost is None else attack.boost)
        return torch.zeros_like(delta) if last_change is None else last_change.to(delta)

    def _after_all(self, updates: Iterable[Update], masks: dict[int, Slices | None]) -> Iterator[Update]:
        """Yield the updates once all of them are known; without honest updates, attackers send their own."""
        collected = list(updates)
        deltas = [update.delta for update in collected if update.client not in masks and update.is_finite()]
        attackers = sum(update.client in masks for update in collected)
        if not (deltas and attackers):
            yield from collected
            return
        replacement = self._common(torch.stack(deltas), attackers)
        for update in collected:
            yield replace_delta(update, replacement, masks[update.client]) if update.client in masks else update

    def _common(self, honest: Tensor, attackers: int) -> Tensor:
        """Return what every attacker of a round sends, given the honest updates ``[n, d]``."""
        attack = self.attack
        if isinstance(attack, InnerProduct):
            return update_attacks.ipm(honest, attack.epsilon)
        if isinstance(attack, LittleIsEnough):
            z = update_attacks.alie_z(len(honest) + attackers, attackers) if attack.z is None else attack.z
            return update_attacks.alie(honest, z)
        assert isinstance(attack, Mimic)
        rounds = int(self.state.get("rounds", torch.zeros(1))[0])
        if rounds < attack.warmup:
            direction = update_attacks.principal_direction(honest, self.state.get("direction"))
            self.state.update(direction=direction, rounds=torch.tensor([rounds + 1]))
        return update_attacks.mimic(honest, self.state["direction"])

    def _last_change(self, v: Tensor) -> Tensor | None:
        """Return the change of the global model in the previous round, ``[d]``, if attackers send it."""
        if not isinstance(self.attack, FreeRide) or self.attack.mode != "last":
            return None
        previous = self.state.get("previous")
        self.state["previous"] = v.clone()
        return None if previous is None else v - previous


def replace_delta(update: Update, delta: Tensor, up: Slices | None) -> Update:
    """Return an update with another ``delta``, and with the reported model that fits it.

    Args:
        update: Update of honest training.
        delta: New value, ``[d]``.
        up: Slices that the client uploads; None for all.
    """
    if up is not None:
        delta = torch.where(slices_mask(up, len(delta)).to(delta.device), delta, torch.zeros_like(delta))
    report = {name: t + (delta - update.delta) if name == "v" else t for name, t in update.report.items()}
    return replace_fields(update, delta=delta, report=report, known_finite=False)
