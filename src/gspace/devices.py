"""Bookkeeping lives on the CPU, whatever torch's default device is.

`torch.set_default_device("cuda")` and `with torch.device("cuda")` say where tensors without a device are made. They are
meant for the user's model. The graph, the skeleton and the tables of a network are made on the CPU all the same.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def on_cpu(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, with the CPU as torch's default device.

    For bookkeeping only: a model's own code must find the default device as the user set it. Nor for what every step
    calls: there a device is named.

    >>> with torch.device("meta"):
    ...     torch.zeros(2).device, on_cpu(torch.zeros)(2).device
    (device(type='meta'), device(type='cpu'))
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        # `torch.get_default_device` did not see `with torch.device(...)` before torch 2.8; a tensor tells.
        if torch.empty(0).device.type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return wrapped
