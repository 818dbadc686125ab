"""What we export, read by llm-compressor itself: its modifiers do with our mappings what they do with its own table.

It needs an environment of its own (`pip install llmcompressor==0.14.0`); without it these tests are skipped.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gspace
from gspace.quantization import awq, smoothquant
from huggingface import DECODER, VOCABULARY, text

pytestmark = pytest.mark.slow
llmcompressor = pytest.importorskip("llmcompressor", reason="llm-compressor wants other versions of transformers")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8}
ROUNDING = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 8}


@pytest.fixture(params=[4, 2], ids=["heads", "grouped queries"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved("Llama", request.param, tmp_path)


def saved(name: str, kv: int, tmp_path: Path) -> Path:
    """A tiny model and its words on disk: llm-compressor asks for both."""
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**DECODER, **SIZES, "num_key_value_heads": kv})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for p in model.parameters():  # gains start alike, which would leave nothing to tell apart
        if p.dim() == 1:
            nn.init.normal_(p, mean=p.mean().item(), std=0.3)
    model.save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({str(k): k for k in range(VOCABULARY)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="0")
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def compressed(folder: Path, *recipe: Any) -> nn.Module:
    ids = torch.randint(3, VOCABULARY, (8, 1, 12), generator=torch.Generator().manual_seed(3))
    batches = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    model = load(folder)
    llmcompressor.oneshot(
        model=model,
        processor=transformers.AutoTokenizer.from_pretrained(folder),
        dataset=torch.utils.data.DataLoader(batches, batch_size=None),
        recipe=list(recipe),
        max_seq_length=12,
        num_calibration_samples=len(batches),
    )
    return model


def layers(model: nn.Module) -> list[gspace.Mapping]:
    """Those that its own table has: the norm in front of the head is not among them."""
    return [m for m in gspace.mappings(model, text(0)) if m.smooth_layer != "model.norm"]


def weights(model: nn.Module, like: nn.Module) -> dict[str, Tensor]:
    return {name: model.get_parameter(name).detach() for name, _ in like.named_parameters()}


def test_smoothquant_with_our_mappings_is_smoothquant_with_its_own(folder: Path) -> None:
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    model = load(folder)
    table = smoothquant(model, layers(model))
    assert len(table) == 4
    theirs = compressed(folder, SmoothQuantModifier(smoothing_strength=0.5))
    ours = compressed(folder, SmoothQuantModifier(smoothing_strength=0.5, mappings=table))
    for name, weight in weights(theirs, model).items():
        assert torch.equal(weight, ours.get_parameter(name)), name
    assert not torch.equal(ours.model.layers[0].input_layernorm.weight, model.model.layers[0].input_layernorm.weight)
    torch.testing.assert_close(ours(**text(1)).logits, model(**text(1)).logits)


def test_its_own_table_of_gemma_2_changes_the_model_and_ours_does_not(tmp_path: Path) -> None:
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    folder = saved("Gemma2", 2, tmp_path)
    model = load(folder)
    before = model(**text(1)).logits.detach()

    def change(**options: Any) -> float:
        after = compressed(folder, SmoothQuantModifier(smoothing_strength=0.5, **options))(**text(1)).logits.detach()
        return float((after - before).abs().max() / before.abs().max())

    assert change() > 0.01
    assert change(mappings=smoothquant(model, layers(model))) < 1e-5


def test_awq_with_our_mappings_is_awq_with_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():  # it pins memory, for copies to a device that is not here
        monkeypatch.setattr(IntermediatesCache, "pin_memory", lambda *args, **kwargs: None)
    model = load(folder)
    entries = awq(model, layers(model))
    values = model.config.num_key_value_heads == model.config.num_attention_heads  # else it has no form for v → o
    assert len(entries) == (8 if values else 6)

    def rounding() -> Any:
        groups = {"all": {"targets": ["Linear"], "weights": ROUNDING}}
        return QuantizationModifier(ignore=["lm_head"], config_groups=groups)

    theirs = compressed(folder, AWQModifier(), rounding())
    ours = compressed(folder, AWQModifier(mappings=[AWQMapping(**entry) for entry in entries]), rounding())
    moved = 0.0
    for name, weight in weights(theirs, model).items():
        if "layernorm" in name:
            moved = max(moved, float((weight - model.get_parameter(name)).detach().abs().max()))
        torch.testing.assert_close(weight, ours.get_parameter(name), rtol=1e-5, atol=1e-6, msg=name)
    assert moved > 0.01
