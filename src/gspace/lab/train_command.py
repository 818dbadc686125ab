"""`gspace train`: one recipe with a few seeds, or a list of recipes."""

import argparse
import json
from pathlib import Path

from gspace.lab import options
from gspace.lab.archive import short_recipe
from gspace.lab.errors import RecipeError
from gspace.lab.recipe import DEFAULTS
from gspace.lab.record import read_summary
from gspace.lab.schema import Line
from gspace.lab.sweep import conclude, finished, read_queue, report, run_all, share
from gspace.lab.train import train

EXAMPLES = """examples:
  gspace train --epochs 20 --optimizer gsgd --init skeleton --lr 0.1
      an MLP on scikit-learn's digits, by G-SGD from the paper's initialisation

  gspace train --data cifar10 --model plain-34 --iterations 8000 --lr 1 --milestones 0.5,0.75 --augment crop-flip \\
      --precision bf16 --optimizer gsgd --init skeleton --pin stages --max-ratio inf --max-drift inf
      a network of the paper's Table 1, on an eighth of its schedule

  gspace train --recipe runs/SOME-RUN/recipe.json --lr 0.05 --seeds 0-4
      a recorded run again, with another rate and five seeds

Each run has a folder below --out, named by what it is and the hash of its recipe. Running the same command again
continues what was stopped, and leaves alone what is finished. A run that diverges is a result, not an error."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="run folders (default: runs)")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="JSON file of fields to start from")
    parser.add_argument("--queue", type=Path, metavar="FILE", help="JSON list of recipes to run instead")
    parser.add_argument("--seeds", type=options.numbers, metavar="N,...", help="several seeds, for example 0-4")
    parser.add_argument("--json", action="store_true", help="print recipes and summaries as JSON")
    options.add_data(parser)
    options.add_recipe(parser)
    options.add_engine(parser)
    options.add_sweep(parser)


def run(args: argparse.Namespace) -> int:
    """Trains; 1 if a run failed."""
    if args.queue:
        ignored = [name for name in (*DEFAULTS, "recipe", "seeds") if getattr(args, name) is not None]
        if ignored:
            raise RecipeError(f"--queue has recipes of its own: leave out --{ignored[0].replace('_', '-')}")
        recipes = read_queue(args.queue)
    else:
        one = options.recipe(args)
        recipes = [one.but(seed=seed) for seed in args.seeds] if args.seeds else [one]
    recipes = share(recipes, args.slice) if args.slice else recipes
    cluster, failed, before = options.cluster(args), 0, sum(finished(args.out, recipe) for recipe in recipes)
    options.prepare(recipes, args)
    with options.session(args, len(recipes)) as session, options.alone(args.json):
        if len(recipes) == 1 and not (args.queue or cluster):  # what goes wrong is then this command's error
            report(recipes[0], train(recipes[0], args.out, **vars(session)))
        else:
            failed = run_all(recipes, args.out, session, args.stack, cluster)
    if args.json:
        ended: list[Line] = [
            {"folder": str(folder), "recipe": short_recipe(recipe), "summary": read_summary(folder, recipe)}
            for recipe in recipes
            for folder in [args.out / recipe.folder]
        ]
        print(json.dumps(ended, indent=1))
    with options.alone(args.json):
        return conclude(len(recipes), before if len(recipes) > 1 or args.queue else 0, failed)
