"""Messages that a site answers, what its replies contain, and which need masks: for site, server and documentation."""

from __future__ import annotations

from typing import NamedTuple

from unskew.config.experiment import Experiment
from unskew.errors import ConfigError


class RequestKind(NamedTuple):
    """One kind of message from the server.

    Attributes:
        when: When the server sends it.
        reply: What leaves the site.
        masked: What the server sees of it under secure aggregation.
    """

    when: str
    reply: str
    masked: str


_KEYS = "public keys, encrypted shares of secrets, signatures and the update under masks"

REQUESTS: dict[str, RequestKind] = {
    "hello": RequestKind(
        "a site connects, and when the columns are known",
        "name and client number, versions of the software, clock, numbers of training and held-out samples, size of the "
        "model; samples per class only for methods that weight sites by them (`feddisco`)",
        "the same without samples per class",
    ),
    "sums": RequestKind(
        "before the first round, and in `deploy diagnose` and `deploy evaluate`",
        "counts and sums over all training rows, see below",
        "only their sums over all sites",
    ),
    "contribute": RequestKind(
        "before the first round, with methods that exchange data",
        "what the method's page names, such as synthetic images",
        "the same; most of these methods need none",
    ),
    "receive": RequestKind("after that", "numbers of samples with the received ones", "the same"),
    "train": RequestKind(
        "in each round in which the site takes part",
        "change of the model, what the method adds, loss and times",
        "only sums over the sites of the round",
    ),
    "share": RequestKind("a masked sum", _KEYS, "no content"),
    "mask": RequestKind("a masked sum", _KEYS, "no content"),
    "agree": RequestKind("a masked sum", _KEYS, "no content"),
    "unmask": RequestKind("a masked sum", _KEYS, "the sum"),
    "evaluate": RequestKind(
        "after the last round, and every `eval_every` rounds if the experiment says so",
        "accuracy and loss on the site's held-out samples",
        "the same; nothing with noise at the sites",
    ),
    "score": RequestKind(
        "in `deploy evaluate`, for models that `evaluate` in `site.yaml` allows",
        "metrics of a model on the site's held-out samples with intervals, and the numbers of samples of classes that have "
        "at least ten; no predictions",
        "nothing; it sends `sums`",
    ),
    "local": RequestKind(
        "in `deploy evaluate`, if `evaluate` in `site.yaml` allows `local`",
        "the same for a model that the site trains on its own samples alone; the model itself only with `share_local`",
        "nothing",
    ),
}
"""Every kind of message that a site answers; it rejects all others."""


def check_hazard_ratios(config: Experiment, hazards: bool) -> None:
    """Validate that sums for hazard ratios are masked: a site's own sums for each bin of time could reveal single patients.

    Args:
        config: The experiment.
        hazards: Whether coefficients of hazards are requested.

    Raises:
        ConfigError: If they are not masked.
    """
    if hazards and config.secure_aggregation != "required":
        raise ConfigError(
            "Hazard ratios over sites require secure_aggregation: required, because a site's own sums for each bin of time "
            "could reveal single patients. Set it in the experiment, or remove coefficients."
        )
