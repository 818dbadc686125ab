"""What gspace 0.1.0 wrote (`data/0.1.0`, at commit 5a2a28f) loads, or is refused with a line that says so. For ever."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gspace
from contract import KINDS, Kind
from gspace.lab import cli

OLD = Path(__file__).parent / "data" / "0.1.0"
RECIPE = "--data digits --hidden 6,5 --optimizer gsgd --lr 0.05 --momentum 0.9 --eval-every 20 --train-size 200"
RECIPE += " --test-size 50 --batch-size 32"


def saved(name: str) -> tuple[nn.Sequential, dict[str, Any]]:
    state = torch.load(OLD / f"{name}.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    model.load_state_dict(state["model"])
    return model, state


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["GSGD", "InGSpace-AdamW", "FrozenSkeletonSGD"])
def test_a_state_with_remembered_coordinates_is_refused_and_changes_nothing(name: str) -> None:
    model, state = saved(name)
    kind: Kind = next(kind for kind in KINDS if kind.name == name)
    optimizer = kind.make(model)
    before = weights(model)
    with pytest.raises(ValueError, match=r"^gspace 0\.1\.0 saved this state, and later versions cannot go on from it"):
        optimizer.load_state_dict(state["optimizer"])
    assert not optimizer.state
    assert all(map(torch.equal, weights(model), before))


def test_path_sgd_goes_on_from_its_state() -> None:
    """Three steps behind the three that were saved, as 0.1.0 took them."""
    model, state = saved("PathSGD")
    optimizer = gspace.PathSGD(model, 0.5)
    optimizer.load_state_dict(state["optimizer"])
    generator = torch.Generator().manual_seed(1)
    for batch in [torch.randn(8, 4, generator=generator) for _ in range(6)][3:]:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state["after"][name], rtol=1e-5, atol=1e-6)


REFUSED = {
    # a command, and what it says of the files below
    "train {finished} --iterations 60": r"it has no digest: it was written before gspace 0",
    "train {stopped} --iterations 4000": r"gspace 0\.1\.0 saved this state|it was written before gspace 0",
    "report {finished}": r"it has no digest: it was written before gspace 0",
    "report {records}": r"is a record of gspace 0\.1, without a digest: now they are lines of \.jsonl files",
}


@pytest.mark.parametrize("words", REFUSED)
def test_files_of_runs_are_refused_in_one_line_and_left(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    paths = {path.name: str(path) for path in tmp_path.iterdir() if path.is_dir()}
    command, given, *more = words.format_map({name: name for name in paths}).split()
    arguments = [*RECIPE.split(), "--out", paths[given], *more] if command == "train" else [paths[given]]
    assert cli.main([command, *arguments]) != 0
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert re.search(REFUSED[words], told[0]), told[0]
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
