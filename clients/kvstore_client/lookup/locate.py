"""Finds the nodes and tiers that have a prompt's prefix, for a router that chooses a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.spec import Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.context import Context
from kvstore_client.prompt import Prompt


class PrefixAt(NamedTuple):
    """``node`` has the first ``token_count`` tokens of a context in ``tier`` or faster ones. No node: a tier that nodes
    share has them by itself."""

    node: str
    tier: Tier
    token_count: int


@dataclass(frozen=True)
class Location:
    """The places of one context's prefix. ``prefixes``: a row per node and tier that has more of it than the node's
    faster tiers. Rows of the asked node are certain; rows of others and of shared tiers are hints. ``asked``: that
    node's name; empty when it was gone. ``reason``: why other nodes are missing, or may have more; empty: all is known
    of them. ``unknown``: the shared tiers that may have more than is told, as they gave no answer, or none for some
    chunks: a tier that fails is not asked, and none is waited for beyond its bound. A sidecar of an older release tells
    none. ``is_short``: the context is shorter than a chunk. Shared tiers take whole chunks only, so none of them is
    unknown: they have nothing of it."""

    prefixes: tuple[PrefixAt, ...]
    asked: str
    reason: str = ""
    unknown: tuple[Tier, ...] = ()
    is_short: bool = False

    @property
    def nodes(self) -> dict[str, int]:
        """Number of leading tokens that each node has in its own tiers."""
        found: dict[str, int] = {}
        for each in self.prefixes:
            if each.node:
                found[each.node] = max(found.get(each.node, 0), each.token_count)
        return found


def locate(context: Context, prompts: Sequence[Prompt]) -> list[Location]:
    """Locate each prompt's prefix, in one call. See ``Client.locate``."""
    with context.or_miss() as miss:
        queries = []
        for prompt in prompts:
            session, name = context.ready(prompt.spec)
            queries.append(prompt.query(name, prompt.digests))
        if not queries:
            return []
        reply = session.call(session.cache.Locate, pb.LocateRequest(queries=queries), context.timeout_s)
        return [
            location_of(chain, reply, prompt.spec.chunk_tokens, prompt.token_count)
            for prompt, chain in zip(prompts, reply.chains, strict=True)
        ]
    return [Location((), "", miss.why) for _ in prompts]


def location_of(chain: pb.LocatedChain, reply: pb.LocateResponse, step: int, token_count: int) -> Location:
    """Return a reply's news of one chain, in tokens. ``step``: the tokens of a whole chunk."""
    prefixes = (
        PrefixAt(each.node, Tier(each.tier), min(each.chunk_count * step, token_count)) for each in chain.prefixes
    )
    unknown, is_short = tuple(map(Tier, reply.unknown_tiers)), token_count < step
    return Location(tuple(prefixes), reply.node, reply.reason, () if is_short else unknown, is_short)
