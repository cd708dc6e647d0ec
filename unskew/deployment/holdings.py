"""What a site holds: its own samples, or its part of the experiment's; the other clients are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from unskew.config.experiment import Experiment
from unskew.data.federation import ClientData, Federation
from unskew.data.load import federation_of, source_of
from unskew.data.reading.tables import Source
from unskew.data.spec import DataSpec
from unskew.deployment.agreement import Reference
from unskew.deployment.site_config import OwnData, SiteConfig
from unskew.errors import DataError


@dataclass(frozen=True)
class OnlyOne(Sequence[ClientData]):
    """The clients of a federation as one of them sees them: it has its own samples, the others have none here."""

    own: ClientData
    total: int

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        if not 0 <= k < self.total:
            raise IndexError(f"There is no client {k}; this federation has {self.total}.")
        own = self.own
        return own if k == own.id else ClientData(k, own.x[:0], own.y[:0], own.x[:0], own.y[:0])


def alone(own: ClientData, total: int, reference: Reference) -> Federation:
    """The federation of one site: its samples, and of the others only how many there are."""
    return Federation(
        clients=OnlyOne(own, total),
        test=(own.x[:0], own.y[:0]),
        task=reference.task,
        classes=reference.classes,
        normalisation=reference.normalisation,
        class_names=reference.class_names,
    )


def split(config: Experiment, client: int) -> tuple[ClientData, Reference, int]:
    """A client's part of the experiment's own data, what these are, and how many clients there are.

    Raises:
        DataError: There is no such client.
    """
    whole = federation_of(config.data_spec, config.seed)
    if client >= len(whole.clients):
        raise DataError(f"The experiment has {len(whole.clients)} clients; there is none with number {client}.")
    return whole.clients[client], Reference.of(whole), len(whole.clients)


def own_source(config: SiteConfig, experiment: Experiment, folder: Path) -> Source:
    """The samples that a site's configuration names, as they are read.

    Raises:
        DataError: They cannot be read.
    """
    data = config.data
    assert isinstance(data, OwnData), "a rehearsal reads the experiment's data"
    prefix, colon, path = data.source.partition(":")
    source = f"{prefix}:{folder / Path(path).expanduser()}" if colon else data.source
    spec = DataSpec(
        data=source,
        data_path=None if data.data_path is None else str(folder / data.data_path),
        label=data.label,
        label_separator=data.label_separator,
        image=data.image,
        image_size=data.image_size,
        features=data.features,
        exclude=data.exclude,
        partition="iid",
        text=experiment.data_spec.text,
    )
    return source_of(spec)


def renamed(y: Tensor, mine: Sequence[str], theirs: Sequence[str], who: str) -> Tensor:
    """Labels by the numbers that the server gives them.

    Raises:
        DataError: There is a label that the server does not know.

    >>> renamed(torch.tensor([0, 1, 1]), ("no", "yes"), ("maybe", "no", "yes"), "a").tolist()
    [1, 2, 2]
    """
    if not theirs or not mine:
        return y
    unknown = [name for name in mine if name not in theirs]
    if unknown:
        raise DataError(
            f"{who} has samples of the class {unknown[0]!r}, which the server does not know: {', '.join(theirs[:20])}."
        )
    places = torch.tensor([list(theirs).index(name) for name in mine])
    if y.dim() > 1:
        wide = torch.zeros(len(y), len(theirs), dtype=y.dtype)
        wide[:, places] = y
        return wide
    return places[y]


def own(config: SiteConfig, source: Source, reference: Reference) -> ClientData:
    """A site's own samples; the part that their source keeps for tests is held out.

    Raises:
        DataError: They are not of the kind that the server has.
    """
    classes = len(reference.class_names) or source.classes
    names = reference.class_names or source.class_names
    read = Reference(
        tuple(source.train.x.shape[1:]), classes, names, source.task, source.train.x.dtype, reference.normalisation
    )
    if reference.task == "language":
        read = replace(read, classes=reference.classes)
    reference.check(read, f"The site {config.name}")
    y, y_test = (
        renamed(part.y, source.class_names, reference.class_names, f"The site {config.name}")
        for part in (source.train, source.test)
    )
    if not len(y):
        raise DataError(f"The site {config.name} has no samples to train on.")
    return ClientData(config.client, source.train.x, y, source.test.x, y_test)
