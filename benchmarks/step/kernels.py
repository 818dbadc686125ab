"""The kernels of a step on a GPU, and the step with other tiles."""

from collections.abc import Callable, Iterator

import torch

import gspace
from benchmarks.step.networks import NETWORKS
from benchmarks.step.sections import Setting
from benchmarks.step.timing import Time, built, by_device, captured, interleave, rows, with_gradients
from gspace.optim.fast.tables import Tile


def kernels(setting: Setting) -> Iterator[list[Time]]:
    """Microseconds per kernel of one GSGD step, by torch's profiler."""
    for name in ("plain-34", "mlp-100M"):
        model = with_gradients(built(NETWORKS[name], "cuda", channels_last=name == "plain-34"))
        optimizer = gspace.GSGD(model, torch.tensor(1e-6, device="cuda"), fused=True)
        for _ in range(3):
            optimizer.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(setting.repeats):
                optimizer.step()
            torch.cuda.synchronize()
        found = [(e.key[:60], e.self_device_time_total / setting.repeats) for e in profile.key_averages()]
        common = {"device": "cuda", "mode": "eager", "precision": "float32", "momentum": 0.0}
        yield [
            Time("kernels", name, key, **common, median_us=us, p10_us=us, p90_us=us, n=setting.repeats)
            for key, us in found
            if us
        ]


TILES = (
    Tile(),
    Tile(loops=2),
    Tile(loops=8),
    Tile(registers=128),
    Tile(rows=8, loops=16, registers=80),
    Tile(rows=32, warps=8),
    Tile(rows=8, width=256, loops=8, registers=128),
    Tile(rows=4, width=256, loops=16, warps=2, registers=128),
)


def tiles(setting: Setting) -> Iterator[list[Time]]:
    """GSGD's step with other tiles, as CUDA graphs."""
    from gspace.optim.fast import launch

    for name in ("plain-34", "mlp-100M"):
        calls: dict[str, Callable[[], object]] = {}
        for tile in TILES:
            model = with_gradients(built(NETWORKS[name], "cuda", channels_last=name == "plain-34"))
            optimizer = gspace.GSGD(model, torch.tensor(1e-6, device="cuda"), fused=True)
            optimizer.use(launch.FusedStep, tile)
            calls["{}x{} loops {} warps {} registers {}".format(*tile)] = captured(optimizer.step, lambda: None)
        times = interleave(calls, by_device, setting.repeats)
        common = {"device": "cuda", "mode": "graph", "precision": "float32", "momentum": 0.0}
        yield rows(times, next(iter(calls)), section="tiles", network=name, **common)
