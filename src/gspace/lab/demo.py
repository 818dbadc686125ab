"""`gspace demo`: in about a minute on two cores, what the symmetry is, who respects it, and how they train.

Everything runs on scikit-learn's bundled digits: an MLP and a small convolutional network, trained by SGD, G-SGD and
Path-SGD and by the controls, each with the same rate, batches and seeds.
"""

import argparse
import copy
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as Grid
from torch import Tensor, nn
from torch.nn import functional as F

import gspace
from gspace.lab.analyze import largest_changes
from gspace.lab.archive import read_records
from gspace.lab.cells import Cell, Experiment, Scores, Variant, jobs, seeds
from gspace.lab.data import load
from gspace.lab.display import display, steps
from gspace.lab.document import Panel, Section, Series, Table, narrow
from gspace.lab.engine import Engine
from gspace.lab.experiments import CONTROLS, G_SGD, PATH_SGD, SGD
from gspace.lab.learners import initial_model
from gspace.lab.loop import stop_requests
from gspace.lab.models import build_optimizer
from gspace.lab.recipe import Recipe
from gspace.lab.record import make_folder
from gspace.lab.report import assemble, publish
from gspace.lab.sweep import finished, run_all
from gspace.lab.train import Session
from gspace.lab.transform import Feed, epoch_rows, feed

MLP = Recipe(data="digits", model="mlp", hidden=(32, 32), lr=0.1, batch_size=32, epochs=15.0, eval_every=44)
CNN = MLP.but(model="cnn", width=8, epochs=5.0, eval_every=22)
NETWORKS = {"MLP [64 : 32 : 32 : 10]": (MLP, 5), "CNN [8 : 16 : 16 channels]": (CNN, 3)}
TWINS = (SGD, PATH_SGD, G_SGD)
STEPS = 44  # of the two copies of a network: an epoch


def _cells(quick: bool, scores: Scores) -> Iterator[Cell]:
    for name, (base, count) in NETWORKS.items():
        for method in (SGD, G_SGD, PATH_SGD, *CONTROLS):
            yield Cell("test error", name, method, seeds(method.on(base), count))


NOTE = "One rate for all, 0.1. The digits are easy: this shows that everything runs, not which method is best."
CLAIM = "SGD trains a network and its rescaled copy to two results, G-SGD trains both to one"
BESIDE = "The controls are SGD from where G-SGD starts, and the same with the weights frozen that G-SGD never changes."
DEMO = Experiment("demo", _cells, "Small networks on scikit-learn's digits.", (NOTE, BESIDE), command="gspace demo")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")


def run(args: argparse.Namespace) -> int:
    """Shows, trains, reports; 1 if a run failed."""
    runs = args.out / "runs"
    make_folder(runs)
    torch.set_num_threads(1)  # networks this small gain nothing from a second thread, and wait for it on a busy machine
    console = Console(file=sys.stdout, highlight=False)
    opening = headline(feed(load("digits"), "standard", "none"))
    for table in opening[1].tables:
        console.print(grid(table))
    cells, failed = Variant().cells(DEMO, lambda recipe: None), 0
    if all(finished(runs, recipe) for recipe in jobs(cells)):
        console.print(f"Trained before: delete {args.out} to see it again.", soft_wrap=True)
    else:
        shown = display(len(jobs(cells)), quiet=not console.is_terminal)
        told = redirect_stdout(io.StringIO()) if console.is_terminal else nullcontext()  # a log keeps a line per run
        with stop_requests() as stop, shown as watch, told:
            failed = run_all(jobs(cells), runs, Session(engine=Engine(device="cpu"), watch=watch, stop=stop))
    report = assemble(read_records([runs]), [DEMO], DEMO.command)
    (last,) = report.sections
    for table in last.tables:
        console.print(grid(narrow(table, 80)))
    last = replace(last, title="All methods", command="", text=(*last.text, report.text[0]))
    written = publish(replace(report, title=CLAIM, text=(), sections=(*opening, last)), args.out / "report")
    console.print("\n".join(str(path) for path in written), soft_wrap=True)
    return 1 if failed else 0


def headline(source: Feed) -> tuple[Section, Section]:
    """The same network twice, with every unit of the copy rescaled: two functions that are one, trained."""
    facts, apart, drawn = [], [], []
    with steps(len(NETWORKS) * (1 + len(TWINS))) as begin:
        for name, (recipe, _) in NETWORKS.items():
            begin(f"analyze {name}")
            model = initial_model(recipe).double()
            rows = epoch_rows(recipe.seed, 0, len(source.labels), recipe.batch_size, source.augment)[:STEPS]
            analysis, batches = gspace.analyze(model), [(x.double(), y) for x, y in map(source.batch, rows)]
            moved = largest_changes(model, analysis, (batches[0][0],), torch.Generator().manual_seed(0))
            ratio = f"{analysis.invariant_ratio:.4f}"
            facts.append((name, f"{analysis.m:,}", f"{analysis.H}", ratio, f"{max(moved.values()):.0e}"))
            scales = gspace.random_scales(model, torch.Generator().manual_seed(0), analysis=analysis)
            starts = (model, gspace.rescale_(copy.deepcopy(model), scales, analysis=analysis))
            found = {}
            for method in TWINS:
                begin(f"train {name} twice by {method.label}")
                chosen = recipe.but(optimizer=method.fields["optimizer"])
                found[method] = [trained(start, chosen, batches) for start in starts]
            gaps = (max(abs(a - b) / a for a, b in zip(*pair, strict=True)) for pair in found.values())
            apart.append((name, *(f"{gap:.1g}" for gap in gaps)))
            for method in (SGD, G_SGD):
                one, other = ([(float(k), (loss,)) for k, loss in enumerate(losses)] for losses in found[method])
                copied = Series("rescaled copy", other, control=True, hue=1, width=1.5)  # can be seen on the other
                curves = (Series("network", one, hue=5, width=5.0), copied)
                drawn.append(Panel(f"{method.label}, {name}", "step", "training loss", curves, log_y=True))
    scaled = ("network", "weights m", "units H", "H/m", "outputs differ by")
    title = f"Both trained for {STEPS} steps: largest relative gap between their losses"
    text = "The copy computes the same function with other weights: every hidden unit is rescaled by e^N(0, 1)."
    tables = (
        Table("A network and a rescaled copy", scaled, tuple(facts)),
        Table(title, ("network", *(m.label for m in TWINS)), tuple(apart)),
    )
    return (
        Section("headline", "One network, written twice", "", (text,), (), tuple(drawn)),
        Section("twins", "The same in numbers", "", (), tables),
    )


def trained(start: nn.Module, recipe: Recipe, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Loss of each batch, before the step on it."""
    model, losses = copy.deepcopy(start), []
    optimizer = build_optimizer(model, recipe, recipe.lr, torch.zeros_like(batches[0][0][:1]))
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def grid(table: Table) -> Grid:
    made = Grid(title=table.title, title_justify="left", title_style="bold", box=SIMPLE)
    for k, name in enumerate(table.head):
        made.add_column(name.replace(", ", ",\n"), justify="right" if k else "left", no_wrap=k > 0)
    for row in table.rows:
        made.add_row(*row)
    return made
