"""On a GPU the engines give the numbers of the CPU. Skipped where there is none."""

import pytest
import torch
from support.federations import QUICK, SmallBatchNorm, blobs
from support.multilabel import federation
from support.tolerance import MAGNIFIED, assert_close, near

import unskew
from unskew.generators.base import GeneratorJob
from unskew.generators.registry import generator_factory
from unskew.generators.trained.dp_sgd import PrivacyOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def train(method, engine, device, data=None, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "participation": 0.7, "precision": "fp64", **options}
    data = data or blobs([5, 23, 8, 17])
    return unskew.run(data, model=SmallBatchNorm(), method=method, engine=engine, device=device, **given)


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
@pytest.mark.parametrize(
    "method",
    [
        *("fedavg", "scaffold+fedadam", "moon", "fedpvr", "fedrep+ft", "ditto", "fedcog:start_round=1,g_steps=3,n=8"),
        "fedcog:start_round=1,g_steps=2,n=8,generator=network,augment=true,labels=explicit,explicit=0;2",
        *(QUICK["dense"], QUICK["feddm"]),
    ],
)
def test_the_gpu_gives_the_numbers_of_the_cpu(method, engine):
    reference = train(method, "inline", "cpu")
    result = train(method, engine, "cuda")
    assert result.vector.device.type == "cpu"
    assert_close(result.vector, reference.vector, 100 * MAGNIFIED)
    assert result.summary.get("personal_accuracy_mean") == reference.summary.get("personal_accuracy_mean")


@pytest.mark.parametrize("sizes", [(12, 12, 12, 12, 12, 12), (5, 23, 8, 17)])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "moon", "fedcog:start_round=1,g_steps=3,n=8"])
def test_recorded_steps_give_the_numbers_of_steps_from_python(method, precision, sizes, recwarn):
    """Single updates have the same bits; sums of them differ by rounding."""
    options = {"rounds": 6, "local_steps": 8, "precision": precision, "participation": 1.0}
    results = [
        train(method, "vectorized", "cuda", blobs(list(sizes)), graphs=graphs, **options)
        for graphs in ("never", "auto")
    ]
    assert not [warning for warning in recwarn if "not recorded" in str(warning.message)]
    assert_close(
        results[1].vector, results[0].vector, 100 * MAGNIFIED, dtype=torch.float64 if precision == "fp64" else None
    )


def test_recorded_rounds_repeat_their_bits():
    options = {"rounds": 8, "local_steps": 8, "precision": "fp32", "lr_schedule": "cosine", "optimizer": "adam"}
    vectors = [train("fedavg", "vectorized", "cuda", **options).vector for _ in range(2)]
    assert torch.equal(*vectors)


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_seeds_trained_together_on_the_gpu_have_the_numbers_of_single_runs(method, tmp_path):
    options = {"rounds": 5, "local_steps": 6, "precision": "fp64", "data": "digits", "clients": 6, "model": "cnn"}
    found = [
        unskew.compare(methods=[method], seeds=3, out=tmp_path / str(parallel), engine="vectorized", device="cuda",
                       parallel=parallel, references=False, **options)
        for parallel in (1, "stacked")
    ]  # fmt: skip
    accuracies = [[rows[-1]["accuracy"] for rows in result.histories[method]] for result in found]
    assert accuracies[0] == accuracies[1]


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
def test_several_labels_on_the_gpu(engine):
    method = "fedcog:start_round=1,g_steps=3,n=8,cooccurrence=true,coefficients=auto"
    reference = train(method, "inline", "cpu", federation())
    result = train(method, engine, "cuda", federation())
    assert_close(result.vector, reference.vector, 100 * MAGNIFIED)
    assert result.summary["micro_f1"] == near(reference.summary["micro_f1"])


def test_a_run_on_the_gpu_goes_on_from_its_checkpoint(tmp_path):
    straight = train("scaffold", "vectorized", "cuda", rounds=4, checkpoint_every=2)
    train("scaffold", "vectorized", "cuda", rounds=2, checkpoint_every=2, out=tmp_path / "run")
    torch.manual_seed(0)
    again = unskew.resume(tmp_path / "run", federation=blobs([5, 23, 8, 17]), model=SmallBatchNorm(), rounds=4)
    torch.testing.assert_close(again.vector, straight.vector, rtol=0, atol=0)


@pytest.mark.parametrize("spec", ["vae-small;epochs=3", "gan-small;epochs=3", "ddpm-small;epochs=2;sampling_steps=4"])
def test_generators_on_the_gpu_make_the_images_of_the_cpu(spec):
    """Noise is drawn on the CPU, so only rounding differs: a few steps of training do not let it grow."""
    x = torch.randint(0, 255, (40, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y, made = torch.arange(40) % 3, []
    for device in ("cpu", "cuda"):
        generator = generator_factory(spec)(GeneratorJob((1, 8, 8), 3, 0, torch.device(device)))
        generator.fit(x, y)
        made.append(generator.sample(torch.tensor([0, 1, 2, 2])).float())
    assert (made[0] - made[1]).abs().mean() < 3


def test_a_private_generator_trains_on_the_gpu():
    x = torch.randint(0, 255, (30, 1, 8, 8), dtype=torch.uint8)
    job = GeneratorJob((1, 8, 8), 3, 0, torch.device("cuda"), privacy=PrivacyOptions(noise_multiplier=1.0))
    generator = generator_factory("ddpm-small;batch=8;sampling_steps=3", 2)(job)
    generator.fit(x, torch.arange(30) % 3)
    assert generator.epsilon > 0
    assert generator.sample(torch.tensor([0, 1])).shape == (2, 1, 8, 8)


def test_a_diagnosis_on_the_gpu_finds_what_it_finds_on_the_cpu():
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        options = {"precision": "fp64", "device": device, "shares": [0.0, 0.5]}
        found.append(unskew.diagnose(blobs([5, 23, 8]), model=SmallBatchNorm(), **options).measurements[0])
    assert found[1].metrics == pytest.approx(found[0].metrics, rel=1e-6)
    for mine, theirs in zip(*(place.shares for place in found), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
