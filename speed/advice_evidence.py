"""Evidence of the advice, from the outcomes of a benchmark: ``python -m speed.advice_evidence --data-path DATA``.

Run it in the repository. It diagnoses every federation, which needs the data, and writes
``unskew/diagnosis/evidence.json`` with features, gains and traffic, and with the scores of the advice for left-out
federations. The federations of another suite, which test the advice, are stored, too; they are not part of the evidence.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unskew.benchmark.results import FederationResults, diverged, read_results
from unskew.benchmark.runner import SuiteRuns
from unskew.benchmark.suite import load_suite, run_settings
from unskew.comparison.references import is_reference
from unskew.diagnosis.diagnose import diagnose
from unskew.diagnosis.evidence import (
    SUGGESTED,
    WORTHWHILE,
    MeasuredFederation,
    View,
    complementary,
    coordinates,
    expected_gains,
)
from unskew.diagnosis.features import SkewFeatures
from unskew.filesystem import write_atomic
from unskew.reproduction.tables import markdown

VIEWS: tuple[View, ...] = ("global", "clients")
SUITES, OTHER_SUITE = ("skew", "cifar10"), "advice"
"""Suites that are the evidence of the advice, and the suite on which the advice is scored in addition."""
FEWEST = 10
"""Number of federations on which a method must have been run to be part of the evidence."""
PATH, PAGE = Path("unskew/diagnosis/evidence.json"), Path("docs/results/advice.md")
START, OTHER_START = "<!-- scores -->", "<!-- scores of other federations -->"
END = "<!-- end -->"


def score_leaving_out(
    evidence: Sequence[MeasuredFederation], view: View, scored: Sequence[MeasuredFederation] | None = None
) -> list[dict[str, Any]]:
    """Score the advice for each federation with evidence of the others only.

    Args:
        evidence: Measured federations.
        view: Global model or clients.
        scored: Federations to score; None for those of the evidence, each of which is left out in turn.

    Returns:
        For each federation: the advised methods, the measured gain of the first and of the best of them (0 for FedAvg
        itself), that of the best of all methods, and the mean traffic of the advised ones relative to FedAvg's.
    """
    rows = []
    for federation in evidence if scored is None else scored:
        others = [other for other in evidence if other.name != federation.name]
        gains = federation.gains[view]
        expected = expected_gains(federation.coordinates, view, others)
        fitting = [entry for entry in expected if entry.gain >= WORTHWHILE and entry.method in gains]
        ordered = complementary(fitting, federation.coordinates, view, others)
        advised = [entry.method for entry in ordered[:SUGGESTED]]
        best = max([0.0, *gains.values()])
        own = [gains[name] for name in advised]
        decided_losses = [name for name in advised if name in federation.decided[view] and gains[name] < 0]
        rows.append(
            {
                "federation": federation.name,
                "advised": advised,
                "first": own[0] if own else 0.0,
                "best_of_advised": max(own, default=0.0),
                "best_of_all": best,
                "best_method": max(gains, key=lambda name: gains[name]) if best > 0 else "fedavg",
                "first_is_worse": bool(advised) and advised[0] in decided_losses,
                "all_are_worse": bool(advised) and len(decided_losses) == len(advised),
                "traffic": math.fsum(federation.traffic.get(name, 1.0) for name in advised) / max(1, len(advised)),
            }
        )
    return rows


def summarize_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the shares of federations in which the advice was right, and its mean distance to the best method.

    Args:
        rows: Result of ``score_leaving_out``.
    """
    count = len(rows)
    return {
        "federations": count,
        "first_above": sum(row["first"] > 0 for row in rows) / count,
        "first_not_worse": sum(not row["first_is_worse"] for row in rows) / count,
        "best_of_three_above": sum(row["best_of_advised"] > 0 for row in rows) / count,
        "best_of_three_not_worse": sum(not row["all_are_worse"] for row in rows) / count,
        "within_one_point": sum(row["best_of_all"] - max(0.0, row["best_of_advised"]) <= 1 for row in rows) / count,
        "missing": math.fsum(row["best_of_all"] - max(0.0, row["best_of_advised"]) for row in rows) / count,
        "missing_of_fedavg": math.fsum(row["best_of_all"] for row in rows) / count,
        "traffic": math.fsum(row["traffic"] for row in rows) / count,
    }


def measured_federation(runs: SuiteRuns, results: FederationResults) -> MeasuredFederation:
    """Diagnose a federation and collect its gains and traffic.

    Args:
        runs: Units of the suite.
        results: Outcomes of the federation.
    """
    settings = run_settings(runs.suite, results.federation, runs.data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = diagnose(seed=runs.suite.tuning_seed, samples=100, curvature=False, **settings)
    assert report.setting is not None
    features = SkewFeatures.of(report.setting, report.labels, report.measurements[0], report.details)
    gains: dict[View, dict[str, float]] = {}
    decided: dict[View, list[str]] = {}
    for view in VIEWS:
        differences = results.differences(view)
        gains[view] = {name: round(difference.mean, 2) for name, difference in differences.items()}
        decided[view] = [name for name, difference in differences.items() if difference.verdict != "tie"]
    sent = {
        name: statistics.fmean(summary["bytes"] for summary in outcome["summaries"])
        for name, outcome in results.outcomes.items()
        if not is_reference(name) and not diverged(outcome)
    }
    traffic = {name: round(value / sent[results.baseline], 3) for name, value in sent.items()}
    rounded = {
        name: value if value is None or isinstance(value, str) else round(value, 3)
        for name, value in coordinates(features).items()
    }
    return MeasuredFederation(results.federation.name, results.federation.title, rounded, gains, decided, traffic)


def without_methods(federation: MeasuredFederation, names: Collection[str]) -> MeasuredFederation:
    """Return a measured federation without some methods.

    Args:
        federation: Measured federation.
        names: Method expressions to leave out.
    """
    return replace(
        federation,
        gains={
            view: {name: gain for name, gain in own.items() if name not in names}
            for view, own in federation.gains.items()
        },
        decided={view: [name for name in own if name not in names] for view, own in federation.decided.items()},
        traffic={name: value for name, value in federation.traffic.items() if name not in names},
    )


def collect(runs: Sequence[SuiteRuns], other_runs: SuiteRuns) -> dict[str, Any]:
    """Return the content of the evidence file.

    Args:
        runs: Units of the suites that are the evidence.
        other_runs: Units of the suite on which the advice is scored in addition; federations with missing units are left
            out.
    """
    results = [(of_suite, own) for of_suite in runs for own in read_results(of_suite)]
    counts = Counter(name for _, own in results for name in (*own.outcomes, *own.not_applicable))
    few = [name for name, count in counts.items() if count < min(FEWEST, len(results))]
    evidence = [without_methods(measured_federation(of_suite, own), few) for of_suite, own in results]
    unfinished = {unit.federation for unit in {*other_runs.units()} - other_runs.stored().keys()}
    finished = [own for own in read_results(other_runs) if own.federation.name not in unfinished]
    others = [measured_federation(other_runs, own) for own in finished]
    tuning = [gain.mean for _, own in results if (gain := own.tuning_gain("global")) is not None]
    scores = {view: summarize_scores(score_leaving_out(evidence, view)) for view in VIEWS}
    return {
        "made_with": " and ".join(f"unskew benchmark {of_suite.suite.name}" for of_suite in runs),
        "federations": [asdict(federation) for federation in evidence],
        "tuning_gain": {"mean": round(statistics.fmean(tuning), 2), "federations": len(tuning)},
        "scores": {view: {name: round(value, 3) for name, value in own.items()} for view, own in scores.items()},
        "other_federations": [asdict(federation) for federation in others],
    }


def score_page(evidence: Sequence[MeasuredFederation], scored: Sequence[MeasuredFederation] | None = None) -> str:
    """Return tables of the scores of the advice, as Markdown.

    Args:
        evidence: Measured federations.
        scored: Federations that are not in the evidence; None for those of the evidence, each left out in turn.
    """
    titles = {"global": "One global model, on test data", "clients": "Personal or global models, on clients' own data"}
    first_title = "left-out federation" if scored is None else "federation"
    header = [first_title, "advised", "first", "best of three", "best of all", "missing", "traffic"]
    lines = []
    for view in VIEWS if scored is None or scored else ():
        scores = score_leaving_out(evidence, view, scored)
        rows = []
        for row in scores:
            advised, best = row["best_of_advised"], row["best_of_all"]
            rows.append(
                [
                    row["federation"],
                    ", ".join(f"`{name}`" for name in row["advised"]) or "FedAvg",
                    f"{row['first']:+.1f}",
                    f"{advised:+.1f}",
                    f"{best:+.1f} `{row['best_method']}`",
                    f"{best - max(0.0, advised):.1f}",
                    f"{row['traffic']:.2g}" if row["advised"] else "1",
                ]
            )
        own = summarize_scores(scores)
        lines += [f"**{titles[view]}**", markdown(header, rows)]
        if len(scores) < 2:
            continue
        lines += [
            f"The first method is above tuned FedAvg in {own['first_above']:.0%} of {own['federations']:.0f} federations and "
            f"not clearly below it in {own['first_not_worse']:.0%}; the best of three in {own['best_of_three_above']:.0%} "
            f"and {own['best_of_three_not_worse']:.0%}. The best of three, or FedAvg if it is better, is within 1 point of "
            f"the best method in {own['within_one_point']:.0%}, and {own['missing']:.1f} points below it on average; "
            f"FedAvg is {own['missing_of_fedavg']:.1f} points below it.",
        ]
    return "\n\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the evidence file and the scores in ``docs/results/advice.md``; then run ``speed.result_pages``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/benchmark"))
    parser.add_argument("--data-path", type=Path)
    options = parser.parse_args(arguments)
    *runs, other_runs = (
        SuiteRuns(*load_suite(name), options.results, options.data_path) for name in (*SUITES, OTHER_SUITE)
    )
    content = collect(runs, other_runs)
    write_atomic(PATH, (json.dumps(content, indent=1) + "\n").encode())
    evidence = [MeasuredFederation(**federation) for federation in content["federations"]]
    others = [MeasuredFederation(**federation) for federation in content["other_federations"]]
    text = PAGE.read_text(encoding="utf-8")
    for start, tables in ((START, score_page(evidence)), (OTHER_START, score_page(evidence, others))):
        before, rest = text.split(start)
        text = f"{before}{start}\n{tables}\n{END}{rest.split(END, 1)[1]}"
    write_atomic(PAGE, text.encode())


if __name__ == "__main__":
    main()
