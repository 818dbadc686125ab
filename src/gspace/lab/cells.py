"""What a table of the paper is made of: cells, each a few runs that differ in seed alone.

An experiment is a generator of cells. Some are decided by the results of others (the best learning rate of a grid, run
again with more seeds), so the generator is given the scores of what is finished and yields what can be known so far.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import fmean
from typing import Any

from gspace.lab.learners import stack_key, stackable
from gspace.lab.recipe import Recipe

Scores = Callable[[Recipe], float | None]
"""Test (or validation) error of a finished run, infinity if it diverged, None if it is not finished."""

DATA_NAMES = {"digits": "digits", "mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
DATA_NAMES |= {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
LENGTHS = {text: Fraction(text) for text in ("1", "1/2", "1/4", "1/8")}


@dataclass(frozen=True)
class Printed:
    """A number the paper prints, in per cent; one with a standard deviation is the mean of five runs."""

    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f} (5)"


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        key: Its name on the command line.
        label: Its name in tables.
        fields: What it sets in a recipe.
        control: Whether it is there to explain the others.
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


@dataclass(frozen=True)
class Axis:
    """A quantity that the rows of a table vary: its value for a run, and how a row states it if its name does not."""

    label: str
    of: Callable[[Recipe], float]
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """One number of a table: the mean over its runs.

    Attributes:
        part: Heading of the table it stands in.
        row: Its line there, but for the data set.
        method: Its column there.
        recipes: Its runs, one per seed.
        paper: What the paper prints in its place.
        setting: What was chosen for it, if something was.
        axis: The quantity that the table's rows vary, if it is one.
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
        """Its row, with the data set as a reader must see it."""
        note = f" ({self.axis.note.format(self.axis.of(self.recipes[0]))})" if self.axis and self.axis.note else ""
        return ", ".join(filter(None, (f"{self.row}{note}", data_label(self.recipes[0]))))

    def only(self, seeds: Collection[int]) -> "Cell":
        return replace(self, recipes=tuple(recipe for recipe in self.recipes if recipe.seed in seeds))


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper, or a question of ours.

    Attributes:
        name: Its name on the command line.
        cells: Yields its cells, for full or quick size.
        question: What it tests.
        notes: Choices that the paper leaves open, and anything a reader must know.
        source: Where it stands in the paper; empty if it does not.
        command: What runs it, if not `gspace reproduce`.
    """

    name: str
    cells: Callable[[bool, Scores], Iterator[Cell]]
    question: str
    notes: Sequence[str] = field(default=(), hash=False)
    source: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", self.command or f"gspace reproduce {self.name}")


@dataclass(frozen=True)
class Variant:
    """How much of an experiment is run, and on what.

    Attributes:
        quick: Small networks on the digits, minutes on a CPU.
        length: Fraction of the full schedule.
    """

    quick: bool = False
    length: Fraction = Fraction(1)

    @property
    def label(self) -> str:
        """Empty for the experiment as the paper has it."""
        shorter = "" if self.length == 1 else f"{self.length} of the schedule"
        return "quick: small networks on the digits" if self.quick else shorter

    @property
    def flags(self) -> str:
        """The command line's way to ask for it."""
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


def best(candidates: Sequence[Sequence[Recipe]], scores: Scores) -> Recipe | None:
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
