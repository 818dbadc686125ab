"""The wheel: what is in it, and that it runs where nothing but torch is installed."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

import gspace

pytestmark = pytest.mark.slow
pytest.importorskip("build", reason="the wheel is made by `build`")

ROOT = Path(__file__).parents[1]
USE = """
import gspace, torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
assert gspace.analyze(model).H == 8
optimizer = gspace.GSGD(model, lr=0.1)
model(torch.ones(2, 4)).square().mean().backward()
optimizer.step()
print(gspace.__version__, gspace.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the source distribution, as `python -m build` does, in a copy: setuptools writes beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    assert {path.suffix for path in out.iterdir()} == {".whl", ".gz"}
    return next(out.glob("*.whl"))


def call(*command: str, folder: Path | None = None) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needed(name: str, found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """A package and all that it needs, as far as it is installed; extras and what is for other systems are not."""
    found = {} if found is None else found
    try:
        found[name] = distribution(name)
    except PackageNotFoundError:
        return found
    for line in found[name].requires or ():
        other = re.match(r"[\w.-]+", line)
        if other and other[0] not in found and "extra ==" not in line:
            needed(other[0], found)
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"gspace", "gspace_command.py", wheel.name[:-17] + ".dist-info"}
    assert {Path(name).suffix for name in names if name.startswith("gspace/")} == {
        ".py",
        ".c",
        ".html",
        ".json",
        ".md",
        ".mplstyle",
        ".toml",
        ".typed",
    }
    assert {
        "gspace/optim/fast/kernels.c",
        "gspace/py.typed",
        "gspace/lab/experiments.toml",
        "gspace/lab/templates/page.html",
        "gspace/lab/templates/report.md",
    } <= set(names)
    assert wheel.stat().st_size < 1e6


def test_it_runs_where_only_torch_is(wheel: Path, tmp_path: Path) -> None:
    """An empty environment, with links to torch and to what torch itself asks for."""
    call(sys.executable, "-m", "venv", str(tmp_path / "empty"))
    python = tmp_path / "empty" / "bin" / "python"
    site = Path(call(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for package in needed("torch").values():
        for top in {Path(str(file)).parts[0] for file in package.files or () if ".." not in str(file)}:
            if not (site / top).exists() and top != "__pycache__":
                (site / top).symlink_to(Path(str(package.locate_file(top))))
    call(str(python), "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel))
    version, where = call(str(python), "-c", USE, folder=tmp_path).split()
    assert version == gspace.__version__
    assert Path(where).is_relative_to(site)
    command = tmp_path / "empty" / "bin" / "gspace"
    assert gspace.__version__ in call(str(command), "--version", folder=tmp_path)
    model = tmp_path / "model.py"
    model.write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    assert "H = 8 units" in call(str(command), "analyze", f"{model}:build()", "--verify", folder=tmp_path)
    refused = subprocess.run([str(command), "demo"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert refused.returncode == 2
    assert "pip install" in refused.stderr


def test_no_module_is_long() -> None:
    """At most 400 lines."""
    sizes = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert len(sizes) > 80
    assert {name: n for name, n in sizes.items() if n > 400} == {}
