"""``kvstore plan``: a real sidecar's prompt, as it is and with other speeds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import connect
from kvstore_ops.cli import app
from kvstore_ops.sidecar import Sidecar
from typer.testing import CliRunner

from kvstore.errors import InvalidRequest
from kvstore.spec import Durability
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()
COUNT = 2048


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """Its prompt lies on the device alone."""
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as running:
        with connect(running.address) as client:
            receipt = client.store(SPEC, tokens_of(COUNT), random_cache(SPEC, COUNT))
            assert receipt.wait(10.0) is Durability.LOCAL
        running.stop()
        running.start()
        with connect(running.address) as client:
            client.connect_now()
            client.lookup(SPEC, tokens_of(COUNT))
        yield running


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps([int(each) for each in tokens_of(COUNT + 64)]))
    return path


def said(sidecar: Sidecar, prompt: Path, *options: str) -> str:
    place = ("--model", SPEC.model_id, "--prompt", str(prompt), "--address", sidecar.address)
    result = CliRunner().invoke(app, ["plan", *place, *options])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def planned(sidecar: Sidecar, prompt: Path, *options: str) -> Any:
    return json.loads(said(sidecar, prompt, "--json", *options))


def test_what_is_stored_and_what_it_is_worth(sidecar: Sidecar, prompt: Path) -> None:
    found = planned(sidecar, prompt, "--prefill-tokens-per-s", "100")
    assert found["stored"][0]["tier"] == "NVME"
    assert sum(run["token_count"] for run in found["stored"]) == COUNT
    assert [each["way"] for each in found["candidates"]][:2] == ["prefill", "load"]
    assert found["chosen"]["load_stop"] == COUNT
    assert found["chosen"]["ttft_s"] < found["candidates"][0]["ttft_s"]
    assert found["candidates"][0]["ttft_s"] > (COUNT + 64) / 100, "attention comes on top"
    assert "less than a plain prefill" in found["why"]


def test_what_if_the_device_were_slow(sidecar: Sidecar, prompt: Path) -> None:
    found = planned(sidecar, prompt, "--prefill-tokens-per-s", "1000", "--rate", "nvme=1B")
    assert found["chosen"]["way"] == "prefill"
    assert "would take" in found["why"]
    fast = planned(sidecar, prompt, "--prefill-tokens-per-s", "1000", "--rate", "nvme=1GB/s", "--rate", "memory=1GB")
    assert fast["chosen"]["load_stop"] == COUNT


def test_a_picture_is_drawn_of_it(sidecar: Sidecar, prompt: Path) -> None:
    text = said(sidecar, prompt, "--prefill-tokens-per-s", "1000")
    assert "load |" in text
    assert "compute the rest |" in text
    assert "####" in text
    assert "assumed" in text
    assert "--prefill-tokens-per-s" in said(sidecar, prompt), "without it, that is what is missing"


@pytest.mark.parametrize("rate", ["nvme", "nvme=0", "disk=1GB", "nvme=fast"])
def test_a_rate_that_cannot_be_read_is_named(sidecar: Sidecar, prompt: Path, rate: str) -> None:
    with pytest.raises(InvalidRequest):
        said(sidecar, prompt, "--rate", rate)


@pytest.mark.parametrize("speed", ["inf", "1e-300", "1e300"])
def test_a_speed_that_no_engine_has_is_named(sidecar: Sidecar, prompt: Path, speed: str) -> None:
    with pytest.raises(InvalidRequest, match="--prefill-tokens-per-s"):
        said(sidecar, prompt, "--prefill-tokens-per-s", speed)


def test_one_context_at_a_time(sidecar: Sidecar, tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text("[[1, 2], [3]]")
    with pytest.raises(InvalidRequest, match="one context"):
        said(sidecar, tmp_path / "two.json")
