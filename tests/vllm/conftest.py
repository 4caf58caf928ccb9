"""Tiny models with random weights. Without vLLM (``make setup-vllm``) nothing here is collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvstore_ops.sidecar import Sidecar

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def _make(kind: str, seed: int, directory: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    model_class, config_class = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    }[kind]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    model_class(config).to(torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models of one geometry: ``llama``, ``other`` (as llama, other weights) and ``qwen3``."""
    parts = {"llama": ("llama", 0), "other": ("llama", 1), "qwen3": ("qwen3", 0)}
    return {name: _make(kind, seed, tmp_path_factory.mktemp(name)) for name, (kind, seed) in parts.items()}


@pytest.fixture(scope="module")
def durable() -> Iterator[Sidecar]:
    """A real sidecar with a device tier: what it has acknowledged it has again after ``kill -9``."""
    with Sidecar("--capacity", "64 MiB", nvme="128 MiB") as running:
        yield running
