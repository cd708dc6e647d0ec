"""Generation of all clients' images; images of finished clients are stored, so that an interrupted job can resume."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.checked_tensors import encode_checked, load_checked
from unskew.data.federation import ClientData, Federation, concatenate_inputs, take_rows
from unskew.errors import CheckpointError, ConfigError, DataError
from unskew.filesystem import append_text, make_folder, make_subfolder, parse_json, write_atomic
from unskew.folder_locks import file_lock, folder_lock
from unskew.generators import synthetic_dataset as synthetic
from unskew.generators.base import GeneratorJob, Progress
from unskew.generators.labels import allocate_counts, labels_from_counts
from unskew.generators.registry import Factory
from unskew.generators.synthetic_dataset import SyntheticSet
from unskew.generators.trained.dp_sgd import PrivacyOptions
from unskew.secret_draws import KEY_FILE, SecretKey, secret_uniform, secret_words, stored_key
from unskew.seeding import derive, generator

LOG = "generators.jsonl"
DRAWN = 100  # number of clients whose images are plotted
TRAINING = 0.8  # share of training in a client's progress; the rest is sampling
Keep = Callable[[Tensor, Tensor], Any]
Tell = Callable[[str, float, float], None]


@dataclass(frozen=True)
class GenerationRecipe:
    """Options for generating the images of all clients.

    Attributes:
        rho: Share of a client's samples that its generator is trained on.
        count: Number of images that each client generates.
        factory: Creates the generators.
        privacy: Privacy options, or None.
        sharing: Clients that take part.
        keep: Maps a client's images and labels to a mask of shared images, boolean ``[count]``; None shares all.
    """

    rho: float
    count: int
    factory: Factory
    privacy: PrivacyOptions | None
    sharing: Sequence[int]
    keep: Keep | None = None

    @property
    def secret(self) -> bool:
        """Return whether private generators draw from a secret key."""
        return self.privacy is not None and not self.privacy.reproducible


def generate_images(
    federation: Federation,
    recipe: GenerationRecipe,
    seed: int,
    folder: Path | None,
    device: torch.device,
    about: dict[str, Any],
    tell: Tell,
    warn: Callable[[str], None],
) -> SyntheticSet:
    """Generate the images of all clients, in the clients' order (steps 1 and 2 of Fedssyn's Algorithm 1).

    Args:
        federation: Data of all clients.
        recipe: Options of the generation.
        seed: Random seed of the run.
        folder: Folder for finished clients, generator checkpoints and the set; None stores nothing.
        device: Device for generators.
        about: Metadata that identify the set and must match an existing one.
        tell: Called with progress: a text, the finished and the total number of clients.
        warn: Called with warnings for the user.

    Raises:
        ConfigError: If the folder contains another set, or another process is using it.
        CheckpointError: If the key of unfinished private generators is missing.
        DataError: If a generator returns anything other than images.
    """
    for needed in (recipe.factory, recipe.privacy):
        getattr(needed, "ready", lambda: None)()
    work = _Work(federation, recipe, seed, folder, device, tell, warn, SecretKey() if recipe.secret else None)
    if folder is None:
        return work.all_images(about)
    synthetic.check_can_store()
    make_subfolder(folder.parent, folder.name, "work")
    # Parallel runs that need the same set wait for the run that generates it.
    with file_lock(folder / ".making.lock", math.inf), folder_lock(folder) if os.name == "posix" else nullcontext():
        if (folder / synthetic.ABOUT).is_file():
            images = synthetic.load_matching(folder, about.get("recipe"))
            synthetic.remove_work_folder(folder)
            return images
        spelling = json.dumps(about.get("recipe"), sort_keys=True)
        begun = folder / "work" / "recipe.json"
        if begun.is_file() and begun.read_bytes() != spelling.encode():
            raise ConfigError(f"{folder} contains an unfinished synthetic set with other options. Remove it.")
        if recipe.secret:
            work = replace(work, secret=stored_key(folder / "work" / KEY_FILE, begun.is_file()))
        write_atomic(begun, spelling.encode())
        images = work.all_images(about)
        draw_picture(folder, images, federation)
        synthetic.save(folder, images, federation.classes, federation.class_names)
        synthetic.remove_work_folder(folder)
    return images


@dataclass(frozen=True)
class _Work:
    """Arguments of ``generate_images``."""

    federation: Federation
    recipe: GenerationRecipe
    seed: int
    folder: Path | None
    device: torch.device
    report: Tell
    warn: Callable[[str], None]
    secret: SecretKey | None

    def all_images(self, about: dict[str, Any]) -> SyntheticSet:
        """Generate the set; images of finished clients are read from the folder."""
        recipe, folder = self.recipe, self.folder
        if recipe.privacy is not None:
            sizes = [self.federation.clients[k].num_samples for k in recipe.sharing]
            recipe.privacy.check_delta(sizes, recipe.rho, self.warn)
        parts: list[tuple[Tensor, Tensor]] = []
        epsilons: dict[int, float] = {}
        began, before = time.perf_counter(), 0.0
        for number, k in enumerate(recipe.sharing):
            finished = None if folder is None else folder / "work" / f"client-{k}.safetensors"
            if finished is not None and finished.is_file():
                x, y, seconds, spent = self.finished_images(finished)
                parts.append((x, y))
                if spent is not None:
                    epsilons[k] = spent
                before += seconds
                self.report(f"client {k}: loading its finished images", number + 1, len(recipe.sharing))
                continue
            started = time.perf_counter()
            x, y, spent = self.client_images(self.federation.clients[k], number)
            parts.append((x, y))
            tensors = {"x": x.permute(0, 2, 3, 1).contiguous(), "y": y}
            tensors["seconds"] = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            if spent is not None:
                epsilons[k] = spent
                tensors["epsilon"] = torch.tensor(spent, dtype=torch.float64)
            if finished is not None and folder is not None:
                write_atomic(finished, encode_checked(tensors))
                shutil.rmtree(folder / "work" / f"generator-{k}", ignore_errors=True)
        source = torch.repeat_interleave(torch.tensor(list(recipe.sharing)), torch.tensor([len(y) for _, y in parts]))
        about = {
            **about,
            "counts": {int(k): len(y) for k, (_, y) in zip(recipe.sharing, parts, strict=True)},
            "seconds": round(before + time.perf_counter() - began, 1),
            **({"epsilon": {int(k): e for k, e in epsilons.items()}} if epsilons else {}),
        }
        return SyntheticSet(concatenate_inputs([x for x, _ in parts]), torch.cat([y for _, y in parts]), source, about)

    def finished_images(self, path: Path) -> tuple[Tensor, Tensor, float, float | None]:
        """Load the images of a client that an interrupted job has finished.

        Args:
            path: File of the client.

        Returns:
            Images ``[m, C, H, W]``, their classes ``[m]``, the seconds that they took, and the spent ``epsilon`` or None.

        Raises:
            CheckpointError: If the file is corrupted.
        """
        federation = self.federation
        try:
            tensors = load_checked(path)
            x, y, seconds = tensors["x"].permute(0, 3, 1, 2), tensors["y"], float(tensors["seconds"])
            spent = float(tensors["epsilon"]) if "epsilon" in tensors else None
            right = x.dtype == torch.uint8 and y.dtype == torch.int64 and tuple(x.shape[1:]) == tuple(federation.shape)
            if (
                not right
                or y.dim() != 1
                or len(y) != len(x)
                or not all(0 <= n < math.inf for n in (seconds, spent or 0))
            ):
                raise ValueError("it does not contain images of this federation")
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < federation.classes:
                raise ValueError("it contains images of an unknown class")
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} is corrupted ({error}). Remove it to generate the images again.") from error
        return x, y, seconds, spent

    def client_images(self, client: ClientData, number: int) -> tuple[Tensor, Tensor, float | None]:
        """Generate one client's images.

        Args:
            client: Data of the client.
            number: Number of clients before this one.

        Returns:
            Images ``[m, C, H, W]``, their classes ``[m]``, and the spent ``epsilon`` or None.
        """
        federation = self.federation
        recipe = self.recipe
        folder = self.folder
        rows = draw_subset(client.num_samples, recipe.rho, self.seed, client.id, self.secret)
        x, y = take_rows(client.x.cpu(), rows), client.y.cpu()[rows]
        work = None if folder is None else folder / "work" / f"generator-{client.id}"
        if work is not None:
            make_folder(work)

        def report(progress: Progress) -> None:
            share = TRAINING * progress["epoch"] / progress["epochs"]
            text = f"client {client.id}: generator epoch {progress['epoch']} of {progress['epochs']}"
            self.report(text, number + share, len(recipe.sharing))
            if folder is not None:
                append_log(folder / LOG, {"client": client.id, **progress})

        def sampled(share: float) -> None:
            text = f"client {client.id}: generating {recipe.count} images"
            self.report(text, number + TRAINING + (1 - TRAINING) * share, len(recipe.sharing))

        shape = (federation.shape[0], federation.shape[1], federation.shape[2])
        key, secret = derive(self.seed, "client's generator", 0, client.id), None
        if self.secret is not None:
            secret = self.secret.subkey("private training", 0, client.id)
            key = int(secret_words(self.secret.subkey("client's generator", 0, client.id), 0, 1)) & (1 << 63) - 1
        job = GeneratorJob(
            shape, federation.classes, key, self.device, work, recipe.privacy, secret, report, sampled, self.warn
        )
        model = recipe.factory(job)
        model.fit(x, y)
        wanted = labels_from_counts(
            allocate_counts(torch.bincount(y, minlength=federation.classes), recipe.count), recipe.count
        )
        sampled(0.0)
        images = model.sample(wanted)
        if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.shape != (recipe.count, *shape):
            got = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise DataError(f"The generator must return uint8 images {(recipe.count, *shape)}, not {got}.")
        images = images.cpu()
        if recipe.keep is not None:
            shared = np.asarray(recipe.keep(images, wanted))
            if shared.dtype != bool or shared.shape != wanted.shape:
                raise DataError(f"keep must return {recipe.count} booleans, one per image.")
            mask = torch.from_numpy(shared)
            images, wanted = take_rows(images, mask.nonzero().flatten()), wanted[mask]
        spent: float | None = getattr(model, "epsilon", None) if recipe.privacy is not None else None
        return images, wanted, spent


def append_log(path: Path, line: Progress) -> None:
    """Append a line to a log, and remove lines that an interrupted job wrote for the same client and epoch or later ones.

    Args:
        path: Path of the log.
        line: Values of the new line.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    if lines and not _is_earlier(lines[-1], line):
        write_atomic(path, b"".join(text for text in lines if _is_earlier(text, line)))
    append_text(path, json.dumps(line) + "\n")


def _is_earlier(text: bytes, line: Progress) -> bool:
    """Return whether a line of the log is complete, and of another client or an earlier epoch than ``line``."""
    try:
        row = parse_json(text)
        return text.endswith(b"\n") and bool(row["client"] != line["client"] or row["epoch"] < line["epoch"])
    except (ValueError, LookupError, TypeError):
        return False


def draw_subset(num_samples: int, rho: float, seed: int, client: int, secret: SecretKey | None = None) -> Tensor:
    """Draw ``rho n`` (rounded, at least one) indices of a client's samples, uniformly without replacement, ascending.

    From a secret key, each sample is drawn with probability ``rho`` independently of the others (at least one). So one sample
    more changes at most one sample of the subset, as the guarantee for a sample that is added or removed requires; except if
    no other one is drawn, see ``PrivacyOptions.check_delta``.

    Args:
        num_samples: Number ``n`` of samples of the client.
        rho: Share of drawn samples.
        seed: Seed of the run.
        client: Number of the client.
        secret: Secret key to draw from; None draws from the seed.
    """
    if secret is not None:
        uniform = secret_uniform(secret.subkey("generator subset", 0, client), 0, num_samples)
        return torch.nonzero(uniform <= uniform.min().clamp_min(rho)).flatten()
    order = torch.randperm(num_samples, generator=generator(seed, "generator subset", 0, client))
    return order[: max(1, round(rho * num_samples))].sort().values


def draw_picture(folder: Path, images: SyntheticSet, federation: Federation) -> None:
    """Plot the images of each client as ``client-K.png``, with one row per class.

    Args:
        folder: Folder of the plots.
        images: Generated images of all clients.
        federation: Data of all clients.
    """
    from unskew.plots.image_grid import save_images_by_class

    for k in images.makers[:DRAWN]:
        own_rows = images.source == k
        classes, y = images.y[own_rows].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        names = [federation.class_names[c] if federation.class_names else str(c) for c in classes.tolist()]
        title = f"{federation.client_label(k)}: {len(y)} synthetic images"
        save_images_by_class(
            images.x[own_rows].numpy() / 255, y.numpy(), len(classes), names, folder / f"client-{k}.png", title
        )
