"""FedTGP: clients send class means as in FedProto, and the server trains common ones that are far apart.

Zhang, Liu, Hua, Cao, "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and
Model Heterogeneity in Federated Learning", 2024, arXiv:2401.03230. Clients are those of ``unskew.methods.fedproto``. With the
class means ``m_kc`` of a round and their mean ``m_c`` over clients::

    margin = min(max_c min_{c' != c} ||m_c - m_c'||, threshold)
    T_c    = W2 relu(W1 E_c + b1) + b2                          E_c [f], W1 and W2 [f, f]: trained at the server
    SGD over all (m_kc, c):  CE(-(||m_kc - T_c'|| + margin [c' = c])_c', c)

Clients receive ``T_c``. Defaults are those of the authors' scripts (``run_me.sh`` of TsingZ0/FedTGP). There, clients also
receive ``T_c`` of classes of which no client has sent a mean yet, and predict with the nearest ``T_c`` instead of their head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.fedproto import FedProto
from unskew.methods.own_models import list_means, train_on_means
from unskew.protocol.rules import Tensors, Updates
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import fold, normal, uniform

PURPOSE = 9
"""Separates the draws of the first network from other draws with the server's key."""


@dataclass(frozen=True)
class FedTGP(FedProto):
    """Prototypes that the server trains.

    Attributes:
        ld: Strength of the pull of features towards the prototype of their class; with 0 clients train alone.
        epochs: Epochs of the server's training in each round. With 0, prototypes are random.
        threshold: Largest margin.
        lr: Learning rate of the server's training.
        batch: Number of class means in each step of the server's training.
    """

    name: ClassVar[str] = "fedtgp"
    summary: ClassVar[str] = "own models, whose features are pulled towards prototypes that the server trains"
    paper: ClassVar[str] = "Zhang et al. 2024, arXiv:2401.03230"
    needs = ("one_class", "individual")
    # One decade on each side of the authors' 10.
    spaces: ClassVar[Mapping[str, Space]] = {"ld": log_range(1.0, 100.0)}
    idle_options = (({"epochs": 0}, ("threshold", "lr", "batch")),)

    ld: Annotated[float, Field(ge=0)] = 10.0
    epochs: Annotated[int, Field(ge=0)] = 100
    threshold: Annotated[float, Field(ge=0)] = 100.0
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    batch: Annotated[int, Field(ge=1)] = 10

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the prototypes, and the classes of which some client has sent a mean."""
        return {name: state[name] for name in ("means", "known")} if state else {}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Train the prototypes on the class means of the round."""
        means, labels = list_means(updates, self.name)
        classes, width = next(iter(updates)).upload[self.name]["means"].shape
        counts = torch.bincount(labels, minlength=classes)
        sums = means.new_zeros(classes, width).index_add(0, labels, means)
        margin = self.margin(sums / counts.clamp_min(1)[:, None], counts > 0)
        network = state["network"] if state else draw_network(updates.key, classes, width).to(means)

        def loss(values: Tensor, means: Tensor, labels: Tensor) -> Tensor:
            own = F.one_hot(labels, classes).to(means)
            return F.cross_entropy(-(distances(means, prototypes(values, classes, width)) + margin * own), labels)

        network = train_on_means(loss, network, means, labels, updates.key, self.epochs, self.lr, self.batch)
        known = (counts > 0).to(network.dtype)
        known = torch.maximum(known, state["known"]) if state else known
        return {"means": prototypes(network, classes, width), "known": known, "network": network}

    def margin(self, means: Tensor, present: Tensor) -> Tensor:
        """Return the largest distance of a class to its nearest one, at most ``threshold``.

        Args:
            means: Mean of each class over clients, ``[C, f]``.
            present: Mask of the classes that the means are known of, ``[C]``.
        """
        pairs = present[:, None] & present & ~torch.eye(len(means), dtype=torch.bool, device=means.device)
        nearest = torch.where(pairs, distances(means, means), torch.inf).amin(1)
        return torch.where(present, nearest, 0.0).amax().clamp_max(self.threshold)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distances of all pairs of rows, ``[n, m]``, whose gradient at 0 is 0.

    Args:
        a: Points, ``[n, f]``.
        b: Points, ``[m, f]``.
    """
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def draw_network(key: Tensor, classes: int, width: int) -> Tensor:
    """Return the first parameters of the prototypes, distributed as in PyTorch, ``[p]``, in float64.

    Args:
        key: Random key of the server and round.
        classes: Number ``C`` of classes.
        width: Number ``f`` of features.
    """
    key = fold(key, PURPOSE)
    layers = 2 * uniform(fold(key, 1), (2 * (width + 1) * width,)).to(torch.float64) - 1
    return torch.cat([normal(fold(key, 0), (classes * width,)), layers * width**-0.5])


def prototypes(network: Tensor, classes: int, width: int) -> Tensor:
    """Return the prototypes ``T_c``, ``[C, f]``.

    Args:
        network: Parameters ``E``, ``W1``, ``b1``, ``W2`` and ``b2`` in one vector, ``[p]``.
        classes: Number ``C`` of classes.
        width: Number ``f`` of features.
    """
    embedding, *layers = torch.split(network, [classes * width, width * width, width, width * width, width])
    hidden = F.relu(F.linear(embedding.view(classes, width), layers[0].view(width, width), layers[1]))
    return F.linear(hidden, layers[2].view(width, width), layers[3])
