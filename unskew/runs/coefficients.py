"""Coefficients of a logistic regression or of proportional hazards with 95 % intervals (``coefficients.json``), from sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.data.readers.encoders import category_counts
from unskew.errors import ConfigError
from unskew.records.recorder import finite_or_none
from unskew.runs.assembly import RunParts
from unskew.runs.input_spec import input_spec_of
from unskew.sums.base import SumRequest
from unskew.sums.exchange import Exchange, with_remaining
from unskew.tasks.coefficients import Estimate, NoEstimateError, newton
from unskew.tasks.intervals import NORMAL_95

NAME = "coefficients.json"
MOST_INPUTS = 200
"""Maximum number of inputs, where a category counts once per value."""
MODELS = {
    "odds": "Logistic regression by maximum likelihood on the training rows of all clients together, without class weights "
    "and",
    "hazard": "Proportional hazards, constant in bins of time, by maximum likelihood on all clients' training rows together,",
}
"""Model of each ratio."""
MEANING = (
    "{model} without effects of clients; missing numbers are the mean. A coefficient is the change of the log {ratio} of the "
    "event per unit of the column in the data (dates: per day), or from the column's reference category to this category. "
    "Columns that are constant have none."
)


class Design:
    """Columns of the regression: numbers minus their mean, and every category except the reference, after the intercepts.

    There is one intercept, or for survival one for each bin.

    Args:
        federation: Data of all clients.
        features: Names of the inputs of a table without encoders; may be empty.

    Attributes:
        columns: Name, category and mean of each column; the category of numbers is None.
        titles: Names of the columns for messages.
        references: First category of each categorical column.
        bins: Cut points of a survival task, ``[J]``, and log hazards over all clients in the bins, ``[J]``; empty otherwise.
        intercepts: Number of intercepts, which are the first columns.
    """

    def __init__(self, federation: Federation, features: Sequence[str] = ()):
        encoders, known, inputs = federation.encoders, federation.normalization, federation.shape[0]
        names = [encoder.name for encoder in encoders]
        names += [f"{encoder.name} missing" for encoder in encoders if encoder.marks]
        names = names or [features[j] if len(features) == inputs else f"input {j}" for j in range(inputs)]
        self.counts = category_counts(encoders) or (0,) * inputs
        self.center = np.zeros(inputs) if known is None else np.array(known.mean) / known.scale
        means = [*(encoder.mean for encoder in encoders), *self.center[len(encoders) :]]
        every: list[tuple[str, str | None, float]] = [("(intercept)", None, 0.0)]
        constants, self.bins = federation.objective.constants, dict[str, Tensor]()
        if "cuts" in constants:
            cuts, rates = (torch.tensor(constants[name], dtype=torch.float64) for name in ("cuts", "rates"))
            self.bins = {"cuts": cuts, "offsets": rates.log()}
            every = [(f"(hazard until {cut:g})", None, 0.0) for cut in cuts.tolist()]
        self.intercepts = len(every)
        for j, (name, count, mean) in enumerate(zip(names, self.counts, means, strict=True)):
            every += [(name, value, mean) for value in (("(missing)", *encoders[j].values) if count else (None,))]
        self.references = {encoder.name: encoder.values[0] for encoder in encoders if encoder.values}
        self.kept = [value is None or self.references.get(name) != value for name, value, _ in every]
        self.columns = list(compress(every, self.kept))
        self.titles = [name if value is None else f"{name}={value}" for name, value, _ in self.columns]

    def request(self, event: int, beta: np.ndarray) -> SumRequest:
        """Return the request for the sums of the regression.

        Args:
            event: Number of the class whose odds are modeled.
            beta: Coefficients.
        """
        tensors = {"center": torch.from_numpy(self.center), "beta": torch.from_numpy(beta), **self.bins}
        args: dict[str, Any] = {"codes": self.counts, "kept": self.kept[self.intercepts :], "event": event}
        return SumRequest("fisher", args, tensors)


def check_coefficients(config: Experiment, federation: Federation, built_in: bool) -> None:
    """Validate that coefficients can be computed.

    Args:
        config: Configuration of the run.
        federation: Data of all clients.
        built_in: Whether the model was named, not passed as an object.

    Raises:
        ConfigError: If the model or the data do not fit.
    """
    design, task = Design(federation), federation.objective
    name, inputs = config.model if built_in else "an object", len(design.columns) - design.intercepts
    options = config.model_options if isinstance(config.model_options, dict) else {}
    fits = name == task.linear_model and not options.get("hidden")
    two_classes = "one_class" not in task.provides or federation.classes == 2
    if not fits or not two_classes or len(federation.shape) != 1 or inputs > MOST_INPUTS:
        raise ConfigError(
            "coefficients requires the model logistic and a table with two classes, or the model proportional without hidden "
            f"layers and survival times, and at most {MOST_INPUTS} numbers and categories. Here, the model is {name}, there "
            f"are {federation.classes} classes, targets or bins and {inputs} inputs. Change them, or remove coefficients."
        )
    if any(task.constants.get("discrete", ())):
        raise ConfigError(
            "coefficients requires loss=piecewise, because they are ratios of hazards. Change it, or remove them."
        )


def compute_coefficients(parts: RunParts, exchange: Exchange) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compute coefficients after the last round, and count the traffic.

    Args:
        parts: Parts of the run.
        exchange: Asks all clients for sums.

    Returns:
        The content of ``coefficients.json``, or nothing and the reason as a field of the summary.
    """
    federation, event = parts.evaluator.federation, parts.metrics.computed.positive
    design = Design(federation, input_spec_of(federation, parts.config).features)

    def estimate_over(asked: Exchange) -> Estimate:
        def total(beta: np.ndarray) -> dict[str, Tensor]:
            return asked([design.request(event, beta)])[0]

        return newton(total, design.titles)

    try:
        if any(rule.draws_secretly or getattr(rule, "reproducible", False) for rule in parts.method.rules):
            raise NoEstimateError("exact sums of the clients' data would break the run's differential privacy.")
        estimate = with_remaining(exchange, estimate_over)
        for k, (up, down) in zip(exchange.clients, exchange.traffic.tolist(), strict=True):
            parts.server.traffic.total.count(k, "up", up, 0)
            parts.server.traffic.total.count(k, "down", down, 0)
        task = federation.objective
        return coefficient_table(estimate, design, task.outcome or federation.names[event], task.ratio), {}
    except NoEstimateError as error:
        parts.recorder.warn(f"Coefficients have no intervals: {error}")
        return {}, {"coefficients_omitted": str(error)}


def coefficient_table(estimate: Estimate, design: Design, event: str, ratio: str) -> dict[str, Any]:
    """Return the content of ``coefficients.json``.

    Args:
        estimate: Estimate for the columns of the design.
        design: Columns of the regression.
        event: Class whose odds are modeled, or the name of the event.
        ratio: What the exponential of a coefficient multiplies: ``odds`` or ``hazard``.
    """
    sums, change, first = estimate.sums, np.eye(len(estimate.beta)), design.intercepts
    change[:first, first:] = [-mean for _, _, mean in design.columns[first:]]  # to columns that are not centered
    beta, error = change @ estimate.beta, np.sqrt(np.diag(change @ estimate.covariance @ change.T))
    p = torch.erfc(torch.from_numpy(np.abs(beta / error)) / 2**0.5).numpy()
    values = {"standard_error": error, "z": beta / error, "p_value": p}
    for end, quantile in (("", 0), ("_low", -NORMAL_95), ("_high", NORMAL_95)):
        values[f"coefficient{end}"] = beta + quantile * error
        values[f"{ratio}_ratio{end}"] = torch.from_numpy(beta + quantile * error).exp().numpy()
    rows = []
    for (name, category, _), used, *row in zip(
        design.columns, sums["information"].diag() > 0, *values.values(), strict=True
    ):
        numbers = {key: float(value) if used else None for key, value in zip(values, row, strict=True)}
        if used or category is None:
            rows.append({"column": name, "category": category, **finite_or_none(numbers)})
    return {
        "meaning": MEANING.format(model=MODELS[ratio], ratio=ratio),
        "event": event,
        **dict(zip(("rows", "events"), sums["counts"].tolist(), strict=True)),
        "log_likelihood": float(sums["log_likelihood"]),
        "exchanges": estimate.exchanges,
        "references": design.references,
        "coefficients": rows[first:] if design.bins else rows,
    }
