"""Tiny models with random weights. ``python -m tests.vllm.models DIRECTORY`` makes the one that sees."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def make_text(kind: str, seed: int, directory: Path) -> Path:
    import torch
    import transformers

    small: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
    }  # fmt: skip
    heads = {"num_key_value_heads": 2, "head_dim": 32}
    latent = {
        "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 3, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    }  # fmt: skip
    windows = {
        **heads, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 32,
    }  # fmt: skip
    experts = {**heads, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
    name, more = {
        "llama": ("Llama", heads), "qwen3": ("Qwen3", heads), "gemma": ("Gemma3", windows), "oss": ("GptOss", experts),
        "mistral": ("Mistral", {**heads, "sliding_window": 64}), "latent": ("DeepseekV2", latent),
    }[kind]  # fmt: skip
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}{'Text' if kind == 'gemma' else ''}Config")(**{**small, **more})
    getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).save_pretrained(directory)
    return directory


def make_scaled(directory: Path) -> Path:
    """A tiny Llama whose checkpoint gives its cache 8 bits, and scales so small that they show in its answers."""
    import torch
    from safetensors.torch import load_file, save_file

    make_text("llama", 0, directory)
    weights = load_file(directory / "model.safetensors")
    for layer in range(3):
        for part, scale in (("k", 0.003), ("v", 0.002)):
            weights[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor(scale * (layer + 1))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme,
        "quantization_status": "frozen",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_eagle(target: Path, directory: Path, *, is_third: bool = False) -> Path:
    """A draft of two layers for a tiny Llama, which reads hidden states of its last layer, or (EAGLE 3) of three."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    name = "Eagle3LlamaForCausalLM" if is_third else "EagleLlamaForCausalLM"
    config |= {"architectures": [name], "num_hidden_layers": 2}
    made = torch.Generator().manual_seed(5)
    hidden, inner, kv = config["hidden_size"], config["intermediate_size"], 64
    shapes = {"fc": (hidden, 3 * hidden), "lm_head": (512, hidden)} if is_third else {"fc": (hidden, 2 * hidden)}
    for layer in range(2):
        given = 2 * hidden if is_third and not layer else hidden
        for part, rows, columns in (
            ("self_attn.q_proj", hidden, given), ("self_attn.k_proj", kv, given), ("self_attn.v_proj", kv, given),
            ("self_attn.o_proj", hidden, hidden), ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):  # fmt: skip
            shapes[f"layers.{layer}.{part}"] = (rows, columns)
    weights = {f"{name}.weight": 0.3 * torch.randn(shape, generator=made) for name, shape in shapes.items()}
    norms = ["layers.0.post_attention_layernorm", "layers.1.input_layernorm", "layers.1.post_attention_layernorm"]
    norms += ["layers.0.input_layernorm", "layers.0.hidden_norm", "layers.1.hidden_norm", "norm"] if is_third else []
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_glm(directory: Path) -> Path:
    """A tiny GLM 4.5, whose last layer drafts tokens (MTP)."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, max_position_embeddings=2048,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0, num_nextn_predict_layers=1,
        tie_word_embeddings=False, use_qk_norm=False,
    )  # fmt: skip
    transformers.Glm4MoeForCausalLM(config).to(torch.float32).save_pretrained(directory)
    weights, draft = load_file(directory / "model.safetensors"), "model.layers.3"
    attention = {name: each for name, each in weights.items() if ".layers.2." in name and ".mlp." not in name}
    weights |= {name.replace("layers.2", "layers.3"): each.clone() for name, each in attention.items()}
    shapes = {"mlp.gate": (4, 128), "eh_proj": (128, 256)}
    for name in (*(f"mlp.experts.{number}" for number in range(4)), "mlp.shared_experts"):
        shapes |= {f"{name}.gate_proj": (64, 128), f"{name}.up_proj": (64, 128), f"{name}.down_proj": (128, 64)}
    weights |= {f"{draft}.{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"{draft}.{name}.weight": torch.ones(128) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{draft}.mlp.gate.e_score_correction_bias"] = torch.zeros(4)
    weights[f"{draft}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{draft}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def make_seeing(directory: Path) -> Path:
    """A tiny BLIP-2: images of 56 x 56 become 8 tokens before a prompt."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<s>", "</s>", "<image>", "<unk>", *(f"t{number}" for number in range(5, 512))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    images = transformers.BlipImageProcessorPil(size={"height": 56, "width": 56})
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=8).save_pretrained(directory)
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "initializer_range": 0.3}
    config = transformers.Blip2Config(
        vision_config={**small, "hidden_size": 64, "image_size": 56, "patch_size": 14},
        qformer_config={**small, "hidden_size": 64, "vocab_size": 100, "encoder_hidden_size": 64},
        text_config={
            "model_type": "opt", "vocab_size": 512, "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 512, "word_embed_proj_dim": 128, "init_std": 0.3,
        },
        num_query_tokens=8, image_token_index=3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Blip2ForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    return directory


def make_adapter(seed: int, directory: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    made = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for part, rows in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = torch.randn(8, 128, generator=made)
            weights[f"{name}.lora_B.weight"] = torch.randn(rows, 8, generator=made)
    save_file(weights, str(directory / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


if __name__ == "__main__":
    make_seeing(Path(sys.argv[1]))
