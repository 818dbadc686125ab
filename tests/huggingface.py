"""Hugging Face models from tiny configs as data, each with its units counted by hand from the model's code.

Words of the derivations, for one layer: a *gain* is a norm's weight (and bias) that linear layers read, one unit a
channel. *V → O*: a channel of a value head, written by the value layer and read by the output layer. *Q → K*: a channel
of a head that queries and keys multiply; one a pair of channels where rotary embeddings turn them. *up → down* and
*fc1 → fc2*: the hidden layer of a feed-forward whose activation is homogeneous there. A stream that only norms read has
one scale for all its channels, which they absorb. Whatever is an output has none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 23


def text(seed: int, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, VOCABULARY, (3, 7), generator=generator), **more}


def translation(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1000)
    return text(seed, decoder_input_ids=torch.randint(3, VOCABULARY, (3, 5), generator=generator))


def normal(name: str, *shape: int) -> Callable[[int], dict[str, Tensor]]:
    """A batch of normal numbers under one keyword."""
    return lambda seed: {name: torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


images = normal("pixel_values", 3, 3, 16, 16)


def captions(seed: int) -> dict[str, Tensor]:
    return {**text(seed), **images(seed)}


def speech(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(seed))
    return {**normal("input_features", 3, 5, 16)(seed), "decoder_input_ids": ids}


@dataclass(frozen=True)
class Family:
    """One model class, its config, and what `analyze` must say.

    Attributes:
        model: Name of the class in transformers.
        config: Name of its config's class; `options` are the config's arguments.
        batch: A batch for a seed.
        float32: What the model computes in float32 whatever its dtype; empty if nothing.
        seeds: The batches to analyze along; several where one does not reach every expert.
    """

    name: str
    model: str
    config: str
    options: dict[str, Any]
    batch: Callable[[int], dict[str, Any]]
    H: int
    H_absorbed: int
    float32: str = ""
    seeds: tuple[int, ...] = (0,)

    @property
    def tolerance(self) -> float:
        return 1e-6 if self.float32 else 1e-12


# layers, hidden, intermediate, query heads, key–value heads, channels of a head
L, h, f, q, kv, d = 2, 12, 14, 4, 2, 6
DECODER = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": L,
    "hidden_size": h,
    "intermediate_size": f,
    "num_attention_heads": q,
    "num_key_value_heads": kv,
    "head_dim": d,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RMS = "RMSNorm"
# A layer: gains before attention and before the feed-forward, up → down, V → O, Q → K in rotary pairs; then the last
# norm's gains, which the head reads. The stream is one absorbed scale.
LLAMA = L * (2 * h + f + kv * d + kv * d // 2) + h
# With QK-norm the gains of q and k, shared by the heads, are what Q → K has left: rotary pairs of one head. Every head
# of queries and of keys is divided by its size.
QWEN3 = L * (2 * h + f + kv * d + d // 2) + h
QWEN3_ABSORBED = 1 + L * (q + kv)

FAMILIES = (
    Family("llama", "LlamaForCausalLM", "LlamaConfig", DECODER, text, LLAMA, 1, RMS),
    # Biases of q, k, v scale along.
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", DECODER, text, LLAMA, 1, RMS),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config", DECODER, text, QWEN3, QWEN3_ABSORBED, RMS),
    Family("mistral", "MistralForCausalLM", "MistralConfig", DECODER, text, LLAMA, 1, RMS),
    # q, k, v in one weight, gate and up in another; heads of hidden / heads channels.
    Family(
        "phi3",
        "Phi3ForCausalLM",
        "Phi3Config",
        {**{k: v for k, v in DECODER.items() if k != "head_dim"}, "hidden_size": q * d},
        text,
        H=L * (2 * q * d + f + kv * d + kv * d // 2) + q * d,
        H_absorbed=1,
        float32=RMS,
    ),
    # Norms behind attention and feed-forward write the stream: no unit, but o and down have a scale each that they
    # absorb. The head is the embedding: the last gains may only follow the stream, inversely.
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**DECODER, "tie_word_embeddings": True},
        text,
        H=L * (2 * h + f + kv * d + kv * d // 2),
        H_absorbed=1 + 2 * L,
        float32=RMS,
    ),
    # As Gemma-2, with QK-norm; the last of the layers attends to everything, the others to a window.
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **DECODER,
            "tie_word_embeddings": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        text,
        H=L * (2 * h + f + kv * d + d // 2),
        H_absorbed=1 + 2 * L + L * (q + kv),
        float32=RMS,
    ),
    # Gains before attention and feed-forward, V → O, Q → K (no rotary); GELU leaves fc1 no scale. Tied as Gemma-2.
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": h, "n_layer": L, "n_head": 3},
        text,
        H=L * (2 * h + h + h),
        H_absorbed=1,
    ),
    # Rotary on 4 of the 8 channels of a head: 2 pairs and 4 singles for Q → K; own head.
    Family(
        "gpt-neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {
            **DECODER,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        text,
        H=L * (2 * 16 + 16 + 2 * (4 // 2 + 4)) + 16,
        H_absorbed=1,
    ),
    # As GPT-2 with ReLU: fc1 → fc2.
    Family(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": h,
            "num_hidden_layers": L,
            "ffn_dim": f,
            "num_attention_heads": 3,
            "max_position_embeddings": 16,
            "word_embed_proj_dim": h,
            "pad_token_id": 0,
        },
        text,
        H=L * (2 * h + h + h + f),
        H_absorbed=1,
    ),
)
