"""Is the analysis on a GPU the one on the CPU? Counts, edges, forms, statistics and pins, compared entry by entry.

    python benchmarks/devices.py [--device cuda] [--dtype bfloat16] [--json FILE]

Networks of the test zoo, attention of torch and, where transformers is installed, tiny models of it. Operations may
have other names on another device (cudnn, flash), so that of pins is written down and not compared.
"""

import argparse
import importlib
import importlib.util
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import gspace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import zoo  # the architectures of the test zoo
from huggingface import FAMILIES
from huggingface_more import MORE

Built = tuple[nn.Module, Any]


def images(build: Callable[[], nn.Module], *shape: int) -> Built:
    return build(), torch.randn(4, *(shape or (3, 32, 32)))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.attention(x, x, x, need_weights=False)[0])
        return out


def huggingface(name: str) -> Built:
    transformers = importlib.import_module("transformers")
    family = next(f for f in (*FAMILIES, *MORE) if f.name == name)
    model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.options))
    batches = [family.batch(seed) for seed in family.seeds]
    return model, tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, batches)


NETWORKS: dict[str, Callable[[], Built]] = {
    "mlp": partial(images, partial(zoo.mlp, 6, 8, 8, 3, norm=True), 6),
    "vgg": partial(images, partial(zoo.vgg, True)),
    "plain-34": partial(images, zoo.plain),
    "resnet": partial(images, partial(zoo.ResNet, zoo.Bottleneck, (2, 2, 2, 2), 8)),
    "densenet": partial(images, zoo.densenet),
    "mobilenet-v2": partial(images, zoo.mobilenet_v2),
    "unet": partial(images, zoo.UNet),
    "attention": partial(images, Attends, 5, 16),
    **{
        name: partial(huggingface, name)
        for name in ("llama", "qwen3", "gemma3", "gpt2", "t5-relu", "vit", "swin", "convnext", "mixtral")
    },
}


def told(found: gspace.Analysis) -> dict[str, Any]:
    """All that an analysis says, as plain values."""

    def written(edges: tuple[gspace.Edges, ...]) -> list[Any]:
        kinds = ("name", "swap", "normalized", "first", "last", "shift")
        return [[*(getattr(e, k) for k in kinds), e.head.tolist(), e.tail.tolist()] for e in edges]

    pins = sorted([p.where, p.count, p.reason] for p in found.pinned)
    statistics = [[s.name, s.unit.tolist(), s.power] for s in found.statistics]
    edges = {"edges": written(found.edges), "transparent": written(found.transparent)}
    return {**found.to_dict(), **edges, "pinned": pins, "statistics": statistics}


def compare(name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Both analyses of one network; what differs, by the names of its parts."""
    found = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        model, example = NETWORKS[name]()

        def moved(t: torch.Tensor, where: str = where) -> torch.Tensor:
            return t.to(where, dtype if t.is_floating_point() else t.dtype)

        found.append(gspace.analyze(model.to(where, dtype), tree_map_only(torch.Tensor, moved, example)))
    here, there = map(told, found)
    operations = sorted({p.operation for p in found[1].pinned} - {p.operation for p in found[0].pinned})
    counts = {"H": found[0].H, "H_absorbed": found[0].H_absorbed, "pins": len(found[0].pinned)}
    differ = [part for part in here if here[part] != there[part]]
    return {"network": name, **counts, "differ": differ, "other_operations": operations}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    rows = []
    for name, build in NETWORKS.items():
        if getattr(build, "func", None) is huggingface and importlib.util.find_spec("transformers") is None:
            print(f"{name:14} left out: transformers is not installed")
            continue
        try:
            row = compare(name, options.device, getattr(torch, options.dtype))
        except Exception as error:  # noqa: BLE001 - it is recorded, and the others still run
            row = {"network": name, "differ": ["error"], "error": f"{type(error).__name__}: {str(error)[:300]}"}
        rows.append(row)
        print(f"{name:14} {row.get('H', '–'):>6} units   {row.get('error') or row['differ'] or 'the same'}", flush=True)
    on_gpu = options.device.startswith("cuda") and torch.cuda.is_available()
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else options.device,
        "dtype": options.dtype,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "transformers": getattr(sys.modules.get("transformers"), "__version__", None),
        "networks": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row["differ"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
