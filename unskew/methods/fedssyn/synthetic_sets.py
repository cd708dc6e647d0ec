"""Metadata of a synthetic set, and clients that do not share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from unskew.data.federation import Federation
from unskew.errors import ConfigError
from unskew.generators.synthetic_dataset import SyntheticSet
from unskew.generators.trained.dp_sgd import PrivacyOptions


def check_fits(synthetic_set: SyntheticSet, federation: Federation) -> None:
    """Validate that a given synthetic set fits the data.

    Args:
        synthetic_set: Generated images.
        federation: Data of all clients.

    Raises:
        ConfigError: If the classes, the shape or the number of clients differ.
    """
    here = {"classes": federation.classes, "shape": list(federation.shape), "clients": len(federation.clients)}
    for name, value in here.items():
        if synthetic_set.about.get(name) != value:
            raise ConfigError(
                f"The synthetic set has {name}={synthetic_set.about.get(name)}, but the data have {name}={value}."
            )


def set_metrics(about: dict[str, Any]) -> dict[str, object]:
    """Return the summary metrics of the images, from their metadata."""
    summary: dict[str, object] = {"synthetic": about.get("folder"), "synthetic_images": sum(about["counts"].values())}
    summary["synthetic_seconds"] = about["seconds"]
    if about.get("epsilon") and about["recipe"]["privacy"]:
        summary |= privacy_metrics(PrivacyOptions(**about["recipe"]["privacy"]), max(about["epsilon"].values()))
    return summary


def privacy_metrics(privacy: PrivacyOptions, spent: float) -> dict[str, object]:
    """Return the summary metrics of the guarantee of private generators.

    Args:
        privacy: Options of the generators.
        spent: Largest epsilon of any client.
    """
    share = "it shares images of that generator; the number of images per class is not covered by the guarantee."
    fields = {"epsilon": None, "epsilon_if_secret": spent} if privacy.reproducible else {"epsilon": spent}
    return {**fields, "delta": privacy.delta, "privacy": privacy.sentence(spent, share)}


def logged_epsilons(synthetic_set: SyntheticSet, folder: Path) -> SyntheticSet:
    """Return the set with its folder in the metadata.

    Args:
        synthetic_set: Generated images.
        folder: Folder that contains them.
    """
    return replace(synthetic_set, about={**synthetic_set.about, "folder": str(folder)})


def refusing_clients(refuse: str, clients: int | None = None) -> set[int]:
    """Parse the clients that do not share: ``"0;3"`` lists them, ``"0.2"`` is a share, counted from the highest number.

    Args:
        refuse: Option of the method.
        clients: Number of clients, or None to validate only what does not depend on it.

    Raises:
        ConfigError: If the text is neither a list of valid clients nor a share.

    >>> sorted(refusing_clients("0;3", 10)), sorted(refusing_clients("0.2", 10)), refusing_clients("", 10)
    ([0, 3], [8, 9], set())
    """
    try:
        if "." in refuse:
            share = float(refuse)
            if not 0 <= share <= 1:
                raise ValueError
            total = clients or 0
            return set(range(total - round(share * total), total))
        refusing = {int(part) for part in refuse.split(";") if part.strip()}
    except ValueError:
        raise ConfigError(f"fedssyn:refuse={refuse} is neither clients such as 0;3 nor a share such as 0.2.") from None
    if refusing and min(refusing) < 0:
        raise ConfigError(f"fedssyn:refuse={refuse}: clients are numbered from 0.")
    if refusing and clients is not None and max(refusing) >= clients:
        raise ConfigError(f"fedssyn:refuse={refuse}: there are {clients} clients, numbered from 0.")
    return refusing
