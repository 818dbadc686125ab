"""Optimizers of a model, for frameworks that want a class and call it with parameters."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer


def factory(optimizer_class: type[Optimizer], model: nn.Module, *args: Any, **options: Any) -> type[Optimizer]:
    """An optimizer class that knows its model, and is made as torch's are: of parameters or groups of them.

    The `Trainer` of Hugging Face takes it as `optimizer_cls_and_kwargs=(factory(GSGD, model), {"lr": 0.1})`.

    Args:
        optimizer_class: GSGD, InGSpace, PathSGD or FrozenSkeletonSGD.
        model, args, options: Its first arguments, such as the inner optimizer of InGSpace, and some of its options.

    >>> import torch
    >>> from gspace import InGSpace
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> make = factory(InGSpace, net, torch.optim.AdamW)
    >>> make(net.parameters(), lr=1e-3).param_groups[0]["lr"]
    0.001
    """

    class Of(optimizer_class):  # type: ignore[misc, valid-type]
        def __init__(self, params: Iterable[Any], **more: Any) -> None:
            super().__init__(model, *args, params=params, **{**options, **more})

    Of.__name__, Of.__doc__ = optimizer_class.__name__, optimizer_class.__doc__
    return Of
