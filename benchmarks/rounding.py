"""What does equalization save when weights are rounded? Two CIFAR-10 networks, 8, 6 and 4 bits, Brevitas beside.

    gspace bench rounding --data-dir DIR              # trains and rounds, some minutes on a GPU; needs Brevitas
    gspace bench rounding --quick --data-dir DIR      # small networks, few images, one seed: tries the code
    gspace bench rounding --table docs/quantization.md    # writes the table of the page from the record

A depthwise separable network and ResNet-34 are trained by the lab. Then, in float64, BatchNorm is folded into the
convolutions, and scales of channels are moved between layers. Both leave the function as it is; the record says how
well. At last every weight of a convolution or linear layer is rounded to the nearest of 2^bits − 1 multiples of
max|w| / (2^(bits−1) − 1), per tensor or per output channel. Biases and activations stay in float32.
"""

import argparse
import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

import gspace
from gspace.lab.data import load, subset
from gspace.lab.engine import Engine, arithmetic
from gspace.lab.models import build_model
from gspace.lab.recipe import Recipe
from gspace.lab.record import environment, open_run, write_json
from gspace.lab.train import train
from gspace.lab.transform import feed

SEEDS = 3
BITS = (8, 6, 4)
MODELS = ("depthwise", "resnet-34")
RECIPE = Recipe(
    data="cifar10", model="depthwise", iterations=5000, batch_size=128, augment="crop-flip", precision="bf16",
    lr=0.1, momentum=0.9, weight_decay=5e-4, schedule="cosine", warm_up=0.05,
)  # fmt: skip
QUICK = {"width": 8, "iterations": 60, "train_size": 2000, "test_size": 500, "precision": "float32", "quick": True}
BREVITAS_ITERATIONS = 20  # as in its own examples on ImageNet
PROBES = 32  # images that the function is compared on, in float64
BLOCK = re.compile(r"(<!-- gspace bench rounding -->\n).*?(<!-- end -->)", re.DOTALL)


# Weights --------------------------------------------------------------------------------------------------------------


def brevitas(model: nn.Module, x: Tensor) -> nn.Module:
    """Brevitas' cross-layer equalization by the largest |w|, with its own search for layers and its own defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that other parts of it use, and of its age
        from brevitas.fx import symbolic_trace
        from brevitas.graph.equalize import EqualizeGraph

        return EqualizeGraph(iterations=BREVITAS_ITERATIONS).apply(symbolic_trace(model))


def equalized(by: Any) -> Callable[[nn.Module, Tensor], nn.Module]:
    def change(model: nn.Module, x: Tensor) -> nn.Module:
        gspace.equalize_(model, by, example_input=x)
        return model

    return change


WEIGHTS: Mapping[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "as trained": lambda model, x: model,
    '`equalize_` "max-abs"': equalized("max-abs"),
    '`equalize_` "l2"': equalized("l2"),
    "Brevitas": brevitas,
}


def folded(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode whose convolutions hold their BatchNorm."""
    return fuse(copy.deepcopy(model).eval())


@torch.no_grad()
def rounded(model: nn.Module, bits: int, *, channels: bool) -> nn.Module:
    """A copy with the weights of convolutions and linear layers on a grid, one per tensor or per output channel."""
    made = copy.deepcopy(model)
    for m in made.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            m.weight.copy_(on_grid(m.weight, bits, channels=channels))
    return made


def on_grid(w: Tensor, bits: int, *, channels: bool) -> Tensor:
    """
    >>> on_grid(torch.tensor([[0.1, -2.0], [3.0, 6.0]]), 3, channels=False).tolist()
    [[0.0, -2.0], [4.0, 6.0]]
    >>> on_grid(torch.tensor([[0.1, -0.75], [3.0, 6.0]]), 3, channels=True).tolist()
    [[0.0, -0.75], [4.0, 6.0]]
    """
    most = 2 ** (bits - 1) - 1
    largest = w.abs().amax(list(range(1, w.dim())), True) if channels else w.abs().max()
    step = torch.where(largest > 0, largest / most, 1)
    return (w / step).round() * step


# Measurement ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Fraction of test images that are classified wrongly, in float32."""
    model = copy.deepcopy(model).to(x.device, torch.float32)
    return sum(int((model(a).argmax(1) != b).sum()) for a, b in zip(x.split(2000), y.split(2000), strict=True)) / len(y)


def trained(recipe: Recipe, options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """The network at the end of its run, on the CPU, and the summary of the run."""
    summary = train(recipe, options.runs, data_dir=options.data_dir)
    with open_run(options.runs, recipe) as run:
        state = run.load()
    if summary["status"] != "finished" or state is None:
        raise SystemExit(f"the run {recipe.folder} is {summary['status']}: no network to round")
    model = build_model(recipe.model, (3, 32, 32), 10, width=recipe.width)
    model.load_state_dict(state["learner"]["model"])
    return model, summary


def rows(recipe: Recipe, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each choice of weights: how far its function is from the trained one's, and the errors."""
    model, summary = trained(recipe, options)
    data = subset(load(recipe.data, options.data_dir), test=recipe.test_size).to(Engine().resolve().device)
    source = feed(data, recipe.inputs, "none")
    x, y = source.x_test, source.y_test
    probe = x[:PROBES].cpu().double()
    whole = model.double().eval()
    with torch.no_grad():
        before = whole(probe)
    for name, change in WEIGHTS.items():
        made = change(folded(whole), probe)
        with torch.no_grad():
            moved = float((made(probe) - before).abs().max() / before.abs().max())
        found = {"float": error(made, x, y)}
        for bits in BITS:
            found[f"tensor {bits}"] = error(rounded(made, bits, channels=False), x, y)
            found[f"channel {bits}"] = error(rounded(made, bits, channels=True), x, y)
        run = {"identity": recipe.identity, "test_error": summary["test_error"], "wall_s": summary["wall_seconds"]}
        print(f"{recipe.model:10} seed {recipe.seed}  {name:22} moved {moved:.0e}  {found}", flush=True)
        yield {"model": recipe.model, "seed": recipe.seed, "weights": name, "moved": moved, "error": found, "run": run}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The record: recipe, versions, and one row per network, seed and choice of weights."""
    try:
        versions = {"brevitas": version("brevitas"), "brevitas_iterations": BREVITAS_ITERATIONS}
    except PackageNotFoundError:
        raise SystemExit("Brevitas is not installed: pip install brevitas") from None
    recipe = RECIPE.but(**QUICK) if options.quick else RECIPE
    command = "gspace bench rounding" + (" --quick" if options.quick else "")
    record = {"command": command, "recipe": recipe.to_dict(), **environment(**versions), "rows": []}
    if options.commit:
        record["commit"] = options.commit
    with arithmetic("float32", deterministic=False):
        for model in MODELS:
            for seed in range(1 if options.quick else SEEDS):
                record["rows"] += rows(recipe.but(model=model, seed=seed), options)
                write_json(options.out, record)
    return record


# Table ----------------------------------------------------------------------------------------------------------------


def table(record: Mapping[str, Any]) -> str:
    """Test errors, and one sentence on what was run."""
    kinds = ["float", *(f"{per} {bits}" for per in ("tensor", "channel") for bits in BITS)]
    titles = ["float", *(f"{bits} bits" for bits in BITS), *(f"{bits}, per channel" for bits in BITS)]
    lines = [f"| network | weights | {' | '.join(titles)} |", "|---|---|" + "---:|" * len(kinds)]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        groups.setdefault((row["model"], row["weights"]), []).append(row)
    for (model, weights), same in groups.items():
        cells = [mean_and_std([100 * row["error"][kind] for row in same]) for kind in kinds]
        lines.append(f"| {model} | {weights} | {' | '.join(cells)} |")
    n = len({row["seed"] for row in record["rows"]})
    moved = max(row["moved"] for row in record["rows"] if row["weights"].startswith("`equalize_`"))
    theirs = max(row["moved"] for row in record["rows"] if row["weights"] == "Brevitas")
    where = record["gpu"] or "a CPU"
    said = (
        f"Test error in per cent on CIFAR-10, mean ± standard deviation of n = {n} seeds ({where}, torch "
        f"{record['torch']}, Brevitas {record['brevitas']}). Folding and equalizing move the outputs of a network by "
        f"at most {moved:.0e} of the largest in float64 (Brevitas: {theirs:.0e})."
    )
    return "\n".join([said, "", *lines])


def mean_and_std(values: Sequence[float]) -> str:
    """
    >>> mean_and_std([5.0, 6.0, 7.0])
    '6.0 ± 1.0'
    """
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def page(text: str, record: Mapping[str, Any]) -> str:
    """`text` with its marked block written from the record."""
    return BLOCK.sub(lambda m: m[1] + table(record) + "\n" + m[2], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/rounding.json"), help="the record")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="run folders of the training")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of data sets (default: $GSPACE_DATA)")
    parser.add_argument("--quick", action="store_true", help="small networks, few images, one seed: tries the code")
    parser.add_argument("--commit", help="of the source, where it runs without its git checkout")
    parser.add_argument("--table", type=Path, help="write the page from the record, measure nothing")
    options = parser.parse_args()
    if options.table:
        record = json.loads(options.out.read_text(encoding="utf-8"))
        options.table.write_text(page(options.table.read_text(encoding="utf-8"), record), encoding="utf-8")
    else:
        measure(options)


if __name__ == "__main__":
    main()
