"""Stored contexts, and commands that change what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from kvstore_client import Client

from kvstore.keys import chain_digests
from kvstore.spec import Durability
from tests.ops.command import Done
from tests.specs import bits, random_cache, small_spec, tokens_of

STEP = small_spec().chunk_tokens
_numbers = iter(range(1, 1000))


class Stored:
    """A model of its own with one context on the device. ``digests``: of its chunks, in hex."""

    def __init__(self, client: Client, count: int, tail: int = 0, **spec: Any) -> None:
        self.client = client
        self.number = next(_numbers)
        self.name = f"model-{self.number}"
        self.spec = small_spec(model_id=self.name, weights_digest=f"{self.number:064x}", **spec)
        self.tokens = tokens_of(count * STEP + tail, self.number)
        self.store()
        self.digests = [each.hex() for each in chain_digests(self.tokens, STEP)][:count]

    def store(self) -> None:
        cache = random_cache(self.spec, len(self.tokens), self.number)
        assert self.client.store(self.spec, self.tokens, cache).wait(20) is Durability.LOCAL

    @property
    def hit_count(self) -> int:
        """Tokens that a fetch gives, with every byte as it was stored."""
        found = self.client.fetch(self.spec, self.tokens, verify=True)
        cache = random_cache(self.spec, len(self.tokens), self.number)
        for layer, put in zip(found, cache, strict=True):
            for got, whole in zip(layer, put, strict=True):
                assert not found.token_count or np.array_equal(bits(got), whole[:, : found.token_count])
        return found.token_count

    def prompt(self, place: Path) -> str:
        path = place / "prompt.json"
        path.write_text(json.dumps([int(each) for each in self.tokens]))
        return str(path)


def chunks_of(say: Any, name: str) -> dict[str, Any]:
    """Everything that a listing tells of a model's chunks but its counts of uses, by digest."""
    found = {each["digest"]: each for each in say("ls", "--model", name, "--json").json["chunks"]}
    for each in found.values():
        del each["use_count"]
    return found


def both(say: Any, stored: Stored, *arguments: str) -> tuple[dict[str, int], Done]:
    """A dry run, which changes nothing, and the run, which does what it said. The words of both, and the run."""
    before = chunks_of(say, stored.name)
    dry = say(*arguments, "--dry-run", "--json")
    assert dry.code == 0, dry.err
    assert chunks_of(say, stored.name) == before
    done = say(*arguments, "--json")
    assert dry.json["outcomes"] == done.json["outcomes"], done.err
    assert dry.json["total_count"] == done.json["total_count"]
    return {what: each["chunk_count"] for what, each in done.json["outcomes"].items()}, done
