import pytest
import torch
from support.augment import one_by_one

from unskew.data.augment import crop_and_flip, crop_and_flip_samples, draw_crop_and_flip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("shape", "padding"), [((7, 3, 8, 8), 4), ((5, 1, 6, 9), 2), ((1, 4, 3, 5), 0), ((0, 3, 4, 4), 1)]
)
def test_matches_a_loop_over_samples(dtype, shape, padding):
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 256, shape, generator=generator).to(dtype).contiguous(memory_format=torch.channels_last)
    offsets, flips = draw_crop_and_flip(len(x), padding, generator)
    out = crop_and_flip(x, offsets, flips, padding)
    assert out.dtype == dtype
    assert torch.equal(out, one_by_one(x, offsets, flips, padding))


def test_every_offset_and_both_flips():
    offsets = torch.cartesian_prod(torch.arange(5), torch.arange(5)).repeat(2, 1)
    flips = torch.arange(50) < 25
    x = torch.randint(1, 256, (50, 2, 6, 5), dtype=torch.uint8)
    assert torch.equal(crop_and_flip(x, offsets, flips, 2), one_by_one(x, offsets, flips, 2))


def test_keeps_channels_last_memory_and_the_input():
    x = torch.rand(6, 8, 8, 3).permute(0, 3, 1, 2)
    before = x.clone()
    out = crop_and_flip(x, *draw_crop_and_flip(6, 4, torch.Generator().manual_seed(0)))
    assert out.stride() == x.stride()
    assert torch.equal(x, before)


def test_the_middle_offset_without_a_flip_changes_nothing():
    x = torch.rand(4, 3, 5, 5)
    out = crop_and_flip(x, torch.full((4, 2), 3), torch.zeros(4, dtype=torch.bool), padding=3)
    assert torch.equal(out, x)


def test_draws_depend_on_the_generator_only_and_cover_their_range():
    torch.manual_seed(0)
    first = draw_crop_and_flip(2000, 4, torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    again = draw_crop_and_flip(2000, 4, torch.Generator().manual_seed(5))
    other = draw_crop_and_flip(2000, 4, torch.Generator().manual_seed(6))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert first[0].unique().tolist() == list(range(9))
    assert first[1].dtype == torch.bool
    assert 0.45 < first[1].float().mean() < 0.55


def test_runs_under_vmap():
    x = torch.rand(3, 4, 2, 6, 6)
    draws = [draw_crop_and_flip(4, 2, torch.Generator().manual_seed(k)) for k in range(3)]
    offsets, flips = (torch.stack(parts) for parts in zip(*draws, strict=True))
    out = torch.func.vmap(lambda *a: crop_and_flip(*a, padding=2))(x, offsets, flips)
    for k in range(3):
        assert torch.equal(out[k], one_by_one(x[k], offsets[k], flips[k], 2))


def test_masks_move_with_their_images_and_have_no_truth_outside():
    y = torch.randint(0, 3, (20, 6, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    x = y[:, None].float() + 1
    draws = draw_crop_and_flip(20, 2, torch.Generator().manual_seed(1))
    moved, masks = crop_and_flip_samples(x, y, *draws, 2, pixels=True)
    assert torch.equal(moved[:, 0], torch.where(masks == 255, 0, masks.float() + 1))
    assert (masks == 255).any()
    assert masks.dtype == torch.uint8
    other, labels = crop_and_flip_samples(x, y, *draws, 2, pixels=False)
    assert torch.equal(other, moved)
    assert labels is y
