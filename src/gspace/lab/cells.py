"""What a table of the paper is made of, and costs: cells, each a few runs that differ in seed alone.

An experiment is a generator of cells. Some are decided by the results of others (the best learning rate of a grid, run
again with more seeds), so the generator is given the scores of what is finished and yields what can be known so far.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gspace.lab.data import SETS
from gspace.lab.learners import batches, code_key, network, stack_key, stackable
from gspace.lab.recipe import Recipe, curve_interval, images_of, total_iterations
from gspace.lab.transform import input_shape

Scores = Callable[[Recipe], float | None]
"""Test (or validation) error of a finished run, infinity if it diverged, None if it is not finished."""

Grid = Sequence[Sequence[Recipe]]  # settings to choose from, each with its runs
DATA_NAMES = {"digits": "digits", "mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
DATA_NAMES |= {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
LENGTHS = {text: Fraction(text) for text in ("1", "1/2", "1/4", "1/8")}


class Printed(NamedTuple):
    """A number the paper prints, in per cent; one with a standard deviation is the mean of five runs."""

    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f} (5)"


@dataclass(frozen=True)
class Method:
    """A way to train: its names on the command line and in tables, and what it sets in a recipe.

    A control is there to explain the others.
    """

    key: str
    label: str
    fields: Mapping[str, Any] = field(hash=False)
    control: bool = False

    def on(self, recipe: Recipe, **changes: Any) -> Recipe:
        """The recipe trained this way. A network that does not start on a skeleton has nowhere to end one."""
        fields = {**changes, **self.fields}
        if "skeleton" not in fields.get("init", recipe.init):
            fields["pin"] = "none"
        return recipe.but(**fields)


class Axis(NamedTuple):
    """A quantity that the rows of a table vary: its value for a run, and how a row states it if its name does not."""

    label: str
    of: Callable[[Recipe], float]
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """One number of a table: the mean over its runs.

    It stands in the table with the heading `part`, in the line `row`, to which the data set is added, and in the column
    `method`. `setting` says what was chosen for it, `axis` is the one quantity that the rows vary.
    """

    part: str
    row: str
    method: Method
    recipes: tuple[Recipe, ...]
    paper: Printed | None = None
    setting: str = ""
    axis: Axis | None = None

    @property
    def line(self) -> str:
        note = f" ({self.axis.note.format(self.axis.of(self.recipes[0]))})" if self.axis and self.axis.note else ""
        return ", ".join(filter(None, (f"{self.row}{note}", data_label(self.recipes[0]))))


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper, or a question of ours; `cells` are those of full or of quick size."""

    name: str
    cells: Callable[[bool, Scores], Iterator[Cell]]
    question: str
    notes: Sequence[str] = field(default=(), hash=False)
    source: str = ""
    command: str = ""


@dataclass(frozen=True)
class Variant:
    """How much of an experiment is run: small networks on the digits, or a fraction of the full schedule."""

    quick: bool = False
    length: Fraction = Fraction(1)

    @property
    def label(self) -> str:
        """Empty for the experiment as the paper has it."""
        shorter = "" if self.length == 1 else f"{self.length} of the schedule"
        return "quick: small networks on the digits" if self.quick else shorter

    @property
    def flags(self) -> str:
        return (" --quick" if self.quick else "") + ("" if self.length == 1 else f" --length {self.length}")

    def apply(self, recipe: Recipe) -> Recipe:
        return stand_in(recipe) if self.quick else shorten(recipe, self.length)

    def cells(self, experiment: Experiment, scores: Scores) -> list[Cell]:
        """The experiment's cells at this size, as far as the scores decide them; headings say how long its runs are.

        The paper's number stands beside runs of the paper's size only.
        """
        made = []
        for cell in experiment.cells(self.quick, lambda recipe: scores(self.apply(recipe))):
            recipes = tuple(map(self.apply, cell.recipes))
            length = "" if recipes[0].iterations is None else f"{recipes[0].iterations:,}"
            part, row = (text.replace("{iterations}", length) for text in (cell.part, cell.row))
            paper = cell.paper if self == Variant() else None
            made.append(replace(cell, recipes=recipes, paper=paper, part=part, row=row))
        return made


def shorten(recipe: Recipe, length: Fraction) -> Recipe:
    """The schedule, drops included, shrunk to a fraction."""
    if length == 1:
        return recipe
    if recipe.iterations is not None:
        return recipe.but(iterations=max(1, round(recipe.iterations * length)))
    assert recipe.epochs is not None, "a recipe has a length"
    return recipe.but(epochs=float(recipe.epochs * length))


def stand_in(recipe: Recipe) -> Recipe:
    """The same on the digits, and saying so. Digits must not be mirrored, and are too small to be pooled."""
    small = {"augment": "none", "inputs": "standard" if recipe.inputs == "pooled" else recipe.inputs}
    return recipe.but(data="digits", stands_for=recipe.data, validation=min(recipe.validation, 300), **small)


def data_label(recipe: Recipe) -> str:
    """The data set as a reader must see it."""
    stands = f" in place of {DATA_NAMES.get(recipe.stands_for, recipe.stands_for)}" if recipe.stands_for else ""
    return DATA_NAMES[recipe.data] + stands


def seeds(recipe: Recipe, count: int) -> tuple[Recipe, ...]:
    return tuple(recipe.but(seed=seed) for seed in range(count))


def best(candidates: Grid, scores: Scores) -> Recipe | None:
    """First run of the candidate with the lowest mean score; None while any run of any of them is unfinished.

    Runs that diverge end first: what is known early is no fair sample.
    """
    found = [[score for run in runs if (score := scores(run)) is not None] for runs in candidates]
    if any(len(some) < len(runs) for some, runs in zip(found, candidates, strict=True)):
        return None
    means = list(map(fmean, found))
    return candidates[means.index(min(means))][0]


def guessed(scores: Scores) -> Scores:
    """The scores, and a bad one for what is not finished: shows how many runs are still to be decided."""
    return lambda recipe: 1.0 if (score := scores(recipe)) is None else score


def jobs(cells: Sequence[Cell]) -> list[Recipe]:
    """Every run once, in a good order.

    MLPs that can be trained together stand together. Other networks come seed by seed within a line of the table, so
    that an early stop leaves every column with the same seeds.
    """
    groups: dict[object, list[Recipe]] = {}
    for cell in cells:
        for recipe in cell.recipes:
            group = stack_key(recipe) if stackable(recipe) else (cell.part, cell.line)
            groups.setdefault(group, []).append(recipe)
    ordered: list[Recipe] = []
    for runs in groups.values():
        ordered += runs if stackable(runs[0]) else sorted(runs, key=lambda recipe: recipe.seed)
    return list(dict.fromkeys(ordered))


# What an experiment costs before it is run ----------------------------------------------------------------------------


class Machine(NamedTuple):
    """A machine that costs are stated for.

    An iteration takes the longer of its floating-point work and the time to issue it; both figures were measured
    (Plain-34 and ResNet-34 on the GPU, MLPs and quick networks on the CPU). Good to a factor of two.
    """

    name: str
    flops: Mapping[str, float]  # per second that training reaches, by precision
    layer_seconds: float  # to issue one layer of one iteration, forward, backward and step
    start_seconds: float  # to load, build and capture a run
    compile_seconds: float  # per layer, once for runs of the same network; a stack of MLPs is not compiled


GPU = Machine("one NVIDIA H200", {"bf16": 2.1e14, "tf32": 1.25e14, "float32": 4e13, "float64": 2e13}, 3e-5, 2.0, 1.4)
CPU = Machine("two CPU cores", {"bf16": 2e10, "tf32": 6e10, "float32": 6e10, "float64": 3e10}, 3e-4, 0.5, 0.0)


def estimate(recipes: Sequence[Recipe], machine: Machine) -> float:
    """Seconds to run them one after the other, MLPs stacked; compiled when the network is another than before."""
    groups = list(batches(recipes))
    alone = [members[0] for members in groups if not stackable(members[0])]
    layers = sum(network_cost(code)[1] for code, _ in groupby(alone, key=code_key))
    return sum(_seconds(members, machine) for members in groups) + layers * machine.compile_seconds


def _seconds(members: Sequence[Recipe], machine: Machine) -> float:
    recipe, count = members[0], len(members)
    total = total_iterations(recipe, images_of(recipe))
    flops, layers = network_cost(code_key(recipe))
    rate = machine.flops[recipe.precision]
    step = max(3 * flops * recipe.batch_size * count / rate, layers * machine.layer_seconds)
    tested = recipe.test_size or recipe.validation or SETS[recipe.data].test
    points = total // curve_interval(recipe, total)
    return machine.start_seconds + total * step + points * tested * count * flops / rate


@functools.cache
def network_cost(code: Recipe) -> tuple[int, int]:
    """Operations of one image's forward pass, and the number of layers with weights, of runs with this `code_key`."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:  # without memory
        model = network(code).eval()
        model(torch.empty(1, *input_shape(code.data, code.inputs)))
    return counter.get_total_flops(), sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())


def duration(seconds: float) -> str:
    """Rounded for a reader.

    >>> duration(40), duration(1500), duration(9000)
    ('40 s', '25 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def costs(recipes: Sequence[Recipe], machines: Sequence[Machine] = (GPU, CPU)) -> str:
    """The estimate on the machine that is meant, or on those that could be and would take less than a day."""
    found = {machine.name: estimate(recipes, machine) for machine in machines}
    bearable = 24 * 3600 if len(found) > 1 else math.inf
    return ", ".join(f"{duration(seconds)} on {name}" for name, seconds in found.items() if seconds < bearable)
