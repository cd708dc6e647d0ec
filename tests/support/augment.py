"""Cropping and mirroring, image by image."""

import torch


def one_by_one(x, offsets, flips, padding):
    """The oracle: each image padded, cropped and mirrored on its own."""
    out = torch.zeros_like(x)
    height, width = x.shape[2:]
    for i in range(len(x)):
        padded = torch.zeros(x.shape[1], height + 2 * padding, width + 2 * padding, dtype=x.dtype)
        padded[:, padding : padding + height, padding : padding + width] = x[i]
        top, left = offsets[i].tolist()
        image = padded[:, top : top + height, left : left + width]
        out[i] = image.flip(-1) if flips[i] else image
    return out
