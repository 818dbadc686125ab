"""Mappings that llm-compressor publishes, as of August 2026 (commit ab1ba3ef), for the models of `huggingface`.

Facts, written down from `modifiers/transform/{awq/mappings,smoothquant/utils}.py`. Where transformers keeps all experts
in one parameter, `experts.*.gate_proj` and `experts.*.up_proj` are `experts.gate_up_proj` here; llm-compressor takes
them apart before it applies its tables. An entry that both tables have is here once, in AWQ's spelling.
"""

from dataclasses import dataclass
from typing import Any

from huggingface import DECODER, FAMILIES, Family, d, q, text
from huggingface_more import EAGER, MORE


@dataclass(frozen=True)
class Published:
    """One entry of a table.

    Attributes:
        family: Name in `FAMILIES`.
        smooth: The smooth layer.
        balance: The balance layers, separated by spaces.
        wrong: What a check must say of it; empty if the entry is exact.
        source: The table it is from.
    """

    family: str
    smooth: str
    balance: str
    wrong: str = ""
    source: str = "AWQ"

    @property
    def entry(self) -> tuple[str, list[str]]:
        return f"re:.*{self.smooth}", [f"re:.*{name}" for name in self.balance.split()]


QKV, MLP = "q_proj$ k_proj$ v_proj$", "gate_proj$ up_proj$"
ATTENTION, DOWN = ("v_proj$", "o_proj$"), ("up_proj$", "down_proj$")
DEFAULT = (("input_layernorm$", QKV), ATTENTION, ("post_attention_layernorm$", MLP), DOWN)
GEMMA = (("input_layernorm$", QKV), ATTENTION, ("pre_feedforward_layernorm$", MLP), DOWN)
PHI = (
    ("input_layernorm$", "qkv_proj$"),
    ("qkv_proj$", "o_proj$"),
    ("post_attention_layernorm$", "gate_up_proj$"),
    ("gate_up_proj$", "down_proj$"),
)
COHERE = (
    ("input_layernorm$", "self_attn.q_proj$ self_attn.k_proj$ self_attn.v_proj$ mlp.gate_proj$ mlp.up_proj$"),
    ATTENTION,
    DOWN,
)
EXPERTS = (
    ("input_layernorm$", QKV),
    ATTENTION,
    ("post_attention_layernorm$", "mlp.gate$ mlp.experts.gate_up_proj$"),
    DOWN,
)
DEEPSEEK = (
    ("input_layernorm$", "(q|q_a)_proj$ kv_a_proj_with_mqa$"),
    ("q_a_layernorm$", "q_b_proj$"),
    ("kv_a_layernorm$", "kv_b_proj$"),
    ("post_attention_layernorm$", "mlp.gate$ gate_proj$ up_proj$"),
    DOWN,
)
WHISPER = (("final_layer_norm", "fc1"),)
OPT = (("self_attn_layer_norm", "q_proj k_proj v_proj"), ("final_layer_norm", "fc1"))  # the modifier's example
EXACT = {
    "llama": DEFAULT,
    "qwen2": DEFAULT,
    "qwen3": DEFAULT,
    "mistral": DEFAULT,
    "gemma2": GEMMA,
    "gemma3": GEMMA[1:],
    "phi3": PHI,
    "opt": OPT,
    "whisper": WHISPER,
    "cohere": COHERE,
    "mixtral": (("input_layernorm$", QKV),),
    "qwen3-moe": EXPERTS,
    "deepseek-v3": DEEPSEEK,
}
STREAM = "carries no scale that can move"
ROUTER = "mlp.gate' reads the scale"
SMOOTHED = ("input_layernorm$", QKV), ("post_attention_layernorm$", MLP)
WRONG = (
    # SmoothQuant's default: behind Gemma's attention stands a norm that writes the stream.
    Published("gemma2", *SMOOTHED[1], STREAM, "SmoothQuant"),
    Published("gemma3", *SMOOTHED[1], STREAM, "SmoothQuant"),
    # SmoothQuant: the pattern reaches the decoder's attention to the encoder too.
    Published("whisper", "self_attn_layer_norm", "k_proj v_proj q_proj", "does not read the scale", "SmoothQuant"),
    # AWQ: the router is missing.
    Published("glm4-moe-lite", *SMOOTHED[1], ROUTER),
    Published("ernie4.5-moe", *SMOOTHED[1], ROUTER),
    # SmoothQuant: the same.
    Published("glm4-moe", *SMOOTHED[1], ROUTER, "SmoothQuant"),
    # AWQ until April 2026, for Qwen2-MoE and Qwen3-MoE.
    Published("qwen3-moe", "post_attention_layernorm$", "mlp.experts.gate_up_proj$", ROUTER, "AWQ until April 2026"),
)
OF = {"opt": "SmoothQuant", "whisper": "SmoothQuant", "mixtral": "SmoothQuant"}
PUBLISHED = (
    *(Published(name, *entry, source=OF.get(name, "AWQ")) for name, table in EXACT.items() for entry in table),
    Published("gemma3", *SMOOTHED[0], source="SmoothQuant"),
    *WRONG,
)

HEADLESS = {k: v for k, v in DECODER.items() if k != "head_dim"}
SPARSE = {
    **HEADLESS,
    **EAGER,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 7,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "mlp_layer_types": ["dense", "sparse"],
}
ERNIE = {
    **HEADLESS,
    **EAGER,
    "hidden_size": q * d,
    "moe_intermediate_size": 5,
    "moe_num_experts": 3,
    "moe_k": 3,  # of random experts some get no token
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
}


def _family(name: str, model: str, options: dict[str, Any], seeds: tuple[int, ...] = (0, 2, 3)) -> Family:
    config = model.replace("ForCausalLM", "Config")
    return Family(name, model, config, options, text, 0, 0, "RMSNorm", seeds)


TABLED = {
    **{family.name: family for family in (*FAMILIES, *MORE)},
    "cohere": _family("cohere", "CohereForCausalLM", {**HEADLESS, "hidden_size": q * d}, (0,)),
    "glm4-moe": _family("glm4-moe", "Glm4MoeForCausalLM", {**SPARSE, "first_k_dense_replace": 1, "head_dim": 6}),
    "glm4-moe-lite": _family("glm4-moe-lite", "Glm4MoeLiteForCausalLM", {**SPARSE, **LATENT}),
    "ernie4.5-moe": _family("ernie4.5-moe", "Ernie4_5_MoeForCausalLM", ERNIE),
}
# The models of the claim: every mapping of each is tried.
MODELS = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "opt", "gpt2", "bert-gelu", "bert-relu", "vit",
    "whisper", "cohere", "mixtral", "qwen3-moe", "deepseek-v3",
)  # fmt: skip
