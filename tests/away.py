"""A second device where there is none: tensors that say they are elsewhere, and compute only with their like."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Away(Tensor):
    """A tensor on the meta device that has values all the same. `.to("cpu")` is a plain tensor."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "Away":
        made: Away = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device="meta")
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not all(isinstance(t, cls) for t in tree_leaves(args) if isinstance(t, Tensor)):
            raise RuntimeError(f"{func}: tensors are on two devices")
        result = func(*tree_map_only(cls, lambda t: t.held, args), **given)
        return result if given.get("device") == torch.device("cpu") else tree_map_only(Tensor, cls, result)
