"""The loops: a fault at every file operation of a run, random faults over a long run, damage to every kind of file."""

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.attempt import MODES, Fault, Outcome, attempt, command, damaged

RECIPE = "--data digits --hidden 12,10 --optimizer gsgd --lr 0.05 --momentum 0.9 --train-size 400 --test-size 100"
RECIPE += " --batch-size 32 --threads 1 --checkpoint-seconds 0.000001"
CLOCKS = ("second", "started", "folder", "digest")  # what two runs may differ in


@dataclass
class Count:
    """What a loop has tried, by kind, and what did not hold."""

    tried: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, kind: str, problem: str | None) -> None:
        self.tried[kind] += 1
        if sum(self.tried.values()) % 50 == 0:
            print(f"{sum(self.tried.values())} tried, {len(self.failed)} failed", file=sys.stderr, flush=True)
        if problem is not None:
            self.failed.append(f"{kind}: {problem}"[:300])

    def record(self) -> dict[str, Any]:
        total = sum(self.tried.values())
        return {
            "tried": total,
            "held": total - len(self.failed),
            "kinds": dict(sorted(self.tried.items())),
            "failed": self.failed,
        }


def essence(value: Any) -> Any:
    """A result without clocks and places."""
    if isinstance(value, dict):
        return {k: essence(v) for k, v in value.items() if not any(word in k for word in CLOCKS)}
    return [essence(v) for v in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Training:
    """A digits run of some iterations in `out`, through the command line alone."""

    out: Path
    iterations: int
    every: int

    def run(self, fault: Fault | None = None, seconds: float | None = None) -> Outcome:
        words = f"train {RECIPE} --iterations {self.iterations} --eval-every {self.every} --json --out {self.out}"
        return attempt(command(words.split()), self.out, fault, seconds)

    def result(self) -> Any:
        """The result and the curve of the run, which is finished if it is not yet."""
        done = self.run()
        if done.code != 0:
            return f"exit code {done.code}: {done.err[-200:]}"
        curves = (path.read_text().splitlines() for path in sorted(self.out.glob("*/metrics.jsonl")))
        return essence(json.loads(done.out)), [essence(json.loads(line)) for curve in curves for line in curve]


def problem_of(training: Training, outcome: Outcome, fault: Fault | None, expected: Any) -> str | None:
    """What is wrong after a fault and a plain start behind it; None if nothing is."""
    if outcome.crashed:
        return f"{fault}: crashed with {outcome.code}: {outcome.err[-200:]}"
    if outcome.code not in (0, -9) and not outcome.refused:
        return f"{fault}: exit code {outcome.code} without a line: {outcome.err[-200:]}"
    found = training.result()
    return None if found == expected else f"{fault}: another result: {found}"


def every_operation(work: Path, modes: tuple[str, ...] = MODES, step: int = 1) -> Count:
    """A fault at every operation, or every `step`-th, of a run that begins and of one that goes on."""
    count = Count()
    plain = Training(work / "plain", 6, 2)
    expected = plain.result()
    half = Training(work / "half", 6, 2)
    whole = half.run()
    shutil.rmtree(half.out)
    stopped = half.run(Fault(whole.operations * 2 // 3, "kill before"))
    assert (stopped.code, whole.code) == (-9, 0), (stopped, whole)
    for name, start in (("begin", None), ("go on", half.out)):
        probe = Training(_copy(start, work / "probe"), 6, 2)
        operations = probe.run().operations
        for mode in modes:
            for n in range(1, operations + 1, step):
                training = Training(_copy(start, work / "faulty"), 6, 2)
                fault = Fault(n, mode)
                outcome = training.run(fault)
                count.add(f"{name}, {mode}", problem_of(training, outcome, fault, expected))
    return count


def _copy(start: Path | None, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    if start is not None:
        shutil.copytree(start, to)
    return to


def long_run(work: Path, faults: int, seed: int = 0) -> Count:
    """So many random faults in one run; then it is brought to its end and compared with one that nobody disturbed."""
    rng, count = random.Random(seed), Count()
    training = Training(work / "long", 60 * faults, 25)
    while sum(count.tried.values()) < faults:
        timed = rng.random() < 0.2
        fault = None if timed else Fault(rng.randint(1, 60), rng.choice(MODES), last=61)
        outcome = training.run(fault, rng.uniform(0.0, 0.3) if timed else None)
        problem = None
        if outcome.code == 0:
            problem = "the run ended before all faults had come"
        elif outcome.crashed or (outcome.code != -9 and not outcome.refused):
            problem = f"{fault}: exit code {outcome.code}: {outcome.err[-200:]}"
        count.add("kill at a random time" if timed else fault.mode, problem)  # type: ignore[union-attr]
        if len(count.failed) > 10:
            return count
    plain = Training(work / "long-plain", training.iterations, training.every)
    if (found := training.result()) != plain.result():
        count.failed.append(f"the result differs: {str(found)[:200]}")
    return count


# Damage ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A file that is read, the command that reads it, and what that says of a sound one.

    Attributes:
        rebuilt: It is a cache: a damaged one is made anew, and the command ends well.
        loose: It has no checksum, so damage may change what is read; nothing may crash.
    """

    name: str
    path: Path
    read: Callable[[], Outcome]
    rebuilt: bool = False
    loose: bool = False


def damage(kept: list[Kept], count: int, seed: int = 0) -> Count:
    """Files in turn, each damaged at random places; refused in a line, or no difference to what is read."""
    rng, counted = random.Random(seed), Count()
    sound = {k.name: essence_of(k.read()) for k in kept}
    for k in kept:
        assert sound[k.name][0] == 0, (k.name, sound[k.name])
    for i in range(count):
        k = kept[i % len(kept)]
        folder = k.path.parent
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        kind, content = damaged(before[k.path], rng)
        k.path.unlink()  # a library that is loaded stays as it is
        k.path.write_bytes(content)
        outcome = k.read()
        counted.add(f"{k.name}, {kind}", _wrong(k, outcome, sound[k.name]))
        for p in folder.rglob("*"):
            if p.is_file() and p not in before:
                p.unlink()
        for p, old in before.items():
            p.unlink(missing_ok=True)
            p.write_bytes(old)
    return counted


def _wrong(k: Kept, outcome: Outcome, sound: Any) -> str | None:
    if outcome.crashed:
        return f"crashed with {outcome.code}: {outcome.err[-300:]}"
    if outcome.refused and not k.rebuilt:
        return None
    if k.loose and outcome.code in (0, 1):
        return None
    return None if essence_of(outcome) == sound else f"silent: exit code {outcome.code}, {outcome.out[:200]}"


def essence_of(outcome: Outcome) -> tuple[int, Any]:
    try:
        return outcome.code, essence(json.loads(outcome.out))
    except json.JSONDecodeError:
        return outcome.code, outcome.out


def files(work: Path) -> Iterator[Kept]:
    """Every kind of file that is read: of runs, records, data sets, the cached library, states, tables of mappings."""
    from benchmarks.faults import samples

    finished, stopped = Training(work / "finished", 6, 2), Training(work / "stopped", 6, 2)
    whole = finished.run()
    stopped.run(Fault(whole.operations * 2 // 3, "kill before"))
    for name, training, read in (("finished", finished, reported), ("stopped", stopped, again)):
        (folder,) = training.out.iterdir()
        for path in sorted(p for p in folder.iterdir() if p.suffix != ".part" and not p.name.startswith(".")):
            if (name, path.name) != ("finished", "checkpoint"):  # nobody reads that any more
                yield Kept(f"{path.name} of a {name} run", path, lambda r=read, t=training: r(t.out))
    records = work / "records" / "records.jsonl"
    records.parent.mkdir()
    records.write_text(reported(finished.out).out)
    yield Kept("a record", records, lambda: reported(records.parent))
    yield from samples.files(work)


def again(out: Path) -> Outcome:
    """Goes on with a copy, so that what is read stays what it is."""
    return Training(_copy(out, out.with_name("copy")), 6, 2).run()


def reported(out: Path) -> Outcome:
    """The records of runs, or of records, as a report reads them."""
    exported = out.with_name(f"{out.name}-exported")

    def call() -> int:
        code = command(["report", str(out), "--export", str(exported)])()
        sys.stdout.write("".join(path.read_text() for path in sorted(exported.glob("*.jsonl"))))
        return code

    shutil.rmtree(exported, ignore_errors=True)
    done = attempt(call, out)
    lines = (line for line in done.out.splitlines() if line.startswith("{"))
    return Outcome(done.code, "".join(f"{line}\n" for line in lines), done.err, done.operations)
