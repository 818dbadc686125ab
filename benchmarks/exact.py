"""Does `batch_norm="exact"` cost test error? A small ResNet on Fashion-MNIST, each method at its best rate.

    gspace bench exact --data-dir DIR --out results/exact.json     # about 40 minutes on one core
    gspace bench exact --quick                                     # tries the code, on digits

Rates are chosen by the error on held-out training images, with seed 0. Then every method trains `SEEDS` networks on all
training images. Rows before a BatchNorm need no decay in exact coordinates: their length is fixed there.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from gspace.lab.engine import Engine
from gspace.lab.recipe import Recipe
from gspace.lab.record import environment
from gspace.lab.train import train

SEEDS = 5
RECIPE = Recipe(
    data="fashion_mnist", model="resnet-10", width=16, inputs="pooled", iterations=2500, eval_every=2500,
    momentum=0.9, schedule="cosine", warm_up=0.05,
)  # fmt: skip
QUICK = {"data": "digits", "inputs": "standard", "width": 4, "iterations": 20, "eval_every": 20, "quick": True}
METHODS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "SGD, decay 5e-4": {"weight_decay": 5e-4},
    'G-SGD "released"': {"optimizer": "gsgd", "residual": "tie"},
    'G-SGD "exact"': {"optimizer": "gsgd", "residual": "tie", "batch_norm": "exact"},
    'G-SGD "exact", decay 5e-4': {"optimizer": "gsgd", "residual": "tie", "batch_norm": "exact", "weight_decay": 5e-4},
}
RATES = (0.03, 0.1, 0.3, 1.0)


def measured(options: argparse.Namespace, runs: Path) -> dict[str, Any]:
    """For each method the held-out errors by rate, and the test errors and losses at the best."""
    recipe = replace(RECIPE, **(QUICK if options.quick else {}))
    held_out, seeds = (300, 2) if options.quick else (10_000, SEEDS)
    engine = Engine(device="cpu")
    torch.set_num_threads(1)

    def run(**changed: Any) -> dict[str, Any]:
        summary = train(replace(recipe, **changed), runs, data_dir=options.data_dir, engine=engine)
        print(changed, summary["status"], summary["test_error"], flush=True)
        return summary

    found = {}
    for name, fields in METHODS.items():
        tried = {lr: run(lr=lr, validation=held_out, **fields)["test_error"] for lr in RATES}
        best = min(RATES, key=lambda lr: tried[lr] if tried[lr] is not None else 1.0)
        summaries = [run(lr=best, seed=seed, **fields) for seed in range(seeds)]
        rows = {key: [s[key] for s in summaries] for key in ("status", "test_error", "train_loss")}
        found[name] = {"held_out": tried, "lr": best, **rows}
    return {"environment": environment(), "recipe": recipe.to_dict(), "methods": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder of data sets")
    parser.add_argument("--runs", type=Path, help="run folders, to be continued")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        record = measured(options, options.runs or Path(folder))
    for name, row in record["methods"].items():
        errors = [100 * e for e in row["test_error"]]
        print(f"{name:28} lr {row['lr']:<5} {fmean(errors):.2f} ± {stdev(errors):.2f} % (n = {len(errors)})")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
