"""Segmentation against MONAI, against sums by hand, and in closed form."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.masks import square_federation
from support.tolerance import FEW, assert_close
from torch import nn

import unskew
from unskew.data.spec import SegmentationSpec
from unskew.errors import ConfigError, DataError
from unskew.tasks.base import OUTSIDE
from unskew.tasks.hausdorff_distance import hd95, mean_hd95
from unskew.tasks.registry import TASKS
from unskew.tasks.segmentation import SMOOTHING, Segmentation

TASK = TASKS["segmentation"]

# MONAI 1.6.1 with PyTorch 2.13.0, for ``random_case()``, with include_background=False and reduction="none":
# DiceLoss(softmax=True, to_onehot_y=True, smooth_nr=1e-5, smooth_dr=1e-5), averaged over classes;
# DiceMetric() and MeanIoU() of one-hot masks, [image, class]; HausdorffDistanceMetric(percentile=95), in float32.
# In the order of images:
DICE_LOSS = [0.6520547414011051, 0.715527820228579, 0.6656057733512661, 0.6420253986853675]
DICE = [
    [0.3684210526315789, 0.34146341463414637],
    [0.3013698630136986, 0.18604651162790697],
    [0.43010752688172044, 0.25],
    [0.3142857142857143, 0.4186046511627907],
]
IOU = [
    [0.22580645161290322, 0.20588235294117646],
    [0.1774193548387097, 0.10256410256410256],
    [0.273972602739726, 0.14285714285714285],
    [0.1864406779661017, 0.2647058823529412],
]
HD95 = [
    [1.443502426147461, 1.8828423023223877],
    [1.4142135381698608, 1.443502426147461],
    [1.8535534143447876, 2.0],
    [3.0162274837493896, 1.8242645263671875],
]
# torch.nn.functional.cross_entropy of the same logits, the mean over the pixels of each image:
CROSS_ENTROPY = [1.3441340215468591, 1.5220926134802188, 1.3062992167086587, 1.2722014978810348]
REGIONS_HD95 = [[2.0, 3.0567972660064697], [2.0, 3.0], [3.0, 3.0]]
"""HausdorffDistanceMetric(percentile=95) for ``regions()``."""


def random_case():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(4, 3, 12, 10)))
    return logits, torch.from_numpy(rng.integers(0, 3, (4, 12, 10))).to(torch.uint8)


def regions():
    truth, predicted = np.zeros((2, 3, 20, 24), np.uint8)
    for k in range(3):
        truth[k, 2 + k : 9 + k, 3:12] = 1
        truth[k, 12:18, 10 + k : 20] = 2
        predicted[k, 1 : 8 + 2 * k, 5:13] = 1
        predicted[k, 11 : 19 - k, 12:23] = 2
    return predicted, truth


def test_losses_are_those_of_monai_and_pytorch():
    logits, y = random_case()
    dice, entropy = (torch.tensor(values, dtype=torch.float64) for values in (DICE_LOSS, CROSS_ENTROPY))
    for loss, expected in (
        ("dice", dice),
        ("ce", entropy),
        ("ce+dice", entropy + dice),
        ("ce+dice:0.5", entropy + dice / 2),
    ):
        torch.testing.assert_close(TASK.with_loss(loss).losses(logits, y), expected, rtol=0, atol=1e-12)
    assert TASK.with_loss("ce+dice") == TASK


def test_metrics_are_those_of_monai():
    logits, y = random_case()
    dice, iou = (torch.tensor(values, dtype=torch.float64) for values in (DICE, IOU))
    torch.testing.assert_close(TASK.correct(logits, y), dice.mean(1), rtol=0, atol=1e-12)
    measured = TASK.named(["rest", "a", "b"]).measure(TASK.tally(logits, y), 0.0)
    expected = {"dice/a": dice[:, 0], "dice/b": dice[:, 1], "iou/a": iou[:, 0], "iou/b": iou[:, 1]}
    for name, values in expected.items():
        assert measured[name] == pytest.approx(float(values.mean()), abs=1e-12)
    right = logits.argmax(1) == y
    assert measured["accuracy"] == pytest.approx(float(right.double().mean()), abs=1e-12)
    hits, sizes = zip(
        *[((right & (y == c)).sum(), (y == c).sum() + (logits.argmax(1) == c).sum()) for c in (1, 2)], strict=True
    )
    assert measured["dice_pooled"] == pytest.approx(
        float((2 * torch.stack(hits) / torch.stack(sizes)).double().mean()), abs=1e-6
    )


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        (random_case()[0].argmax(1).numpy(), random_case()[1].numpy(), HD95),
        (*regions(), REGIONS_HD95),
    ],
)
def test_hd95_is_that_of_monai(predicted, truth, expected):
    mine = [[hd95(one == c, other == c) for c in (1, 2)] for one, other in zip(predicted, truth, strict=True)]
    np.testing.assert_allclose(mine, expected, rtol=1e-6)  # MONAI computes distances in float32
    assert mean_hd95(predicted, truth, 3) == pytest.approx(np.mean(mine))


def test_hd95_of_absent_classes():
    empty, one = np.zeros((2, 3, 4), np.uint8)
    one[1, 1] = 1
    assert math.isnan(mean_hd95(empty[None], empty[None], 2))
    assert mean_hd95(np.stack([empty, one]), np.stack([one, one]), 3) == 2.5  # the diagonal of 3 x 4, and 0
    assert mean_hd95(one[None], np.full((1, 3, 4), OUTSIDE), 2) != 0  # no class at all: NaN
    predicted = np.ones((1, 3, 4), np.uint8)
    truth = np.where(one == 1, 1, OUTSIDE)[None]
    assert mean_hd95(predicted, truth, 2) == 0  # where there is no truth, predictions do not count


def test_two_pixels_by_hand():
    """Image with one pixel of class 0 and one of class 1, whose probabilities of class 1 are 1/4 and 1/2."""
    logits = torch.log(torch.tensor([[[[0.75, 0.5]], [[0.25, 0.5]]]], dtype=torch.float64))
    y = torch.tensor([[[0, 1]]], dtype=torch.uint8)
    dice = (2 * 0.5 + SMOOTHING) / (0.75 + 1 + SMOOTHING)
    entropy = -(math.log(0.75) + math.log(0.5)) / 2
    assert float(TASK.loss(logits, y)) == pytest.approx(entropy + 1 - dice, abs=1e-15)
    weighted = TASK.with_weights((1.0, 3.0))
    assert float(weighted.loss(logits, y)) == pytest.approx(
        -(math.log(0.75) + 3 * math.log(0.5)) / 2 + 1 - dice, abs=1e-15
    )
    assert weighted.unweighted == TASK
    assert float(TASK.correct(logits, y)) == 0  # equal logits are class 0, so class 1 has no predicted pixel


def test_ignored_pixels_have_no_gradient_and_no_effect():
    logits, y = random_case()
    ignored = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    y = torch.where(ignored, OUTSIDE, y)
    y[2] = OUTSIDE
    gradient = torch.func.grad(lambda z: TASK.loss(z, y))(logits)
    everywhere = ignored | (y == OUTSIDE)
    assert bool((gradient.movedim(1, -1)[everywhere] == 0).all())
    assert bool((gradient.movedim(1, -1)[~everywhere] != 0).all())
    other = torch.where(everywhere[:, None], logits + torch.randn(logits.shape).double(), logits)
    torch.testing.assert_close(TASK.losses(other, y), TASK.losses(logits, y), rtol=0, atol=0)
    torch.testing.assert_close(TASK.tally(other, y), TASK.tally(logits, y), rtol=0, atol=0)
    assert float(TASK.losses(logits, y)[2]) == 0


def test_an_image_without_foreground_has_no_dice_term():
    logits, _ = random_case()
    y = torch.zeros(4, 12, 10, dtype=torch.uint8)
    assert TASK.with_loss("dice").losses(logits, y).tolist() == [0.0] * 4
    assert torch.equal(TASK.losses(logits, y), TASK.with_loss("ce").losses(logits, y))
    background = torch.zeros_like(logits)
    background[:, 0] = 1
    assert TASK.correct(background, y).tolist() == [1.0] * 4
    measured = TASK.measure(TASK.tally(background, y), 0.0)
    assert (measured["dice_pooled"], measured["accuracy"]) == (1.0, 1.0)
    assert math.isnan(measured["dice/1"])


def test_sums_of_parts_measure_all_images():
    logits, y = random_case()
    parts = TASK.tally(logits[:1], y[:1]) + TASK.tally(logits[1:], y[1:])
    assert TASK.measure(parts, 0.0) == pytest.approx(TASK.measure(TASK.tally(logits, y), 0.0), rel=1e-14)
    assert torch.equal(TASK.empty_tally(3) + parts, parts)


def test_a_1x1_convolution_is_logistic_regression_of_the_pixels():
    """One local step from zero: the gradient of the mean cross-entropy of pixels, in closed form."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(6, 2, 5, 7)), rng.integers(0, 3, (6, 5, 7))
    fed = unskew.Federation.from_arrays([(x, y, x, y)], test=(x, y), task="segmentation", classes=3)
    options = {"model": Pixelwise(), "rounds": 1, "local_steps": 1, "batch_size": 6, "lr": 0.5, "precision": "fp64"}
    result = unskew.run(fed, **options, loss="ce", device="cpu", engine="inline")
    pixels, classes = x.transpose(0, 2, 3, 1).reshape(-1, 2), y.reshape(-1)
    slope = (np.eye(3)[classes] - 1 / 3).T @ np.c_[pixels, np.ones(len(pixels))] / len(pixels)
    expected = np.concatenate([0.5 * slope[:, :2].reshape(-1), 0.5 * slope[:, 2]])
    np.testing.assert_allclose(result.vector.numpy(), expected, atol=1e-12)


class Pixelwise(nn.Module):
    """1x1 convolution, initially zero."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(2, 3, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(x)


def test_losses_under_vmap_are_those_of_the_loop():
    logits, y = random_case()
    task = TASK.with_weights((1.0, 2.0, 3.0))
    slope = torch.func.grad(lambda z, target: task.loss(z[None], target[None]))
    each = torch.stack([slope(one, target) for one, target in zip(logits, y, strict=True)])
    assert_close(torch.func.vmap(slope)(logits, y), each, FEW)


def test_volumes_have_the_loss_of_images():
    logits, y = random_case()
    assert_close(TASK.losses(logits.unflatten(2, (3, 4)), y.unflatten(1, (3, 4))), TASK.losses(logits, y), FEW)
    assert_close(TASK.tally(logits.unflatten(2, (3, 4)), y.unflatten(1, (3, 4))), TASK.tally(logits, y), FEW)


def test_metrics_of_probabilities_are_those_of_logits():
    logits, y = random_case()
    task, names = TASK.named(["rest", "a", "b"]), SimpleNamespace(class_names=("rest", "a", "b"))
    metrics = task.metrics_of_outputs(y.numpy(), task.outputs(logits).numpy(), names)
    assert metrics["loss"] == pytest.approx(float(task.loss(logits, y)), rel=1e-12)
    expected = {"dice": float(task.correct(logits, y).mean()), **task.measure(task.tally(logits, y), 0.0)}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    counts = np.array([[1, 1, 1, 1], [0, 2, 2, 0]])
    for scores in (task.outputs(logits).numpy(), task.scores(logits).numpy()):
        for name in ("dice", "iou/b", "accuracy"):
            values = task.statistic(name, y.numpy(), scores, names)(counts)
            assert values[0] == pytest.approx(metrics[name], rel=1e-12)
        assert values[1] == pytest.approx(task.measure(task.tally(logits[1:3], y[1:3]), 0.0)["accuracy"])


def test_gray_values_and_shares_of_predictions():
    task = Segmentation(class_names=("a", "b"), values=(7, 200), ignore=128)
    outputs = np.array([[[[0.9, 0.2]], [[0.1, 0.8]]]])
    (mask,) = task.decisions(outputs, None)
    assert (mask.tolist(), mask.dtype) == ([[7, 200]], np.uint8)
    assert task.gray(np.array([0, OUTSIDE])).tolist() == [7, 128]
    assert [*task.predicted_columns(outputs, ("no", "yes"), None).values()] == [[0.5], [0.5]]
    assert task.output_names(["a", "b"], None) == ["share(a)", "share(b)"]
    with pytest.raises(ConfigError, match="A threshold needs a model with two classes"):
        task.decisions(outputs, None, 0.5)


def test_constants_of_files_give_the_task():
    task = Segmentation(values=(0, 255), ignore=128)
    assert task.constants == {"values": (0.0, 255.0), "ignore": (128.0,)}
    assert TASK.with_constants(task.constants, 2) == task
    assert TASK.with_constants({}, 2) == TASK
    weighted = replace(task, weights=(1.0, 2.0))
    assert TASK.with_constants(weighted.constants, 2) == task  # only the training needs weights
    for loss in TASK.loss_options:
        trained = task.with_loss(loss.replace("WEIGHT", "0.25"))
        assert TASK.with_constants(trained.constants, 2) == trained
        assert task.accepts(trained.constants) == (
            "" if loss == "ce+dice" else "its loss is not that of the experiment"
        )
        assert not trained.accepts(trained.constants)
    for wrong in (
        {"values": (0.0,)},
        {"values": (0.0, 0.0)},
        {"values": (0.0, 300.0)},
        {"values": (0.5, 1.0)},
        {"mean": (1.0, 2.0)},
        {"loss": (1.0,)},
        {"loss": (0.0, 0.5)},
        {"loss": (1.0, math.inf)},
    ):
        with pytest.raises(ValueError, match="not a gray value and a positive weight per class"):
            TASK.with_constants(wrong, 2)


def test_only_configured_gray_values_are_accepted():
    task = Segmentation(values=(0, 255), ignore=128)
    assert not task.accepts(task.constants)
    assert not Segmentation().accepts({"values": (0.0, 7.0)})
    assert "segmentation.values" in task.accepts({"values": (0.0, 254.0), "ignore": (128.0,)})
    assert "segmentation.ignore" in task.accepts({"values": (0.0, 255.0)})
    assert "segmentation.ignore" in Segmentation().accepts({"ignore": (1.0,)})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"classes": "vessel"}, "has one class, but a segmentation needs at least two: vessel"),
        ({"values": "7"}, "has one class"),
        ({"classes": "a,b,c", "values": "0,255"}, "has 3 classes, but 2 values"),
        ({"values": "0,255", "ignore": 255}, "ignores the value of a class"),
        ({"classes": "a,b", "values": "0,0"}, "has a value twice"),
    ],
)
def test_contradicting_options_are_rejected(options, reason):
    with pytest.raises(ConfigError, match=reason):
        TASK.configured(SegmentationSpec(**options))


def test_options_name_the_classes():
    task = TASK.configured(SegmentationSpec(classes="background,vessel", values=(0, 9), ignore=1))
    assert task == Segmentation(class_names=("background", "vessel"), values=(0, 9), ignore=1)
    assert task.configured(SegmentationSpec()) == task
    assert TASK.configured(SegmentationSpec(values="3,4")).class_names == ("3", "4")
    with pytest.raises(ConfigError, match="has 3 classes, but the data have 2"):
        replace(task, values=()).configured(SegmentationSpec(classes="a,b,c"))


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (np.zeros((4, 1, 8, 8)), np.zeros(4, int), "expected one integer class per pixel"),
        (np.zeros((4, 1, 8, 8)), np.zeros((4, 8, 8)), "expected one integer class per pixel"),
        (np.zeros((4, 1, 8, 8)), np.zeros((4, 8, 6), int), r"sides \(8, 6\), but their images \(8, 8\)"),
        (np.zeros((4, 3, 8, 8)), np.zeros((4, 3, 8, 8), int), "Volumes need an axis of channels"),
        (np.zeros((4, 1, 8, 8)), np.full((4, 8, 8), 3), "contain 3, but with 2 classes"),
        (np.zeros((4, 1, 8, 8)), np.full((4, 8, 8), 255), "only ignored pixels"),
        (np.zeros((4, 1, 8, 8)), np.full((4, 8, 8), 256), "outside of 0 to 255"),
    ],
)
def test_arrays_that_are_no_masks_are_rejected(x, y, reason):
    with pytest.raises(DataError, match=reason):
        unskew.Federation.from_arrays([(x, y)], test=(x, y), task="segmentation", classes=2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": "ce+dice:0"}, "a number above 0"),
        ({"loss": "dice", "class_weights": "balanced"}, "class_weights weight the cross-entropy"),
        ({"loss": "mse"}, "loss=mse requires regression"),
        ({"class_weights": (1.0,)}, "1 weights, but there are 3 classes"),
        ({"metrics": ["auroc"]}, "metrics=auroc requires classification, but the task of arrays is segmentation"),
        ({"attack": "labelflip:share=0.5"}, "one class per sample"),
        ({"model": "cnn"}, r"expected \(2, 3, 8, 8\) logits"),
    ],
)
def test_options_without_meaning_are_rejected(options, reason):
    with pytest.raises(ConfigError, match=reason):
        unskew.run(square_federation(), **{"model": "unet", "rounds": 1, "device": "cpu", **options})


def test_balanced_weights_count_pixels():
    fed = square_federation()
    counts = fed.class_counts().sum(0)
    assert counts.sum() == 64 * fed.sizes.sum()
    weights = unskew.data.task_options.apply_task_options(fed, "ce", "balanced").objective.weights
    np.testing.assert_allclose(weights, counts.sum() / (3 * counts))
