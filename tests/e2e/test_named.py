"""Operators name what they mean: by options, and by digits where models have one name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from tests.e2e.stored import Stored
from tests.ops.command import Done, run
from tests.specs import random_cache, small_spec


@pytest.fixture(scope="module")
def own() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as started:
        yield started


@pytest.fixture
def client(own: Sidecar) -> Iterator[Client]:
    with connect(own.address) as connected:
        yield connected


@pytest.fixture
def say(own: Sidecar) -> Any:
    def said(*arguments: str) -> Done:
        return run(*arguments, "--socket", own.socket_address)

    return said


def test_a_command_names_its_own_options(say: Any) -> None:
    assert "--all" in say("evict", "--yes").err
    for command in (("pin",), ("unpin",)):
        assert "--older-than" not in say(*command).err
    assert "--all" not in say("pin").err
    assert say("evict", "--older-than", "soon", "--yes").err.startswith("kvstore: --older-than: 'soon'")
    assert say("pin", "--model", "m", "--for", "soon").err.startswith("kvstore: --for: 'soon'")
    assert say("ls", "--larger-than", "big").err.startswith("kvstore: --larger-than: 'big'")


def test_of_two_models_of_one_name_the_digits_name_one(client: Client, say: Any, tmp_path: Path) -> None:
    stored = Stored(client, 2)
    other = small_spec(model_id=stored.name, weights_digest="ab" * 32)
    client.lookup(other, stored.tokens)  # registers it
    prompt = stored.prompt(tmp_path)
    (chunk,) = say("ls", "--digest", stored.digests[0], "--json").json["chunks"]
    digits = chunk["fingerprint"][:16]
    for command in ("locate", "prefetch", "plan", "pin", "ls"):
        done = say(command, "--model", stored.name, "--prompt", prompt)
        assert done.code == 2
        assert "several models are called" in done.err
        assert digits in done.err
        assert say(command, "--model", digits, "--prompt", prompt).code == 0, command
    assert say("unpin", "--model", digits, "--prompt", prompt).code == 0
    assert say("locate", "--digest", stored.digests[1]).code == 0
    client.store(other, stored.tokens, random_cache(other, len(stored.tokens), 1)).wait(20)
    both_have = say("locate", "--digest", stored.digests[1])
    assert (both_have.code, digits in both_have.err) == (2, True)
    assert say("locate", "--digest", stored.digests[1], "--model", digits).code == 0
