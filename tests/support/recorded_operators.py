"""A stand-in for CUDA graphs on a CPU: recorded operators that are replayed without Python."""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class RecordedOperators(TorchDispatchMode):
    """Recording of work with the tensors that its operators read and wrote.

    What a CUDA graph would repeat with an outdated value, such as a Python number that changes or a tensor that is created
    again, is repeated with the same outdated value here.
    """

    def __init__(self, work, restore):
        super().__init__()
        self.calls = []
        self.replays = 0
        with self:
            work()
        restore()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function.is_view or torch.Tag.inplace_view in function.tags:  # of memory that replays do not move
            return result
        returned = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        given = {memory(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if any(memory(t) not in given for t in returned) or function._schema.is_mutable:
            self.calls.append((function, args, kwargs, returned))
        return result

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for function, args, kwargs, returned in self.calls:
                result = function(*args, **kwargs)
                fresh = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
                for old, new in zip(returned, fresh, strict=True):
                    if memory(old) != memory(new):
                        old.copy_(new.view(old.shape))


def memory(tensor):
    return tensor.untyped_storage()._cdata
