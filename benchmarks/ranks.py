"""What a step costs several processes: collectives and bytes, counted, and throughput beside one process.

python benchmarks/ranks.py --out results/ranks.json       # some minutes: processes with gloo on this machine
python benchmarks/ranks.py --table docs/scale.md          # writes the tables from that record
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """The collectives of a block: their names, and the bytes of what this process gives to them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.names.append(func._overloadpacket.__name__)
            self.bytes += sum(t.numel() * t.element_size() for t in tree_leaves(args[0]) if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))
