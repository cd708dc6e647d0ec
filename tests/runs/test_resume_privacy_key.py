"""The key of a private run: where it is stored, how long, and what follows if it is lost."""

import shutil
import stat

import pytest
import torch
from support.federations import blobs
from support.running import Stop, StopAfter

import unskew
from unskew.config.loader import experiment
from unskew.deployment.server.site_clients import check_deployable
from unskew.errors import CheckpointError, ConfigError, MethodConflictError
from unskew.records.result import read_history
from unskew.runs import session

SIZES = [9, 14, 9, 14, 9, 9, 14, 9]
FEW = {
    "model": "mlp",
    "rounds": 4,
    "local_steps": 2,
    "batch_size": 4,
    "lr": 0.05,
    "engine": "inline",
    "eval_clients": 0,
}
PRIVATE = "dp:noise=1,adaptive=false,clip=0.1"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def run(method=PRIVATE, **options):
    return unskew.run(blobs(SIZES), method=method, **{**FEW, **options})


def interrupted(folder, rounds=2, **options):
    with pytest.raises(Stop):
        run(out=folder, callbacks=[StopAfter(rounds)], **options)
    return folder / "privacy.key"


def resume(folder, **changes):
    return unskew.resume(folder, federation=blobs(SIZES), **changes)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_unfinished_run_keeps_its_key_and_a_finished_one_has_none(tmp_path):
    path = interrupted(tmp_path / "a")
    key = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for other, content in contents(tmp_path).items():
        assert other == path or key not in content
        assert key.hex().encode() not in content
    resume(tmp_path / "a")
    assert not path.exists()
    assert not any(key in content for content in contents(tmp_path).values())


def test_only_runs_with_secret_draws_have_a_key(tmp_path):
    for number, method in enumerate(("fedavg", "dp:noise=0", f"{PRIVATE},reproducible=true", "dpsgd:noise=0")):
        assert not interrupted(tmp_path / str(number), method=method).exists()
    assert interrupted(tmp_path / "private", method="dpsgd:noise=1").exists()


def test_an_unfinished_run_cannot_be_resumed_without_its_key(tmp_path):
    path = interrupted(tmp_path / "a")
    key = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match="of the unfinished private run"):
        resume(tmp_path / "a")
    path.write_bytes(key)
    resume(tmp_path / "a")


def test_a_run_without_a_checkpoint_cannot_be_resumed_without_its_key_either(tmp_path):
    """Metrics of its rounds may have been shown."""
    path = interrupted(tmp_path / "a", checkpoint_every=4)
    path.unlink()
    with pytest.raises(CheckpointError, match="of the unfinished private run"):
        resume(tmp_path / "a")


def test_repeated_rounds_have_the_same_noise_unless_the_number_of_rounds_changed(tmp_path):
    """The noise for an epsilon depends on that number, and the same draws of two scales would reveal the sum."""
    interrupted(tmp_path / "a", checkpoint_every=4)
    before = [row["loss"] for row in read_history(tmp_path / "a")]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    same, other = resume(tmp_path / "a"), resume(tmp_path / "b", rounds=5)
    assert [row["loss"] for row in same.history[:2]] == before
    assert not {row["loss"] for row in other.history} & set(before)


@pytest.mark.parametrize(
    "change",
    [{}, {"method": "dp:noise=1,adaptive=false,clip=0.2"}, {"seed": 5}, {"federation": blobs([10, *SIZES[1:]])}],
)
def test_noise_is_not_repeated_for_other_options_or_other_data(tmp_path, change):
    """Without a checkpoint, a run begins again; the same noise for other inputs would cancel in the difference."""
    still = {**FEW, "checkpoint_every": 4, "lr": 1e-30, "rounds": 4}
    interrupted(tmp_path / "a", checkpoint_every=4, lr=1e-30)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    start = unskew.run(blobs(SIZES), method="fedavg", **{**still, "seed": change.get("seed", 0)}).vector
    first = resume(tmp_path / "a").vector - unskew.run(blobs(SIZES), method="fedavg", **still).vector
    given = {"federation": blobs(SIZES), "method": PRIVATE, **still, **change}
    second = unskew.run(**given, out=tmp_path / "b", resume=True).vector - start
    assert (torch.cosine_similarity(first, second, 0) > 0.99) == (not change)
    assert change or torch.equal(first, second)


def test_the_key_of_a_run_that_was_killed_just_before_its_end_is_removed(tmp_path, monkeypatch):
    write = session.write_artifacts
    monkeypatch.setattr(session, "write_artifacts", lambda *given: (write(*given), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        run(out=tmp_path / "a")
    monkeypatch.undo()
    assert (tmp_path / "a" / "privacy.key").exists()
    with pytest.raises(CheckpointError, match="is complete"):
        resume(tmp_path / "a")
    assert not (tmp_path / "a" / "privacy.key").exists()


def test_epsilons_of_different_meaning_are_not_added(tmp_path):
    """In a fixed cohort of some clients, epsilon is for data replaced by none, otherwise for a client added or removed."""
    run(rounds=1, participation=0.5, out=tmp_path / "some")
    run(rounds=1, out=tmp_path / "all")
    poisson = {"sampling": "poisson", "participation": 0.5}
    for name, options in (("some", poisson), ("some", {}), ("all", {"participation": 0.5})):
        with pytest.raises(ConfigError, match="epsilon has another meaning"):
            run(rounds=2, start_from=str(tmp_path / name), **options)
    assert run(rounds=2, start_from=str(tmp_path / "some"), participation=0.25).summary["epsilon"] > 0
    assert run(rounds=2, start_from=str(tmp_path / "all"), **poisson).summary["epsilon"] > 0
    assert run("fedavg", rounds=2, start_from=str(tmp_path / "some"), client_weighting="uniform").summary["rounds"] == 2


@pytest.mark.parametrize("method", [PRIVATE, f"{PRIVATE},noise_at=sites,honest=4", "dpsgd:noise=1"])
def test_a_run_that_starts_from_a_reproducible_one_has_no_guarantee(method, tmp_path):
    run(f"{method},reproducible=true", rounds=1, out=tmp_path / "a")
    between = run(method, rounds=2, start_from=str(tmp_path / "a"), out=tmp_path / "b")
    after = run(method, rounds=3, start_from=str(tmp_path / "b"))
    run(method, rounds=1, out=tmp_path / "c")
    run(f"{method},reproducible=true", rounds=2, start_from=str(tmp_path / "c"), out=tmp_path / "d")
    last = run(method, rounds=3, start_from=str(tmp_path / "d"))
    for result in (between, after, last):
        assert result.summary["privacy"].startswith("None: noise was computed from the seed")
        assert result.summary["epsilon"] is None
        assert result.summary["epsilon_if_secret"] > 0
        assert "epsilon" not in result.history[-1] or result.history[-1]["epsilon"] is None
    assert run(method, rounds=1).summary["epsilon"] > 0


def test_reproducible_runs_say_that_they_have_no_guarantee():
    with pytest.warns(UserWarning, match="no privacy against anyone who knows the configuration"):
        result = run(f"{PRIVATE},reproducible=true")
    assert torch.equal(result.vector, run(f"{PRIVATE},reproducible=true").vector)
    assert "epsilon" not in result.history[0]
    assert result.history[0]["epsilon_if_secret"] > 0
    with pytest.raises(MethodConflictError, match="reproducible=true for both or none"):
        run(f"dpsgd:noise=1+{PRIVATE},reproducible=true")


def test_real_sites_have_no_reproducible_noise():
    for method in (PRIVATE, "dpsgd:noise=1", "fedssyn:noise_multiplier=1"):
        with pytest.raises(ConfigError, match="reproducible=true computes noise from the seed"):
            check_deployable(experiment({"method": f"{method},reproducible=true"}))
        check_deployable(experiment({"method": method}))
