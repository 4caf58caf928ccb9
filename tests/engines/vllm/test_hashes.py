"""Chunks named by vLLM's own block hashes, without vLLM: golden vectors, the client's calls, the connector."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Extra, PageHashes, connect
from kvstore_client.engines.vllm.hashes import block_hashes, given_hashes
from kvstore_client.engines.vllm.naming import check_algorithm
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from tests.engines.vllm.engine import BLOCK, SPEC, Engine, blocks_of, request, scheduled
from tests.specs import bits, random_cache, tokens_of

SIXTEEN = "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749"
SALTED = "67e9f72522b34138a0f4be0e3a68d9d49b1e50aea0af7762f6170ad7eebbdeaf"
NONE_HASH = bytes.fromhex("9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0")


def test_the_hashes_are_vllms() -> None:
    """Vectors of vLLM 0.33, sha256_cbor, default seed; 0.32 has the same."""
    assert block_hashes(range(16), 16) == [bytes.fromhex(SIXTEEN)]
    assert block_hashes(range(31), 16, salt="s") == [bytes.fromhex(SALTED)]  # full blocks only
    assert block_hashes(range(15), 16) == []


def test_a_second_block_and_numbers_of_every_width() -> None:
    """Written out by hand: an array of the hash before, the tokens and null."""
    tokens = [23, 24, 255, 256, 65535, 65536]
    body = b"\x17" + b"\x18\x18" + b"\x18\xff" + b"\x19\x01\x00" + b"\x19\xff\xff" + b"\x1a" + struct.pack(">I", 65536)
    first = hashlib.sha256(b"\x83\x58\x20" + NONE_HASH + b"\x86" + body + b"\xf6").digest()
    second = hashlib.sha256(b"\x83\x58\x20" + first + b"\x86" + body + b"\xf6").digest()
    assert block_hashes(tokens * 2, 6) == [first, second]


def test_what_a_cache_depends_on_is_in_the_hash() -> None:
    tokens = list(range(32))
    told: list[dict[str, Any]] = [
        {}, {"salt": "a"}, {"salt": "b"}, {"seed": "0"}, {"lora": ("a", "/a")}, {"lora": ("a", "/b")},
        {"items": [(2, 3, "cat")]}, {"items": [(3, 3, "cat")]}, {"items": [(2, 3, "dog")]},
        {"items": [(2, 3, "cat"), (20, 4, "dog")]},
    ]  # fmt: skip
    assert len({block_hashes(tokens, 16, **each)[-1] for each in told}) == len(told)
    late = block_hashes(tokens, 16, items=[(14, 4, "cat")])  # it reaches into the second block
    assert late[0] != block_hashes(tokens, 16)[0]
    assert late != block_hashes(tokens, 16, items=[(14, 2, "cat")])


# ---------------------------------------------------------------- the client's calls


def named(tokens: Any, page: int = BLOCK, **more: Any) -> PageHashes:
    count = len(tokens) // page * page
    return given_hashes(block_hashes(tokens, page, **more), page, np.asarray(tokens[:count]))


def test_a_prompt_by_its_engines_hashes(sidecar: Sidecar) -> None:
    tokens = tokens_of(44, 7)  # chunks of 16, and a tail of 12
    with connect(sidecar.address) as client:
        kv = random_cache(SPEC, 44)
        assert client.store(SPEC, named(tokens), kv).wait().name == "MEMORY"
        assert client.lookup(SPEC, tokens).prefix_token_count == 0  # our own digests are others
        assert client.lookup(SPEC, given_hashes(block_hashes(tokens, BLOCK), BLOCK)).prefix_token_count == 44
        fork = [*tokens[:40], 1, 2, 3, 4]
        assert client.lookup(SPEC, named(fork)).prefix_token_count == 32
        longer = [*tokens, *tokens[:8]]
        assert client.lookup(SPEC, named(longer)).prefix_token_count == 44  # the tail, too
        found = client.fetch(SPEC, named(longer))
        assert found.token_count == 44
        for (k, v), (wanted_k, wanted_v) in zip(found, kv, strict=True):
            assert np.array_equal(bits(k), wanted_k)
            assert np.array_equal(bits(v), wanted_v)
        assert client.lookup(SPEC, named(tokens, salt="x")).prefix_token_count == 0
        with client.start_store(SPEC, named(longer)) as writer:
            assert writer.wanted_token_count == 52 - 32


def test_what_cannot_be_a_prompt(sidecar: Sidecar) -> None:
    tokens = tokens_of(32, 8)
    hashes = block_hashes(tokens, BLOCK)
    with connect(sidecar.address) as client:
        with pytest.raises(InvalidRequest, match="pages of 5 tokens do not divide chunks of 16"):
            client.lookup(SPEC, given_hashes(block_hashes(tokens, 5), 5))
        with pytest.raises(InvalidRequest, match="extras must be empty"):
            client.lookup(SPEC, named(tokens), extras=[Extra(0, b"salt")])
        with pytest.raises(InvalidRequest, match="needs the tokens"):
            client.start_store(SPEC, given_hashes(hashes, BLOCK))
    with pytest.raises(InvalidRequest, match="32 bytes each"):
        PageHashes("x", 4, [b"short"])
    with pytest.raises(InvalidRequest, match="31 tokens are not 8 pages of 4"):
        given_hashes(hashes, BLOCK, tokens[:31])
    with pytest.raises(InvalidRequest, match="scheme"):
        PageHashes("Not this", 4, hashes)


# ---------------------------------------------------------------- the connector


def asked(name: str, tokens: Any, **more: Any) -> Any:
    """A request whose blocks vLLM has hashed."""
    made = request(name, tokens, **more)
    salt = more.get("cache_salt")
    made.block_hashes = block_hashes(made.all_token_ids, BLOCK, salt=salt)
    return made


@pytest.fixture
def engines(sidecar: Sidecar) -> Iterator[tuple[Engine, Engine]]:
    made = Engine(sidecar.address, digests="vllm"), Engine(sidecar.address, digests="vllm")
    yield made
    for each in made:
        each.close()


def test_engines_share_by_vllms_hashes(engines: tuple[Engine, Engine], sidecar: Sidecar) -> None:
    first, second = engines
    tokens = tokens_of(42, 9)
    filled = first.keep(asked("a", tokens), blocks_of(42))
    with connect(sidecar.address) as client:
        assert client.lookup(SPEC, named(tokens)).prefix_token_count == 40  # who has the hashes finds it
    again, blocks = asked("b", tokens), blocks_of(42, 20)
    assert second.admit(again, blocks) == 40
    second.worker.begin(second.scheduler.step(scheduled("x", [], 0, 0)))
    assert second.landed() == {"b"}
    for have, want in zip(second.content(blocks[:10]), filled, strict=True):
        assert torch.equal(have, want[:10])
    assert second.admit(asked("c", tokens, cache_salt="s"), blocks) == 0


def test_hashes_of_another_kind_are_not_used(engines: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture) -> None:
    """A vLLM that hashes otherwise, or by a seed that we do not know of."""
    engine, _ = engines
    tokens = tokens_of(40, 10)
    odd = request("a", tokens, block_hashes=block_hashes(list(map(int, tokens)), BLOCK, seed="7"))
    assert engine.admit(odd, blocks_of(40)) == 0
    assert engine.compute(odd, blocks_of(40), 0, 40).saves == []
    coarse = request("b", tokens, block_hashes=block_hashes(list(map(int, tokens)), 2 * BLOCK))
    assert engine.compute(coarse, blocks_of(40), 0, 40).saves == []
    assert caplog.text.count("nothing is loaded or kept") == 1


def test_blocks_that_are_not_hashed_yet_wait(engines: tuple[Engine, Engine]) -> None:
    engine, _ = engines
    late = asked("late", tokens_of(40, 11))
    assert engine.admit(late, blocks_of(40)) == 0
    del late.block_hashes[5:]
    (save,) = engine.compute(late, blocks_of(40), 0, 40).saves
    assert save.tokens.size == 20


def test_a_seed_of_ones_own_is_said(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    engine = Engine(sidecar.address, digests="vllm")
    assert "PYTHONHASHSEED=5" in caplog.text
    seeded = request("a", range(40), block_hashes=block_hashes(range(40), BLOCK, seed="5"))
    engine.keep(seeded, blocks_of(40))
    with connect(sidecar.address) as client:
        found = given_hashes(block_hashes(range(40), BLOCK, seed="5"), BLOCK, seed="5")
        assert client.lookup(SPEC, found).prefix_token_count == 40
    engine.close()


def test_other_algorithms_are_refused() -> None:
    check_algorithm("kvstore", "xxhash")
    check_algorithm("vllm", "sha256_cbor")
    for algorithm in ("sha256", "xxhash_cbor"):
        with pytest.raises(InvalidRequest, match="--prefix-caching-hash-algo sha256_cbor"):
            check_algorithm("vllm", algorithm)
