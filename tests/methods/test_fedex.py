"""FedEx-LoRA against a loop that averages the clients' effective weights, and in its limits."""

import pytest
import torch
from support.batch_loop import CLASSES, FEATURES, HIDDEN, OPTIONS, SIZES, run, skewed
from support.lora import RANK, SCALE, Starts, initial, model, split, train

import unskew
from unskew.errors import ConfigError, MethodConflictError

pytestmark = pytest.mark.xdist_group("heavy")  # PEFT takes several seconds to import
EXACT = 1e-12


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(("participation", "transposed"), [(1.0, False), (0.5, True), (0.5, False)])
def test_the_effective_weight_is_the_mean_of_the_clients(participation, transposed, weights):
    recorder = Starts()
    result, cohorts = run(
        "fedex", participation, model=model(transposed), recorder=recorder, outermost=True, client_weighting=weights
    )
    w, bias, parts = initial(transposed)
    starts = iter(recorder.starts)
    for cohort in cohorts:
        total = sum(SIZES[k] if weights == "samples" else 1 for k in cohort)
        effective, mean = torch.zeros_like(w), [torch.zeros_like(part) for part in parts]
        for k, batches in cohort.items():
            for found, expected in zip(next(starts), [w.T if transposed else w, *parts], strict=True):
                assert float((found - expected.reshape(found.shape)).abs().max()) < EXACT
            share = (SIZES[k] if weights == "samples" else 1) / total
            own = train(w, bias, parts, batches)
            effective += share * (w + SCALE * own[1] @ own[0])
            mean = [m + share * part for m, part in zip(mean, own, strict=True)]
        w, parts = effective - SCALE * mean[1] @ mean[0], mean
    ends = split(result.vector)
    assert float((ends[0].flatten() - (w.T if transposed else w).flatten()).abs().max()) < EXACT
    for found, expected in zip(ends[1:], parts, strict=True):
        assert float((found - expected).abs().max()) < EXACT
    assert float((w - initial(transposed)[0]).abs().max()) > 1e-4  # the correction is not zero


def test_one_client_needs_no_correction():
    """Factors are then those of FedAvg, and the weight stays."""
    fed = skewed((9,))
    weight, *trained = split(run("fedex", fed=fed, model=model(), outermost=True)[0].vector)
    averaged = run("fedavg", fed=fed, model=model(), outermost=True)[0].vector
    assert float((weight - initial()[0]).abs().max()) < EXACT
    assert float((torch.cat([part.flatten() for part in trained]) - averaged).abs().max()) < EXACT


def test_traffic_is_the_model_down_and_all_but_the_weight_up():
    factors, head = RANK * (FEATURES + HIDDEN), CLASSES * (HIDDEN + 1)
    summary = run("fedex", model=model())[0].summary
    visits = OPTIONS["rounds"] * len(SIZES)
    assert summary["bytes_up"] == visits * 8 * (factors + head)
    assert summary["bytes_down"] == visits * 8 * (FEATURES * HIDDEN + factors + head)


@pytest.mark.parametrize(
    "changed", [{"engine": "processes"}, {"engine": "vectorized"}, {"engine": "inline", "clients_per_group": 3}]
)
def test_engines_give_the_same_vector(changed):
    options = {**OPTIONS, "precision": "fp64", "participation": 0.5, "engine": "inline", "method": "fedex"}
    reference, other = (unskew.run(skewed(), model=model(), **{**options, **o}).vector for o in ({}, changed))
    assert float((reference - other).abs().max()) < EXACT


def test_a_continued_run_is_the_whole_one_bit_for_bit(tmp_path):
    whole = run("fedex", 0.5, model=model())[0].vector
    options = {**OPTIONS, "precision": "fp64", "participation": 0.5, "engine": "inline", "method": "fedex"}
    unskew.run(skewed(), model=model(), out=tmp_path / "a", **{**options, "rounds": 2})
    assert torch.equal(unskew.run(skewed(), model=model(), start_from=str(tmp_path / "a"), **options).vector, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "fedex needs a model with LoRA factors"),
        ({"model": model(freeze_a=True)}, "Remove freeze_a"),
        ({"network": {"delay": "half-normal:2"}}, "all updates of a round in the same round"),
        ({"secure_aggregation": "required"}, "secure_aggregation"),
    ],
)
def test_unsupported_runs_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        run("fedex", **{"model": model(), **options})


@pytest.mark.parametrize("other", ["scaffold", "topk:share=0.5", "ditto", "median", "flora", "dpsgd:noise=1"])
def test_compositions_that_need_other_updates_are_rejected(other):
    with pytest.raises(MethodConflictError):
        run(f"fedex+{other}", model=model())
