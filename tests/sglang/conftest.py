"""SGLang's own controller, host pools and hashes, on CPUs. Nothing is collected without it (``make setup-sglang``)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import pytest

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
if not HAS_SGLANG:
    collect_ignore_glob = ["test_*.py"]
elif importlib.util.find_spec("torchvision") is None:
    # SGLang imports it for images. Its wheels need a GPU's torch, so this environment has none.
    importlib.import_module("transformers.models.auto.processing_auto")  # before it could take the stand-in for real
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        made = MagicMock(__spec__=ModuleSpec(f"torchvision{name}", None), __path__=[], __name__=f"torchvision{name}")
        sys.modules[f"torchvision{name}"] = made


@pytest.fixture(scope="session", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is the only rank."""
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    meeting: Path = tmp_path_factory.mktemp("ranks") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    with get_parallel().override(**alone):
        yield
    dist.destroy_process_group()
