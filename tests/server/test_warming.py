"""Hints between nodes: in the envelope of copies in Redis, of what is hot, and followed while memory is young."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.controller import ChainQuery
from kvstore.controller.operators import Operators
from kvstore.errors import DataLoss
from kvstore.seams import EnvelopeRing
from kvstore.server.warming import Warming
from tests.controller.service import Service
from tests.tiers.attacks import KEY, OLD

OURS, THEIRS = EnvelopeRing((KEY,)), EnvelopeRing((OLD,))
TAG_AT = 60


class Place:
    """Keeps hints; stands for a directory, which has tests of its own in a real Redis."""

    def __init__(self) -> None:
        self.data: bytes | None = None

    async def give_hints(self, _fingerprint: bytes, _heat: float, runs: bytes) -> None:
        self.data = runs

    async def hints(self, _fingerprint: bytes) -> bytes | None:
        return self.data


def warming(service: Service, place: Place, kind: str = "none", ring: EnvelopeRing | None = None) -> Any:
    operators = Operators(service.parts, service.controller)
    return Warming(service.parts, service.controller, operators, place, (kind, ring or EnvelopeRing()), 1 << 30)  # type: ignore[arg-type]  # of a directory only its hints are used


async def hot_node() -> Service:
    service = Service(chunks=8)
    session = service.controller.open_session()
    for path in ((1, 2, 3), (1, 2, 4), (9,)):
        await service.store(session, *path)
    for path in ((1, 2, 3), (1, 2, 4)) * 3:
        service.check(session, *path)
    return service


def model_of(service: Service) -> Any:
    return service.parts.catalog.models[service.model]


@pytest.mark.parametrize(("kind", "ring"), [("none", EnvelopeRing()), ("mac", OURS), ("aead", OURS)])
async def test_hints_name_what_is_hot_and_the_shared_beginning_first(kind: str, ring: EnvelopeRing) -> None:
    hot, place = await hot_node(), Place()
    await warming(hot, place, kind, ring)._give()
    new = Service(chunks=8)
    chains = await warming(new, place, kind, ring)._hinted(model_of(new))
    assert chains[0] == hot.query(1, 2).digests
    assert sorted(chains[1:]) == sorted([hot.query(1, 2, 3).digests, hot.query(1, 2, 4).digests])
    assert place.data is not None
    assert (hot.query(1).digests[0] in place.data) is (kind != "aead"), "no digest is shown that could confirm a prompt"


async def test_only_hints_in_our_envelope_are_followed() -> None:
    hot, new, place = await hot_node(), Service(chunks=8), Place()
    follows = warming(new, place, "mac", OURS)
    await warming(hot, place)._give()
    assert await follows._hinted(model_of(new)) == [], "without an envelope"
    await warming(hot, place, "mac", THEIRS)._give()
    assert await follows._hinted(model_of(new)) == [], "with a key that is not ours"
    await warming(hot, place, "mac", OURS)._give()
    assert place.data is not None
    place.data = place.data[:TAG_AT] + bytes([place.data[TAG_AT] ^ 1]) + place.data[TAG_AT + 1 :]
    with pytest.raises(DataLoss):
        await follows._hinted(model_of(new))
    await follows._tried(model_of(new))  # logs it, and goes on


async def test_a_memory_that_is_in_use_is_not_warmed_up() -> None:
    hot, place = await hot_node(), Place()
    await warming(hot, place)._give()
    used = Service(chunks=8)
    asked = []
    follows = warming(used, place)
    follows._warm_up = lambda *_: asked.append(True)  # never awaited: it is not to be called
    await used.store(used.controller.open_session(), 11, 12, 13, 14, 15)
    await follows._tried(model_of(used))
    assert not asked


async def test_what_has_no_room_is_not_brought() -> None:
    used = Service(chunks=8)
    follows = warming(used, Place())
    size = used.layout.total_bytes
    await used.store(used.controller.open_session(), 11, 12, 13)
    assert await follows._is_free_for(4 * size)
    assert not await follows._is_free_for(5 * size), "room for engines' own stores stays"


async def test_hints_whose_chains_do_not_share_their_beginnings_end() -> None:
    """Whoever can write to a Redis without envelopes can make them up: the share of a model bounds them, too."""
    new, asked = Service(chunks=8), list[int]()
    follows = warming(new, Place())
    follows._byte_count_max = 8 * new.layout.total_bytes

    async def prefetch(_session: object, query: ChainQuery, *, dry_run: bool) -> AsyncIterator[None]:
        asked.append(len(query.digests))
        assert len(asked) < 50, "it never ends"
        for nothing in ():
            yield nothing

    follows._operators = SimpleNamespace(prefetch=prefetch)
    known, other = ([bytes([first, number]) * 16 for number in range(30)] for first in (1, 2))
    await follows._warm_up(model_of(new), [known[:5], [*other, *known[:5]]])
    assert asked == [5, 8]
