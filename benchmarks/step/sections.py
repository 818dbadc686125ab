"""What is timed: iterations, steps, how steps grow with width and depth."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.step.networks import FOREACH, FUSED, NETWORKS, OPTIMIZERS, OURS, Network, Rate, square
from benchmarks.step.timing import (
    Time,
    arithmetic,
    built,
    by_device,
    by_host,
    captured,
    interleave,
    iteration,
    rows,
    with_gradients,
)


@dataclass(frozen=True)
class Setting:
    device: str
    repeats: int
    networks: Sequence[str] = tuple(NETWORKS)
    modes: Sequence[str] = ("eager",)
    optimizers: Sequence[str] = tuple(OPTIMIZERS)


ADAM = ("AdamW fused", "InGSpace(AdamW)")


def time_iteration(
    setting: Setting, name: str, mode: str, precision: str, momentum: float, optimizers: list[str], baseline: str
) -> list[Time]:
    network = NETWORKS[name]
    device = setting.device
    image = device == "cuda" and len(network.shape) == 3 and network.shape[0] == 3
    x = torch.randn(network.batch, *network.shape, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if image else x
    calls: dict[str, Callable[[], object]] = {}
    with arithmetic(precision):
        for label in [*optimizers, f"{baseline} again"]:
            model = built(network, device, channels_last=image)
            classes = [p for p in model.parameters() if p.dim() == 2][-1].shape[0]
            y = torch.randint(classes, (network.batch,), generator=torch.Generator().manual_seed(0)).to(device)
            rate: Rate = torch.tensor(1e-5, device=device) if device == "cuda" and "foreach" not in label else 1e-5
            optimizer = OPTIMIZERS[label.removesuffix(" again")](model, rate, momentum, x)
            once = iteration(model, optimizer, x, y, precision, compiled="compiled" in mode)
            try:
                once()
                graph = "graph" in mode
                calls[label] = captured(once, partial(optimizer.zero_grad, set_to_none=True)) if graph else once
            except RuntimeError as error:
                print(f"{label} refuses {name} {mode} {precision}: {str(error).splitlines()[0]}", flush=True)
        clock = partial(by_device, calls=5) if "graph" in mode else by_host
        times = interleave(calls, clock, setting.repeats)
    common = {"network": name, "device": device, "mode": mode, "precision": precision, "momentum": momentum}
    return rows(times, baseline, section="iteration", **common)


def time_step(
    setting: Setting, name: str, network: Network, mode: str, momentum: float, optimizers: list[str], baseline: str,
    section: str = "step",
) -> list[Time]:  # fmt: skip
    """The step alone, on gradients that stay."""
    calls: dict[str, Callable[[], object]] = {}
    x = torch.zeros(1, *network.shape, device=setting.device)
    for label in [*optimizers, f"{baseline} again"]:
        model = with_gradients(built(network, setting.device))
        rate: Rate = torch.tensor(1e-6, device="cuda") if setting.device == "cuda" and "foreach" not in label else 1e-6
        optimizer = OPTIMIZERS[label.removesuffix(" again")](model, rate, momentum, x)
        calls[label] = captured(optimizer.step, lambda: None) if mode == "graph" else optimizer.step
    clock = by_device if setting.device == "cuda" and mode != "eager" else by_host
    times = interleave(calls, clock, setting.repeats)
    common = {"device": setting.device, "mode": mode, "precision": "float32", "momentum": momentum}
    return rows(times, baseline, section=section, network=name, **common)


def time_copy(setting: Setting) -> Time:
    """A copy of 1 GiB on the device: what memory gives."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    times = interleave({"copy": lambda: target.copy_(source)}, by_device, setting.repeats)
    common = {"network": "1 GiB", "device": "cuda", "mode": "eager", "precision": "float32", "momentum": 0.0}
    return rows(times, "copy", section="step", **common)[0]


def share_of_copy(row: Time, weights: int, copy: Time) -> Time:
    """What the step reads and writes (w, g, w, and twice the buffer; w and g again) over what a copy does."""
    moved = weights * (28 if row.momentum else 20) / row.median_us
    return replace(row, note=f"{moved / ((2 << 30) / copy.median_us):.0%} of copy")


def iterations(setting: Setting) -> Iterator[list[Time]]:
    on_gpu = setting.device == "cuda"
    for name, mode in itertools.product(setting.networks, setting.modes):
        if NETWORKS[name].gpu_only and not on_gpu:
            continue
        others = [FUSED, "InGSpace(SGD)"] + (["PathSGD"] if name not in ("resnet-50", "mlp-100M") else [])
        pairs = [[other for other in group if other in setting.optimizers] for group in (others, ADAM)]
        for precision, momentum in itertools.product(("bf16", "tf32") if on_gpu else ("float32",), (0.0, 0.9)):
            fair = [FUSED, FOREACH] if "graph" not in mode else [FUSED]  # torch's foreach needs a rate on the host
            common = (setting, name, mode, precision, momentum)
            yield time_iteration(*common, [*fair, OURS], fair[-1])
            for group in pairs if momentum == 0 else pairs[:1]:
                if len(group) > 1:
                    yield time_iteration(*common, group, group[0])


def steps(setting: Setting) -> Iterator[list[Time]]:
    others = [name for name in ("GSGD definition",) if name in setting.optimizers]
    copy = time_copy(setting) if setting.device == "cuda" else None
    if copy:
        yield [copy]
    for name, momentum in itertools.product(setting.networks, (0.0, 0.9)):
        network = NETWORKS[name]
        if "eager" in setting.modes and (copy or not network.gpu_only):
            yield time_step(setting, name, network, "eager", momentum, [FOREACH, FUSED, OURS, *others], FOREACH)
        if "graph" in setting.modes and copy:
            weights = sum(p.numel() for p in network.build().parameters())
            found = time_step(setting, name, network, "graph", momentum, [FUSED, OURS], FUSED)
            yield [share_of_copy(row, weights, copy) if row.optimizer == OURS else row for row in found]


def widths(setting: Setting) -> Iterator[list[Time]]:
    """10³ to 10⁸ weights in three layers; on a GPU as a CUDA graph, where the host has no part in it."""
    mode, baseline = ("graph", FUSED) if setting.device == "cuda" else ("eager", FOREACH)
    for width in (18, 58, 183, 577, 1826, 3333, 5774):
        network = Network(partial(square, width, 3), (1, 1, width), 1)
        yield time_step(setting, f"3x{width}x{width}", network, mode, 0.0, [baseline, OURS], baseline, "width")


def depths(setting: Setting) -> Iterator[list[Time]]:
    for layers in (10, 50, 100, 500):
        network = Network(partial(square, 64, layers), (1, 1, 64), 1)
        yield time_step(setting, f"{layers}x64x64", network, "eager", 0.0, [FOREACH, OURS], FOREACH, "depth")
