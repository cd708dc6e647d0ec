"""FedSA-LoRA against a loop that averages the first factor, and in its limits."""

import pytest
import torch
from support.batch_loop import CLASSES, FEATURES, HIDDEN, OPTIONS, SIZES, client_states, run, skewed
from support.lora import RANK, initial, model, train

import unskew
from unskew.errors import ConfigError, MethodConflictError

pytestmark = pytest.mark.xdist_group("heavy")  # PEFT takes several seconds to import
EXACT = 1e-12
FACTOR, HEAD = RANK * FEATURES, CLASSES * (HIDDEN + 1)


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("head", "shared"), [("local", [0]), ("shared", [0, 2, 3])])
def test_a_run_is_the_papers_loop(head, shared, participation, tmp_path):
    result, cohorts = run(f"fedsa:head={head}", participation, model=model(), out=tmp_path / "run")
    w, bias, first = initial()
    common, own = list(first), {}
    for cohort in cohorts:
        total = sum(SIZES[k] for k in cohort)
        for k, batches in cohort.items():
            parts = [common[i] if i in shared else part for i, part in enumerate(own.get(k, first))]
            own[k] = train(w, bias, parts, batches)
        for i in shared:
            common[i] = sum(SIZES[k] / total * own[k][i] for k in cohort)
    flat = torch.cat([part.flatten() for part in common])
    assert float((result.vector - flat).abs().max()) < EXACT
    states = client_states(tmp_path / "run")
    assert set(states) == set(own)
    for k, parts in own.items():
        assert float((states[k]["model"] - torch.cat([part.flatten() for part in parts])).abs().max()) < EXACT


def test_the_model_of_a_single_client_is_that_of_fedavg(tmp_path):
    fed = skewed((9,))
    run("fedsa", fed=fed, model=model(), out=tmp_path / "run")
    own, averaged = client_states(tmp_path / "run")[0]["model"], run("fedavg", fed=fed, model=model())[0].vector
    assert float((own - averaged).abs().max()) < EXACT


@pytest.mark.parametrize(("head", "numbers"), [("local", FACTOR), ("shared", FACTOR + HEAD)])
def test_traffic_is_that_of_the_shared_parameters(head, numbers):
    summary = run(f"fedsa:head={head}", model=model())[0].summary
    assert summary["bytes_up"] == summary["bytes_down"] == OPTIONS["rounds"] * len(SIZES) * numbers * 8


@pytest.mark.parametrize(
    "changed", [{"engine": "processes"}, {"engine": "vectorized"}, {"engine": "inline", "clients_per_group": 3}]
)
def test_engines_give_the_same_vector(changed):
    options = {**OPTIONS, "precision": "fp64", "participation": 0.5, "engine": "inline", "method": "fedsa"}
    reference, other = (unskew.run(skewed(), model=model(), **{**options, **o}).vector for o in ({}, changed))
    assert float((reference - other).abs().max()) < EXACT


def test_a_continued_run_is_the_whole_one_bit_for_bit(tmp_path):
    whole = run("fedsa", 0.5, model=model())[0].vector
    options = {**OPTIONS, "precision": "fp64", "participation": 0.5, "engine": "inline", "method": "fedsa"}
    unskew.run(skewed(), model=model(), out=tmp_path / "a", **{**options, "rounds": 2})
    assert torch.equal(unskew.run(skewed(), model=model(), start_from=str(tmp_path / "a"), **options).vector, whole)


def test_secure_aggregation_gives_the_same_vector():
    masked, plain = (run("fedsa", model=model(), secure_aggregation=value)[0] for value in ("required", "off"))
    assert torch.equal(masked.vector, plain.vector)


def frozen_head():
    net = model()
    net[2].requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fedsa", {"model": None}, "fedsa needs a model with LoRA factors"),
        ("fedsa", {"model": model(freeze_a=True)}, "Remove freeze_a"),
        ("fedsa:head=shared", {"model": frozen_head()}, "has no effect, because '2' is frozen"),
        ("fedsa", {"network": {"delay": "half-normal:2"}}, "all updates of a round in the same round"),
    ],
)
def test_unsupported_runs_are_rejected(method, options, message):
    with pytest.raises(ConfigError, match=message):
        run(method, **{"model": model(), **options})


@pytest.mark.parametrize("other", ["scaffold", "fedexp", "ditto", "flora", "fedper"])
def test_rules_that_need_the_whole_model_are_rejected(other):
    for expression in (f"fedsa+{other}", f"{other}+fedsa"):
        with pytest.raises(MethodConflictError):
            unskew.method(expression)
