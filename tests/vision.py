"""Lets the Python of torchvision be imported where its operators do not load: they are built for another torch.

timm imports it, and so does transformers where it is installed. It adds kernels to operators that must be known by
then. None of what is tested calls them.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []  # what is declared goes with its library


def declare() -> None:
    found = find_spec("torchvision")
    if found is None or found.origin is None or _declared:
        return
    try:
        torch.ops.load_library(next(Path(found.origin).parent.glob("_C*.so")))
    except OSError:
        _declared.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
