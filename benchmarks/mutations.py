"""Does a wrong step get caught? Plants one bug at a time in a copy of the library and runs the tests of the step.

    gspace bench mutations

Prints one line per bug: which test fails first. A bug that no test catches makes the exit code 1.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("step", "shown", "shards", "invariance", "kernels")  # quick ones first

# name: file, right, wrong
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "sign of the path gradient": (
        "optim/step.py",
        "torch.add(view, change, out=out)",
        "torch.sub(view, change, out=out)",
    ),
    "missing T": ("optim/step.py", "sums.root - behind, 0)", "sums.root, 0)"),
    "T with the free edge": ("optim/step.py", "sums.out - sums.free", "sums.out"),
    "ratio at the head instead of the tail": (
        "optim/eager.py",
        "ratios = plan.ends(every * c, None if spread is None else c.reciprocal())",
        "ratios = plan.ends(c, every * c)",
    ),
    "Ĩ·Õ divided out once instead of twice": (
        "optim/eager.py",
        "_write(change, step.unscaled, change, of)",
        "pass",
    ),
    "Ĩ and Õ do not follow the weights": ("optim/step.py", "value = value * value[at]", "pass"),
    "momentum of a skeleton path at another entry": (
        "optim/eager.py",
        "plan.put(path_grads, at_entries)",
        "plan.put(path_grads, at_entries.flip(0))",
    ),
    "decay of trained skeleton paths": ("optim/eager.py", "plan.put(shown, torch.zeros_like(at_entries))", "pass"),
    "free weight moved": ("optim/step.py", "change = ratio[at.root] / ", "change = 0.999 * ratio[at.root] / "),
    "trained skeleton weight forgets R(tail)": (
        "optim/step.py",
        "torch.where(at.root > 0, ratio[at.tail], 1)",
        "torch.ones_like(ratio[at.root])",
    ),
    "path ratio measured by w": ("optim/step.py", "raw = 1 - lr * direction / path_value", "raw = 1 - lr * direction"),
    "C: missing T": ("optim/fast/kernels.c", "(s - behind) / norm", "s / norm"),
    "C: sign": ("optim/fast/kernels.c", "w[j] - step * d[j] * g[j]", "w[j] + step * d[j] * g[j]"),
    "C: Ĩ·Õ divided out once on rows": ("optim/fast/kernels.c", "sign * i_r * i_r * m_r", "sign * i_r * m_r"),
    "C: no momentum": ("optim/fast/kernels.c", "momentum * b[j] + d[j]", "d[j]"),
    "C: skeleton weight forgets R(tail)": (
        "optim/fast/kernels.c",
        "kept * (p->factors[4 * n + id] * m_c[entry])",
        "kept * p->factors[4 * n + id]",
    ),
    "C: Nesterov": ("optim/fast/kernels.c", "nesterov ? d[j] + momentum * b[j] : b[j]", "b[j]"),
    "C: momentum of a skeleton path overwritten": (
        "optim/fast/kernels.c",
        "if (entry >= 0) b[entry] = kept_here;",
        "",
    ),
    "C: walks stop after one step": ("optim/fast/kernels.c", " * p->products[e[FOLLOWING]]", ""),
    "InGSpace: state of another parameter": (
        "optim/inner.py",
        "self.state[made.owners[v]].update(new)",
        "self.state[built.weights[0]].update(new)",
    ),
    "C: shown values given back from elsewhere": (
        "optim/fast/kernels.c",
        "(b[j] - w[j] * (v_r * v_c[j]))",
        "(b[j] - w[j] * v_c[j])",
    ),
    "C: a skeleton path is shown without gradient": (
        "optim/fast/kernels.c",
        "= p->root_grad[root[ROOT_UNIT]];",
        "= 0;",
    ),
    "Triton: shown values of skeleton entries": (
        "optim/fast/kernels.py",
        "tl.where(by_row | by_column, 0.0, v)",
        "tl.where(by_row, 0.0, v)",
    ),
    "sums of parts are not added up": ("optim/step.py", "plan.reduce(torch.cat(", "alone(torch.cat("),
    "Triton: sign": ("optim/fast/kernels.py", "moved = w - d * ((lr * i_r)", "moved = w + d * ((lr * i_r)"),
}


def caught(name: str) -> list[str]:
    """The tests that fail with this bug planted, or with none."""
    file, right, wrong = MUTATIONS[name] if name else ("__init__.py", "", "")
    with tempfile.TemporaryDirectory() as folder:
        for part in ("src", "tests", "pyproject.toml"):
            source, target = ROOT / part, Path(folder) / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, target)
        path = Path(folder) / "src" / "gspace" / file
        text = path.read_text()
        if right not in text:
            raise SystemExit(f"{name}: {file} has no line {right!r} any more")
        path.write_text(text.replace(right, wrong))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-n",
            "auto",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            *(f"tests/test_{name}.py" for name in TESTS),
        ]
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{folder}/tests"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        raise SystemExit(f"{name}: the tests did not run\n{done.stdout}{done.stderr}")
    return failed


def main() -> int:
    missed = 0
    if found := caught(""):
        raise SystemExit(f"{found[0]} fails without a bug: nothing can be told")
    for name in MUTATIONS:
        tests = caught(name)
        missed += not tests
        print(f"| {name} | {tests[0] if tests else '**not caught**'} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
