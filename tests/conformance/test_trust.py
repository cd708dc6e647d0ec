"""unskew against stored outputs of other libraries: accountants, adaptive clipping, robust rules, attacks, compression."""

import json
from pathlib import Path

import numpy as np
import pytest

import conformance.trust.__main__ as trust_command
from conformance.trust import inputs
from conformance.trust.comparisons import SECTIONS
from conformance.trust.results import number, read, run_line, table
from unskew.privacy import accounting

PAGE = Path(__file__).parents[2] / "docs" / "results" / "conformance.md"
COMPARISONS = [comparison for comparisons in SECTIONS.values() for comparison in comparisons]
ROUNDING = 1e-12
"""Differences up to this one depend on the processor."""
EVERY = 4
"""Step between the cases of a slow comparison that are computed again."""


@pytest.fixture(scope="module")
def results():
    return read()


def title(comparison):
    return f"{comparison.library}: {comparison.title}"


@pytest.mark.parametrize("comparison", COMPARISONS, ids=title)
def test_unskew_agrees_with_the_stored_outputs_or_differs_as_stated(results, comparison):
    if comparison in SECTIONS["Accountants"]:
        pytest.importorskip("opacus")
    stored = results["differences"][comparison.library][comparison.title]
    every = EVERY if comparison.slow else 1
    found = comparison.differences(results["libraries"][comparison.library]["values"], every)
    assert comparison.verdict(stored) != "unexplained"
    assert len(found) == len(stored)
    assert max(found[-1], stored[-1]) <= comparison.tolerance
    if every == 1:
        assert found == pytest.approx(stored, rel=1e-6, abs=ROUNDING)
    else:
        assert found[0] <= max(stored[0] * (1 + 1e-6), comparison.tolerance)


def test_every_stated_cause_is_of_a_real_difference(results):
    for comparison in COMPARISONS:
        stored = results["differences"][comparison.library][comparison.title]
        assert bool(comparison.cause) == (stored[0] > comparison.tolerance or comparison.bound), title(comparison)


def test_the_page_has_the_stored_results(results):
    page = PAGE.read_text()
    section = page[page.index("## Privacy and robustness") :]
    assert section.split("<!-- trust -->")[1].split("<!-- /trust -->")[0].strip() == table(results)
    assert run_line(results) in section
    (error,) = results["libraries"]["flower"]["values"]["zero update"]
    assert f"raises `{error}` if an update is zero" in section
    krum = next(c for c in COMPARISONS if title(c) == "byzfl: Krum")
    pairs = zip(krum.cases, results["libraries"]["byzfl"]["values"]["krum"], strict=True)
    others = sum(not np.allclose(krum.ours(points), value) for points, value in pairs)
    assert f"in {others} of {len(krum.cases)} sets" in section
    assert set(results["libraries"]) == set(trust_command.LIBRARIES)


def test_the_renyi_divergence_is_the_integral():
    """dp-accounting has larger values at fractional orders."""
    pytest.importorskip("opacus")
    x, step = np.linspace(-40, 60, 200_001, retstep=True)
    for rate, noise in ((0.1, 1.0), (0.01, 0.8), (120 / 3383, 1.2)):
        found = {order: accounting._rdp_per_step(noise, rate, order) for order in accounting._orders()}
        for order in (1.5, 2.5, 2.9, 4.5, 8.0):
            density = np.exp(-((x / noise) ** 2) / 2) / (noise * np.sqrt(2 * np.pi))
            log_ratio = np.log1p(rate * np.expm1(np.clip((2 * x - 1) / (2 * noise**2), None, 500)))
            integral = step * (density * np.exp(np.clip(order * log_ratio, None, 700))).sum()
            assert found[order] == pytest.approx(np.log(integral) / (order - 1), rel=1e-8)


def test_inputs_are_as_described():
    sampled = inputs.sampled_settings()
    assert sampled[: len(inputs.TABLE)] == [inputs.Setting(*row) for row in inputs.TABLE]
    assert {len(points) for points in inputs.point_sets()} == {12, 13}
    assert np.linalg.norm(inputs.updates(), axis=1) == pytest.approx(inputs.norms())
    assert [number(value) for value in (0.0, 3e-16, 0.0712, 12.5)] == ["0", "3e-16", "0.071", "12.500"]


def test_a_library_that_cannot_be_installed_is_named_and_the_command_fails(monkeypatch, capsys, tmp_path, results):
    def failing(folder, module):
        raise OSError("no network")

    stored = tmp_path / "results.json"
    stored.write_text(json.dumps(results))
    monkeypatch.setattr(trust_command, "environment", failing)
    monkeypatch.setattr(trust_command, "RESULTS", stored)
    monkeypatch.setattr(trust_command, "SECTIONS", {})
    monkeypatch.setattr("sys.argv", ["trust", "byzfl", "--environments", str(tmp_path)])
    assert trust_command.main() == 1
    assert "byzfl: not run, OSError with byzfl==0.0.11." in capsys.readouterr().out
