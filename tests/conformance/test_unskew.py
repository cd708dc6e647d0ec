"""unskew in the conformance suite: every method with a convex meaning against the papers in NumPy."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.slow import slow_but

import conformance.__main__ as conformance_command
from conformance import invariants
from conformance.adapters import unskew as adapter
from conformance.cases import TABLE, case, distance, measured
from conformance.papers import PAPERS, paper
from conformance.problem import problem
from unskew.methods.registry import METHODS

EXACT = 1e-12


def test_every_method_is_in_the_suite_or_in_a_test_of_its_own():
    """The problem of the suite is convex, so it says nothing on heads, generated inputs, codes or noise."""
    named = {part for method in adapter.METHODS for part in re.sub("-(1|momentum)$", "", method).split("+")}
    own = "\n".join(
        file.read_text()
        for part in ("methods", "protocol")
        for file in (Path(__file__).parents[1] / part).rglob("*.py")
    )
    assert [name for name in METHODS if name not in named and not re.search(rf"[\"'+]{name}[\"':+]", own)] == []
    assert set(adapter.METHODS) == set(PAPERS)


@pytest.mark.filterwarnings("ignore:f[etd]")  # fedbn and ft say that they have nothing to do
@pytest.mark.parametrize("participation", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("method", adapter.METHODS)
def test_the_trajectory_is_the_papers(method, participation):
    assert invariants.follows_the_paper(adapter.run, method, participation) < EXACT


@pytest.mark.filterwarnings("ignore:fedbn")
@pytest.mark.parametrize("method", invariants.ONE_STEP)
def test_one_local_step_is_gradient_descent(method):
    assert invariants.one_step_is_gradient_descent(adapter.run, method) < EXACT


@pytest.mark.filterwarnings("ignore:fedbn")
@pytest.mark.parametrize("method", invariants.EQUAL)
def test_equal_clients_are_one(method):
    assert invariants.equal_clients_are_one(adapter.run, method) < EXACT


def test_fedprox_without_its_term_is_fedavg():
    assert invariants.no_proximal_term_is_fedavg(adapter.run) < EXACT


@pytest.mark.parametrize("run", [paper, pytest.param(adapter.run, marks=pytest.mark.slow)], ids=["paper", "unskew"])
def test_fedprox_drifts_less_with_more_of_its_term(run):
    distances = invariants.fedprox_by_mu(run)
    assert distances == sorted(distances, reverse=True)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("method", slow_but(["fedavg", *invariants.VARIATES], invariants.BY_SAMPLES))
def test_unequal_sizes_count_as_the_weights_say(method, weights):
    assert invariants.weights_name_the_objective(adapter.run, method, weights) < EXACT
    if method in (*invariants.VARIATES, "ca2fl"):  # the part that the cohort is of all clients enters there
        assert invariants.weights_name_the_objective(adapter.run, method, weights, 0.5) < EXACT


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_one_step_descends_the_objective_that_the_weights_name(weights):
    assert invariants.one_step_descends_the_objective(adapter.run, weights) < EXACT


@pytest.mark.parametrize("method", ["fedavg", "fednova", "scaffold", "scaffold-1"])
def test_unequal_local_steps(method):
    assert invariants.unequal_steps(adapter.run, method) < EXACT


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedDyn 0.5", "FedDyn 0.5, 50%"])
def test_the_papers_reach_the_optimum_of_the_table(name):
    """The oracle, in fewer rounds than the table has: the suite itself is checked before a library is."""
    asked = TABLE[name]
    assert distance(paper(replace(asked, rounds=30)).models[-1], problem()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, asked in TABLE.items() if asked.method in adapter.METHODS])
def test_rows_of_the_table_follow_the_paper(name):
    asked = TABLE[name]
    apart, far = measured(adapter.run, replace(asked, rounds=min(asked.rounds, 60)), 20)
    assert apart < 1e-10
    if TABLE[name].method in ("scaffold", "scaffold-1", "feddyn"):
        assert far < 1e-2
    if TABLE[name].method in ("fedavg", "fedprox"):
        assert far > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("run", [paper, adapter.run], ids=["paper", "unskew"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("method", invariants.VARIATES)
def test_variates_reach_the_optimum_that_the_weights_name(run, method, participation, weights):
    found = invariants.fixed_point(run, method, weights, participation, 60 if participation == 1 else 120)
    assert found.pop(weights) < 1e-5
    assert min(found.values()) > 0.1


def test_the_problem_has_what_it_promises():
    one = problem()
    best = one.optimum()
    assert abs(sum(one.gradient(k, best) for k in range(one.clients))).max() < 1e-12
    assert distance(paper(case("fedavg", rounds=10)).models[-1], one) > 0.1


@pytest.mark.parametrize(("asked", "code"), [(["unskew"], 1), ([], 1), (["fedlab"], 1)])
def test_a_library_that_takes_too_long_is_named_and_the_command_fails(monkeypatch, capsys, tmp_path, asked, code):
    def slow(*command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(conformance_command, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(conformance_command, "interpreter", lambda library: "python")
    monkeypatch.setattr(conformance_command, "TABLE", {})
    monkeypatch.setattr(conformance_command.subprocess, "run", slow)
    monkeypatch.setattr("sys.argv", ["conformance", *asked, "--minutes", "0.5"])
    assert conformance_command.main() == code
    assert (
        f"{(asked or ['unskew'])[0]}: not run, it took more than 0.5 minutes, raise --minutes"
        in capsys.readouterr().out
    )
