"""FLoRA against a loop that trains the factors of each client and adds their products to the weight."""

import pytest
import torch
from support.batch_loop import CLASSES, FEATURES, HIDDEN, OPTIONS, SIZES, run
from support.lora import RANK, SCALE, Starts, model, split, train

from unskew.errors import ConfigError, MethodConflictError

pytestmark = pytest.mark.xdist_group("heavy")  # PEFT takes several seconds to import


@pytest.mark.parametrize(
    ("ranks", "participation", "transposed"),
    [("", 1.0, False), ("", 0.5, True), ("3/1", 1.0, False), ("2/1/3", 0.5, False)],
)
def test_a_run_is_the_papers_loop(ranks, participation, transposed):
    recorder = Starts()
    method = f"flora:ranks={ranks}" if ranks else "flora"
    listed = [int(rank) for rank in ranks.split("/")] if ranks else [RANK]
    result, cohorts = run(method, participation, model=model(transposed), recorder=recorder, outermost=True)
    net = model(transposed)
    bias = net[0].base_layer.bias.detach().double()
    w = net[0].base_layer.weight.detach().double()
    w = w.T if transposed else w
    head = [net[2].weight.detach().double(), net[2].bias.detach().double()]
    starts, drawn = iter(recorder.starts), []
    for cohort in cohorts:
        total = sum(SIZES[k] for k in cohort)
        products, heads = torch.zeros_like(w), [torch.zeros_like(part) for part in head]
        for k, batches in cohort.items():
            rank = listed[k % len(listed)]
            _, a, b, *_ = next(starts)
            assert not a[rank:].any()
            assert not b.any()
            assert a[:rank].abs().max() <= FEATURES**-0.5
            drawn.append(a[:rank].flatten()[0].item())
            a, b, *own = train(w, bias, [a[:rank], b[:, :rank], *head], batches)
            products += SIZES[k] / total * SCALE * (b @ a)
            heads = [mean + SIZES[k] / total * part for mean, part in zip(heads, own, strict=True)]
        w, head = w + products, heads
    assert len(set(drawn)) == len(drawn)  # each client draws new factors in each round
    served = torch.cat([(w.T if transposed else w).flatten(), *[part.flatten() for part in head]])
    ends = split(result.vector)
    assert not ends[2].any()  # the served model has no product left
    kept = torch.cat([ends[0].flatten(), ends[3].flatten(), ends[4]])
    assert float((kept - served).abs().max()) < 1e-12


def test_traffic_is_the_weights_down_and_the_factors_of_each_rank_up():
    head = CLASSES * (HIDDEN + 1)
    result, _ = run("flora:ranks=3/1", model=model())
    up = sum(4 * (rank * (FEATURES + HIDDEN) + head) for rank in (3, 1, 3, 1))
    down = 4 * 4 * (FEATURES * HIDDEN + head + 1)  # and the rank
    assert result.summary["bytes_up"] == OPTIONS["rounds"] * 2 * up  # float64
    assert result.summary["bytes_down"] == OPTIONS["rounds"] * 2 * down


def test_fine_tuned_clients_have_factors_of_their_rank():
    recorder = Starts()
    run(["flora:ranks=3/1", "ft"], model=model(), recorder=recorder, outermost=True)
    final = recorder.starts[-len(SIZES) :]
    assert [bool(a[1:].any()) for _, a, *_ in final] == [True, False, True, False]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("flora", {"model": None}, "needs a model with LoRA factors"),
        ("flora", {"model": model(freeze_a=True)}, "Remove freeze_a"),
        ("flora:ranks=4", {}, "a rank above 3"),
        ("flora:ranks=2/0", {}, "positive integers"),
        ("flora", {"network": {"delay": "half-normal:2"}}, "all updates of a round in the same round"),
    ],
)
def test_what_does_not_fit_is_rejected(method, options, message):
    with pytest.raises(ConfigError, match=message):
        run(method, **{"model": model(), **options})


def with_products():
    net = model()
    torch.nn.init.normal_(net[0].lora_B["default"].weight)
    return net


def test_products_of_the_given_model_are_added_to_its_weights():
    net, merged = with_products(), with_products()
    layer = merged[0]
    with torch.no_grad():
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        layer.base_layer.weight += SCALE * product
        layer.lora_B["default"].weight.zero_()
    found, expected = (run("flora", model=each)[0].vector for each in (net, merged))
    assert float((found - expected).abs().max()) < 1e-6  # the weights given are float32


def test_a_run_with_trained_factors_cannot_be_continued(tmp_path):
    run("fedex", model=model(), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="start_from has trained LoRA factors"):
        run("flora", model=model(), start_from=str(tmp_path / "run"), rounds=OPTIONS["rounds"] + 1)


@pytest.mark.parametrize("method", ["flora", "hetlora", "hetlora:ranks=3/1"])
def test_layers_with_factors_of_different_rank_are_rejected(method):
    import peft

    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, CLASSES))
    net = peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=["0", "1"], rank_pattern={"0": 1}), net)
    net[2].requires_grad_(True)
    with pytest.raises(ConfigError, match="one rank in all layers, but some have rank 1, and those of 1 have rank 3"):
        run(method, model=net)


@pytest.mark.parametrize("other", ["scaffold", "topk:share=0.5", "ditto", "median", "heterofl"])
def test_compositions_that_mix_factors_of_rounds_are_rejected(other):
    with pytest.raises(MethodConflictError):
        run(f"flora+{other}", model=model())
