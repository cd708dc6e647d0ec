"""Figure 2 of Fedssyn with its three panels: the runs, a table and the figure; ``quadratic`` has the computation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from unskew.comparison.summary_statistics import mean_std
from unskew.plots.figure import new_figure, save_figure
from unskew.reproduction.outcomes import Outcome
from unskew.reproduction.studies.quadratic import (
    QuadraticProblem,
    best_rounds,
    fedavg,
    fit_rounds,
    fit_rounds_chained,
    make_problem,
    predicted_ratio,
)
from unskew.reproduction.study import ByPart, Line

Whole = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
CURVES, TUNED = "errors", "tuned step sizes"
SHOWN = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
POINTS = 150


@dataclass(frozen=True)
class QuadraticStudy:
    """Figure 2 of Fedssyn.

    Attributes:
        workers: Number of workers ``n``.
        dimension: Dimension ``d`` of the problem.
        pairs: Number of data pairs of each worker, ``n_i``.
        zeta2: Dissimilarity of the workers' gradients at 0, in expectation.
        rounds: Communication rounds.
        curve_shares: Shuffled shares ``p`` of panel (a); not stated in the paper.
        curve_step: Step size of panel (a); not stated in the paper.
        curve_noise: Noises ``sigma^2`` of panel (a), as in the paper.
        shares: Number of shares from 0 to 1 in panels (b) and (c), which have no noise.
        steps: Number of step sizes to try: the smallest of 40 from 1e-6 to 100, evenly spaced on a logarithmic scale.
        epsilon: Accuracy of panel (b).
        accuracies: Number of accuracies in panel (c): the largest ones of 80 from 1e-6 to 10^-4.3.
    """

    workers: Whole = 10
    dimension: Whole = 25
    pairs: Whole = 100
    zeta2: Annotated[float, Field(gt=0)] = 10.0
    rounds: Whole = 800
    curve_shares: tuple[Share, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    curve_step: Annotated[float, Field(gt=0)] = 1e-4
    curve_noise: tuple[Annotated[float, Field(ge=0)], ...] = (0.0, 1000.0)
    shares: Annotated[int, Field(ge=2)] = 41
    steps: Annotated[int, Field(ge=1, le=40)] = 31
    epsilon: Annotated[float, Field(gt=0)] = 1.16e-6
    accuracies: Annotated[int, Field(ge=2, le=79)] = 79

    def parts(self) -> list[str]:
        """Return the names of the parts: panel (a), and panels (b) and (c) together."""
        return [CURVES, TUNED]

    def prepare(self, data_path: str | None) -> None:
        """Load nothing; the problem is drawn at random."""

    def problem(self, shares: list[float], sigma2: float, seed: int) -> QuadraticProblem:
        """Draw the workers' pairs, as ``make_problem`` does.

        Args:
            shares: Shares of each worker's pairs that are shuffled among the workers.
            sigma2: Noise of a worker's gradients at 0, in expectation.
            seed: Seed of the run.
        """
        return make_problem(shares, self.zeta2, sigma2, seed, self.workers, self.dimension, self.pairs)

    def run(self, part: str, seed: int) -> dict[str, Any]:
        """Run one part; see ``unskew.reproduction.study.Study``.

        Args:
            part: Name of the part.
            seed: Seed of the run.
        """
        return self.curves(seed) if part == CURVES else self.tuned(seed)

    def curves(self, seed: int) -> dict[str, Any]:
        """Run panel (a) and return errors at logarithmically spaced rounds, and the error floors of drift."""
        shown = np.unique(np.geomspace(1, self.rounds, min(POINTS, self.rounds)).round().astype(int))
        errors, floors = [], []
        for sigma2 in self.curve_noise:
            problem = self.problem(list(self.curve_shares), sigma2, seed)
            distances = fedavg(problem, torch.tensor([self.curve_step]), self.rounds, seed)[:, :, 0]
            errors.append(
                [[float(f"{e:.4g}") for e in row] for row in distances[torch.from_numpy(shown) - 1].T.tolist()]
            )
            floors.append([float(f"{e:.4g}") for e in error_floor(problem, self.curve_step).tolist()])
        return {"rounds": shown.tolist(), "errors": errors, "floors": floors}

    def tuned(self, seed: int) -> dict[str, Any]:
        """Run panels (b) and (c) and return rounds with the best step size, and the fitted ``A`` and ``B``."""
        shares = np.linspace(0, 1, self.shares)
        problem = self.problem(shares.tolist(), 0.0, seed)
        gammas = torch.logspace(-6, 2, 40, dtype=torch.float64)[: self.steps]
        errors = fedavg(problem, gammas, self.rounds, seed)
        accuracies = np.logspace(-6, -4.3, 80)[1:][-self.accuracies :]
        rounds, which = best_rounds(errors, torch.tensor([self.epsilon, *accuracies]))
        by_accuracy = rounds[:, 1:].numpy()
        fits = [fit_rounds(accuracies, row) for row in by_accuracy]
        zeta2 = problem.dissimilarity(problem.optimum)
        return {
            "shares": shares.tolist(),
            "rounds": _plain(rounds[:, 0].tolist()),
            "step": gammas[which[:, 0]].tolist(),
            "A": _plain([a for a, _ in fits]),
            "B": _plain([b for _, b in fits]),
            "A_chained": _plain(fit_rounds_chained(accuracies, by_accuracy)),
            "smoothness": problem.smoothness.tolist(),
            "dissimilarity": (zeta2 / zeta2[0]).tolist(),
        }

    def lines(self, by_part: ByPart) -> list[Line]:
        """Return a table of coefficients, rounds, smoothness and dissimilarity over seeds, next to the theory."""
        if TUNED not in by_part:
            return []
        outcomes = by_part[TUNED]
        shares = np.array(next(iter(outcomes.values()))["summary"]["shares"])
        largest, average = self.smoothness()
        line = predicted_ratio(shares, largest, average)
        rows = []
        for i, p in enumerate(shares):
            if not np.isclose(p, SHOWN, atol=1e-9).any():
                continue
            rows.append(
                [
                    f"{p:.1f}",
                    _over(outcomes, lambda s, i=i: _ratio(s["A"], i)),
                    _over(outcomes, lambda s, i=i: _ratio(s["A_chained"], i)),
                    f"{line[i]:.3f}",
                    f"{(1 - p) ** 2:.3f}",
                    _over(outcomes, lambda s, i=i: s["rounds"][i], 0),
                    _over(outcomes, lambda s, i=i: s["smoothness"][i], 1),
                    f"{(1 - p) * largest + p * average:.1f}",
                    _over(outcomes, lambda s, i=i: s["dissimilarity"][i]),
                    f"{(1 - p) ** 2:.3f}",
                ]
            )
        header = ["p", "A_p/A_0", "authors' fit", "paper's theory", "(1-p)²", f"rounds to {self.epsilon:.3g}"]
        header += ["L_p", "theory", "ζ_p²/ζ²", "theory"]
        seeds = ", ".join(map(str, outcomes))
        return [(f"Rounds R = A/√ε + B with the best step size, σ² = 0; seeds {seeds}", header, rows)]

    def smoothness(self) -> tuple[float, float]:
        """Return the largest and the mean smoothness constant of the workers, ``L_max`` and ``L_avg``."""
        squares = np.arange(1, self.workers + 1) ** 2
        return float(squares.max()), float(squares.mean())

    def draw(self, by_part: ByPart, path: Path) -> Path:
        """Draw panel (a) for each noise, and panels (b) and (c).

        Args:
            by_part: Outcomes of each part.
            path: File to write.
        """
        noises = len(self.curve_noise)
        figure, (axes,) = new_figure(4.1 * (noises + 2), 3.7, noises + 2, 1)
        for axis, number in zip(axes, range(noises), strict=False):
            self._draw_curves(axis, number, by_part.get(CURVES, {}))
        if TUNED in by_part:
            self._draw_tuned(axes[noises], axes[noises + 1], by_part[TUNED])
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.legend(frameon=False, fontsize=7)
        return save_figure(figure, path)

    def _draw_curves(self, axis: Any, number: int, outcomes: dict[int, Outcome]) -> None:
        for row, p in enumerate(self.curve_shares):
            logs = [np.log10(np.array(o["summary"]["errors"][number][row], dtype=float)) for o in outcomes.values()]
            if not logs:
                continue
            rounds = next(iter(outcomes.values()))["summary"]["rounds"]
            axis.plot(rounds, 10 ** np.mean(logs, 0), color=f"C{row}", label=f"p = {p:g}")
            floors = [np.log10(o["summary"]["floors"][number][row]) for o in outcomes.values()]
            if self.curve_noise[number] == 0 and p < 1:
                axis.axhline(10 ** np.mean(floors), color=f"C{row}", linestyle=":", alpha=0.7)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("communication round")
        axis.set_ylabel("error ‖x − x*‖²")
        dotted = "; dotted: floor by drift" if self.curve_noise[number] == 0 else ""
        axis.set_title(f"(a) σ² = {self.curve_noise[number]:g}, γ = {self.curve_step:g}{dotted}", fontsize=9)

    def _draw_tuned(self, left: Any, right: Any, outcomes: dict[int, Outcome]) -> None:
        shares = np.array(next(iter(outcomes.values()))["summary"]["shares"])
        line = predicted_ratio(shares, *self.smoothness())
        summaries = [o["summary"] for o in outcomes.values()]
        rounds = np.array([s["rounds"] for s in summaries], dtype=float)
        ratios = np.array([[_ratio(s["A"], i) for i in range(len(shares))] for s in summaries], dtype=float)
        chained = np.array([[_ratio(s["A_chained"], i) for i in range(len(shares))] for s in summaries], dtype=float)
        for axis, values, base in ((left, rounds, np.nanmean(rounds[:, 0])), (right, ratios, 1.0)):
            spread = values.std(0, ddof=1) if len(values) > 1 else None
            axis.errorbar(shares, values.mean(0), spread, fmt="o", markersize=3, label="measured", capsize=2)
            axis.plot(shares, base * line, "k--", label="(1−p)√(1−p+p·L_avg/L_max)")
            axis.plot(shares, base * (1 - shares) ** 2, "C3:", label="(1−p)²: drift of quadratics")
            axis.set_xlabel("shuffled share p")
        right.plot(shares, chained.mean(0), "x", color="C2", markersize=4, label="measured, authors' fit")
        left.set_ylabel(f"rounds to ε = {self.epsilon:.3g}")
        left.set_title("(b) σ² = 0, best γ of each p", fontsize=9)
        right.set_ylabel("A_p / A_0")
        right.set_title("(c) R = A/√ε + B, σ² = 0", fontsize=9)


def error_floor(problem: QuadraticProblem, step: float) -> torch.Tensor:
    """Return the error at which client drift stops FedAvg, to leading order in the step size, ``[P]``.

    With ``h_i`` a worker's mean curvature and ``g_i`` its gradient at ``x*``, a pass of ``m`` steps moves by
    ``-gamma m (h_i (x - x*) + g_i) + gamma^2 m (m - 1) / 2 h_i g_i``. So the mean does not move at
    ``x - x* = gamma (m - 1) / 2 mean_i h_i g_i / mean_i h_i``. Shuffling reduces the distances of
    ``h_i`` and ``g_i`` from their means by the factor ``1 - p``. So for the same error, the step size can be larger and
    the number of rounds smaller by the factor ``(1 - p)^2``.

    Args:
        problem: Pairs of the workers, for each share.
        step: Step size.
    """
    h = problem.a.square().mean(2)
    g = h[..., None] * problem.optimum - (problem.a[..., None] * problem.b).mean(2)
    shift = step * (problem.a.shape[2] - 1) / 2 * (h[..., None] * g).mean(1) / h.mean(1, keepdim=True)
    return shift.square().sum(1)


def _ratio(values: list[float | None], i: int) -> float:
    top, base = values[i], values[0]
    return float("nan") if top is None or not base else top / base


def _over(outcomes: dict[int, Outcome], of: Any, digits: int = 3) -> str:
    values = [v for o in outcomes.values() if (v := of(o["summary"])) is not None and np.isfinite(v)]
    if not values:
        return ""
    mean, std = mean_std(values)
    return f"{mean:.{digits}f} ± {std:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def _plain(values: list[float]) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in values]
