"""The client looks at each chunk's header for itself: a server that names another chunk's memory brings a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvstore_client import Client, Exactness, connect
from kvstore_client.copying import Copier
from kvstore_client.fetch.open import open_prefix
from kvstore_client.fetch.target import DenseTarget
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import ChainName
from kvstore_client.planes.prefix import Prefix
from kvstore_client.prompt import EXACTNESSES, Prompt
from kvstore_ops.sidecar import Sidecar

from kvstore.seams import FaultPoints
from kvstore.spec import MissReason
from tests.specs import random_cache, small_spec, tokens_of

SPEC, OTHER = small_spec(), small_spec(weights_digest="cd" * 32)
TOKENS = tokens_of(40, 3)


@pytest.fixture(scope="module")
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address) as connected:
        for spec in (SPEC, OTHER):
            connected.store(spec, TOKENS, random_cache(spec, 40, 1)).wait(10)
        connected.store(SPEC, TOKENS, random_cache(SPEC, 40, 2), exactness=Exactness.DERIVED).wait(10)
        yield connected


def opened(client: Client, asked: Any = SPEC, *, exactness: int = 1) -> Prefix:
    """The prefix of ``TOKENS`` as SPEC's, of a server that was asked for another model's, or other chunks."""
    session, name = client._context.ready(asked)
    prompt = Prompt.of(SPEC, TOKENS, (), Exactness.EXACT)
    return open_prefix(
        session, Wanted.of(SPEC, None, None, (), False), ChainName(name, exactness, 0), prompt.digests, 10.0
    )


def good_tokens(prefix: Prefix) -> int:
    """How many are left when all has come that will."""
    copier, bad = Copier(), set[int]()
    target = DenseTarget(prefix.wanted, None, prefix.token_count)
    prefix.copy_all(target, copier, FaultPoints(), bad, 10.0)
    good = prefix.settle(bad)
    prefix.close()
    copier.close()
    return good


def test_the_chunks_that_were_asked_for_are_taken(client: Client) -> None:
    assert good_tokens(opened(client)) == 40


def test_another_models_chunk_of_the_same_tokens_is_a_miss(client: Client) -> None:
    """Same geometry, same tokens, same digests: only the fingerprint in the header tells them apart."""
    prefix = opened(client, OTHER)
    assert good_tokens(prefix) == 0
    assert prefix.reason is MissReason.CORRUPT


def test_a_derived_chunk_in_an_exact_ones_place_is_a_miss(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXACTNESSES, 2, Exactness.EXACT)
    prefix = opened(client, exactness=2)
    assert good_tokens(prefix) == 0
    assert prefix.reason is MissReason.CORRUPT


def test_a_chunk_of_other_tokens_is_a_miss(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers with the chunks of another prompt of the same model."""
    other = tokens_of(40, 4)
    client.store(SPEC, other, random_cache(SPEC, 40, 4)).wait(10)
    session, name = client._context.ready(SPEC)
    wanted = Wanted.of(SPEC, None, None, (), False)
    mine, others = (Prompt.of(SPEC, each, (), Exactness.EXACT).digests for each in (TOKENS, other))
    answered: Any = _Answered(others, mine)  # a stand-in for a stream
    prefix = open_prefix(session, wanted, ChainName(name, 1, 0), answered, 10.0)
    assert good_tokens(prefix) == 0
    assert prefix.reason is MissReason.CORRUPT


class _Answered:
    """Digests that are asked for, and others that are expected."""

    def __init__(self, asked: list[bytes], expected: list[bytes]) -> None:
        self._asked, self._expected = asked, expected

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._asked)

    def __len__(self) -> int:
        return len(self._asked)

    def __getitem__(self, index: int) -> bytes:
        return self._expected[index]


def shorter(extents: Any) -> None:
    extents[0].byte_count -= 4096


def longer(extents: Any) -> None:
    extents[0].byte_count += 4096


def doubled(extents: Any) -> None:
    extents.append(extents[0])


def cut_in_a_slab(extents: Any) -> None:
    """Two extents whose sizes add up, of which the first ends in the middle of a slab."""
    extents.append(extents[0])
    extents[1].byte_count = 4096 + 2048
    extents[1].offset += extents[0].byte_count - extents[1].byte_count
    extents[0].byte_count -= extents[1].byte_count


@pytest.mark.parametrize("change", [shorter, longer, doubled, cut_in_a_slab])
def test_extents_that_do_not_hold_a_chunk_are_a_miss(local_sidecar: Sidecar, change: Callable[[Any], None]) -> None:
    """Of memory behind a chunk's own nothing is taken for its bytes."""
    with connect(local_sidecar.address) as client:
        client.store(SPEC, TOKENS, random_cache(SPEC, 40, 1)).wait(10)
        session, _ = client._context.ready(SPEC)
        fetch = session.cache.Fetch

        class Stream:
            """The server's, with other extents."""

            def __init__(self, *args: Any, **options: Any) -> None:
                self._stream = fetch(*args, **options)

            def __next__(self) -> Any:
                reply = next(self._stream)
                for chunk in reply.chunks:
                    change(chunk.extents)
                return reply

            def __getattr__(self, name: str) -> Any:
                return getattr(self._stream, name)

        session.cache.Fetch = Stream
        found = client.fetch(SPEC, TOKENS)
        assert (found.token_count, found.reason) == (0, MissReason.CORRUPT)
        session.cache.Fetch = fetch
        assert client.fetch(SPEC, TOKENS).token_count == 40
