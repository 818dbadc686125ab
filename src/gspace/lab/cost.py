"""What an experiment costs before it is run: arithmetic of the networks over what a machine was seen to do.

An iteration takes the longer of its floating-point work and the time to issue it; both figures of a machine were
measured on it (Plain-34 and ResNet-34 on the GPU, MLPs and quick networks on the CPU). Good to a factor of two.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gspace.lab.data import SETS
from gspace.lab.learners import code_key, stackable
from gspace.lab.models import build_model
from gspace.lab.recipe import Recipe, evaluation_interval, images_of, total_iterations
from gspace.lab.sweep import batches
from gspace.lab.transform import input_shape


@dataclass(frozen=True)
class Machine:
    """A machine that costs are stated for.

    Attributes:
        flops: Floating-point operations per second that training reaches, per precision.
        layer_seconds: Time to issue one layer of one iteration, forward, backward and step.
        start_seconds: Time to load, build and capture a run.
        compile_seconds: Time to compile one layer (seen: 47 s for the 34 of Plain-34). The next run of the same network
            does without, and a stack of MLPs is not compiled at all.
    """

    name: str
    flops: Mapping[str, float]
    layer_seconds: float
    start_seconds: float
    compile_seconds: float


GPU = Machine("one NVIDIA H200", {"bf16": 2.1e14, "tf32": 1.25e14, "float32": 4e13, "float64": 2e13}, 3e-5, 2.0, 1.4)
CPU = Machine("two CPU cores", {"bf16": 2e10, "tf32": 6e10, "float32": 6e10, "float64": 3e10}, 3e-4, 0.5, 0.0)


def estimate(recipes: Sequence[Recipe], machine: Machine, stack: int = 16) -> float:
    """Seconds to run them one after the other, MLPs stacked; compiled when the network is another than before."""
    groups = list(batches(recipes, stack))
    alone = [members[0] for members in groups if not stackable(members[0])]
    layers = sum(network_cost(next(same))[1] for _, same in groupby(alone, key=code_key))
    return sum(_seconds(members, machine) for members in groups) + layers * machine.compile_seconds


def _seconds(members: Sequence[Recipe], machine: Machine) -> float:
    recipe, count = members[0], len(members)
    total = total_iterations(recipe, images_of(recipe))
    flops, layers = network_cost(recipe)
    rate = machine.flops[recipe.precision]
    step = max(3 * flops * recipe.batch_size * count / rate, layers * machine.layer_seconds)
    tested = recipe.test_size or recipe.validation or SETS[recipe.data].test
    points = total // evaluation_interval(recipe, total)
    return machine.start_seconds + total * step + points * tested * count * flops / rate


def network_cost(recipe: Recipe) -> tuple[int, int]:
    """Operations of one image's forward pass, and the number of layers with weights."""
    shape = input_shape(recipe.data, recipe.inputs)
    return _network_cost(recipe.model, shape, SETS[recipe.data].classes, recipe.hidden, recipe.width)


@functools.cache
def _network_cost(
    name: str, shape: tuple[int, int, int], classes: int, hidden: tuple[int, ...], width: int
) -> tuple[int, int]:
    """Counted on a model without memory."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model = build_model(name, shape, classes, hidden=hidden, width=width).eval()
        model(torch.empty(1, *shape))
    layers = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())
    return counter.get_total_flops(), layers


def duration(seconds: float) -> str:
    """Rounded for a reader.

    >>> duration(40), duration(1500), duration(9000)
    ('40 s', '25 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
