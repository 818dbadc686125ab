"""What an experiment costs before it is run: arithmetic of the networks over what a machine was seen to do.

An iteration takes the longer of its floating-point work and the time to issue it; both figures of a machine were
measured on it (Plain-34 and ResNet-34 on the GPU, MLPs and quick networks on the CPU). Good to a factor of two.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from gspace.lab.data import SETS
from gspace.lab.learners import code_key
from gspace.lab.models import build_model
from gspace.lab.recipe import Recipe
from gspace.lab.schedule import evaluation_interval, total_iterations
from gspace.lab.stacked import stackable
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
    """Seconds to run them one after the other, MLPs stacked."""
    groups = list(batches(recipes, stack))
    return sum(_seconds(members, machine) for members in groups) + _compilation(groups, machine)


def _compilation(groups: Sequence[Sequence[Recipe]], machine: Machine) -> float:
    """Each time that the network to compile is another one than before."""
    singles = [members[0] for members in groups if not stackable(members[0])]
    changes = [next(same) for _, same in groupby(singles, key=code_key)]
    return sum(network_cost(recipe)[1] * machine.compile_seconds for recipe in changes)


def _seconds(members: Sequence[Recipe], machine: Machine) -> float:
    recipe, count = members[0], len(members)
    images = images_of(recipe)
    total = total_iterations(recipe, images)
    flops, layers = network_cost(recipe)
    rate = machine.flops[recipe.precision]
    step = max(3 * flops * recipe.batch_size * count / rate, layers * machine.layer_seconds)
    tested = recipe.test_size or recipe.validation or SETS[recipe.data].test
    points = total // evaluation_interval(recipe, total)
    return machine.start_seconds + total * step + points * tested * count * flops / rate


def images_of(recipe: Recipe) -> int:
    """Training images of a run."""
    there = SETS[recipe.data].train - recipe.validation
    return min(recipe.train_size or there, there)


def network_cost(recipe: Recipe) -> tuple[int, int]:
    """Operations of one image's forward pass, and the number of layers with weights."""
    shape = input_shape(recipe.data, recipe.inputs)
    return _network_cost(recipe.model, shape, SETS[recipe.data].classes, recipe.hidden, recipe.width)


@functools.cache
def _network_cost(
    name: str, shape: tuple[int, int, int], classes: int, hidden: tuple[int, ...], width: int
) -> tuple[int, int]:
    """Multiplications and additions of convolutions and linear layers, counted on a model without memory."""
    with torch.device("meta"):
        model = build_model(name, shape, classes, hidden=hidden, width=width)
        image = torch.empty(1, *shape)
    counts: list[int] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = layer.get_parameter("weight")
        counts.append(2 * weight.numel() * output[0, 0].numel())

    for module in list(model.modules()):
        for child_name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):  # slow without memory, and next to nothing to compute
                setattr(module, child_name, nn.Identity())
            elif isinstance(child, nn.Conv2d | nn.Linear):
                child.register_forward_hook(count)
    with torch.no_grad():
        model(image)
    return sum(counts), len(counts)


def duration(seconds: float) -> str:
    """Rounded for a reader.

    >>> duration(40), duration(1500), duration(9000)
    ('40 s', '25 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
