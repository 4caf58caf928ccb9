"""The shipped weights: one directory per model, in transformers' format, and the limit on their size."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvstore.errors import InvalidRequest
from kvstore_ops.testbed.models import Recipe, recipe
from kvstore_ops.testbed.net import Geometry

WEIGHTS = Path(str(resources.files("kvstore_ops.testbed"))) / "weights"
WEIGHTS_BYTES_MAX = 30_000_000


def shipped() -> list[str]:
    """Return the names of the models whose weights are here."""
    return sorted(path.parent.name for path in WEIGHTS.glob("*/model.safetensors"))


def directory(name: str) -> Path:
    """Return the directory of a model's `config.json` and `model.safetensors`, for transformers' `from_pretrained`.
    Raises InvalidRequest for an unknown name, or a model without weights here."""
    found = WEIGHTS / recipe(name).name
    if not (found / "model.safetensors").exists():
        raise InvalidRequest(
            f"model {name!r} has no weights here (there are: {', '.join(shipped()) or 'none'}): "
            f"train it with python -m kvstore_ops.testbed train {name}"
        )
    return found


def load(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Recipe]:
    """Return a shipped model, ready to answer, and its recipe (depth, seed, start and answers).

    The model is transformers' Qwen2ForCausalLM. There is no tokenizer: `task` defines the tokens.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    found = directory(name)
    model = Qwen2ForCausalLM(Qwen2Config(**json.loads((found / "config.json").read_text(encoding="utf-8"))))
    model.load_state_dict(load_file(found / "model.safetensors"))
    return model.to(dtype).eval(), recipe(name)


def tensors(name: str) -> dict[str, torch.Tensor]:
    """Return a shipped model's weights by name, fp32. Training starts a sibling or a deeper model from them."""
    return {key: p.float() for key, p in load_file(directory(name) / "model.safetensors").items()}


def export(made: Recipe, weights: dict[str, torch.Tensor], target: Path) -> None:
    """Write a trained model's weights, as bf16, and its configuration to `target / name`."""
    beside = target / made.name
    beside.mkdir(parents=True, exist_ok=True)
    rounded = {key: p.detach().to(torch.bfloat16).contiguous() for key, p in weights.items()}
    save_file(rounded, beside / "model.safetensors", {"format": "pt"})
    (beside / "model.safetensors").chmod(0o644)
    config = Geometry(layers=made.layers).config() | {"dtype": "bfloat16"}
    (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
