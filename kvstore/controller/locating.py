"""Locates: the nodes and tiers that have a prompt's prefix, and the length that each has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from kvstore.controller.fetches.lookup import namespaces_of
from kvstore.controller.parts import Parts
from kvstore.controller.values import ChainQuery, Located, NodePrefix
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.movement import TierWord
from kvstore.seams import Deadline, Pauses
from kvstore.spec import SPEED, Tier

LOCATED_CHUNKS_MAX = 16_384
"""Chunks of all chains of a call, times their parts."""
KEYS_AT_ONCE = 256
"""Chunks whose keys are computed between two pauses."""
DIRECTORY_S = 1.0
DIRECTORY_CHUNKS_PER_S = 4000
"""The directory may take ``DIRECTORY_S`` for its answer, and the time for its chunks. What this node has does not wait
longer for a Redis that stands still."""
NO_DIRECTORY = "other nodes are not known here: set tiers.redis.url to a server that they use, too"


class Locates:
    """Locates prefixes for one tenant. Answers about this node are certain; those about other nodes and about shared
    tiers are hints."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def locate(self, queries: Sequence[ChainQuery], deadline: Deadline) -> Located:
        """Locate the prefix of each chain. Raises InvalidRequest for more than ``LOCATED_CHUNKS_MAX`` chunks."""
        if sum(len(query.digests) * (len(query.hidden_layers) + 1) for query in queries) > LOCATED_CHUNKS_MAX:
            raise InvalidRequest(f"locate: more than {LOCATED_CHUNKS_MAX} chunks in one call: ask for fewer contexts")
        pauses = self._parts.long_work.begin()
        has_others = self._parts.directory is not None or self._parts.movement.shared_tiers.tiers
        keys = [await self._keys(query, pauses) if has_others else [] for query in queries]
        parts = [part for chunks in keys for part in zip(*chunks, strict=True)]
        (others, reason), said = await asyncio.gather(
            self._others(keys, deadline), self._parts.movement.shared_tiers.said(parts, deadline.left_s)
        )
        chains: list[list[NodePrefix]] = []
        for query, elsewhere, chunks in zip(queries, others, keys, strict=True):
            chains.append([*self._here(query), *elsewhere, *_of_tiers(chunks, said)])
            await pauses.between()
        return Located(self._parts.node, chains, reason, tuple(each.kind for each in said if not each.is_whole))

    async def _keys(self, query: ChainQuery, pauses: Pauses) -> list[list[bytes]]:
        """Return the storage keys of each chunk, one per part, in steps between which others are answered. A chain may
        be long, and a key is a hash."""
        spaces, found = namespaces_of(self._parts.catalog, query), list[list[bytes]]()
        for start in range(0, len(query.digests), KEYS_AT_ONCE):
            digests = query.digests[start : start + KEYS_AT_ONCE]
            found += map(list, zip(*(self._parts.movement.names.keys(space, digests) for space in spaces), strict=True))
            await pauses.between()
        return found

    def _here(self, query: ChainQuery) -> list[NodePrefix]:
        walk = self._parts.catalog.walk(namespaces_of(self._parts.catalog, query), query.digests)
        tiers = [run.tier for run in walk.runs for _ in range(run.chunk_count)][: walk.hit_count]
        return _prefixes(self._parts.node, tiers)

    async def _others(
        self, chains: Sequence[Sequence[Sequence[bytes]]], deadline: Deadline
    ) -> tuple[list[list[NodePrefix]], str]:
        """Return the prefixes of each chain that other nodes have, and the reason why there may be more."""
        nothing: list[list[NodePrefix]] = [[] for _ in chains]
        directory = self._parts.directory
        if directory is None:
            return nothing, NO_DIRECTORY
        asked = list(dict.fromkeys(key for chunks in chains for keys in chunks for key in keys))
        timeout_s = min(deadline.answerable_s, DIRECTORY_S + len(asked) / DIRECTORY_CHUNKS_PER_S)
        try:
            said = await directory.where(asked, timeout_s)
        except Unavailable as error:
            return nothing, error.message
        found = dict(zip(asked, said.chunks, strict=True))
        return [_of_nodes([[found[key] for key in keys] for keys in chunks]) for chunks in chains], said.reason


def _of_tiers(chunks: Sequence[Sequence[bytes]], said: Iterable[TierWord]) -> list[NodePrefix]:
    """Return the prefixes of a chain that shared tiers are said to have. ``chunks``: the keys of each, part by part."""
    counts = [(each.kind, _leading(all(key in each.keys for key in keys) for keys in chunks)) for each in said]
    return [NodePrefix("", kind, count) for kind, count in counts if count]


def _leading(flags: Iterable[bool]) -> int:
    """Count the flags before the first false one."""
    return sum(1 for _ in takewhile(bool, flags))


def _prefixes(node: str, tiers: Sequence[Tier]) -> list[NodePrefix]:
    """Return a row per tier that, with the faster ones, has more of the prefix than those have. ``tiers``: the tier of
    each chunk of the prefix."""
    found: list[NodePrefix] = []
    for speed, tier in enumerate(SPEED):
        count = _leading(SPEED.index(each) <= speed for each in tiers)
        if count > (found[-1].chunk_count if found else 0):
            found.append(NodePrefix(node, tier, count))
    return found


def _of_nodes(chunks: Sequence[Sequence[Mapping[str, Tier] | None]]) -> list[NodePrefix]:
    """Return the prefixes by node. ``chunks``: for each part of each chunk, the tier by node; None: it is unknown."""
    nodes = sorted(next((part for parts in chunks for part in parts if part is not None), ()))
    found = []
    for node in nodes:
        tiers = ([Tier.NONE if part is None else part.get(node) for part in parts] for parts in chunks)
        found += _prefixes(node, _bridged(list(takewhile(lambda parts: None not in parts, tiers))))
    return found


def _bridged(chunks: Sequence[Sequence[Tier | None]]) -> list[Tier]:
    """Return the slowest tier of each leading chunk. ``chunks``: the tier of each part; NONE: it is unknown. Unknown
    chunks count as in the tier of the next known one, for a node that has a chunk has those before it; those after the
    last known one do not count."""
    found: list[Tier] = []
    for parts in reversed(chunks):
        if all(parts):
            found.append(max((each for each in parts if each), key=SPEED.index))
        elif found:
            found.append(found[-1])
    return found[::-1]
