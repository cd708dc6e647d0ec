"""The client's optimizer against ``torch.optim``, also while a part of the parameters is frozen."""

import pytest
import torch
from support.tolerance import assert_close

from unskew.engines import optimizers
from unskew.protocol.training_config import Training

SETTINGS = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "adam": {"optimizer": "adam", "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
}


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("phases", [[(True, True)], [(True, False), (False, True)], [(False, True), (True, True)]])
def test_a_frozen_part_is_as_if_it_were_not_there(setting, clip, phases):
    training = Training(lr=0.03, clip_grad_norm=clip, **SETTINGS[setting])
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(7, generator=draws, dtype=torch.float64)
    parts = [torch.nn.Parameter(start[:4].clone()), torch.nn.Parameter(start[4:].clone())]
    given = {k: v for k, v in SETTINGS[setting].items() if k != "optimizer"}
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(setting, torch.optim.SGD)
    reference = kind(parts, lr=0.03, **given)

    freezes = phases != [(True, True)]
    v, state, t = start.clone(), optimizers.init_state(training, start, freezes), 0
    for moving in phases:
        mask = torch.tensor([moving[0]] * 4 + [moving[1]] * 3)
        before, kept = v.clone(), {name: tensor.clone() for name, tensor in state.items()}
        for _ in range(6):
            g = torch.randn(7, generator=draws, dtype=torch.float64)
            for part, piece, moves in zip(parts, (g[:4], g[4:]), moving, strict=True):
                part.grad = piece.clone() if moves else None
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parts, clip)
            reference.step()
            v, state = optimizers.optimizer_step(training, v, g, state, t, mask if freezes else None)
            t += 1
        assert_close(v, torch.cat([p.detach() for p in parts]))
        assert torch.equal(v[~mask], before[~mask])
        for name, tensor in state.items():
            assert torch.equal(tensor[~mask], kept[name][~mask])
            assert not torch.equal(tensor[mask], kept[name][mask])
