"""Attacks on training data: flipped labels, and images with a patch that should cause a target class."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from unskew.attacks.registry import Backdoor, LabelFlip
from unskew.data.clients import ArrayClients, ClientData, DrawnClients, concatenate_inputs, joined_clients, take_rows
from unskew.data.federation import Federation
from unskew.seeding import generator

Predict = Callable[[Tensor], Tensor]
"""Returns the predicted class of stored inputs ``[n, ...]``, ``[n]``; -1 if the outputs are not finite."""


def flipped_labels(y: Tensor, classes: int, attack: LabelFlip) -> Tensor:
    """Return the labels that attackers train on, ``[n]``.

    Args:
        y: True labels, ``[n]``.
        classes: Number of classes.
        attack: Options of the attack.
    """
    if attack.from_class is None or attack.to_class is None:
        return classes - 1 - y
    return torch.where(y == attack.from_class, torch.full_like(y, attack.to_class), y)


def with_flipped_labels(federation: Federation, attackers: Collection[int], attack: LabelFlip) -> Federation:
    """Return the federation in which attackers have flipped training labels; inputs are not copied.

    Args:
        federation: Data of all clients.
        attackers: Numbers of the attackers.
        attack: Options of the attack.
    """
    clients = federation.clients
    if not isinstance(clients, ArrayClients):
        clients = joined_clients(clients)
    y = clients.y.clone()
    for k in attackers:
        start, split, _ = clients.bounds(k)
        y[start:split] = flipped_labels(y[start:split], federation.classes, attack)
    if isinstance(clients, DrawnClients):
        flipped: ArrayClients = DrawnClients(
            clients.rows, clients.like, y, clients.offsets, clients.splits, clients.mapped
        )
    else:
        flipped = ArrayClients(clients.x, y, clients.offsets, clients.splits)
    return replace(federation, clients=flipped)


def patch_intensity(federation: Federation) -> float:
    """Return the intensity of the patch: 255 for 8-bit images, otherwise the largest value of the test images."""
    images = federation.test[0]
    return 255.0 if images.dtype == torch.uint8 else float(images.max())


def with_patch(x: Tensor, side: int, intensity: float) -> Tensor:
    """Return copies of images with a square patch in the bottom right corner.

    Args:
        x: Stored images, ``[n, C, H, W]``.
        side: Side length of the patch in pixels.
        intensity: Stored value of the patch's pixels.
    """
    x = x.clone()
    x[..., -side:, -side:] = intensity
    return x


def with_backdoor(federation: Federation, attackers: Collection[int], attack: Backdoor, seed: int) -> Federation:
    """Return the federation in which attackers have additional training images with the patch and the target label.

    All inputs are copied into one array.

    Args:
        federation: Data of all clients.
        attackers: Numbers of the attackers.
        attack: Options of the attack.
        seed: Seed of the run, which draws the copied images.
    """
    intensity = patch_intensity(federation)

    def poisoned(client: ClientData) -> ClientData:
        n, draws = len(client.y), generator(seed, "backdoor images", 0, client.id)
        copies = max(1, round(n * attack.share_of_batch / (1 - attack.share_of_batch)))
        # Every image is copied equally often, up to one.
        orders = [torch.randperm(n, generator=draws) for _ in range(-(-copies // n))]
        chosen = torch.cat(orders)[:copies].to(client.y.device)
        images = with_patch(take_rows(client.x, chosen), attack.patch, intensity)
        labels = torch.full_like(client.y[chosen], attack.target)
        x, y = concatenate_inputs([client.x, images]), torch.cat([client.y, labels])
        return ClientData(client.id, x, y, client.x_test, client.y_test)

    clients = [poisoned(client) if client.id in attackers else client for client in federation.clients]
    return replace(federation, clients=joined_clients(clients))


def backdoor_success(predict: Predict, federation: Federation, attack: Backdoor) -> float:
    """Return the share of test images of other classes that the patch turns into the target class; NaN without any.

    Args:
        predict: Returns the predicted class of stored images.
        federation: Data with the test images.
        attack: Options of the attack.
    """
    x, y = federation.test
    others = (y != attack.target).nonzero().flatten()
    if not len(others):
        return float("nan")
    images = with_patch(take_rows(x, others.to(x.device)), attack.patch, patch_intensity(federation))
    return float((predict(images) == attack.target).to(torch.float64).mean())
