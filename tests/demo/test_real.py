"""The demo's questions to a pretrained model: answered where there is one, left out with the reason where not."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from kvstore_client import connect
from kvstore_ops.demo import real
from kvstore_ops.pretrained import Absent, pretrained
from kvstore_ops.sidecar import Sidecar
from rich.console import Console


def test_without_the_model_the_scene_is_left_out_and_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVSTORE_MODEL_DIRECTORY", str(tmp_path))
    console = Console(width=200, file=io.StringIO(), record=True)
    assert real.perform(None, console) == []  # type: ignore[arg-type]  # nobody is asked
    said = console.export_text()
    assert "the trained models answer alone" in said
    assert "make model" in said


@pytest.mark.slow
@pytest.mark.timeout(400)  # a busy machine needs several times what a quiet one does
def test_the_model_answers_from_documents_that_were_computed_before(monkeypatch) -> None:
    found = pretrained()
    if isinstance(found, Absent):
        pytest.skip(str(found))
    monkeypatch.setattr(real, "COUNT", 1)
    console = Console(width=200, file=io.StringIO(), record=True)
    with Sidecar("--capacity", "256 MiB") as sidecar, connect(sidecar.address) as client:
        (answered,) = real.perform(client, console)
    assert answered.reused == 8 * 128
    assert answered.in_full.startswith(answered.right)
    assert answered.question in console.export_text().replace("\n", " ")
