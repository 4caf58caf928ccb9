"""Where a prompt's prefix is among nodes and tiers, for whoever chooses a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.spec import Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.context import Context
from kvstore_client.prompt import Prompt


class PrefixAt(NamedTuple):
    """So many leading tokens of a context are on ``node``, in ``tier`` or faster ones. No node: a tier that nodes share
    has them by itself."""

    node: str
    tier: Tier
    token_count: int


@dataclass(frozen=True)
class Location:
    """Where one context's prefix is. ``prefixes``: a row per node and tier that has more of it than the node's faster
    tiers; of the node that was asked certain, of others and of shared tiers hints. ``asked``: that node's name; empty
    when it was gone. ``reason``: why other nodes are not among them; empty: they are."""

    prefixes: tuple[PrefixAt, ...]
    asked: str
    reason: str = ""

    @property
    def nodes(self) -> dict[str, int]:
        """How many leading tokens each node has in its own tiers."""
        found: dict[str, int] = {}
        for each in self.prefixes:
            if each.node:
                found[each.node] = max(found.get(each.node, 0), each.token_count)
        return found


def locate(context: Context, prompts: Sequence[Prompt]) -> list[Location]:
    """Where each prompt's prefix is, in one call. See ``Client.locate``."""
    with context.or_miss() as miss:
        queries = []
        for prompt in prompts:
            session, name = context.ready(prompt.spec)
            queries.append(prompt.query(name, prompt.digests))
        if not queries:
            return []
        reply = session.call(session.cache.Locate, pb.LocateRequest(queries=queries), context.timeout_s)
        return [_location(prompt, chain, reply) for prompt, chain in zip(prompts, reply.chains, strict=True)]
    return [Location((), "", miss.why) for _ in prompts]


def _location(prompt: Prompt, chain: pb.LocatedChain, reply: pb.LocateResponse) -> Location:
    step, count = prompt.spec.chunk_tokens, prompt.token_count
    prefixes = (PrefixAt(each.node, Tier(each.tier), min(each.chunk_count * step, count)) for each in chain.prefixes)
    return Location(tuple(prefixes), reply.node, reply.reason)
