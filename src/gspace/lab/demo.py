"""`gspace demo`: in about a minute on two cores, what the symmetry is, who respects it, and how they train.

Everything runs on scikit-learn's bundled digits: an MLP and a small convolutional network, trained by SGD, G-SGD and
Path-SGD and by the controls, each with the same rate, batches and seeds.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gspace
from gspace.lab.archive import read_records
from gspace.lab.data import load
from gspace.lab.display import board
from gspace.lab.engine import Engine
from gspace.lab.experiment import Cell, Experiment, Scores, Variant, jobs, seeds
from gspace.lab.learners import initial_model
from gspace.lab.optimizers import build_optimizer
from gspace.lab.queue import Tally, conclude, run_queue
from gspace.lab.recipe import Recipe
from gspace.lab.record import SUMMARY, make_folder
from gspace.lab.report import assemble, publish
from gspace.lab.settings import CONTROLS, G_SGD, PATH_SGD, SGD
from gspace.lab.stopping import stop_requests
from gspace.lab.tabulate import MEASURES, Found, outcome, write
from gspace.lab.train import Session
from gspace.lab.transform import Feed, epoch_rows, feed
from gspace.lab.verify import largest_changes
from gspace.measure.diagnostics import invariance_gap

MLP = Recipe(data="digits", model="mlp", hidden=(32, 32), lr=0.1, batch_size=32, epochs=15.0, eval_every=44)
CNN = MLP.but(model="cnn", width=8, epochs=5.0, eval_every=22)
NETWORKS = {"MLP [64 : 32 : 32 : 10]": (MLP, 5), "CNN [8 : 16 : 16 channels]": (CNN, 3)}
METHODS = (SGD, G_SGD, PATH_SGD, *CONTROLS)
STEPS = 20  # of the two copies of a network


def _cells(quick: bool, scores: Scores) -> Iterator[Cell]:
    for name, (base, count) in NETWORKS.items():
        for method in METHODS:
            yield Cell("test error", name, method, seeds(method.on(base), count))


DEMO = Experiment(
    "demo",
    "",
    "Small networks on scikit-learn's digits.",
    ("One rate for all, 0.1. The digits are easy: this shows that everything runs, not which method is best.",),
    _cells,
    command="gspace demo",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")


def run(args: argparse.Namespace) -> int:
    """Shows, trains, reports; 1 if a run failed, 4 if one is held by another process."""
    runs = args.out / "runs"
    make_folder(runs)
    torch.set_num_threads(1)  # networks this small gain nothing from a second thread, and wait for it on a busy machine
    console = Console(file=sys.stdout, highlight=False)
    source = feed(load("digits"), "standard", "none")
    console.print(symmetries(source))
    console.print(gaps(source))
    cells = Variant().cells(DEMO, lambda recipe: None)
    tally = Tally()
    if all((runs / recipe.folder / SUMMARY).exists() for recipe in jobs(cells)):
        console.print(f"Trained before: delete {args.out} to see it again.", soft_wrap=True)
    else:
        with stop_requests() as stop, board(cells, console) as shown:
            session = Session(engine=Engine(device="cpu"), watch=shown.watch, stop=stop)
            tally = run_queue(jobs(cells), runs, session)
    records = read_records([runs])
    console.print(results(cells, {record.recipe: record for record in records}))
    written = publish(assemble(records, [DEMO], DEMO.command), args.out / "report")
    console.print("\n".join(str(path) for path in written), soft_wrap=True)
    return conclude(tally)


def results(cells: Sequence[Cell], found: Found) -> Table:
    """Methods against networks: test error and training loss."""
    measures = [MEASURES[key] for key in DEMO.measures]
    rows = [
        (
            f"{method.label} (control)" if method.control else method.label,
            *(
                write(outcome(cell.recipes, found, measure), measure)
                for cell in cells
                if cell.method == method
                for measure in measures
            ),
        )
        for method in METHODS
    ]
    head = ["", *(f"{name.split()[0]}: {measure.label}" for name in NETWORKS for measure in measures)]
    return _grid("3. Trained at one rate, 0.1: mean ± standard deviation (seeds)", head, rows)


def batches(source: Feed, recipe: Recipe, count: int) -> list[tuple[Tensor, Tensor]]:
    """The first batches of a run, in float64."""
    rows = epoch_rows(recipe.seed, 0, len(source.labels), recipe.batch_size, source.augment)[:count]
    return [(x.double(), y) for x, y in map(source.batch, rows)]


def symmetries(source: Feed) -> Table:
    """Every hidden unit has a scale that the function does not see."""
    rows = []
    for name, (recipe, _) in NETWORKS.items():
        model = initial_model(recipe, source)
        found = gspace.analyze(model)
        ((x, _),) = batches(source, recipe, 1)
        changes = largest_changes(model, found, (x,), torch.Generator().manual_seed(0))
        rows.append((name, str(found.m), str(found.H), f"{found.invariant_ratio:.4f}", f"{max(changes.values()):.0e}"))
    head = ("network", "weights m", "units H", "H/m", "output moves by")
    return _grid("1. Every unit rescaled by a random factor e^N(0, 1)", head, rows)


def gaps(source: Feed) -> Table:
    """The same function, written with two sets of weights, after some steps of each optimizer."""
    rows = []
    for name, (recipe, _) in NETWORKS.items():
        model = initial_model(recipe, source).double()
        row = [name]
        for method in (SGD, PATH_SGD, G_SGD):
            chosen = recipe.but(optimizer=method.fields["optimizer"])

            def optimizer(model: nn.Module, chosen: Recipe = chosen) -> torch.optim.Optimizer:
                return build_optimizer(model, chosen, chosen.lr, torch.zeros(1, *source.shape, dtype=torch.float64))

            data = batches(source, recipe, STEPS)
            gap = invariance_gap(optimizer, model, data, generator=torch.Generator().manual_seed(0))
            row.append(f"{gap.final:.0e}")
        rows.append(tuple(row))
    head = ("network", *(method.label for method in (SGD, PATH_SGD, G_SGD)))
    return _grid(f"2. A network and its rescaled twin after {STEPS} steps: how far their outputs are apart", head, rows)


def _grid(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for k, name in enumerate(head):
        table.add_column(name, justify="left" if k == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
