"""Which files a vLLM engine's weights are in."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from tests.engines.vllm.test_identity import VOUCHED, directory, drafting, engine, name_of

__all__ = ["directory"]


def test_weights_are_those_of_the_directory_that_vllm_downloads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own cache may have others of the same name, or none: of a past revision, say."""
    hub, ours = tmp_path / "hub", tmp_path / "ours"
    for cache, weights in ((hub, b"old"), (ours, b"new")):
        snapshot = cache / "models--org--tiny" / "snapshots" / (40 * weights.hex()[0])
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_bytes(weights)
        (cache / "models--org--tiny" / "refs").mkdir()
        (cache / "models--org--tiny" / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    there = engine(Path("org/tiny"), download_dir=str(ours))
    before = name_of(there)
    assert before != name_of(engine(Path("org/tiny")))
    next(ours.rglob("*.safetensors")).write_bytes(b"newer")
    assert name_of(there) != before
    draft = drafting(Path("org/tiny"))
    draft.draft_load_config = there[0].load_config
    own = tmp_path / "own"
    own.mkdir()
    (own / "model.safetensors").write_bytes(b"1")
    before = name_of(engine(own, draft=draft))
    next(ours.rglob("*.safetensors")).write_bytes(b"newest")
    assert name_of(engine(own, draft=draft)) != before


def test_weights_that_are_not_the_models_own_files_need_a_name(directory: Path) -> None:
    elsewhere = [{"load_format": each} for each in ("tensorizer", "ipc_cache", "modelexpress", "of_a_plugin")]
    for settings in (*elsewhere, {"load_format": "runai_streamer", "model_weights": "s3://other/weights"}):
        made = engine(directory, **settings)
        with pytest.raises(InvalidRequest, match=r"takes the weights from .* set weights_digest"):
            name_of(made)
        name_of(made, VOUCHED[1])
