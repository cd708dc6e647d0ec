"""Trees of tensors with a client axis: stacked, and selected or replaced by rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree = Any
"""Nested containers of tensors."""


def stack_trees(trees: list[Any], device: torch.device) -> tuple[Tree, Tree]:
    """Stack tensors in nested dictionaries along a leading client axis, with one transfer to ``device`` for all clients.

    Args:
        trees: Tensor or None, or nested dictionaries of them with the same names, of each client.
        device: Device to move to.

    Returns:
        Stacked tree, and the ``in_dims`` of its leaves: None for leaves that all clients share.
    """
    first = trees[0]
    if isinstance(first, dict):  # much faster than flattening the tree of each client
        pairs = {name: stack_trees([tree[name] for tree in trees], device) for name in first}
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}
    if all(leaf is first for leaf in trees):  # including None, for values that no rule needs
        return None if first is None else first.to(device), None
    together = len({leaf.device for leaf in trees}) == 1  # state from a checkpoint is on the CPU
    return torch.stack(trees if together else [leaf.to(device) for leaf in trees]).to(device), 0


def select_rows(tree: Tree, index: Tensor | int | None, dims: Tree | None = None) -> Tree:
    """Select rows of every leaf with a client axis (all rows, not copied, if ``index`` is None).

    Args:
        tree: Nested containers of tensors.
        index: Rows to select; None for all.
        dims: Leaves with a client axis; None for all.
    """
    if index is None:
        return tree
    if dims is None:
        return pytree.tree_map(lambda leaf: leaf[index], tree)
    leaves, layout = pytree.tree_flatten(tree)
    flags = pytree.tree_flatten(dims, is_leaf=lambda d: d is None)[0]
    picked = [leaf if flag is None else leaf[index] for leaf, flag in zip(leaves, flags, strict=True)]
    return pytree.tree_unflatten(picked, layout)


def replace_rows(tree: Tree, index: Tensor | None, new: Tree) -> Tree:
    """Return ``tree`` with rows replaced.

    Args:
        tree: Nested containers of tensors.
        index: Rows to replace; None for all.
        new: Values of these rows.
    """
    if index is None:
        return new
    return pytree.tree_map(lambda old, part: old.index_copy(0, index, part), tree, new)
