"""More Hugging Face models: post-norm, encoder–decoder, images, sound, experts. See `huggingface` for the words."""

from huggingface import (
    DECODER,
    RMS,
    VOCABULARY,
    Family,
    L,
    captions,
    d,
    f,
    h,
    images,
    kv,
    normal,
    q,
    speech,
    text,
    translation,
)

BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": h,
    "num_hidden_layers": L,
    "num_attention_heads": 3,
    "intermediate_size": f,
    "max_position_embeddings": 16,
}
# Post-norm: what a norm writes is summed and normed again, so its channels share one scale: embeddings, every norm but
# the last. The last norm's h gains are read by the head's dense layer alone; the head's own norm is tied to the table.
BERT_UNITS = L * (h + h) + h  # Q → K and V → O a layer
BERT_ABSORBED = 1 + 1 + L + (L - 1)  # tables, their norm, norms behind attention, norms behind feed-forwards

T5 = {
    "vocab_size": VOCABULARY,
    "d_model": h,
    "d_kv": d,
    "d_ff": f,
    "num_layers": L,
    "num_decoder_layers": 3,
    "num_heads": 5,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}
INNER = 5 * d
# Gains before each part; V → O and Q → K of its attention; the hidden layer. The encoder's last norm is an output.
T5_UNITS = L * (2 * h + 2 * INNER + f) + 3 * (3 * h + 4 * INNER + f)

# Swin: stages of 2 and 1 blocks, 8 and 16 channels.
SWIN = (2, 8), (1, 16)
# ConvNeXt and SegFormer: stages of 2 and 1 blocks, 6 and 10 channels.
STAGES = (2, 6), (1, 10)

EAGER = {"experts_implementation": "eager"}  # the grouped products of the default take no float64

MORE = (
    Family("bert-gelu", "BertForMaskedLM", "BertConfig", BERT, text, BERT_UNITS, BERT_ABSORBED),
    # fc1 → fc2, and the head's dense layer has one scale in front of its norm.
    Family(
        "bert-relu",
        "BertForMaskedLM",
        "BertConfig",
        {**BERT, "hidden_act": "relu"},
        text,
        H=BERT_UNITS + L * f,
        H_absorbed=BERT_ABSORBED + 1,
    ),
    # The table starts both streams and ends in the logits: one scale, against the decoder's last gains.
    Family(
        "t5-relu",
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        translation,
        H=T5_UNITS,
        H_absorbed=1,
        float32="the mean square of RMSNorm",
    ),
    # wi_1 → wo, the gate wi_0 goes through GELU. This config no longer unties the head, only leaves out its factor.
    Family(
        "t5-gated",
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        translation,
        H=T5_UNITS,
        H_absorbed=1,
        float32="the mean square of RMSNorm",
    ),
    # Pre-norm with GELU: two gains, V → O, Q → K a layer; the last norm's gains are read by the classifier.
    Family(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": h,
            "num_hidden_layers": L,
            "num_attention_heads": 3,
            "intermediate_size": f,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 5,
        },
        images,
        H=L * (2 * h + h + h) + h,
        H_absorbed=1,
    ),
    # Blocks as in ViT; merging patches norms 4 · 8 channels before a linear layer; the last norm's 16 gains. Absorbed:
    # the patches in front of their norm, and the stream of each stage.
    Family(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [n for n, _ in SWIN],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 5,
        },
        images,
        H=sum(n * (2 * c + c + c) for n, c in SWIN) + 4 * 8 + 16,
        H_absorbed=1 + 2,
    ),
    # Blocks as in ViT, text h and images 10 channels. Outputs are the text behind its last norm, the image's stream
    # (before its last norm, whose 10 gains the projection reads) and both projections. Absorbed: the text's stream, and
    # the patches in front of their norm.
    Family(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        {
            "projection_dim": 7,
            "text_config": {
                "vocab_size": VOCABULARY,
                "hidden_size": h,
                "intermediate_size": f,
                "num_hidden_layers": L,
                "num_attention_heads": 3,
                "max_position_embeddings": 16,
                "eos_token_id": 2,
            },
            "vision_config": {
                "hidden_size": 10,
                "intermediate_size": f,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
        },
        captions,
        H=L * 4 * h + 3 * 4 * 10 + 10,
        H_absorbed=2,
    ),
    # A block: the norm's gains, and what the last linear layer writes, behind gains of its own (layer scale). Between
    # stages and before the classifier a norm's gains. Absorbed: patches, the stream of each stage, the depthwise
    # convolution of each block.
    Family(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {
            "num_stages": 2,
            "hidden_sizes": [c for _, c in STAGES],
            "depths": [n for n, _ in STAGES],
            "patch_size": 2,
            "image_size": 16,
            "num_labels": 5,
        },
        images,
        H=sum(n * 2 * c + c for n, c in STAGES),
        H_absorbed=1 + 2 + 3,
    ),
    # Encoder: its stream starts behind a GELU and its last norm is an output; a layer has two gains, V → O, Q → K.
    # Decoder: three gains and two attentions a layer; tied head. Absorbed: the decoder's stream.
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 5,
            "d_model": h,
            "encoder_layers": L,
            "decoder_layers": 3,
            "encoder_attention_heads": 3,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": f,
            "decoder_ffn_dim": f,
            "max_source_positions": 8,
            "max_target_positions": 12,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "begin_suppress_tokens": None,
        },
        speech,
        H=L * (2 * h + 2 * h) + 3 * (3 * h + 4 * h),
        H_absorbed=1,
    ),
    # The norm before the projection: 7 gains. Each of the 6 taps of the positional convolution is divided by its size
    # (weight norm, no ε): 6. V → O and Q → K a layer, the last norm's gains. Absorbed: the 5 rows before the first
    # group norm, and the norms of the encoder as in BERT.
    Family(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": h,
            "num_hidden_layers": L,
            "num_attention_heads": 3,
            "intermediate_size": f,
            "conv_dim": [5, 7],
            "conv_stride": [3, 2],
            "conv_kernel": [4, 3],
            "num_conv_pos_embeddings": 6,
            "num_conv_pos_embedding_groups": 2,
            "layerdrop": 0.0,
            "mask_time_prob": 0.0,
        },
        normal("input_values", 3, 80),
        H=7 + 6 + L * (h + h) + h,
        H_absorbed=5 + 1 + L + (L - 1),
    ),
    # Frozen BatchNorm adds constants: no unit in the backbone. Encoder: V → O, Q → K, fc1 → fc2; sine positions are
    # added to the stream, so only the norm before the feed-forward has a scale, absorbed. Decoder: two attentions and
    # fc1 → fc2, but for the first V, which is pinned, as its weights multiply zeros; the learned queries and the norms
    # they are added to share one scale; the norm before each feed-forward, the last before the final norm, and the
    # first attention (added to zeros) have one each. Boxes: two hidden layers.
    Family(
        "detr",
        "DetrForObjectDetection",
        "DetrConfig",
        {
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 4,
                "hidden_sizes": [6, 8],
                "depths": [1, 1],
                "layer_type": "basic",
                "out_features": ["stage2"],
            },
            "num_queries": 5,
            "d_model": h,
            "encoder_layers": L,
            "decoder_layers": 3,
            "encoder_ffn_dim": f,
            "decoder_ffn_dim": 9,
            "encoder_attention_heads": 3,
            "decoder_attention_heads": 2,
            "num_labels": 4,
        },
        images,
        H=L * (2 * h + f) + 3 * (4 * h + 9) + 2 * h - h,
        H_absorbed=L + 1 + 3 + 1 + 1,
    ),
    # A block: two gains, V → O, Q → K, fc1 → depthwise convolution 3c; where keys are taken from fewer places, the
    # gains of the norm between. A stage ends in gains. Head: 5 channels a stage, fused into 5 that BatchNorm rescales.
    # Absorbed: a stage's patches, its stream, the convolution before the norm of keys; the fused 5.
    Family(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [n for n, _ in STAGES],
            "hidden_sizes": [c for _, c in STAGES],
            "sr_ratios": [2, 1],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [3, 3],
            "decoder_hidden_size": 5,
            "num_labels": 4,
        },
        images,
        H=sum(n * (2 * c + c + c + 3 * c) + c for n, c in STAGES) + 2 * 6 + 2 * 5 + 5,
        H_absorbed=(1 + 1 + 2) + (1 + 1) + 5,
    ),
    # As Llama; every one of 3 experts has its own up → down.
    Family(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, **EAGER, "num_local_experts": 3, "num_experts_per_tok": 2},
        text,
        H=L * (2 * h + 3 * f + kv * d + kv * d // 2) + h,
        H_absorbed=1,
        float32=RMS,
        seeds=(0, 2, 3),
    ),
    # As Qwen-3; 3 experts of 5 in the second layer, a plain feed-forward in the first.
    Family(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **DECODER,
            **EAGER,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 5,
            "mlp_only_layers": [0],
        },
        text,
        H=L * (2 * h + kv * d + d // 2) + f + 3 * 5 + h,
        H_absorbed=1 + L * (q + kv),
        float32=RMS,
        seeds=(0, 2, 3),
    ),
    # Queries, and keys with values, pass through 7 and 5 channels with a norm: their gains. V → O 3 a head; Q → K 3 a
    # head, and 2 rotary pairs that all heads share. One plain layer of f; then 4 experts of 5 and a shared one.
    # Absorbed: the stream and the two rows in front of the inner norms.
    Family(
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **{k: v for k, v in DECODER.items() if k != "head_dim"},
            **EAGER,
            "num_key_value_heads": q,
            "q_lora_rank": 7,
            "kv_lora_rank": 5,
            "qk_nope_head_dim": 3,
            "qk_rope_head_dim": 4,
            "v_head_dim": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 5,
            "first_k_dense_replace": 1,
        },
        text,
        H=L * (2 * h + 7 + 5 + q * 3 + q * 3 + 4 // 2) + f + (4 + 1) * 5 + h,
        H_absorbed=1 + 2 * L,
        float32="RMSNorm and the router",
        seeds=(0, 2, 3),
    ),
)
