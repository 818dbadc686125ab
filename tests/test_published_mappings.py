"""Mappings of Hugging Face models from tiny configs, against llm-compressor's published tables and by numbers."""

from functools import cache

import pytest
import torch
from torch import nn

import gspace
from gspace.lab import cli
from gspace.lab.analyze import load_model, parse_spec
from gspace.quantization import Mappings, Side
from huggingface import Family
from moved import change, run
from published import MODELS, PUBLISHED, TABLED, Published

transformers = pytest.importorskip("transformers")
from test_huggingface import build  # noqa: E402  (it needs transformers)

every_model = pytest.mark.parametrize("name", MODELS)


@cache
def analysis(name: str) -> gspace.Analysis:
    family = TABLED[name]
    return gspace.analyze(build(family), examples(family))


def examples(family: Family) -> list[dict]:
    return [family.batch(seed) for seed in family.seeds]


@cache
def found(name: str) -> Mappings:
    return gspace.mappings(build(TABLED[name]), analysis=analysis(name))


def check(name: str, table: list) -> list[str]:
    family = TABLED[name]
    return gspace.check_mappings(build(family), table, examples(family), analysis=analysis(name))


def multiply(model: nn.Module, side: Side, scale: torch.Tensor) -> None:
    """p[slice] + offset times c^exponent, from what a `Side` says alone."""
    with torch.no_grad():
        part = model.get_parameter(side.parameter)[side.slice]
        factor = scale[list(side.channels)] ** side.exponent
        shape = [-1 if d == side.dim else 1 for d in range(part.dim())]
        part.copy_((part + side.offset) * factor.reshape(shape) - side.offset)


@every_model
def test_random_scales_on_every_mapping_leave_the_outputs(name: str) -> None:
    family, model = TABLED[name], build(TABLED[name])
    before = run(model, family.batch(1), training=False)
    generator = torch.Generator().manual_seed(0)
    assert sum(m.size for m in found(name)) == analysis(name).H
    for m in found(name):
        weights = model.get_parameter(m.sources[0].parameter).clone()
        scale = torch.randn(m.size, generator=generator, dtype=torch.float64).exp()
        for side in (*m.sources, *m.sinks):
            multiply(model, side, scale)
        assert not torch.equal(weights, model.get_parameter(m.sources[0].parameter))
        assert change(before, run(model, family.batch(1), training=False)) <= family.tolerance, m


@pytest.mark.parametrize("fact", PUBLISHED, ids=lambda fact: f"{fact.family} {fact.smooth} {fact.balance}")
def test_published_entries(fact: Published) -> None:
    lines = check(fact.family, [fact.entry])
    assert bool(lines) == bool(fact.wrong)
    assert all(fact.wrong in line and "\n" not in line for line in lines)
    if fact.wrong:
        assert max(float(line.rpartition("by ")[2]) for line in lines) > 1e-3, "the output must move"


def test_the_corrected_entries_of_gemma_and_of_experts_are_exact() -> None:
    for name in ("gemma2", "gemma3"):
        assert check(name, [("re:.*pre_feedforward_layernorm", ["re:.*gate_proj", "re:.*up_proj"])]) == []
    experts = "re:.*experts.gate_up_proj"
    assert check("mixtral", [("re:.*post_attention_layernorm", ["re:.*mlp.gate$", experts])]) == []
    (line,) = check("mixtral", [("re:.*post_attention_layernorm", [experts])])
    assert line.startswith("'model.layers.*.mlp.gate' reads the scale of 'model.layers.*.post_attention_layernorm' too")


@every_model
def test_no_valid_table_is_refused(name: str) -> None:
    table = [(m.smooth_layer, m.balance_layers) for m in found(name) if m.kind != "query-key"]
    assert table
    assert check(name, table) == []
    assert check(name, found(name)) == []  # with queries and keys, and all that writes a scale


@pytest.mark.parametrize("part", range(4))
def test_random_corruptions_are_all_caught(part: int) -> None:
    """200 of them: a reader removed, a neighbour's layer, a wrong smooth layer."""
    generator = torch.Generator().manual_seed(part)

    def pick(items: list) -> int:
        return int(torch.randint(len(items), (1,), generator=generator))

    names = MODELS[part::4]
    for turn in range(50):
        name = names[pick(list(names))]
        table = [(m.smooth_layer, list(m.balance_layers)) for m in found(name) if m.kind != "query-key"]
        k, other = pick(table), pick(table)
        (smooth, balance), (wrong, readers) = table[k], table[other]
        if turn % 3 == 0 and len(balance) > 1:
            balance.pop(pick(balance))
        elif turn % 3 == 1 and set(readers) != set(balance) and smooth != wrong:
            balance[pick(balance)] = readers[pick(readers)]
        else:
            wrong = next(s for s, r in table[other:] + table if s != smooth)
            smooth = wrong
        lines = check(name, [(smooth, balance)])
        assert lines, (name, smooth, balance)
        assert all("\n" not in line for line in lines)


def test_values_shared_by_several_queries_move_into_the_output_layer() -> None:
    m = next(m for m in found("llama") if m.kind == "attention")
    assert (m.smooth_layer[-6:], m.balance_layers[0][-6:]) == ("v_proj", "o_proj")
    assert sorted(m.sinks[0].channels) == sorted([*range(m.size)] * 2)


def test_smoothing_keeps_the_outputs_and_evens_the_activations() -> None:
    family, model = TABLED["gemma2"], build(TABLED["gemma2"])
    norm = next(m for m in found("gemma2") if m.smooth_layer.endswith("layers.1.pre_feedforward_layernorm"))
    with torch.no_grad():
        model.get_parameter(norm.sources[0].parameter)[3] = 80.0
    batches = [family.batch(1), family.batch(2)]
    before, spread = run(model, batches[0], training=False), ratio(model, norm.smooth_layer, batches)
    gspace.smooth_(model, batches, alpha=0.5)
    assert change(before, run(model, batches[0], training=False)) <= family.tolerance
    assert ratio(model, norm.smooth_layer, batches) < spread / 3


def ratio(model: nn.Module, name: str, batches: list) -> float:
    """The largest activation of a module over the median of its channels."""
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    for batch in batches:
        run(model, batch, training=False)
    handle.remove()
    largest = torch.cat([t.flatten(0, 1) for t in seen]).abs().amax(0)
    return float(largest.max() / largest.median())


def test_a_llama_on_the_meta_device() -> None:
    family = TABLED["llama"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**family.options))
    batch = {"input_ids": torch.zeros(2, 5, dtype=torch.long, device="meta")}
    assert gspace.mappings(model, batch) == found("llama")
    wrong = gspace.check_mappings(model, [("model.layers.0.input_layernorm", ["model.layers.0.mlp.up_proj"])], batch)
    assert len(wrong) == 4
    assert "moves" not in wrong[0]


SMALL = "encoder_layers=1, decoder_layers=1, d_model=64, encoder_attention_heads=4, decoder_attention_heads=4"


@pytest.mark.parametrize(
    ("config", "built"),
    [
        (f"BartConfig({SMALL})", "BartForConditionalGeneration"),
        (f"WhisperConfig({SMALL})", "WhisperForConditionalGeneration"),
        (f"BartConfig({SMALL}, is_encoder_decoder=False)", "BartForCausalLM"),
        ("BertConfig()", "BertLMHeadModel"),
        ("ViTConfig()", "ViTModel"),
    ],
)
def test_the_config_of_an_encoder_and_decoder_builds_both(config: str, built: str) -> None:
    assert type(load_model(parse_spec(f"hf:{config}"), values=False)).__name__ == built


def test_the_command_finds_an_input_for_an_encoder_and_decoder_or_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["mappings", f"hf:BartConfig({SMALL})"]) == 0
    assert "encoder_attn.q_proj" in capsys.readouterr().out
    for shape in ([], ["--input-shape", "2,80,3000"]):
        assert cli.main(["mappings", f"hf:WhisperConfig({SMALL})", *shape]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "input of WhisperForConditionalGeneration.forward" in line
        assert line.endswith("example_input={name: tensor}")
