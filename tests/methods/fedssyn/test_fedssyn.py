"""Fedssyn: who makes what, how it is shuffled, what it costs, and that it goes on after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.colors import Colors
from support.federations import SmallBatchNorm
from support.protocol import prepared
from support.running import call
from support.slow import slow_but

import unskew
from unskew import Federation
from unskew.comparison.cost_to_target import target_costs
from unskew.data.federation import ServerData
from unskew.deployment.common.client_view import SingleClientView
from unskew.errors import ConfigError, DataError, MethodConflictError
from unskew.generators import synthetic_dataset as synthetic
from unskew.generators.client_images import append_log, draw_subset
from unskew.methods.fedssyn.fedssyn import Fedssyn
from unskew.methods.fedssyn.synthetic_sets import refusing_clients
from unskew.protocol.data_preparation import PreparedData, Workspace
from unskew.protocol.rules import ClientRule
from unskew.protocol.training_config import Training
from unskew.testing import assert_engines_agree

pytestmark = pytest.mark.usefixtures("undrawn")

SIZES = [12, 20, 8, 15]
SHAPE = (3, 6, 6)


MINE = "generator=support.colors:Colors"


def pictures(sizes=SIZES, classes=3, seed=0, holdout=0.0):
    draws = np.random.default_rng(seed)

    def sample(n, allowed):
        y = draws.choice(allowed, size=n)
        return (draws.integers(0, 120, (n, *SHAPE)) + 60 * y[:, None, None, None]).astype(np.uint8), y

    clients = [sample(n, [k % classes, (k + 1) % classes]) for k, n in enumerate(sizes)]
    return Federation.from_arrays(clients, test=sample(40, list(range(classes))), classes=classes, holdout=holdout)


def train(method, out=None, federation=None, rounds=2, **options):
    torch.manual_seed(0)
    given = {"lr": 0.05, "batch_size": 8, "local_epochs": 4, "precision": "fp64", "engine": "inline", **options}
    model = given.pop("model", None) or SmallBatchNorm(channels=3)
    return unskew.run(federation or pictures(), model=model, method=method, rounds=rounds, out=out, **given)


def unprepared(federation):
    return PreparedData(federation, Training(local_epochs=4))


def test_a_site_computes_its_part_of_the_payload_bit_for_bit():
    fed, rule = pictures(holdout=0.25), Fedssyn(generator="support.colors:Colors", refuse="1")
    whole = rule.client_payload(unprepared(fed), 3, Workspace()).sent
    assert whole.keys() == {0, 2, 3}
    assert len(whole[0]["y"]) == sum(SIZES) // 4, "the mean size counts held-out samples"
    for k in range(4):
        alone = PreparedData(
            replace(fed, clients=SingleClientView(fed.clients[k], 4)),
            Training(local_epochs=4),
            client=k,
            site_mean=sum(SIZES) // 4,
        )
        sent = rule.client_payload(alone, 3, Workspace()).sent
        assert sent.keys() == {k} & whole.keys()
        for name, t in sent.get(k, {}).items():
            assert torch.equal(t, whole[k][name])
        assert replace(rule, data="real").client_payload(alone, 3, Workspace()) is alone


def multiset(x, y):
    return Counter((one.tobytes(), int(label)) for one, label in zip(x.contiguous().numpy(), y, strict=True))


def synthetic_part(before, after, k):
    n, c = before.clients[k].num_samples, after.clients[k]
    assert torch.equal(c.x[:n], before.clients[k].x), "real samples stay"
    assert torch.equal(c.x_test, before.clients[k].x_test)
    return c.x[n:], c.y[n:]


def test_what_is_pooled_is_what_is_dealt_out_and_everyone_gets_as_much():
    fed = pictures(holdout=0.25)
    rule = Fedssyn(n_syn=7, generator="support.colors:Colors")
    made = rule.synthetic_set(unprepared(fed), 3, Workspace())
    ready = prepared(rule, fed, 3)
    after, traffic = ready.federation, dict(ready.traffic)
    parts = [synthetic_part(fed, after, k) for k in range(4)]
    assert [len(y) for _, y in parts] == [7] * 4
    dealt = multiset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
    assert dealt == multiset(made.x, made.y)
    assert any(len(set(x[:, 0, 0, 0].tolist())) > 1 for x, _ in parts), "a client gets images of several"
    size = 3 * 6 * 6 + 1
    assert traffic == dict.fromkeys(range(4), (7 * size, 7 * size))
    assert after.sizes.tolist() == [n + 7 for n in fed.sizes]
    again, other = prepared(rule, fed, 3).federation, prepared(rule, fed, 4).federation
    assert torch.equal(again.clients.x, after.clients.x)
    assert not torch.equal(other.clients.x, after.clients.x)


def test_the_permutation_is_uniform_over_places():
    """Where the first image of the pool ends up, over seeds: each client about as often (chi-square, 3 degrees)."""
    fed = pictures([3, 3, 3, 3])
    rule = Fedssyn(n_syn=1, generator="support.colors:Colors", rho=1.0)
    ends = []
    for seed in range(80):
        made, after = rule.synthetic_set(unprepared(fed), seed, Workspace()), prepared(rule, fed, seed).federation
        ends.append(next(k for k in range(4) if torch.equal(after.clients[k].x[-1], made.x[0])))
    counts = np.bincount(ends, minlength=4)
    assert ((counts - 20) ** 2 / 20).sum() < 16.3  # 99.9%


def test_the_generator_sees_rho_of_the_samples_and_makes_their_classes():
    fed = pictures()
    Colors.fitted.clear()
    made = Fedssyn(n_syn=11, rho=0.5, generator="support.colors:Colors").synthetic_set(unprepared(fed), 0, Workspace())
    for k, (x, y) in enumerate(Colors.fitted):
        assert len(y) == round(0.5 * SIZES[k])
        own = multiset(fed.clients[k].x, fed.clients[k].y)
        assert all(own[item] >= count for item, count in multiset(x, y).items()), "without replacement"
        counts = np.bincount(y, minlength=3)
        mine = np.bincount(made.y[made.source == k], minlength=3)
        assert mine.sum() == 11
        assert (np.abs(mine - 11 * counts / counts.sum()) < 1).all()
        assert (mine[counts == 0] == 0).all()
    assert sorted(draw_subset(10, 0.75, 0, 0).tolist()) == draw_subset(10, 0.75, 0, 0).tolist()
    assert len(draw_subset(10, 0.75, 0, 0)) == 8
    assert len(draw_subset(1, 0.1, 0, 0)) == 1


def test_by_default_as_many_as_the_training_set_over_the_clients_held_out_samples_included():
    fed = pictures(holdout=0.25)
    assert (
        Fedssyn(generator="support.colors:Colors")
        .synthetic_set(unprepared(fed), 0, Workspace())
        .about["recipe"]["count"]
        == sum(SIZES) // 4
    )


def test_clients_may_refuse_or_keep_images_back_and_still_get_their_share():
    fed = pictures()
    size = 3 * 6 * 6 + 1

    def dark(images, labels):
        return labels != 2

    rule = unskew.method("fedssyn", n_syn=5, generator="support.colors:Colors", refuse="1", keep=dark).data[0]
    made = rule.synthetic_set(unprepared(fed), 0, Workspace())
    assert set(made.source.tolist()) == {0, 2, 3}
    assert 2 not in made.y.tolist()
    ready = prepared(rule, fed)
    after, traffic = ready.federation, dict(ready.traffic)
    shares = [after.clients[k].num_samples - SIZES[k] for k in range(4)]
    assert sum(shares) == len(made.y)
    assert max(shares) - min(shares) <= 1
    assert traffic[1] == (0, shares[1] * size)
    assert [refusing_clients("0;2", 4), refusing_clients("0.5", 4), refusing_clients("", 4)] == [{0, 2}, {2, 3}, set()]
    for refuse, words in (
        ("7", "there are 4 clients"),
        ("-1", "numbered from 0"),
        ("x", "neither"),
        ("1.5", "neither"),
    ):
        with pytest.raises(ConfigError, match=words):
            prepared(replace(rule, refuse=refuse), fed)
    with pytest.raises(ConfigError, match="there are 1 clients"):
        prepared(replace(rule, refuse="5"), pictures([9]))
    with pytest.raises(ConfigError, match="no client shares images"):
        train(replace(rule, refuse="1.0"), federation=fed)
    with pytest.raises(DataError, match="keep selects no images of any client"):
        prepared(replace(rule, keep=lambda images, labels: labels < 0), fed)
    with pytest.raises(DataError, match="5 booleans"):
        prepared(replace(rule, keep=lambda images, labels: labels), fed)


def test_ablations_change_data_and_traffic_as_stated():
    fed = pictures()
    rule = Fedssyn(n_syn=6, generator="support.colors:Colors")
    made, size = rule.synthetic_set(unprepared(fed), 0, Workspace()), 3 * 6 * 6 + 1
    ready = prepared(replace(rule, data="real"), fed)
    same, cost = ready.federation, dict(ready.traffic)
    assert same is fed
    assert cost == {}
    ready = prepared(replace(rule, data="local"), fed)
    local, cost = ready.federation, dict(ready.traffic)
    assert cost == {}
    for k in range(4):
        assert torch.equal(synthetic_part(fed, local, k)[0], made.x[made.source == k])
    ready = prepared(replace(rule, data="central_real"), fed)
    central, cost = ready.federation, dict(ready.traffic)
    assert multiset(central.clients[0].x, central.clients[0].y) == multiset(fed.clients.x, fed.clients.y)
    assert cost[1] == (20 * size, 0)
    ready = prepared(replace(rule, data="central_synthetic"), fed)
    central, cost = ready.federation, dict(ready.traffic)
    assert multiset(central.clients[0].x, central.clients[0].y) == multiset(made.x, made.y)
    assert cost[1] == (6 * size, 0)
    result = train("fedssyn:data=central_real")
    assert result.summary["client_accuracy_mean"] is not None
    assert result.summary["clients"] == 1
    with pytest.raises(MethodConflictError, match="so scaffold has no effect"):
        unskew.method(f"fedssyn:{MINE},data=central_real+scaffold")
    real = train("fedssyn:data=real")
    assert torch.equal(real.vector, train("fedavg", client_weighting="uniform").vector)


def test_steps_stay_as_many_and_real_samples_weigh():
    fed = pictures([16, 16, 16, 16])
    rule = Fedssyn(n_syn=16, generator="support.colors:Colors")
    before = replace(rule, match_steps="epochs")
    # The authors' code: 50,000 images, as many synthetic ones, ten epochs.
    assert [prepared(before, fed, epochs=n).training.local_epochs for n in (10, 1)] == [5, 1]
    assert prepared(replace(rule, match_steps=False), fed, epochs=10).training.local_epochs == 10
    seen = {}
    for method in ("fedavg", f"fedssyn:{MINE},n_syn=16", f"fedssyn:{MINE},n_syn=16,match_steps=epochs"):
        seen[method] = train(method, federation=fed, local_epochs=3).summary
    assert seen[f"fedssyn:{MINE},n_syn=16"]["local_epochs"] == 1.5
    assert seen[f"fedssyn:{MINE},n_syn=16,match_steps=epochs"]["local_epochs"] == 1
    assert "local_epochs" not in seen["fedavg"]
    uneven = prepared(rule, pictures())
    assert [uneven.federation_info.size(k) for k in range(4)] == SIZES
    assert [uneven.federation.clients[k].num_samples for k in range(4)] == [n + 16 for n in SIZES]


@dataclass(frozen=True)
class CountsSteps(ClientRule):
    """Sends how many steps were taken."""

    name: ClassVar[str] = "counts-steps"
    summary: ClassVar[str] = "sends how many steps were taken"
    paper: ClassVar[str] = "none"

    def gradient(self, grad_fn, ctx, carry):
        """One more step in every call."""

        def counted(v, batch):
            STEPS[(ctx.round, int(ctx.weight))] += 1
            return grad_fn(v, batch)

        return counted


STEPS = Counter()


@pytest.mark.parametrize("data", slow_but(["shuffled"], ["shuffled", "local"]))
@pytest.mark.parametrize(
    "budget", [{"local_epochs": 1}, {"local_epochs": 3, "drop_last": True}, {"local_steps": 5, "local_epochs": None}]
)
def test_each_client_takes_as_many_steps_with_images_as_without(data, budget):
    """Counted in training: sizes that are no multiples of a batch, shares of another size, and every kind of budget."""
    taken = []
    for method in ("fedavg", f"fedssyn:{MINE},n_syn=13,data={data}", f"fedssyn:{MINE},n_syn=40,rho=1,data={data}"):
        STEPS.clear()
        summary = train([method, CountsSteps()], rounds=1, batch_size=8, client_weighting="samples", **budget).summary
        assert summary["clients"] == len(SIZES)
        taken.append(dict(STEPS))
    assert set(taken[0]) == {(0, n) for n in SIZES}
    assert taken[1] == taken[0]
    assert taken[2] == taken[0]


HOSTS = [
    "fedavg",
    "fedprox",
    "scaffold",
    "feddyn",
    "fedpvr:layers=1",
    "fedals:alpha=2",
    "fedcog:start_round=1,n=6,g_steps=2",
]


@pytest.mark.parametrize("host", slow_but(HOSTS[2:5], HOSTS))
def test_a_sum_is_the_host_on_the_augmented_data(host):
    """What a host makes of data that were augmented beforehand, to the bit, with uniform weights and matched epochs."""
    rule = Fedssyn(n_syn=15, generator="support.colors:Colors", match_steps="epochs")
    ready = prepared(rule, pictures())
    assert ready.training.local_epochs == 1
    plain = train(host, federation=ready.federation, client_weighting="uniform", local_epochs=1)
    reference = train(f"fedssyn:{MINE},n_syn=15,match_steps=epochs+{host}")
    assert torch.equal(reference.vector, plain.vector)


@pytest.mark.parametrize("engine", ["processes", "vectorized"])
def test_engines_agree_on_the_augmented_data(engine):
    method = f"fedssyn:{MINE},n_syn=15+scaffold"
    reference, other = train(method), train(method, engine=engine, workers=2)
    assert_engines_agree(other.vector, reference.vector)
    assert other.summary["bytes_up"] == reference.summary["bytes_up"]


def test_before_feddle_it_is_feddle_on_the_augmented_data():
    def served(fed):
        draws = np.random.default_rng(5)
        x = draws.integers(0, 255, (9, *SHAPE)).astype(np.uint8)
        return replace(fed, server=ServerData(torch.from_numpy(x), torch.arange(9) % 3, True))

    rule, host = Fedssyn(n_syn=15, generator="support.colors:Colors", match_steps="epochs"), "feddle:epochs=2"
    after = prepared(rule, pictures()).federation
    plain = train(host, federation=served(after), client_weighting="uniform", local_epochs=1)
    summed = train(f"fedssyn:{MINE},n_syn=15,match_steps=epochs+{host}", federation=served(pictures()))
    assert torch.equal(summed.vector, plain.vector)
    assert not torch.equal(summed.vector, train(host, federation=served(pictures()), client_weighting="uniform").vector)


def test_traffic_is_twice_the_images_and_the_model_in_every_round():
    """Section 2.4: N (2 M_s + 2 R M_c)."""
    result = train(f"fedssyn:{MINE},n_syn=9", rounds=3, precision="fp32", target=0.01)
    m_s, m_c = 9 * (3 * 6 * 6 + 1), 4 * result.summary["parameters"]
    total = result.summary["bytes_up"] + result.summary["bytes_down"]
    total -= result.summary["buffer_bytes_up"] + result.summary["buffer_bytes_down"]
    assert total == 4 * (2 * m_s + 2 * 3 * m_c)
    assert result.summary["bytes_to_target"] == sum(result.history[0][f"bytes_{way}"] for way in ("up", "down"))


def test_the_papers_numbers_follow_from_the_formula():
    """Table A.2 and the comparison with FedDM, from its own M_c = 37.2 and M_s = 15.5, and from what unskew counts."""

    def cost(m_s, m_c, rounds):
        return 2 * m_s + 2 * rounds * m_c

    assert 10 * cost(15.5, 37.2, 40) == pytest.approx(30070)
    published = {(4, 88, 15.5): 95.0, (8, 68, 15.5): 87.6, (12, 100, 3.9): 87.9, (19, 93, 1.55): 79.6}
    for (ours, theirs, m_s), saving in published.items():
        assert 100 * (1 - cost(m_s, 37.2, ours) / cost(0, 37.2, theirs)) == pytest.approx(saving, abs=0.5)
    parameters = sum(p.numel() for p in unskew_vgg().parameters())
    assert parameters * 4 / 2**20 == pytest.approx(37.2, abs=0.01)
    counted = 5000 * (32 * 32 * 3 + 1)
    assert 100 * (1 - cost(counted, 4 * parameters, 4) / cost(0, 4 * parameters, 88)) == pytest.approx(95.0, abs=0.05)


def unskew_vgg():
    from unskew.models.registry import build_model

    return build_model("vgg11", (3, 32, 32), 10)


def rows(*pairs):
    return [{"round": r + 1, "accuracy": a, "bytes_up": b * 5, "bytes_down": b * 5} for r, (a, b) in enumerate(pairs)]


def test_rounds_speed_up_and_saving_of_a_target():
    histories = {
        "fedavg": [rows((0.1, 1), (0.2, 2), (0.6, 3), (0.7, 4))],
        "fedssyn:n_syn=3": [rows((0.6, 2), (0.7, 3), (0.7, 4), (0.7, 5))],
        "scaffold": [rows((0.1, 2), (0.2, 4), (0.3, 6), (0.4, 8))],
        "fedssyn:n_syn=3+scaffold": [rows((0.1, 3), (0.6, 5), (0.7, 7), (0.7, 9))],
    }
    found = {one.method: one for one in target_costs(histories, 0.5)}
    assert (found["fedavg"].rounds, found["fedavg"].bytes, found["fedavg"].saving) == (3, 30, None)
    ours = found["fedssyn:n_syn=3"]
    assert (ours.against, ours.speed_up, ours.speed_up_at_least) == ("fedavg", 3, False)
    assert ours.saving == pytest.approx(1 - 20 / 30)
    assert (found["scaffold"].rounds, found["scaffold"].saving) == (None, None)
    bound = found["fedssyn:n_syn=3+scaffold"]
    assert (bound.against, bound.speed_up, bound.speed_up_at_least) == ("scaffold", 5 / 2, True)


def test_the_set_is_kept_as_a_data_set_and_used_again(tmp_path):
    method = f"fedssyn:{MINE},n_syn=5"
    first = train(method, tmp_path / "a")
    folder = tmp_path / "a" / "synthetic"
    names = {"README.md", "data", "synthetic.json", "generators.jsonl", *(f"client-{k}.png" for k in range(4))}
    assert {path.name for path in folder.iterdir()} == names
    made = synthetic.load(folder)
    assert made.x.shape == (20, *SHAPE)
    datasets = pytest.importorskip("datasets")
    read = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))["train"]
    assert read.features["label"].names == ["0", "1", "2"]
    assert np.array_equal(np.asarray(read[7]["image"]), made.x[7].permute(1, 2, 0).numpy())
    assert read["client"][-1] == 3
    train(f"fedssyn:{MINE},n_syn=2", tmp_path / "other")
    other = datasets.load_dataset(str(tmp_path / "other" / "synthetic"), cache_dir=str(tmp_path / "cache"))["train"]
    assert len(other) == 8
    log = [json.loads(line) for line in (folder / "generators.jsonl").read_text().splitlines()]
    assert [row["client"] for row in log] == [0, 1, 2, 3]

    Colors.fitted.clear()
    again = train("fedssyn", tmp_path / "b", synthetic=str(tmp_path / "a"))
    assert torch.equal(again.vector, first.vector)
    assert not Colors.fitted
    assert not (tmp_path / "b" / "synthetic").exists()
    assert again.summary["synthetic"] == str(folder)
    assert again.summary["bytes_up"] == first.summary["bytes_up"]
    with pytest.warns(UserWarning, match="from other client data"):
        train("fedssyn", federation=pictures([12, 20, 9, 14]), synthetic=str(tmp_path / "a"))
    both = unskew.compare(
        pictures(), methods=["fedavg", "fedssyn"], seeds=1, rounds=1, model="logistic", synthetic=str(tmp_path / "a")
    )
    assert "synthetic_images" in both.summaries["fedssyn"][0]
    for words, options in {
        "is neither a finished": {"synthetic": str(tmp_path / "nowhere")},
        "clients=4, but the data have clients=2": {"federation": pictures([9, 9])},
        "classes=3, but the data have classes=4": {"federation": pictures(classes=4), "model": SmallBatchNorm(4, 3)},
        "with n_syn=5, not 6": {"method": "fedssyn:n_syn=6"},
        "with rho=0.75, not 0.5": {"method": "fedssyn:rho=0.5"},
        "without epsilon, not with 3": {"method": "fedssyn:epsilon=3"},
        "without refuse, not with 0": {"method": "fedssyn:refuse=0"},
        "without epochs, not with 7": {"method": f"fedssyn:{MINE};epochs=7"},
        "does not use synthetic data": {"method": "fedavg"},
    }.items():
        with pytest.raises(ConfigError, match=words):
            train(**{"method": "fedssyn", "synthetic": str(tmp_path / "a"), "out": tmp_path / "c", **options})
        assert not (tmp_path / "c").exists()
    (folder / "data" / "train-00000-of-00001.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match="cannot be read"):
        train("fedssyn", synthetic=str(folder))


@pytest.mark.slow
def test_grey_images_and_a_small_diffusion_model_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = "fedssyn:generator=ddpm-small;width=8;steps=10;sampling_steps=2,epochs=1,n_syn=6,noise_multiplier=1"
    args = ["run", "--method", f"{spec}+fedprox", "--model", "logistic", "--rounds", "1", "--clients", "3"]
    out = call(capsys, *args, "--out", "a", "--json")
    summary = json.loads(out.out)
    assert summary["epsilon"] > 0
    assert "differentially private for one example" in summary["privacy"]
    log = [json.loads(line) for line in Path("a/synthetic/generators.jsonl").read_text().splitlines()]
    assert max(row["epsilon"] for row in log) == summary["epsilon"]
    assert summary["synthetic_images"] == 18
    out = call(capsys, *args, "--synthetic", "a", "--out", "b")
    assert "privacy" in out.out
    assert "18 images" in out.out


@pytest.mark.slow
def test_a_comparison_prepares_once_and_prints_what_the_target_costs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Colors.fitted.clear()
    methods = [f"fedssyn:{MINE},n_syn=5", f"fedssyn:{MINE},n_syn=5+scaffold", f"fedssyn:{MINE},n_syn=5,data=local"]
    made = unskew.compare(
        pictures(), methods=methods, seeds=1, rounds=1, model="logistic", engine="inline", out=tmp_path / "c"
    )
    assert len(Colors.fitted) == 4, "one generator a client for all methods"
    assert len(list((tmp_path / "c" / "synthetic").iterdir())) == 1
    spellings = [
        "vae-small;beta=2;epochs=1",
        "vae-small; epochs=1;beta=2,data=local",
        "vae-small;beta=2,epochs=1,data=local",
    ]
    made_once = unskew.compare(
        pictures(),
        methods=[f"fedssyn:n_syn=5,generator={s}" for s in spellings],
        seeds=1,
        rounds=1,
        model="logistic",
        out=tmp_path / "s",
    )
    assert len(list((tmp_path / "s" / "synthetic").iterdir())) == 1
    other = {
        "model": "logistic",
        "synthetic": made_once.summaries[f"fedssyn:n_syn=5,generator={spellings[0]}"][0]["synthetic"],
    }
    assert train("fedssyn:generator=vae-small;epochs=1;beta=2", **other).summary["synthetic_images"] == 20
    assert made.summaries[methods[0]][0]["synthetic"] == made.summaries[methods[2]][0]["synthetic"]
    Colors.fitted.clear()
    again = unskew.resume(
        tmp_path / "c" / "fedssyn-generator=support.colors-Colors,n_syn=5" / "seed-0",
        federation=pictures(),
        rounds=2,
        trust_code=True,
    )
    assert not Colors.fitted, "a single run of a comparison goes on with the images of all"
    assert Path(again.summary["synthetic"]) == Path(made.summaries[methods[0]][0]["synthetic"])
    args = ["compare", "fedavg", "fedssyn:generator=vae-small,epochs=1,n_syn=5", "--seeds", "1", "--model", "logistic"]
    out = call(capsys, *args, "--rounds", "2", "--target", "0.05", "--clients", "3", "--out", "d").out
    assert "Rounds and traffic to 5.0% test accuracy" in out
    assert "saving" in out


def test_fedssyn_rejects_unsupported_settings(monkeypatch):
    floats = Federation.from_arrays(
        [(np.zeros((4, 3)), np.arange(4) % 2)] * 2, test=(np.zeros((4, 3)), np.arange(4) % 2)
    )
    with pytest.raises(DataError, match="8-bit images"):
        unskew.run(floats, method="fedssyn", model="logistic", rounds=1)
    with pytest.raises(ConfigError, match="does not support private training"):
        unskew.method("fedssyn:generator=vae,epsilon=3")
    with pytest.raises(ConfigError, match="Also set epsilon or noise_multiplier"):
        unskew.method("fedssyn:clip=2")
    with pytest.raises(ConfigError, match="There is no generator 'vea'"):
        unskew.method("fedssyn:generator=vea")

    class Wrong(Colors):
        def sample(self, labels):
            return super().sample(labels).float()

    monkey = Fedssyn(n_syn=2, generator="support.colors:Colors")
    monkeypatch.setattr("support.colors.Wrong", Wrong, raising=False)
    words = Fedssyn(n_syn=2, generator="support.colors:Colors", keep=lambda images, labels: ["no", "yes"])
    with pytest.raises(DataError, match="keep must return 2 booleans"):
        prepared(words, pictures())
    with pytest.raises(DataError, match="must return uint8 images"):
        prepared(replace(monkey, generator="support.colors:Wrong"), pictures())


def test_missing_libraries_are_named_before_anything_is_made(tmp_path, monkeypatch):
    for library, extra, method in (
        ("diffusers", "diffusion", "fedssyn"),
        ("opacus", "privacy", "fedssyn:epsilon=3"),
        ("pyarrow.parquet", "hub", f"fedssyn:{MINE}"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            with pytest.raises(ConfigError, match=rf"unskew\[{extra}\]"):
                train(method, tmp_path / "a")
        assert not (tmp_path / "a").exists()


def test_a_log_forgets_what_is_made_again(tmp_path):
    path = tmp_path / "log"
    for line in ((0, 1), (0, 2), (1, 1), (1, 2), (1, 3)):
        append_log(path, {"client": line[0], "epoch": line[1]})
    with path.open("a") as file:
        file.write('{"client": 1, "ep')  # cut off by a kill
    append_log(path, {"client": 1, "epoch": 2})
    kept = [tuple(json.loads(line).values()) for line in path.read_text().splitlines()]
    assert kept == [(0, 1), (0, 2), (1, 1), (1, 2)]


SLOW = """
import os, time, torch
class Slow:
    def __init__(self, job): self.job = job
    def fit(self, images, labels):
        with open("fits.txt", "a") as file: file.write(f"{self.job.seed}\\\\n")
        if os.environ.get("SLOW"): time.sleep(0.5)
    def sample(self, labels):
        draws = torch.Generator().manual_seed(self.job.seed % 1000)
        return torch.randint(0, 255, (len(labels), *self.job.shape), generator=draws, dtype=torch.uint8)
"""


@pytest.mark.slow
def test_a_killed_preparation_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    """SIGKILL in the middle: finished generators are not trained again, and the numbers are those of a whole run."""
    (tmp_path / "slow.py").write_text(SLOW.replace("\\\\n", "\\n"))
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "SLOW": "1"}
    method = "fedssyn:generator=slow:Slow,n_syn=6"
    args = ["run", "--method", method, "--model", "logistic", "--rounds", "2", "--clients", "6", "--engine", "inline"]
    process = subprocess.Popen(
        [sys.executable, "-m", "unskew", *args, "--out", "killed"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    work = tmp_path / "killed" / "synthetic" / "work"
    deadline = time.monotonic() + 300
    while len(list(work.glob("client-*.safetensors"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = len(list(work.glob("client-*.safetensors")))
    assert 2 <= finished < 6
    begun = (tmp_path / "fits.txt").read_text().split()
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "resume", "killed", "--trust-code").code == 0
    later = (tmp_path / "fits.txt").read_text().split()[len(begun) :]
    assert not set(later) & set(begun[:finished])
    assert len(later) == 6 - finished
    assert call(capsys, *args, "--out", "whole").code == 0
    assert (tmp_path / "killed" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    assert not work.exists()


def test_a_comparison_misses_a_given_set_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "unskew.comparison.comparison_plan.run_or_resume", lambda *_: pytest.fail("something was trained")
    )
    with pytest.raises(ConfigError, match="is neither a finished synthetic set"):
        unskew.compare(methods=["fedavg", "fedssyn"], data="digits", rounds=1, synthetic=str(tmp_path / "none"))


def test_the_preparation_tells_of_training_and_of_sampling_and_never_goes_back():
    seen = []
    spec = "ddpm-small;steps=20;sampling_steps=4;width=8;epochs=2;batch=8;multipliers=1/2"
    place = Workspace(report=lambda *told: seen.append(told))
    Fedssyn(n_syn=3, generator=spec).synthetic_set(unprepared(pictures([9, 8])), 0, place)
    done = [at for _, at, _ in seen]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(2)
    assert {total for _, _, total in seen} == {2}
    for k in range(2):
        mine = [text for text, _, _ in seen if text.startswith(f"client {k}:")]
        assert (
            mine == [f"client {k}: generator epoch {e} of 2" for e in (1, 2)] + [f"client {k}: generating 3 images"] * 5
        )
