"""What an experiment costs before it is run: arithmetic of the networks over what a machine was seen to do.

An iteration takes the longer of its floating-point work and the time to issue it; both figures of a machine were
measured on it (Plain-34 and ResNet-34 on the GPU, MLPs and quick networks on the CPU). Good to a factor of two.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gspace.lab.data import SETS
from gspace.lab.models import build_model
from gspace.lab.queue import batches
from gspace.lab.recipe import Recipe
from gspace.lab.schedule import evaluation_interval, total_iterations


@dataclass(frozen=True)
class Machine:
    """A machine that costs are stated for.

    Attributes:
        flops: Floating-point operations per second that training reaches, per precision.
        layer_seconds: Time to issue one layer of one iteration, forward, backward and step.
        start_seconds: Time to load, compile and capture a run.
    """

    name: str
    flops: Mapping[str, float]
    layer_seconds: float
    start_seconds: float


GPU = Machine("one NVIDIA H200", {"bf16": 2.1e14, "tf32": 1.25e14, "float32": 4e13}, 3e-5, 30.0)
CPU = Machine("two CPU cores", {"bf16": 2e10, "tf32": 6e10, "float32": 6e10}, 3e-4, 0.5)
MACHINES = {"gpu": GPU, "cpu": CPU}


def estimate(recipes: Sequence[Recipe], machine: Machine, stack: int = 16) -> float:
    """Seconds to run them one after the other, MLPs stacked."""
    return sum(_seconds(members, machine) for members in batches(recipes, stack))


def _seconds(members: Sequence[Recipe], machine: Machine) -> float:
    recipe, count = members[0], len(members)
    images = images_of(recipe)
    total = total_iterations(recipe, images)
    flops, layers = network_cost(recipe.but(lr=1.0, seed=0, optimizer="sgd", weight_decay=0.0))
    rate = machine.flops[recipe.precision]
    step = max(3 * flops * recipe.batch_size * count / rate, layers * machine.layer_seconds)
    tested = recipe.test_size or recipe.validation or SETS[recipe.data].test
    points = total // evaluation_interval(recipe, total)
    return machine.start_seconds + total * step + points * tested * count * flops / rate


def images_of(recipe: Recipe) -> int:
    """Training images of a run."""
    there = SETS[recipe.data].train - recipe.validation
    return min(recipe.train_size or there, there)


@functools.cache
def network_cost(recipe: Recipe) -> tuple[int, int]:
    """Operations of one image's forward pass, and the number of layers with weights."""
    spec = SETS[recipe.data]
    channels = spec.shape[2] if len(spec.shape) == 3 and recipe.inputs != "grey" else 1
    shrink = 4 if recipe.inputs == "pooled" else 1
    shape = (channels, spec.shape[0] // shrink, spec.shape[1] // shrink)
    with torch.device("meta"):
        model = build_model(recipe.model, shape, spec.classes, hidden=recipe.hidden, width=recipe.width).eval()
        counter = FlopCounterMode(display=False)
        with counter:
            model(torch.empty(1, *shape))
    return counter.get_total_flops(), sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules())


def duration(seconds: float) -> str:
    """Rounded for a reader.

    >>> duration(40), duration(1500), duration(9000)
    ('40 s', '25 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
