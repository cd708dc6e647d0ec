"""Fedssyn: before training, clients make synthetic images, which the server shuffles and deals out to all of them.

Li, Esfandiari, Schmidt, Alstrom, Stich, "Synthetic data shuffling accelerates the convergence of federated learning under
data heterogeneity", 2023, arXiv:2306.13263, Algorithm 1. Once, before the first round, with all ``N`` clients:

1. Client ``i`` trains a class-conditional generator on ``rho n_i`` of its samples, drawn uniformly.
2. It makes ``n~`` images, its subset's class frequencies kept (largest remainder; a class it lacks gets none).
3. It uploads them as 8-bit pixels with labels. The generator stays where it is.
4. The server permutes all of them uniformly and deals them out in ``N`` equal parts ``D~_si`` (within one image).
5. Client ``i`` trains on ``D_i`` and ``D~_si`` from then on, in every method that this one is added to.

The sum averages clients uniformly, as the paper does; by samples, only real ones count. ``n~`` is the size of the whole
training set over ``N`` (the paper's 50000/N), held-out samples included. So that synthetic data do not mean more gradient
steps, a client takes as many as ``E`` epochs of its real samples have, on batches of both kinds (``match_steps``). The
authors' code makes ``max(1, floor(E n / (n + n~)))`` epochs instead of ``E``, with ``n`` that same mean size
(``match_steps=epochs``), which matches steps only where neither that quotient nor batches are rounded.

Clients that refuse to share, or keep some images back, make the pool smaller; it is still dealt out to all. With ``data`` the
paper's ablations: ``real`` (``D_i`` alone), ``local`` (each client keeps its own images), ``central_real`` and
``central_synthetic`` (one client that holds all real, or all made, samples).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.data.federation import ClientData, Federation, concatenate_inputs, take_rows
from unskew.errors import ConfigError, DataError
from unskew.generators import synthetic_dataset as synthetic
from unskew.generators.client_images import GenerationRecipe, generate_images
from unskew.generators.registry import generator_factory, normalize_expression
from unskew.generators.synthetic_dataset import SyntheticSet
from unskew.generators.trained.dp_sgd import Positive, PrivacyOptions
from unskew.methods.fedssyn.ablations import mean_size, only_own_images, single_client_images
from unskew.methods.fedssyn.synthetic_sets import (
    changed_options,
    check_fits,
    logged_epsilons,
    refusing_clients,
    set_metrics,
)
from unskew.option_parsing import import_callable
from unskew.protocol.data_preparation import (
    NOWHERE,
    ClientPayloads,
    PreparedData,
    ServerPayload,
    Workspace,
    smallest_integer_dtype,
)
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors
from unskew.protocol.rules import DataRule, Method, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.seeding import generator

Kind = Literal["shuffled", "local", "real", "central_real", "central_synthetic"]


@dataclass(frozen=True)
class Fedssyn(DataRule):
    """Synthetic data shuffling.

    Attributes:
        rho: Share of a client's samples that its generator learns from.
        n_syn: Images that each client makes; None: the size of the training set over the number of clients.
        generator: ``ddpm``, ``vae``, ``gan``, one of them with ``-small``, or ``package.module:factory``; its options follow
            after semicolons.
        epochs: Of the generators' training; None: the generator's own.
        data: ``shuffled`` is the method, the others are ablations.
        refuse: Clients that do not share: their numbers (``0;3``), or a share of all (``0.2``).
        keep: What a client shares of its images: a function ``(images, labels) -> booleans``, or its import path.
        match_steps: True: a client takes as many gradient steps as without synthetic data; ``epochs``: fewer local epochs,
            as the authors' code has it; False: more data, more steps.
        epsilon: Privacy budget of each client's generator; with ``noise_multiplier`` its training stops before it is spent,
            alone it decides the noise. With neither, generators are not private.
        noise_multiplier: Noise of DP-SGD over ``clip``.
        delta, clip, accountant: Of DP-SGD.
    """

    name: ClassVar[str] = "fedssyn"
    summary: ClassVar[str] = "clients share shuffled synthetic images before training"
    paper: ClassVar[str] = "Li et al. 2023, arXiv:2306.13263"
    weights: ClassVar[Weights | None] = "uniform"
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    tasks_reason: ClassVar[str] = "its generators make images of one class"

    rho: Annotated[float, Field(gt=0, le=1)] = 0.75
    n_syn: Annotated[int, Field(ge=1)] | None = None
    generator: str = "ddpm"
    epochs: Annotated[int, Field(ge=1)] | None = None
    data: Kind = "shuffled"
    refuse: str = ""
    keep: str | Callable[..., Any] | None = None
    match_steps: bool | Literal["epochs"] = True
    epsilon: Positive | None = None
    noise_multiplier: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Positive = 1.0
    accountant: Literal["rdp", "prv"] = "rdp"

    def __post_init__(self) -> None:
        factory = generator_factory(self.generator, self.epochs)
        aimless = [
            name for name in ("delta", "clip", "accountant") if getattr(self, name) != getattr(PrivacyOptions, name)
        ]
        if self.privacy is None and aimless:
            raise ConfigError(
                f"fedssyn:{aimless[0]} belongs to private generators: give epsilon or noise_multiplier, too."
            )
        if self.privacy is not None and not getattr(getattr(factory, "func", factory), "private", False):
            raise ConfigError(
                f"generator={self.generator} has no private training: a vae's class means and a gan's game would leak. "
                "Use ddpm, or a generator of your own that says private = True."
            )
        if isinstance(self.keep, str):
            import_callable(self.keep, f"keep={self.keep!r}")
        refusing_clients(self.refuse)

    def conflict_with(self, method: Method) -> str | None:
        """Training in one place has no clients that a rule could act on."""
        if self.data.startswith("central") and (method.client or method.sync):
            other = (*method.client, *filter(None, [method.sync]))[0].name
            return f"fedssyn:data={self.data} trains in one place, which leaves nothing to do for {other}."
        return None

    @property
    def privacy(self) -> PrivacyOptions | None:
        """The guarantee asked for."""
        if self.epsilon is None and self.noise_multiplier is None:
            return None
        return PrivacyOptions(self.noise_multiplier, self.epsilon, self.delta, self.clip, self.accountant)

    @property
    def generates_data(self) -> bool:  # type: ignore[override]
        """Return whether images are generated."""
        return self.data not in ("real", "central_real")

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Refuse data that are no 8-bit images, and more refusals than clients."""
        x, total = run.federation.test[0], len(run.federation.clients)
        if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] not in (1, 3):
            raise DataError(
                "fedssyn shares 8-bit images, gray or in color, but an input here is "
                f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}; give uint8 images."
            )
        if self.generates_data and len(refusing_clients(self.refuse, total)) == total:
            raise ConfigError("fedssyn: every client refuses to share, so there is nothing to share out.")
        return ()

    def client_payload(self, prepared: PreparedData, seed: int, workspace: Workspace) -> ClientPayloads:
        """Every client makes its images, or takes those that are given."""
        federation = prepared.federation
        if not self.generates_data:
            real = {c.id: {"x": c.x, "y": smallest_integer_dtype(c.y, federation.classes)} for c in federation.clients}
            return ClientPayloads(real if self.data == "central_real" else {})
        images = self.made(federation, seed, workspace)
        if not len(images.y):
            raise DataError("fedssyn: the clients keep all of their images back, so there is nothing to share out.")
        y = smallest_integer_dtype(images.y, federation.classes)
        own = {k: (images.source == k).nonzero().flatten() for k in images.makers}
        sent = {k: {"x": take_rows(images.x, rows), "y": y[rows]} for k, rows in own.items()}
        return ClientPayloads(sent, set_metrics(images.about), images.digest)

    def for_client(self, client: int, clients: int, mean_size: int) -> Fedssyn | None:
        """Only its own images are made; the ablations are for simulations."""
        if self.data not in ("shuffled", "real"):
            raise ConfigError(f"fedssyn:data={self.data} compares in a simulation; sites shuffle, or share nothing.")
        if not self.generates_data or client in refusing_clients(self.refuse, clients):
            return None
        others = ";".join(str(k) for k in range(clients) if k != client)
        return replace(self, n_syn=self.n_syn or mean_size, refuse=others)

    def server_payload(self, sent: dict[int, Tensors], facts: FederationInfo, seed: int) -> ServerPayload:
        """The server permutes all images uniformly and deals them out in equal parts (within one image)."""
        x, y = (
            concatenate_inputs([images["x"] for images in sent.values()]),
            torch.cat([images["y"] for images in sent.values()]),
        )
        order = torch.randperm(len(y), generator=generator(seed, "synthetic shuffle"))
        parts = torch.tensor_split(order, facts.clients)  # the first ones get one image more
        return ServerPayload({k: {"x": take_rows(x, part), "y": y[part]} for k, part in enumerate(parts)})

    def apply_payload(self, client: ClientData, share: Tensors) -> ClientData:
        """The client trains on its own images and on its share."""
        y = torch.cat([client.y, share["y"].to(client.y.dtype)])
        return replace(client, x=concatenate_inputs([client.x, share["x"]]), y=y)

    def prepare(self, prepared: PreparedData, seed: int, workspace: Workspace = NOWHERE) -> PreparedData:
        """The three steps, or an ablation; then the budget that keeps the steps as many."""
        if self.data == "real":
            return prepared
        if self.data == "shuffled":
            after = super().prepare(prepared, seed, workspace)
        else:
            payloads = self.client_payload(prepared, seed, workspace)
            after = (only_own_images if self.data == "local" else single_client_images)(prepared, payloads, self)
        epochs = prepared.training.local_epochs
        if epochs is None or not self.match_steps or self.data not in ("shuffled", "local"):
            return after
        if self.match_steps is True:
            counted = tuple(prepared.federation.sizes.clip(1).tolist())
            return replace(after, training=replace(after.training, counted=counted))
        real = mean_size(prepared.federation) * len(prepared.federation.clients)
        more = int(after.federation.sizes.sum() - prepared.federation.sizes.sum())
        matched = max(1, epochs * real // (real + more))
        return replace(after, training=replace(after.training, local_epochs=matched))

    def made(self, federation: Federation, seed: int, workspace: Workspace) -> SyntheticSet:
        """The images of all clients, before they are shuffled.

        Args:
            federation: Data of all clients.
            seed: Seed of the run.
            workspace: Folders of the run, and progress reports.
        """
        sharing = [
            k for k in range(len(federation.clients)) if k not in refusing_clients(self.refuse, len(federation.clients))
        ]
        count = self.n_syn or mean_size(federation)
        if workspace.given is not None:
            images = synthetic.load(synthetic.find(workspace.given))
            check_fits(images, federation)
            self.check_asked(images.about["recipe"])
            if images.about["recipe"]["data"][1] != federation.fingerprint:
                workspace.warn("The synthetic set was made by clients that hold other samples than those here.")
            return logged_epsilons(images, synthetic.find(workspace.given))
        chosen, epochs = normalize_expression(self.generator, self.epochs)
        recipe = {
            "seed": seed,
            "rho": self.rho,
            "generator": chosen,
            "epochs": epochs,
            "refuse": self.refuse,
            "count": count,
            "keep": self.kept,
            "privacy": None if self.privacy is None else changed_options(self.privacy),
            "data": [federation.name, federation.fingerprint, list(federation.shape), federation.classes],
            "sizes": hashlib.sha256(federation.sizes.astype(np.int64).tobytes()).hexdigest()[:16],
        }
        about = {"recipe": recipe, "classes": federation.classes, "shape": list(federation.shape)}
        about["clients"] = len(federation.clients)
        key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
        keep = self.keep
        if isinstance(keep, str):
            keep = import_callable(keep, f"keep={keep!r}")
        maker = GenerationRecipe(
            self.rho, count, generator_factory(self.generator, self.epochs), self.privacy, sharing, keep
        )
        where = workspace.within(key).folder
        images = generate_images(
            federation, maker, seed, where, workspace.device, about, workspace.report, workspace.warn
        )
        return images if where is None else logged_epsilons(images, where)

    @property
    def kept(self) -> str | None:
        """Return the function that selects the shared images, by its import path."""
        keep = self.keep
        return keep if isinstance(keep, str | None) else f"{keep.__module__}:{getattr(keep, '__qualname__', keep)}"

    def check_asked(self, recipe: dict[str, Any]) -> None:
        """Refuse a given set that was made otherwise than these options ask for; options left alone ask for nothing.

        Raises:
            ConfigError: An option was set that has no effect.
        """
        names = ("rho", "n_syn", "refuse", "epsilon", "noise_multiplier", "delta", "clip", "accountant")
        requested = {name: getattr(self, name) for name in names} | {"keep": self.kept}
        requested["generator"], requested["epochs"] = normalize_expression(self.generator, self.epochs)
        known = {**recipe, "n_syn": recipe["count"], **(recipe["privacy"] or {})}
        known["generator"], known["epochs"] = normalize_expression(recipe["generator"], recipe["epochs"])
        usual = {field.name: field.default for field in fields(self)}
        for name, value in requested.items():
            known_value = known.get(name)
            if value != usual[name] and value != known_value:
                how = (
                    f"without {name}, not with {value}"
                    if known_value in (None, "")
                    else f"with {name}={known_value}, not {value}"
                )
                raise ConfigError(
                    f"The synthetic set was made {how}; leave that option out, or leave out the set, and images are made."
                )
