"""The command ``unskew privacy``."""

import re
import sys

import pytest
from support.running import call

from unskew.cli.privacy import round_up
from unskew.privacy.accounting import GaussianRounds, exact_epsilon, rdp_epsilon

SETTING = ("privacy", "--clients", 3383, "--cohort", 120, "--rounds", 100)
NOISE = (*SETTING, "--noise", 1.2, "--delta", "1e-5")


@pytest.fixture
def opacus():
    return pytest.importorskip("opacus")


def row(out, title):
    (line,) = (line for line in out.splitlines() if line.strip().startswith(title))
    return re.split(r"\s{2,}", line.strip())


def test_the_epsilon_of_a_noise(opacus, capsys):
    outcome = call(capsys, *NOISE)
    assert (outcome.code, outcome.err) == (0, "")
    assert row(outcome.out, "RDP") == ["RDP", "1.99", "Poisson cohorts"]
    assert row(outcome.out, "PRV") == ["PRV, upper bound", "1.72", "Poisson cohorts"]
    assert row(outcome.out, "exact")[:2] == ["exact, without amplification", "69.5"]
    assert "differ in one client, added or removed" in outcome.out
    assert "noise multiplier of the update is 1.206." in outcome.out


def test_the_noise_for_an_epsilon_gives_it_back(opacus, capsys):
    outcome = call(capsys, *SETTING, "--epsilon", 2, "--delta", "1e-5")
    assert outcome.code == 0
    for title in ("RDP", "PRV", "exact"):
        noise = row(outcome.out, title)[1]
        back = call(capsys, *SETTING, "--noise", noise, "--delta", "1e-5", "--json").json()
        (spent,) = (each["epsilon"] for each in back["rows"] if each["accountant"] == title.lower())
        assert 1.98 < spent <= 2
    assert row(outcome.out, "RDP")[2] == "1.203"
    assert row(outcome.out, "exact")[2] == "cohort >= 200"


def test_json_has_the_setting_and_unrounded_values(opacus, capsys):
    found = call(capsys, *NOISE, "--parameters", 10_000, "--json").json()
    assert {name: found[name] for name in ("clients", "cohort", "sampling", "rounds", "delta", "noise")} == {
        "clients": 3383,
        "cohort": 120,
        "sampling": "poisson",
        "rounds": 100,
        "delta": 1e-5,
        "noise": 1.2,
    }
    assert found["target_epsilon"] is None
    assert [each["accountant"] for each in found["rows"]] == ["rdp", "prv", "exact"]
    assert found["rows"][0]["epsilon"] == pytest.approx(1.98612, abs=1e-4)
    assert found["rows"][1]["epsilon"] == pytest.approx(1.71761, abs=1e-3)
    for each in found["rows"]:
        assert each["adaptive_noise"] == pytest.approx(1.2060454, abs=1e-7)
        assert each["noise_norm"] == pytest.approx(1.2 * 100 / 120)
    assert (
        call(capsys, *SETTING, "--sampling", "fixed", "--noise", "1e-200", "--json").json()["rows"][0]["epsilon"]
        is None
    )


def test_the_noise_relative_to_the_clipping_norm(capsys):
    fixed = (*SETTING, "--sampling", "fixed", "--parameters", 10_000)
    text = " ".join(call(capsys, *fixed, "--noise", 1.2).out.split())
    assert "z sqrt(d) / m = 1 C" in text
    assert "signal-to-noise ratio is at most 1." in text
    assert "noise norm / C" in call(capsys, *fixed, "--epsilon", 2).out


def test_no_amplification_is_claimed_for_fixed_cohorts(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)  # not needed
    outcome = call(capsys, *NOISE, "--sampling", "fixed")
    assert (outcome.code, outcome.err) == (0, "")
    assert row(outcome.out, "exact")[1] == "69.5"
    assert "RDP" not in outcome.out
    assert "PRV" not in outcome.out
    assert "No amplification by sampling is claimed" in outcome.out
    assert "`sampling: poisson` would give it" in outcome.out
    assert "data are replaced by none. If a client is added, removed or replaced" in " ".join(outcome.out.split())
    (shown,) = call(capsys, *SETTING, "--sampling", "fixed", "--noise", 20, "--json").json()["rows"]
    assert shown["epsilon_replaced"] == pytest.approx(exact_epsilon(2 * 10 / 20, 3383**-1.1))


def test_without_sampling_only_the_exact_value_is_shown(capsys):
    found = call(
        capsys, "privacy", "--clients", 50, "--participation", 1, "--rounds", 10, "--noise", 2, "--json"
    ).json()
    assert [each["accountant"] for each in found["rows"]] == ["exact"]
    assert found["delta"] == pytest.approx(50**-1.1)
    assert "All clients take part in every round" in " ".join(found["notes"])


def test_a_participation_is_a_share_of_the_clients(capsys):
    words = ("privacy", "--clients", 25, "--participation", 0.1, "--rounds", 10, "--noise", 0.1, "--json")
    assert call(capsys, *words, "--sampling", "fixed").json()["cohort"] == 2  # as the sampler of a run
    pytest.importorskip("opacus")
    assert call(capsys, *words).json()["cohort"] == 2.5


def test_the_smallest_cohort_for_adaptive_clipping_is_stated(capsys):
    outcome = call(capsys, *SETTING, "--sampling", "fixed", "--noise", 20)
    assert "not possible with cohorts of 120: noise 20 needs a cohort of at least 201" in outcome.out


def test_noise_at_the_sites_costs_slightly_more_than_the_gaussian(opacus, capsys):
    words = ("privacy", "--clients", 50, "--cohort", 20, "--rounds", 10, "--sampling", "fixed", "--delta", "1e-5")
    sites = (*words, "--honest", 5, "--parameters", 10_000)
    (found,) = call(capsys, *sites, "--noise", 4, "--json").json()["rows"]
    gaussian = rdp_epsilon([GaussianRounds(4.0, 1.0, 10)], 1e-5)
    assert gaussian < found["epsilon"] < 1.01 * gaussian
    assert found["noise_norm"] == pytest.approx(4 * 100 * (20 / 5) ** 0.5 / 20)  # 20 clients add noise for 5
    outcome = call(capsys, *sites, "--epsilon", 3)
    noise = row(outcome.out, "RDP, noise at the sites")[1]
    (back,) = call(capsys, *sites, "--noise", noise, "--json").json()["rows"]
    assert 2.98 < back["epsilon"] <= 3
    assert "if at least 5 clients of every sum" in " ".join(outcome.out.split())
    everybody = ("privacy", "--clients", 20, "--cohort", 20, *sites[5:])
    note = "data are replaced by none. If they are replaced by other data"  # the sites that add noise are fixed
    assert note in " ".join(call(capsys, *everybody, "--noise", 4).out.split())
    for wrong in ((*sites, "--sampling", "poisson"), (*words, "--honest", 5), (*sites, "--honest", 21)):
        outcome = call(capsys, *wrong, "--noise", 4)
        assert outcome.code == 2
        assert "--honest (noise at the sites) needs" in " ".join(outcome.err.split())


OPTIONS = {"--clients": 100, "--cohort": 10, "--rounds": 5, "--noise": 1, "--sampling": "fixed"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--noise": None}, "either --noise"),
        ({"--epsilon": 2}, "either --noise"),
        ({"--cohort": None}, "--cohort, or their share with --participation"),
        ({"--participation": 0.1}, "Remove one of them"),
        ({"--cohort": None, "--participation": 0}, "--participation is 0"),
        ({"--cohort": None, "--participation": 1.5}, "--participation is 1.5"),
        ({"--cohort": 101}, "larger than the number of clients, 100"),
        ({"--noise": 0}, "--noise is 0"),
        ({"--noise": "nan"}, "--noise is nan"),
        ({"--noise": 1e30}, "at most 1e+06"),
        ({"--noise": None, "--epsilon": 0}, "Use a positive number"),
        ({"--delta": 0.01}, "below 1/100"),
        ({"--delta": 0}, "below 1/100"),
        ({"--sampling": "random"}, "Known: fixed, poisson"),
        ({"--clients": 1}, "greater than or equal to 2"),
        ({"--clients": None}, "--clients"),
    ],
)
def test_errors_say_what_to_change(changes, message, capsys):
    options = {**OPTIONS, **changes}
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    outcome = call(capsys, "privacy", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_a_missing_opacus_is_named(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)
    outcome = call(capsys, *SETTING, "--noise", 1.2345)
    assert outcome.code == 2
    assert "pip install 'unskew[privacy]'" in outcome.err


def test_values_are_rounded_up():
    assert [round_up(value, 3) for value in (1.98612, 1.71761, 4.0, 0.001, 9.999, 0.0, 99999.0)] == [
        1.99,
        1.72,
        4.0,
        0.001,
        10.0,
        0.0,
        100000.0,
    ]
