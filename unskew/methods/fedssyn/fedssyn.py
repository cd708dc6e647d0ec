"""Fedssyn: before training, clients generate synthetic images, which the server shuffles and distributes to all clients.

Li, Esfandiari, Schmidt, Alstrom, Stich, "Synthetic data shuffling accelerates the convergence of federated learning under
data heterogeneity", 2023, arXiv:2306.13263, Algorithm 1. Once, before the first round, with all ``N`` clients:

1. Client ``i`` trains a class-conditional generator on ``rho n_i`` of its samples, drawn uniformly.
2. It generates ``n~`` images with the class frequencies of this subset (largest remainder; missing classes get none).
3. It uploads them as 8-bit pixels with labels. The generator is not sent.
4. The server permutes all images uniformly and splits them into ``N`` equal parts ``D~_si`` (up to one image).
5. Client ``i`` then trains on ``D_i`` and ``D~_si``, with any method that fedssyn is combined with.

The default client weighting is uniform, as in the paper; weighting by samples counts only real ones. ``n~`` is the size of
the whole training set divided by ``N`` (50000/N in the paper), including held-out samples. To avoid additional gradient
steps, a client takes the number of steps of ``E`` epochs over its real samples, on batches of both kinds (``match_steps``).
The authors' code trains for ``max(1, floor(E n / (n + n~)))`` epochs instead of ``E``, with ``n`` the same mean size
(``match_steps=epochs``). That matches the number of steps only if neither the quotient nor batches are rounded.

If clients do not share, or share only some images, the pool is smaller; it is still distributed to all. ``data`` selects the
paper's ablations: ``real`` (only ``D_i``), ``local`` (each client keeps its own images), ``central_real`` and
``central_synthetic`` (one client with all real, or all synthetic, samples).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.data.federation import ClientData, concatenate_inputs, take_rows
from unskew.errors import ConfigError, DataError
from unskew.generators import synthetic_dataset as synthetic
from unskew.generators.client_images import GenerationRecipe, generate_images
from unskew.generators.registry import generator_factory, normalize_expression
from unskew.generators.synthetic_dataset import SyntheticSet
from unskew.generators.trained.dp_sgd import Positive, PrivacyOptions
from unskew.methods.fedssyn.ablations import only_own_images, single_client_images
from unskew.methods.fedssyn.synthetic_sets import (
    check_fits,
    logged_epsilons,
    privacy_metrics,
    refusing_clients,
    set_metrics,
)
from unskew.models.spec import ModelSpec
from unskew.option_parsing import import_callable
from unskew.protocol.data_preparation import (
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
from unskew.secret_draws import seeded_warnings
from unskew.seeding import generator

PRIVATE_ONLY = ("delta", "clip", "accountant", "reproducible")
"""Options that matter only with private generators."""
OF_IMAGES = ("rho", "n_syn", "generator", "epochs", "refuse", "keep", "match_steps")
"""Options that matter only if images are generated."""
Kind = Literal["shuffled", "local", "real", "central_real", "central_synthetic"]


@dataclass(frozen=True)
class Fedssyn(DataRule):
    """Synthetic data shuffling.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        tasks_reason: Reason why other tasks are not supported: a clause that follows "because".
        rho: Share of a client's samples that its generator is trained on.
        n_syn: Images that each client generates; by default the paper's 50000/N: the size of the training set,
            including held-out samples, over ``N``. For CIFAR-10 with ``N=10`` and ``holdout=0.1``, each client has the
            paper's 4,500 real samples, 3,375 of them for the generator, and 5,000 images.
        generator: ``ddpm``, ``vae``, ``gan``, one of them with ``-small``, or ``package.module:factory``; its options
            follow after semicolons, see Generators.
        epochs: Training epochs of the generators; by default the generator's own.
        data: The method. The others are the paper's ablations: ``real`` (no synthetic data), ``local`` (each client
            keeps its own images), ``central_real`` and ``central_synthetic`` (training in one place). ``local``,
            ``shuffled`` and ``central_synthetic`` use the same images.
        refuse: Clients that do not share: ``refuse=0;3`` names them, ``refuse=0.2`` is that share of all clients, those
            with the highest numbers.
        keep: ``keep=package.module:function`` (in Python also a function) receives a client's images and labels and
            returns which to share; by default all.
        match_steps: Take as many local steps as the epochs over the real samples have, on batches of both kinds.
            ``epochs`` follows the authors' code: ``max(1, ⌊E n / (n + ñ)⌋)`` epochs instead of ``E``, with ``n`` the
            mean client size and ``ñ`` the images per client, which gives another number of steps if the epochs or
            batches are rounded. ``false`` keeps the number of epochs. It has no effect on ``local_steps``.
        epsilon: Privacy budget of each client's generator. Without ``epsilon`` and ``noise_multiplier`` there is no
            privacy.
        noise_multiplier: Noise of DP-SGD relative to ``clip``. With ``epsilon`` too, training stops before the budget
            is exceeded; ``epsilon`` alone determines the noise.
        delta: Probability that the guarantee of DP-SGD does not hold.
        clip: Norm to which DP-SGD clips a sample's gradient.
        accountant: Privacy accountant: ``rdp`` or ``prv``.
        reproducible: Compute the noise of private generators from the seed, without a guarantee.
    """

    name: ClassVar[str] = "fedssyn"
    summary: ClassVar[str] = "clients share shuffled synthetic images before training"
    paper: ClassVar[str] = "Li et al. 2023, arXiv:2306.13263"
    weights: ClassVar[Weights | None] = "uniform"
    needs = ("one_class",)
    tasks_reason: ClassVar[str] = "each image that it generates has one class"
    idle_options = (({"data": "real"}, OF_IMAGES), ({"data": "central_real"}, OF_IMAGES))

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
    reproducible: bool = False

    def __post_init__(self) -> None:
        factory = generator_factory(self.generator, self.epochs)
        aimless = [name for name in PRIVATE_ONLY if getattr(self, name) != getattr(PrivacyOptions, name)]
        if self.privacy is None and aimless:
            raise ConfigError(
                f"fedssyn:{aimless[0]} has no effect without private generators. Also set epsilon or noise_multiplier."
            )
        if self.privacy is not None and not getattr(getattr(factory, "func", factory), "private", False):
            raise ConfigError(
                f"generator={self.generator} does not support private training: a VAE's class means and a GAN's adversarial "
                "training would leak. Use ddpm, or a custom generator with private = True."
            )
        if isinstance(self.keep, str):
            import_callable(self.keep, f"keep={self.keep!r}")
        refusing_clients(self.refuse)

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules that act at clients if there is only one client."""
        if self.data.startswith("central") and (method.client or method.sync):
            other = (*method.client, *filter(None, [method.sync]))[0].name
            return f"fedssyn:data={self.data} trains on a single client, so {other} has no effect. Remove one of them."
        return None

    @property
    def privacy(self) -> PrivacyOptions | None:
        """Options of private training, or None."""
        if self.epsilon is None and self.noise_multiplier is None:
            return None
        return PrivacyOptions(
            self.noise_multiplier, self.epsilon, self.delta, self.clip, self.accountant, self.reproducible
        )

    @property
    def simulated_only(self) -> str | None:  # type: ignore[override]
        """Error for ablations, which need the data of all clients."""
        if self.data in ("shuffled", "real"):
            return None
        return f"fedssyn:data={self.data} is only for simulations. On sites, use data=shuffled or data=real."

    @property
    def generates_data(self) -> bool:  # type: ignore[override]
        """True if images are generated."""
        return self.data not in ("real", "central_real")

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the data are 8-bit images and that at least one client shares."""
        x, total = run.federation.test[0], len(run.federation.clients)
        if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] not in (1, 3):
            raise DataError(
                "fedssyn shares 8-bit images, gray or in color, but the inputs are "
                f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}. Use uint8 images."
            )
        if self.generates_data and len(refusing_clients(self.refuse, total)) == total:
            raise ConfigError("fedssyn: no client shares images. Exclude fewer clients with refuse.")
        return seeded_warnings(self.name, self.reproducible)

    def client_payload(self, prepared: PreparedData, seed: int, workspace: Workspace) -> ClientPayloads | PreparedData:
        """Generate the images of all clients, or load the given set; an ablation returns its finished data."""
        federation = prepared.federation
        if self.data == "real":
            return prepared
        if self.data == "central_real":
            real = {c.id: {"x": c.x, "y": smallest_integer_dtype(c.y, federation.classes)} for c in federation.clients}
            return single_client_images(prepared, ClientPayloads(real))
        if not self.sharing(prepared):
            return ClientPayloads()
        images = self.synthetic_set(prepared, seed, workspace)
        if not len(images.y):
            raise DataError("fedssyn: keep selects no images of any client, so nothing is shared. Select more images.")
        y = smallest_integer_dtype(images.y, federation.classes)
        own = {k: (images.source == k).nonzero().flatten() for k in images.makers}
        sent = {k: {"x": take_rows(images.x, rows), "y": y[rows]} for k, rows in own.items()}
        payloads = ClientPayloads(sent, set_metrics(images.about), images.digest)
        if self.data == "local":
            return only_own_images(prepared, payloads, self, self.match_steps)
        return payloads if self.data == "shuffled" else single_client_images(prepared, payloads)

    @property
    def payload_metrics(self) -> Mapping[str, tuple[float, float]]:  # type: ignore[override]
        """Number of images, seconds of their generation, and with private generators the privacy spent."""
        ranges = {"synthetic_images": (1.0, 1e12), "synthetic_seconds": (0.0, 1e12)}
        return ranges if self.privacy is None else {**ranges, "epsilon": (0.0, 1e12)}

    def summarize_payloads(self, metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Add up images and seconds, and state the guarantee for the largest epsilon with the options of the run."""
        images, seconds = (sum(part[name] for part in metrics) for name in ("synthetic_images", "synthetic_seconds"))
        summary: dict[str, Any] = {"synthetic_images": int(images), "synthetic_seconds": seconds}
        if self.privacy is not None:
            summary |= privacy_metrics(self.privacy, max(part["epsilon"] for part in metrics))
        return summary

    def check_sent(self, sent: Tensors, like: Tensors | None, spec: ModelSpec) -> None:
        """Validate that a client has sent images and their labels, or nothing."""
        x, y = (sent.get(name, torch.zeros(0, dtype=torch.uint8)) for name in ("x", "y"))
        labels = smallest_integer_dtype(y[:0], spec.classes).dtype
        good = y.dim() == 1 and tuple(x.shape) == (len(y), *spec.shape) and (x.dtype, y.dtype) == (torch.uint8, labels)
        if sent and not (good and len(sent) == 2 and bool(((y >= 0) & (y < spec.classes)).all())):
            raise DataError("The images of fedssyn or their labels are invalid.")

    def server_payload(self, sent: dict[int, Tensors], federation_info: FederationInfo, seed: int) -> ServerPayload:
        """Permute all images uniformly and split them into equal parts (up to one image), one per client."""
        if not sent:
            return ServerPayload()
        x, y = (
            concatenate_inputs([images["x"] for images in sent.values()]),
            torch.cat([images["y"] for images in sent.values()]),
        )
        order = torch.randperm(len(y), generator=generator(seed, "synthetic shuffle"))
        parts = torch.tensor_split(order, federation_info.clients)  # the first parts may have one image more
        shares = {k: {"x": take_rows(x, part), "y": y[part]} for k, part in enumerate(parts)}
        return ServerPayload(shares, match_steps=self.match_steps)

    def apply_payload(self, client: ClientData, share: Tensors) -> ClientData:
        """Append the received images to the client's training data."""
        y = torch.cat([client.y, share["y"].to(client.y.dtype)])
        return replace(client, x=concatenate_inputs([client.x, share["x"]]), y=y)

    def sharing(self, prepared: PreparedData) -> list[int]:
        """Return the clients that share images; at a real site, at most its own client.

        Args:
            prepared: Data of the clients.
        """
        refusing = refusing_clients(self.refuse, len(prepared.federation.clients))
        return [k for k in prepared.clients if k not in refusing]

    def synthetic_set(self, prepared: PreparedData, seed: int, workspace: Workspace) -> SyntheticSet:
        """Generate or load the images of all clients, before shuffling.

        Args:
            prepared: Data of the clients.
            seed: Seed of the run.
            workspace: Folders of the run, and progress reports.
        """
        federation, sharing = prepared.federation, self.sharing(prepared)
        count = self.n_syn or prepared.mean_size
        if workspace.existing is not None:
            images = synthetic.load(synthetic.find(workspace.existing))
            check_fits(images, federation)
            self.check_asked(images.about["recipe"])
            if images.about["recipe"]["data"][1] != federation.fingerprint:
                workspace.warn("The synthetic set was generated from other client data than those of this run.")
            return logged_epsilons(images, synthetic.find(workspace.existing))
        chosen, epochs = normalize_expression(self.generator, self.epochs)
        others = ";".join(str(k) for k in range(len(federation.clients)) if k != prepared.client)
        recipe = {
            "seed": seed,
            "rho": self.rho,
            "generator": chosen,
            "epochs": epochs,
            "refuse": self.refuse if prepared.client is None else others,
            "count": count,
            "keep": self.keep_path,
            "privacy": None if self.privacy is None else asdict(self.privacy),
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
        shared = None if workspace.run is None else synthetic.shared_set(workspace.run, key)
        if shared is not None and where is not None and not (where / synthetic.ABOUT).is_file():
            return logged_epsilons(synthetic.load_matching(shared, recipe), shared)
        images = generate_images(
            federation, maker, seed, where, workspace.device, about, workspace.report, workspace.warn
        )
        return images if where is None else logged_epsilons(images, where)

    @property
    def keep_path(self) -> str | None:
        """Import path of the function that selects shared images, or None."""
        keep = self.keep
        return keep if isinstance(keep, str | None) else f"{keep.__module__}:{getattr(keep, '__qualname__', keep)}"

    def check_asked(self, recipe: dict[str, Any]) -> None:
        """Validate that a given set was generated with these options; options with default values are not checked.

        Args:
            recipe: Options with which the set was generated, by name.

        Raises:
            ConfigError: If an option has another value than the one used for the set.
        """
        names = ("rho", "n_syn", "refuse", "epsilon", "noise_multiplier", *PRIVATE_ONLY)
        requested = {name: getattr(self, name) for name in names} | {"keep": self.keep_path}
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
                    f"The synthetic set was generated {how}. Remove that option, or remove synthetic to generate a new set."
                )
