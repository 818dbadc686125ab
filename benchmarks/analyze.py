"""How long `gspace.analyze` takes on networks of full size, on one thread, beside the forward passes it makes.

    python benchmarks/analyze.py [--json FILE] [--repeats N]

CPU seconds of the fastest repeat, in both modes on two images of 224 × 224. ViT-B/16 and a Llama of 1.1 billion weights
on the meta device (no forward passes to compare with) need transformers, and are left out where it is not installed.

For VGG-11 and an MLP of 10,000 layers, width 4, float64, also `balance_`, and `GSGD` with its first step, both with the
analysis given.
"""

import argparse
import copy
import importlib
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gspace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import vision
import zoo  # the architectures of the test zoo

vision.declare()  # transformers imports torchvision where it is installed

DEPTH = 10_000
IMAGES = (2, 3, 224, 224)
GROWTH, BLOCKS, STEM = 32, (6, 12, 24, 16), 64  # of DenseNet-121


class DenseLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * GROWTH, 1, bias=False)),
            *(nn.BatchNorm2d(4 * GROWTH), nn.ReLU(), nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet() -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(3, STEM, 7, 2, 3, bias=False),
        nn.BatchNorm2d(STEM),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = STEM
    for k, count in enumerate(BLOCKS):
        if k:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
            layers += [nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(count):
            layers.append(DenseLayer(channels))
            channels += GROWTH
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers)


def images(build: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    return build(), (torch.randn(IMAGES),)


def vgg() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, pool in ((64, 1), (128, 1), (256, 0), (256, 1), (512, 0), (512, 1), (512, 0), (512, 1)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), *[nn.MaxPool2d(2)] * pool]
        channels = width
    classifier = nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)
    return nn.Sequential(*layers, nn.Flatten(), *classifier)


def deep() -> tuple[nn.Module, Any]:
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(4, 4), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(4, 2)).double(), (torch.randn(2, 4, dtype=torch.float64),)


def vit() -> tuple[nn.Module, Any]:
    transformers = importlib.import_module("transformers")
    return transformers.ViTModel(transformers.ViTConfig()), {"pixel_values": torch.randn(IMAGES)}


def llama() -> tuple[nn.Module, Any]:
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    with torch.device("meta"):
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=32000)
        return transformers.LlamaForCausalLM(config), {"input_ids": torch.zeros(2, 8, dtype=torch.long)}


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "resnet-50": partial(images, partial(zoo.ResNet, zoo.Bottleneck, (3, 4, 6, 3), 64)),
    "resnet-152": partial(images, partial(zoo.ResNet, zoo.Bottleneck, (3, 8, 36, 3), 64)),
    "densenet-121": partial(images, densenet),
    "vit-b-16": vit,
    "llama-1.1b-meta": llama,
    "vgg-11": partial(images, vgg),
    "mlp-10000-layers": deep,
}


BUILT = {"vgg-11", "mlp-10000-layers"}


@dataclass(frozen=True)
class Timing:
    """One network: the analysis and, if it has values, its forward passes in training and evaluation mode.

    For some, `balance_`, and `GSGD` with its first step.
    """

    network: str
    m: int
    H: int
    H_absorbed: int
    analysis_s: float
    forward_s: float | None
    peak_mb: float
    n: int
    balance_s: float | None = None
    gsgd_s: float | None = None


def forward(model: nn.Module, example: Any) -> float:
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    start = time.process_time()
    with torch.no_grad():
        for training in (True, False):
            model.train(training)(*args, **kwargs)
    return time.process_time() - start


def balanced(model: nn.Module, found: gspace.Analysis) -> float:
    start = time.process_time()
    gspace.balance_(model, analysis=found)
    return time.process_time() - start


def first_step(model: nn.Module, example: Any) -> float:
    found = gspace.analyze(model, example, residual="pin")
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-6)
    start = time.process_time()
    gspace.GSGD(model, lr=1e-3, analysis=found).step()
    return time.process_time() - start


def measure(name: str, repeats: int) -> Timing:
    model, example = NETWORKS[name]()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        found = gspace.analyze(model, example)
        times.append(time.process_time() - start)
    meta = any(p.is_meta for p in model.parameters())
    plain = None if meta else min(forward(model, example) for _ in range(repeats))
    built: list[float | None] = [None, None]
    if name in BUILT:
        built = [min(balanced(copy.deepcopy(model), found) for _ in range(repeats))]
        built += [min(first_step(copy.deepcopy(model), example) for _ in range(repeats))]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Timing(name, found.m, found.H, found.H_absorbed, min(times), plain, peak, repeats, *built)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures and the environment to this file")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'network':18}{'m':>14}{'H':>9}{'absorbed':>10}{'analysis':>10}{'forward':>10}{'peak':>11}")
    timings = []
    for name in NETWORKS:
        try:
            t = measure(name, options.repeats)
        except ModuleNotFoundError as error:
            print(f"{name:16} left out: {error}")
            continue
        timings.append(t)
        plain = "–" if t.forward_s is None else f"{t.forward_s:.2f} s"
        counts = f"{t.m:>14,}{t.H:>9,}{t.H_absorbed:>10,}"
        built = "" if t.balance_s is None else f"  balance_ {t.balance_s:.2f} s, GSGD {t.gsgd_s:.2f} s"
        print(f"{name:18}{counts}{t.analysis_s:>8.2f} s{plain:>10}{t.peak_mb:>8.0f} MB{built}", flush=True)
    if options.json:
        environment = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        environment |= {"machine": platform.machine(), "gspace": gspace.__version__}
        report = {"environment": environment, "timings": [asdict(t) for t in timings]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
