"""Are the published mappings of quantizers exact? Tiny models with random weights, every entry applied.

    python benchmarks/mappings.py --out results/mappings.json     # a minute; needs transformers
    python benchmarks/mappings.py --table docs/quantization.md    # writes the tables of the page from that record

An entry is applied alone, layer by layer, with scales e^N(0, 1), in float64. The change is max |after − before| /
max |before| of the logits, the largest over the layers; `SEEDS` draws of weights and scales.
"""

import argparse
import json
import platform
import re
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import gspace
from gspace.quantization import effects

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

SEEDS = 5
BLOCK = re.compile(r"(<!-- gspace bench mappings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# What the entries that are wrong should say.
CORRECTED = {
    "gemma2": ("re:.*pre_feedforward_layernorm$", ["re:.*gate_proj$", "re:.*up_proj$"]),
    "gemma3": ("re:.*pre_feedforward_layernorm$", ["re:.*gate_proj$", "re:.*up_proj$"]),
    "whisper": (
        "re:.*self_attn_layer_norm",
        ["re:.*self_attn.k_proj", "re:.*self_attn.v_proj", "re:.*self_attn.q_proj"],
    ),
    "qwen3-moe": ("re:.*post_attention_layernorm$", ["re:.*mlp.gate$", "re:.*gate_proj$", "re:.*up_proj$"]),
    "glm4-moe": ("re:.*post_attention_layernorm$", ["re:.*mlp.gate$", "re:.*gate_proj$", "re:.*up_proj$"]),
    "glm4-moe-lite": ("re:.*post_attention_layernorm$", ["re:.*mlp.gate$", "re:.*gate_proj$", "re:.*up_proj$"]),
    "ernie4.5-moe": ("re:.*post_attention_layernorm$", ["re:.*mlp.gate$", "re:.*gate_proj$", "re:.*up_proj$"]),
}


def measured() -> list[dict[str, Any]]:
    from published import PUBLISHED, TABLED
    from test_huggingface import build

    rows = []
    for fact in PUBLISHED:
        family = TABLED[fact.family]
        models = [build(family, seed) for seed in range(SEEDS)]
        examples = [family.batch(seed) for seed in (*family.seeds, 11, 12, 13)]
        analyses = [gspace.analyze(model, examples) for model in models]

        def largest(
            entry: Any, models: Any = models, examples: Any = examples, analyses: Any = analyses
        ) -> list[float]:
            changes = []
            for seed, (model, analysis) in enumerate(zip(models, analyses, strict=True)):
                tried = effects(model, [entry], examples, analysis=analysis, seed=seed)
                changes.append(max(change for _, change in tried if change is not None))
            return changes

        lines = gspace.check_mappings(models[0], [fact.entry], examples, analysis=analyses[0])
        row = {"model": family.model, "smooth": fact.smooth, "balance": fact.balance, "source": fact.source}
        row |= {"problems": lines, "change": largest(fact.entry)}
        if lines:
            row |= {"corrected": CORRECTED[fact.family], "corrected_change": largest(CORRECTED[fact.family])}
        rows.append(row)
        print(f"{family.model:28} {fact.smooth:28} {max(row['change']):.1e} {lines[:1]}", flush=True)
    return rows


def large() -> dict[str, float]:
    """Mappings of a Llama of 1.1 billion weights on the meta device."""
    import transformers

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    with torch.device("meta"):
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=32000)
        model = transformers.LlamaForCausalLM(config)
    start, cpu = time.perf_counter(), time.process_time()
    found = gspace.mappings(model, {"input_ids": torch.zeros(2, 8, dtype=torch.long, device="meta")})
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "weights": sum(p.numel() for p in model.parameters()),
        "mappings": len(found),
        "s": seconds,
        "cpu_s": cpu,  # of one thread: what it takes where nothing else runs
        "peak_mb": peak,
    }


def wrong(record: dict[str, Any]) -> str:
    """The entries that change the function."""
    head = "| model | table | published entry | what is wrong | change | corrected |"
    lines = [head, "|---|---|---|---|---|---|"]
    for row in record["entries"]:
        if row["problems"]:
            first = re.sub(r"( \(in \d+ places\))?; applied, .*", "", row["problems"][0])
            first = re.sub(r"'model\.(decoder\.)?layers\.[\d*]+\.([^']*)'", r"`\2`", first)
            entry = f"`{row['smooth']}` → `{row['balance']}`"
            change, corrected = (f"{fmean(row[k]):.0e}" if k != "change" else f"{100 * fmean(row[k]):.1f} %"
                                 for k in ("change", "corrected_change"))  # fmt: skip
            lines.append(f"| {row['model']} | {row['source']} | {entry} | {first} | {change} | {corrected} |")
    return "\n".join(lines)


def exact(record: dict[str, Any]) -> str:
    """One sentence on the others."""
    good = [row for row in record["entries"] if not row["problems"]]
    worst = max(max(row["change"]) for row in good)
    models, big = len({row["model"] for row in good}), record["large"]
    return (
        f"The other {len(good)} entries, of {models} models, are exact: the largest change is {worst:.0e} "
        f"(n = {record['seeds']} draws each). The {big['mappings']} mappings of a Llama of {big['weights'] / 1e9:.1f} "
        f"billion weights on the meta device take {big['cpu_s']:.1f} s of one thread and "
        f"{big['peak_mb'] / 1024:.1f} GB."
    )


def page(text: str, record: dict[str, Any]) -> str:
    """`text` with its marked blocks written from the record."""
    blocks = {"wrong": wrong, "exact": exact}
    return BLOCK.sub(lambda m: m[1] + blocks[m[2]](record) + "\n" + m[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/mappings.json"))
    parser.add_argument("--table", type=Path, help="write the page from the record, measure nothing")
    options = parser.parse_args()
    if options.table:
        record = json.loads(options.out.read_text(encoding="utf-8"))
        options.table.write_text(page(options.table.read_text(encoding="utf-8"), record), encoding="utf-8")
        return
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("torch", "transformers")}
    environment = {"python": platform.python_version(), **versions, "machine": platform.machine()}
    first = large()  # its peak is that of the process
    record = {"environment": environment, "seeds": SEEDS, "large": first, "entries": measured()}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
