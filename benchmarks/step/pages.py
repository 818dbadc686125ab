"""What was measured: a CSV file per device, its figure, and the page `docs/speed.md`."""

import csv
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gspace
from benchmarks.step.networks import OPTIMIZERS
from benchmarks.step.timing import CUDA, Time
from gspace.lab.record import commit


def environment() -> dict[str, Any]:
    triton = metadata.version("triton") if importlib.util.find_spec("triton") else None
    return {
        "machine": torch.cuda.get_device_name() if CUDA else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton,
        "gspace": gspace.__version__,
        "commit": commit(),
    }


def show(times: Sequence[Time]) -> None:
    for t in times:
        where = f"{t.section} {t.network} {t.mode} {t.precision}{' momentum' if t.momentum else ''}"
        range_us, ratio = f"[{t.p10_us:.1f}, {t.p90_us:.1f}]", "" if t.ratio is None else f"{t.ratio:.3f}"
        print(f"{where:56} {t.optimizer:34} {t.median_us:10.1f} µs {range_us:22} {ratio} {t.note}", flush=True)


def write(times: Sequence[Time], earlier: Sequence[Mapping[str, str]], path: Path) -> None:
    """A row for each time, with what it was measured on; what other commands measured before is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    here = environment()
    new = [{key: str(value) for key, value in {**asdict(t), **here}.items()} for t in times]
    measured = set(map(_what, _turns(new)))
    kept = [row for group in _turns(earlier) if _what(group) not in measured for row in group]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[*Time.__dataclass_fields__, *here])
        writer.writeheader()
        writer.writerows(kept + new)


def _turns(recorded: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """What was measured in the same turns: it ends with the baseline, again; a copy has turns of its own."""
    groups: list[list[Mapping[str, str]]] = [[]]
    for row in recorded:
        groups[-1].append(row)
        if row["optimizer"].endswith(" again") or row["optimizer"] == "copy":
            groups.append([])
    return [group for group in groups if group]


def _what(group: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    first = group[0]
    setting = (first[key] for key in ("section", "network", "mode", "precision", "momentum"))
    return (*setting, *(row["optimizer"] for row in group))


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw(path: Path) -> None:
    """Iterations per second beside torch's SGD, per network: the paper's Fig. 6."""
    import matplotlib
    from matplotlib.figure import Figure

    from gspace.lab.figures import COLOURS, STYLE, save

    bars: dict[tuple[str, ...], dict[str, float]] = {}
    for t in read(path):
        if t["section"] == "iteration" and float(t["momentum"]) == 0 and not t["optimizer"].endswith("again"):
            group = bars.setdefault((t["network"], t["mode"], t["precision"]), {})
            group[t["optimizer"]] = 100 / float(t["ratio"])
    if not bars:
        return
    names = [name for name in OPTIMIZERS if any(name in group for group in bars.values())]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(6, 2 + 1.2 * len(bars)), 4), layout="constrained")
        axes = figure.add_subplot(axisbelow=True)
        for i, name in enumerate(names):
            found = [(k, group[name]) for k, group in enumerate(bars.values()) if name in group]
            at = [k + (i - (len(names) - 1) / 2) * 0.8 / len(names) for k, _ in found]
            axes.bar(at, [value for _, value in found], 0.8 / len(names), label=name, color=COLOURS[i % len(COLOURS)])
        axes.axhline(93, color="0.4", linestyle="--", linewidth=1, label="G-SGD in the paper: about 93")
        axes.set_xticks(range(len(bars)), ["\n".join(group) for group in bars])
        axes.set_ylabel("iterations per second,\n% of torch's SGD or AdamW")
        figure.legend(fontsize=8, loc="outside upper left", ncols=4, frameon=False)
    save(figure, path.with_suffix(".svg"))


def page(folder: Path, figures: str = "../results") -> str:
    """What is recorded in a folder, as Markdown: GSGD's medians beside those of torch's SGD.

    `figures` is where the page finds the figures of that folder.
    """
    recorded = {
        device: [row for row in read(folder / name) if row["section"] not in ("kernels", "tiles")]  # no baseline
        for device, name in FILES.items()
    }
    lines = [
        "# Speed: a step and an iteration of G-SGD against torch's SGD",
        "",
        "`GSGD`'s time over that of torch's SGD (the faster of `foreach` and `fused`, timed in the same turns):",
        "",
        *(line for device, rows in recorded.items() for line in _short(device, rows)),
        "",
        "How to read the tables:",
        "",
        "- Times are medians in µs over interleaved repeats in one process, with the 10th and 90th percentile.",
        "- The ratio is the median over that of the baseline. Noise is the ratio of the baseline to itself, measured "
        "in the same turns.",
        "- The baseline is torch's SGD, `foreach` or `fused`, or torch's AdamW for InGSpace(AdamW).",
        "- An iteration is forward, backward and step. `benchmarks/step` describes the networks.",
        "- Bandwidth is the bytes that the step moves per second, in per cent of a copy's.",
        "- The figures are our version of the paper's Fig. 6: iterations per second, in per cent of torch's SGD (of "
        "torch's AdamW for InGSpace(AdamW)). The paper states about 7 % less for G-SGD.",
        "",
        "Generated by `gspace bench step --out results --table docs/speed.md` from `results/step-cpu.csv` and "
        "`results/step-gpu.csv`, which `gspace bench step --out results` writes.",
    ]
    for device, rows in recorded.items():
        where = sorted({"{machine}, torch {torch}, CPU threads: {threads}".format(**row) for row in rows})
        figure = f"![Iterations per second beside torch's SGD]({figures}/{Path(FILES[device]).stem}.svg)"
        lines += ["", f"## {device}", "", f"{'; '.join(where)}.", "", figure, "", PAGE_HEADER] if rows else []
        lines += [line for group in _turns(rows) for line in _compared(group)]
    return "\n".join(lines) + "\n"


FILES = {"GPU": "step-gpu.csv", "CPU": "step-cpu.csv"}
PAGE_HEADER = (
    "| what | network | mode | precision | options | optimizer | baseline | baseline, µs | optimizer, µs | ratio "
    "| noise | n | gspace | bandwidth |\n"
    "|---|---|---|---|---|---|---|---:|---:|---:|---:|---:|---|---|"
)


def _short(device: str, recorded: Sequence[Mapping[str, str]]) -> list[str]:
    """The least and the most of GSGD's times over those of torch's faster SGD, by what was timed; last version."""
    lines = []
    for section, what in (("iteration", "an iteration"), ("step", "the step alone")):
        found: dict[str, list[float]] = {}
        timed = [row for row in recorded if row["section"] == section]
        last = max((row["gspace"] for row in timed), default="")
        for turns in _turns([row for row in timed if row["gspace"] == last]):
            times = {row["optimizer"]: float(row["median_us"]) for row in turns}
            if "GSGD fused" in times:
                least = min(times[name] for name in ("SGD foreach", "SGD fused") if name in times)
                found.setdefault(turns[0]["network"], []).append(times["GSGD fused"] / least)
        ratios = [ratio for of_network in found.values() for ratio in of_network]
        if ratios:
            ends = f"{min(ratios):.3f} to {max(ratios):.3f} (gspace {last})"
            lines.append(f"- {device}, {what} ({', '.join(found)}): {ends}")
    return lines


def _compared(turns: Sequence[Mapping[str, str]]) -> list[str]:
    base = next(row for row in turns if row["optimizer"] == row["baseline"])
    lines = []
    for row in turns[:-1]:
        if row is not base:
            times = [
                f"{float(r['median_us']):.1f} ({float(r['p10_us']):.1f} to {float(r['p90_us']):.1f})"
                for r in (base, row)
            ]
            what = [row[key] for key in ("section", "network", "mode", "precision")]
            what += ["momentum" if float(row["momentum"]) else "", row["optimizer"], row["baseline"]]
            ratios = [f"{float(r['ratio']):.3f}" for r in (row, turns[-1])]
            lines.append(f"| {' | '.join([*what, *times, *ratios, row['n'], row['gspace'], row['note']])} |")
    return lines
