"""Sizes of small models of every text family the host has."""

SMALL = {
    "llama3": {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2},
    "llama4": {"dim": 64, "n_layers": 2, "n_heads": 4},
    "qwen3": {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "hidden_dim": 96,
    },
    "qwen3_moe": {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "moe_inter_dim": 32,
    },
    "deepseek_v3": {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "kv_lora_rank": 32,
        "inter_dim": 96,
        "moe_inter_dim": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "deepseek_v3_q_lora": {
        "dim": 64,
        "n_layers": 1,
        "n_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "inter_dim": 96,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "gpt_oss": {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "moe_inter_dim": 32,
    },
}
FLAVORS = {"qwen3_moe": "debugmodel_moe"}
FAMILIES = tuple(SMALL)


def shrink(args, family):
    """Set a family's small sizes on the host's model arguments."""
    for key, value in SMALL[family].items():
        assert hasattr(args, key), (family, key)
        setattr(args, key, value)
    if hasattr(args, "moe_args"):
        args.moe_args.num_experts = 4
        args.moe_args.top_k = min(args.moe_args.top_k, 2)
    return args


def host_name(family):
    """Name of the host's model for a family."""
    return family.removesuffix("_moe").removesuffix("_q_lora")
