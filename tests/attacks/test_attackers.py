"""Attackers of a run: who attacks, what reaches the server, on every engine and after resuming."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.pages import DOCS, built, section, table
from support.running import TINY, call, summary

import unskew
from unskew.attacks.attackers import Attackers, draw_attackers
from unskew.attacks.registry import ATTACKS, Attack, InnerProduct, SignFlip
from unskew.cli.comparison_tables import comparison_table
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.deployment.server.site_clients import check_deployable
from unskew.errors import ConfigError
from unskew.reproduction.outcomes import run_identity
from unskew.simulation.traffic import TrafficMeter

SIZES = [9, 19, 8, 13, 7, 11, 10, 12]
EVERY_KIND = [*ATTACKS, "freeride:mode=last", "mimic:warmup=2", "labelflip:from_round=2"]


def run(attack=None, method="fedavg", **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "local_steps": 2, "model": "mlp", "engine": "inline"}
    given = {"precision": "fp64", **given, **options}
    return unskew.run(blobs(SIZES), method=method, attack=attack, **given)


@pytest.fixture
def received(monkeypatch):
    """The updates that the server receives, in order."""
    seen = []
    count = TrafficMeter.count_update

    def recorded(self, update, client, up):
        seen.append(update)
        return count(self, update, client, up)

    monkeypatch.setattr(TrafficMeter, "count_update", recorded)

    def take(attack, **options):
        seen.clear()
        result = run(attack, **{"rounds": 1, **options})
        return {update.client: update for update in seen}, result

    return take


@pytest.mark.parametrize("kind", ATTACKS)
def test_honest_updates_of_the_first_round_do_not_change(kind, received):
    honest, _ = received(None)
    attacked, result = received(kind)
    attackers = result.summary["attackers"]
    assert len(attackers) == 2
    assert list(attacked) == list(honest)
    for client, update in attacked.items():
        assert torch.equal(update.delta, honest[client].delta) == (client not in attackers)
        assert update.weight == honest[client].weight
        assert torch.equal(update.buffers, honest[client].buffers)


def test_attackers_send_what_their_formulas_give(received):
    honest, _ = received(None)
    clients = [0, 3]
    others = torch.stack([update.delta for client, update in honest.items() if client not in clients]).numpy()

    def sent(attack, **options):
        updates, _ = received({"clients": clients, **attack}, **options)
        return updates[3].delta.numpy()

    own = honest[3].delta.numpy()
    assert np.array_equal(sent({"kind": "signflip", "scale": 3}), -3 * own)
    assert np.allclose(sent({"kind": "ipm"}), -0.1 * others.mean(0), rtol=1e-12, atol=1e-15)
    expected = others.mean(0) - 2 * others.std(0, ddof=1)
    assert np.allclose(sent({"kind": "alie", "z": 2}), expected, rtol=1e-10, atol=1e-13)
    direction = np.linalg.svd(others - others.mean(0), full_matrices=False)[2][0]
    farthest = np.abs((others - others.mean(0)) @ direction).argmax()
    assert np.array_equal(sent({"kind": "mimic"}), others[farthest])
    assert not sent({"kind": "freeride"}).any()
    plain = sent({"kind": "backdoor", "boost": 1})
    assert np.allclose(sent({"kind": "backdoor"}), 8 * plain, rtol=1e-12, atol=0)
    assert np.allclose(sent({"kind": "backdoor"}, method="fedavg:eta=0.5"), 16 * plain, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:The model did not change")
def test_free_riders_send_the_last_change_of_the_model(received):
    first = run(rounds=1, attack={"kind": "freeride", "mode": "last", "clients": [2]}).vector
    updates, _ = received({"kind": "freeride", "mode": "last", "clients": [2]}, rounds=2)
    torch.manual_seed(0)
    start = run(rounds=1, lr=1e-30).vector
    assert torch.allclose(updates[2].delta, first - start, rtol=1e-9, atol=1e-12)


def test_attackers_start_in_their_round(received):
    plain = run(rounds=2)
    for kind in ("signflip", "labelflip", "ipm"):
        late = run({"kind": kind, "from_round": 3})
        assert run({"kind": kind, "from_round": 2}, rounds=2).history[0]["loss"] == plain.history[0]["loss"]
        assert [row["loss"] for row in late.history[:2]] == [row["loss"] for row in plain.history]
        assert late.history[2]["loss"] != run().history[2]["loss"]


def test_attackers_follow_from_the_seed_and_not_from_the_method():
    attack = SignFlip(share=0.25)
    by_seed = [draw_attackers(attack, 20, seed) for seed in range(4)]
    assert len(set(by_seed)) > 1
    assert all(len(set(drawn)) == 5 for drawn in by_seed)
    assert [draw_attackers(attack, 20, seed) for seed in range(4)] == by_seed
    for method in ("fedavg", "scaffold", "median"):
        assert run("signflip", method, rounds=1).summary["attackers"] == list(draw_attackers(SignFlip(share=0.2), 8, 0))


@pytest.mark.parametrize("attack", EVERY_KIND)
def test_every_kind_on_the_vectorized_engine_and_resumed(attack, tmp_path):
    expected = run(attack)
    assert torch.allclose(run(attack, engine="vectorized").vector, expected.vector, rtol=1e-9, atol=1e-12)
    folder = tmp_path / "run"
    run(attack, rounds=2 if "from_round" in attack else 1, out=folder, checkpoint_every=1)
    torch.manual_seed(0)
    resumed = unskew.resume(folder, rounds=3, federation=blobs(SIZES))
    assert torch.equal(resumed.vector, expected.vector)


@pytest.mark.parametrize("attack", ["mimic", "backdoor:from_round=2"])
def test_attackers_in_worker_processes(attack):
    expected = run(attack, rounds=2)
    other = run(attack, rounds=2, engine="processes", workers=2)
    assert torch.allclose(other.vector, expected.vector, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["scaffold", "fedrep", "fedals", "fedbuff:buffer_size=3", "median", "ditto"])
def test_attackers_in_methods_of_every_kind(method):
    for attack in ("signflip", "ipm", "gaussian:sigma=0.1"):
        options = {"network": "fixed:1"} if method.startswith("fedbuff") else {}
        result = run(attack, method, rounds=2, **options)
        assert torch.isfinite(result.vector).all()


def test_slices_that_stay_at_clients_remain_zero(received):
    updates, result = received("gaussian", method="fedbn", model=SmallBatchNorm())
    first, second = result.summary["attackers"]
    honest = next(update for client, update in updates.items() if client not in (first, second))
    zero = honest.delta == 0
    assert zero.any()
    assert not updates[first].delta[zero].any()
    assert updates[first].delta[~zero].all()


def test_the_median_withstands_what_fedavg_does_not():
    options = {"rounds": 10, "lr": 0.1, "local_steps": 4, "model": "logistic"}
    collapsed, robust = (run("signflip:scale=10", method, **options).summary for method in ("fedavg", "median"))
    assert collapsed["accuracy"] < 0.4
    assert robust["accuracy"] > collapsed["accuracy"] + 0.2


def test_attackers_are_listed_and_left_out_of_client_metrics(tmp_path):
    folder = tmp_path / "run"
    attack = {"kind": "signflip", "clients": [0, 3]}
    options = {"data": "digits", "clients": 5, "model": "logistic", "rounds": 1, "local_steps": 2, "engine": "inline"}
    result = unskew.run(**options, attack=attack, out=folder)
    rows = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    assert [row["client"] for row in rows if row.get("attacker")] == [0, 3]
    honest = [row["accuracy"] for row in rows if "attacker" not in row]
    assert result.summary["client_accuracy_mean"] == pytest.approx(np.mean(honest))
    assert result.summary["clients_evaluated"] == 3
    assert summary(folder)["attackers"] == [0, 3]


def test_attack_success_is_in_evaluated_rounds_the_summary_and_the_table():
    result = run("backdoor:patch=2", rounds=5, eval_every=2)
    shown = [row["backdoor_success"] is not None for row in result.history]
    assert shown == [False, True, False, True, True]
    assert result.summary["backdoor_success"] == result.history[-1]["backdoor_success"]
    options = {"model": "logistic", "rounds": 1, "local_steps": 1, "engine": "inline", "attack": "backdoor"}
    compared = unskew.compare(blobs(SIZES), methods=["fedavg", "median"], seeds=1, references=False, **options)
    rows = compared.rows()
    assert all(0 <= row["backdoor_success"] <= 1 for row in rows)
    assert "attack success" in [column.header for column in comparison_table(rows).columns]


def test_without_an_attack_nothing_changes():
    plain = experiment({})
    assert plain.attack is None
    assert "attack" not in run_identity(plain)
    assert experiment({"attack": "none"}) == plain
    result = run(rounds=1)
    assert not {"attackers", "backdoor_success"} & {*result.summary, *result.history[0]}


def test_an_attack_is_given_as_an_expression_a_mapping_or_a_file(tmp_path, capsys):
    expected = experiment({"attack": {"kind": "signflip", "share": 0.3, "scale": 2}})
    assert experiment({"attack": "signflip:share=0.3,scale=2"}) == expected
    assert experiment(expected.model_dump(mode="json")) == expected
    assert experiment({"attack": "ipm:clients=0+3"}).attack.clients == (0, 3)
    file = tmp_path / "mine.yaml"
    file.write_text("attack: {kind: ipm, epsilon: 0.5}\nrounds: 1\n")
    lines = {
        ("--attack", "signflip:clients=1,scale=2"): {"kind": "signflip", "scale": 2.0, "clients": [1]},
        ("--set", "attack.share=0.5"): {"kind": "ipm", "epsilon": 0.5, "share": 0.5},
    }
    for number, (line, expected) in enumerate(lines.items()):
        folder = tmp_path / str(number)
        assert call(capsys, "run", file, *TINY, *line, "--out", folder).code == 0
        attack = Experiment.model_validate(unskew.config.loader.load_yaml(folder / "config.yaml")).attack
        assert attack.model_dump(mode="json").items() >= expected.items()
    outcome = call(capsys, "run", *TINY, "--rounds", "1", "--set", "attack.kind=signflip", "--out", tmp_path / "set")
    assert outcome.code == 0
    assert summary(tmp_path / "set")["attackers"]


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        ("signflp", "Did you mean 'signflip'"),
        ("signflip:sigma=1", "The attack signflip has no option 'sigma'; it has"),
        ("signflip:2", "'2' in attack=signflip:2 is not an option"),
        ({"share": 0.2}, "attack needs a kind"),
        ({"kindd": "signflip"}, "The section attack has no option 'kindd'.*Did you mean 'kind'"),
        ({"kind": "signflip", "scal": 2}, "The attack signflip has no option 'scal'.*Did you mean 'scale'"),
        ({"kind": "signflip", "share": True}, "must not be a boolean"),
        ("signflip:scale=-1", "attack.scale='-1' is not valid: it must be greater than 0"),
        ("signflip:scale=two", "attack.scale='two' is not valid"),
        ("signflip:share=0.2,clients=0", "Set only one of them"),
        ("signflip:clients=0+0", "names a client twice"),
        ("signflip:clients=0+8", "names client 8, but there are 8 clients"),
        ("signflip:clients=0+1+2+3+4+5+6+7", "so none is honest"),
        ("signflip:share=0.01", "leaves no attacker. Use a larger share"),
        ("signflip:share=0.99", "leaves no honest client. Use a smaller share"),
        ("signflip:from_round=4", "after the last of 3 rounds"),
        ("labelflip:from_class=1", "needed together"),
        ("labelflip:from_class=1,to_class=1", "no label would change"),
        ("labelflip:from_class=1,to_class=3", "attack.to_class=3 is not a class"),
        ("backdoor:target=3", "attack.target=3 is not a class"),
        ("backdoor:patch=7", "larger than the images of 6 x 6 pixels"),
        ("freeride:mode=both", "attack.mode='both' is not valid"),
    ],
)
def test_wrong_options_are_reported_before_training(attack, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        run(attack)


def test_attacks_that_do_not_fit_the_task_or_the_run():
    draws = np.random.default_rng(0)
    x = draws.normal(size=(12, 4)).astype(np.float32)
    numbers = unskew.Federation.from_arrays([(x, x[:, 0])] * 5, test=(x, x[:, 0]), task="regression")
    classes = unskew.Federation.from_arrays([(x, draws.integers(0, 2, 12))] * 5, test=(x, draws.integers(0, 2, 12)))
    options = {"model": "mlp", "rounds": 1, "engine": "inline"}
    with pytest.raises(ConfigError, match="the task is regression"):
        unskew.run(numbers, attack="labelflip", **options)
    with pytest.raises(ConfigError, match="the inputs are not images"):
        unskew.run(classes, attack="backdoor", **options)
    with pytest.raises(ConfigError, match="without a server that clients could attack"):
        unskew.run(classes, attack="signflip", method="local", **options)
    with pytest.raises(ConfigError, match="not supported over real sites"):
        check_deployable(experiment({"attack": "signflip"}))
    assert unskew.run(numbers, attack="signflip", **options).summary["attackers"]


@pytest.mark.parametrize(
    ("attack", "method", "words"),
    [
        ("alie:clients=0", "fedavg", "With 1 of the 8 clients of a round attacking, alie computes z=0"),
        ("alie:z=0", "fedavg", "With attack.z=0"),
        ("signflip:share=0.375", "trimmed:share=0.2", "38% of the clients attack, but trimmed suspects only 20%"),
    ],
)
def test_attacks_without_effect_and_too_many_attackers_are_named(attack, method, words):
    with pytest.warns(UserWarning, match=words):
        run(attack, method, rounds=1)


def test_a_flip_of_a_class_that_attackers_do_not_have_is_named(recwarn):
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    fed = unskew.Federation.from_arrays(
        [(x, np.arange(6) % 2)] * 2 + [(x, np.arange(6) % 3)] * 3, test=(x, np.arange(6) % 3)
    )
    options = {"model": "mlp", "rounds": 1, "engine": "inline"}
    with pytest.warns(UserWarning, match="labelflip changes nothing"):
        unskew.run(fed, attack="labelflip:clients=0+1,from_class=2,to_class=0", **options)
    recwarn.clear()
    unskew.run(fed, attack="labelflip:clients=1+2,from_class=2,to_class=0", **options)
    assert not [warning for warning in recwarn if "labelflip" in str(warning.message)]


@pytest.mark.parametrize(
    ("method", "words"), [("feddm", "clients of feddm send none"), ("center", "nobody could attack")]
)
def test_methods_without_updates_cannot_be_attacked(method, words):
    with pytest.raises(ConfigError, match=words):
        run("signflip", method)


def test_advice_on_divergence_names_the_attack_and_robust_methods():
    with pytest.warns(UserWarning, match=r"run diverged.*attack gaussian.*robust method.*smaller learning rate"):
        run("gaussian:sigma=1e6", rounds=2)


def test_without_honest_updates_attackers_send_their_own():

    attackers = Attackers(InnerProduct(clients=(1,)), 3, 0)
    update = SimpleNamespace(client=1)
    broadcast = SimpleNamespace(client=1, up=None)
    assert list(attackers.replace_updates(0, torch.zeros(2), [broadcast], [update])) == [update]


def test_the_page_lists_every_kind_with_its_options():
    rows = table(section(built(DOCS / "attacks.md"), "Kinds"))
    listed = {row[0].strip("`"): set(re.findall(r"`(\w+)`(?:,| \()", row[2])) for row in rows}
    assert listed == {name: {*kind.model_fields} - {*Attack.model_fields} for name, kind in ATTACKS.items()}
