"""The command line: what it prints, what it returns, and one line for every kind of mistake."""

import json
import math
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from gspace import analyze
from gspace.lab import cli
from gspace.lab.analyze import (
    TOLERANCE,
    RequestError,
    Spec,
    _relative_change,
    guess,
    largest_changes,
    load_model,
    parse_spec,
)

SOURCE = Path(cli.__file__).resolve().parents[2]
EXAMPLES = Path(__file__).with_name("example_models.py")
MLP = f"{EXAMPLES}:mlp(widths=(5, 4, 3))"
MLP_H = 4
MLP_M = 4 * (5 + 1) + 3 * (4 + 1)

MODEL_FILE = """
import random

import torch
from torch import nn
from neighbour import linear  # of this file

print("this model is chatty")
ready = nn.Sequential(linear(3, 2), nn.ReLU(), linear(2, 1))
number = 3

def build(width, depth=1, bias=True):
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width, bias), nn.ReLU())]
    return nn.Sequential(linear(3, width, bias), nn.ReLU(), *hidden, linear(width, 2, bias))

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(5, 4), nn.Linear(8, 2)

    def forward(self, x, y):
        return {"out": self.out(torch.relu(torch.cat([self.a(x), self.b(y)], 1)))}

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else -self.a(x)

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x)

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, tokens, weights=None):
        h = torch.relu(self.a(self.table(tokens))).mean(1)
        return self.b(h if weights is None else h * 2)

class Drawing(Noisy):
    def forward(self, x):
        return self.body(x) * random.random()

def weightless():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

def digits():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 26 * 26, 2))

def unfinished():
    raise RuntimeError("first line\\nsecond line")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL_FILE)
    (tmp_path / "neighbour.py").write_text(
        "from torch import nn\n\n\ndef linear(*args):\n    return nn.Linear(*args)\n"
    )
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "needy.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # loading a SPEC adds its folder
    return tmp_path


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )


# What it prints


def test_a_model_without_units_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", "torch.nn:Linear(3, 2)"]) == 0
    assert capsys.readouterr().out.startswith("no unit can be rescaled\n\nm = 8 weights")


def test_analyze_prints_the_table_and_verifies(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", MLP, "--verify"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert f"verified: {MLP_H} units" in out


def test_analyze_reads_a_file_and_its_neighbours(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", "model.py:build(6, depth=2)", "--verify", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["H"] == 3 * 6  # nothing but the report, though the file prints on import
    assert "chatty" in err


def test_json_holds_the_analysis_and_the_verification(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", MLP, "--json", "--verify"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["H"], report["m"], report["dim"]) == (MLP_H, MLP_M, MLP_M - MLP_H)
    assert 0 < report["verify"]["eval"] < TOLERANCE
    assert 0 < report["verify"]["train"] < TOLERANCE
    assert report["verify"]["exact"] is True


@pytest.mark.parametrize(
    ("arguments", "H"),
    [
        (["torch.nn:Linear(3, 4)"], 0),
        (["model.py:ready"], 2),
        (["model:ready"], 2),
        (["model.py:build(6)"], 12),
        (["model.py:build(width=6, bias=False)"], 12),
        (["model.py:build(6)", "--pin", "0"], 6),
        (["model.py:TwoInputs", "--input-shape", "2,3", "--input-shape", "2,5"], 8),
        (["model.py:Noisy()"], 8),
        (["model.py:Tokens"], 10),
        (["model.py:Tokens", "--input-shape", "2,5"], 10),
        (["model.py:Tokens", "--input-shape", "2,5:9", "--input-shape", "2"], 10),
        (["model.py:digits", "--input-shape", "2,1,28,28"], 4),
        ([f"{EXAMPLES}:residual(width=4, blocks=1)"], 8),
        ([f"{EXAMPLES}:residual(width=4, blocks=1)", "--residual", "pin"], 4),
        (["model.py:digits"], 4),
        (["model.py:Branching"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_units_of_a_spec(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], H: int) -> None:
    assert cli.main(["analyze", *arguments, "--json", "--verify"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["H"] == H
    assert report["verify"]["exact"] is True


def test_the_same_seed_gives_the_same_report(capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for seed in ("1", "1", "2"):
        assert cli.main(["analyze", MLP, "--json", "--verify", "--seed", seed]) == 0
        reports.append(capsys.readouterr().out)
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.parametrize("name", ["mlp", "lenet", "plain(width=16, depth=4)", "residual(width=16)", "gated"])
def test_the_examples_are_verified(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", f"{EXAMPLES}:{name}", "--verify"]) == 0
    assert "\nverified: " in capsys.readouterr().out


def test_analyze_needs_torch_alone() -> None:
    code = (
        "import sys; from gspace.lab import cli; cli.main(['analyze', 'torch.nn:Linear(3, 4)']);"
        "sys.exit(' '.join({'matplotlib', 'rich', 'scipy', 'sklearn'} & set(sys.modules)) or 0)"
    )
    result = python("-c", code)
    assert (result.returncode, result.stderr) == (0, "")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text and said in text for name, (said, _) in cli.COMMANDS.items())


def test_a_change_above_the_tolerance_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspace.lab.analyze.TOLERANCE", 0.0)  # rounding alone is then too much
    assert cli.main(["analyze", MLP, "--verify"]) == 1
    assert "NOT a symmetry" in capsys.readouterr().out


def test_verification_exposes_units_that_are_not_there(generator: torch.Generator) -> None:
    """tanh is not homogeneous: scaled with the units of its ReLU twin, the network changes."""
    curve = [torch.relu]

    class Bent(nn.Module):  # what an analysis cannot see: that its forward is another one later
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return curve[0](x)

    model = nn.Sequential(nn.Linear(5, 4), Bent(), nn.Linear(4, 3))
    inputs, analysis = guess(model), analyze(model)
    assert max(largest_changes(model, analysis, inputs, generator).values()) < 1e-12
    curve[0] = torch.tanh
    assert min(largest_changes(model, analysis, inputs, generator).values()) > 1e-3


# What it refuses

BAD = {
    "no colon": (["analyze", "model.py"], "is not of the form"),
    "nothing behind the colon": (["analyze", "model.py:"], "is not of the form"),
    "no such file": (["analyze", "absent.py:build"], "no such Python file"),
    "no such module": (["analyze", "absent.module:build"], "No module named 'absent'"),
    "no such name": (["analyze", "model.py:absent"], "has no 'absent'"),
    "syntax error in the file": (["analyze", "broken.py:build"], "SyntaxError"),
    "import error in the file": (["analyze", "needy.py:build"], "a_package_that_is_not_there"),
    "file that exits": (["analyze", "leaving.py:build"], "SystemExit"),
    "missing argument": (["analyze", "model.py:build"], "missing 1 required positional argument: 'width'"),
    "unknown argument": (["analyze", "model.py:build(6, wide=3)"], "unexpected keyword argument 'wide'"),
    "code as argument": (["analyze", "model.py:build(__import__('os').getpid())"], "only literals"),
    "unclosed argument": (["analyze", "model.py:build([6)"], "cannot read the arguments"),
    "two calls": (["analyze", "model.py:build(6)(7)"], "more than one pair of parentheses"),
    "starred keyword": (["analyze", "model.py:build(**{'width': 6})"], "** is not a literal"),
    "factory that fails": (["analyze", "model.py:unfinished"], "RuntimeError: first line second line"),
    "misspelt name": (["analyze", "model.py:biuld(6)"], "'model.py' has no 'biuld': did you mean 'build'?"),
    "not callable": (["analyze", "model.py:number"], "builds no model: it is of type int"),
    "not a model": (["analyze", "builtins:dict(a=1)"], "gives no torch.nn.Module, but an object of type dict"),
    "letters in the shape": (["analyze", MLP, "--input-shape", "2,five"], "is no shape"),
    "negative shape": (["analyze", MLP, "--input-shape", "2,-5"], "is no shape"),
    "wrong shape": (["analyze", MLP, "--input-shape", "2,6"], "does not accept"),
    "batch too small": (
        ["analyze", "model.py:Noisy", "--input-shape", "1,6"],
        "Expected more than 1 value per channel",
    ),
    "verification without values": (["analyze", "model.py:weightless", "--verify"], "on the meta device has no values"),
    "several inputs, no shape": (["analyze", "model.py:TwoInputs", "--verify"], "--input-shape gives one"),
    "input that cannot be guessed": (["analyze", "torch.nn:Bilinear(3, 4, 5)"], "--input-shape gives one"),
    "not below 0": (["analyze", "model.py:Tokens", "--input-shape", "2,5:0"], "2,16:1000 for integers below 1000"),
    "refused input": (["analyze", "model.py:Branching", "--input-shape", "2,4"], "does not accept this example_input"),
    "unknown pin": (["analyze", MLP, "--pin", "absent"], "absent"),
    "unknown choice": (["analyze", MLP, "--residual", "cut"], "invalid choice: 'cut'"),
    "negative seed": (["analyze", MLP, "--seed", "-1"], "is no seed"),
    "unknown option": (["analyze", MLP, "--absent"], "unrecognized arguments: --absent (see gspace analyze --help)"),
    "unknown option of all": (["--absent", "demo"], "unrecognized arguments: --absent (see gspace --help)"),
    "unknown command": (["absent"], "invalid choice: 'absent'"),
    "no command": ([], "COMMAND"),
}
CHATTY = "this model is chatty\n"


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as exit:  # argparse leaves this way
        code = exit.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    err = err.removeprefix(CHATTY)
    assert code == 2
    assert out == ""
    assert err.startswith("gspace: error: ")
    assert err.count("\n") == 1, err
    assert says in err


@pytest.mark.parametrize(
    "kind",
    [
        "refused input",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("no such module", "wrong shape", "unknown option")),
    ],
)
def test_a_mistake_is_one_line_of_the_real_process(folder: Path, kind: str) -> None:
    arguments, says = BAD[kind]
    result = python("-m", "gspace", *arguments, cwd=folder)
    err = result.stderr.removeprefix(CHATTY)
    assert (result.returncode, result.stdout, err.count("\n")) == (2, "", 1), err
    assert says in err


def test_debug_leaves_the_traceback_to_python(folder: Path) -> None:
    with pytest.raises(RequestError, match="first line") as caught:
        cli.main(["analyze", "model.py:unfinished", "--debug"])
    assert 'raise RuntimeError("first line' in "".join(traceback.format_exception(caught.value))


def test_a_command_without_its_extra_says_what_to_install(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(cli.COMMANDS, "needy", ("needs more than torch", "needy"))
    assert cli.main(["needy"]) == 2
    assert "needs a_package_that_is_not_there: pip install 'gspace[lab]'" in capsys.readouterr().err


# How a SPEC is read


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a.b:c", Spec("a.b", "c")),
        ("a.b:c.d()", Spec("a.b", "c.d", ())),
        ("nets/m.py:f(1, 'x', k=[2.0, None])", Spec("nets/m.py", "f", (1, "x"), {"k": [2.0, None]})),
        ("m:f('a:b(1)')", Spec("m", "f", ("a:b(1)",))),
        (r"C:\nets\m.py:f(True)", Spec(r"C:\nets\m.py", "f", (True,))),
        ("nets (old)/m.py:f(-1)", Spec("nets (old)/m.py", "f", (-1,))),
    ],
)
def test_parse_spec(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec


def test_a_file_named_like_a_module_does_not_replace_it(folder: Path) -> None:
    (folder / "json.py").write_text("from torch.nn import Linear\n")
    load_model(parse_spec("json.py:Linear(2, 3)"))
    assert sys.modules["json"] is json


def test_arguments_are_never_evaluated(folder: Path) -> None:
    with pytest.raises(RequestError, match="only literals"):
        parse_spec("model.py:build(open('touched', 'w'))")
    assert not (folder / "touched").exists()


def test_every_output_is_verified_by_its_own_size() -> None:
    large, small = torch.tensor([1e9]), torch.tensor([1e-3])
    assert _relative_change([large, small], [large, torch.tensor([0.5])], "eval") > 1
    assert _relative_change([large, small], [large, torch.tensor([math.nan])], "eval") == math.inf
    assert _relative_change([large, small], [large, small], "eval") == 0


def test_a_queue_beside_a_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "q.json").write_text("[{}]")
    for option in (["--lr", "7"], ["--seeds", "0-3"], ["--optimizer", "gsgd"]):
        assert cli.main(["train", "--queue", str(tmp_path / "q.json"), "--out", str(tmp_path / "runs"), *option]) != 0
        assert option[0] in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("minutes", ["inf", "nan", "0", "-1"])
def test_minutes_are_a_number(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--minutes", minutes])
    assert "no positive number" in capsys.readouterr().err


def test_a_reader_that_has_read_enough_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`gspace … | head`: the pipe has no reader any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["analyze", MLP]) == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == ""
