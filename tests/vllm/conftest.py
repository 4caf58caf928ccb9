"""Tiny models with random weights. Without vLLM (``make setup-vllm``) nothing here is collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvstore_ops.sidecar import Sidecar

from tests.vllm.models import make_adapter, make_eagle, make_glm, make_scaled, make_seeing, make_text

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models: ``llama``, ``other`` (as llama, other weights), ``scaled`` (as llama, with a cache of 8 bits),
    ``eagle`` and ``eagle3`` (llama's drafts), ``glm`` (with a draft of its own), ``qwen3``, ``gemma`` (with windows),
    ``oss`` (gpt-oss, with windows), ``mistral`` (all layers have one), and ``latent`` (DeepSeek V2's MLA)."""
    parts = {"llama": ("llama", 0), "other": ("llama", 1)}
    parts |= {name: (name, 0) for name in ("qwen3", "gemma", "oss", "mistral", "latent")}
    made = {name: make_text(kind, seed, tmp_path_factory.mktemp(name)) for name, (kind, seed) in parts.items()}
    made["eagle"] = make_eagle(made["llama"], tmp_path_factory.mktemp("eagle"))
    made["eagle3"] = make_eagle(made["llama"], tmp_path_factory.mktemp("eagle3"), is_third=True)
    made["glm"] = make_glm(tmp_path_factory.mktemp("glm"))
    made["scaled"] = make_scaled(tmp_path_factory.mktemp("scaled"))
    return made


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for images."""
    return make_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two LoRA adapters of ``llama``."""
    return {name: make_adapter(seed, tmp_path_factory.mktemp(name)) for name, seed in (("one", 1), ("two", 2))}


@pytest.fixture(scope="module")
def durable() -> Iterator[Sidecar]:
    """A real sidecar with a device tier: what it has acknowledged it has again after ``kill -9``."""
    with Sidecar("--capacity", "64 MiB", nvme="128 MiB") as running:
        yield running
