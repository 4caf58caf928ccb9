"""Opens a prefix at the sidecar, by either plane."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from kvstore.errors import Exhausted
from kvstore.spec import ChunkState, Exactness, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.context import Context
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import ChainName, LookupAnswer, Presence
from kvstore_client.lookup.tails import first_held, longest_tail, peeked_tail
from kvstore_client.planes.prefix import Prefix
from kvstore_client.planes.session import ClientSession
from kvstore_client.prompt import Prompt


def open_prefix(
    session: ClientSession, wanted: Wanted, name: ChainName, digests: list[bytes], timeout_s: float, ticket: bytes = b""
) -> Prefix:
    """Ask for the resident prefix of a chain, or redeem a ticket for all of it. If the limit on leases is reached, wait
    for the leases on their way back, and ask once more. Raises the typed error of a failed call."""
    query = pb.ChainQuery(
        fingerprint=name.fingerprint, digests=b"".join(digests), hidden_layers=wanted.hidden_layers,
        exactness=name.exactness, provenance=name.provenance,  # type: ignore[arg-type]  # wire numbers
    )  # fmt: skip
    layers = () if wanted.layers == wanted.spec.slab_layers else wanted.layers
    request = pb.FetchRequest(query=query, layers=layers, ticket=ticket)
    ask = partial(session.open_prefix, wanted, request, digests, timeout_s)
    try:
        return ask()
    except Exhausted:
        session.returns.settle(timeout_s)
        return ask()


def open_longest(session: ClientSession, name: bytes, wanted: Wanted, prompt: Prompt, timeout_s: float) -> Prefix:
    """Open the resident chunks, and the partial chunk after them when one matches. Raises the typed error of a failed
    call."""
    digests, chain = prompt.digests, ChainName(name, prompt.exactness, prompt.provenance)
    prefix = open_prefix(session, wanted, chain, digests, timeout_s)
    hits = -(-prefix.token_count // wanted.spec.chunk_tokens)
    held = partial(first_held, session, name, prompt, wanted.hidden_layers, timeout_s)
    try:
        tail = longest_tail(prompt, prefix.token_count, hits, prefix, held)
    except BaseException:
        prefix.close()
        raise
    if tail is None:
        return prefix
    # The tail's digest stands for its whole prefix: ask for the chain with it in place of the next chunk.
    prefix.close()
    return _ends_with_tail(open_prefix(session, wanted, chain, [*digests[:hits], tail[1]], timeout_s), prefix.reason)


def _ends_with_tail(prefix: Prefix, reason: MissReason) -> Prefix:
    """Return a prefix that ends with a partial chunk, in the place of a chunk of the prompt that is missing for this
    ``reason``: so is the rest of the prompt, though all that was asked for is there."""
    prefix.reason = prefix.reason or reason or MissReason.COLD
    return prefix


def _missing(seen: LookupAnswer) -> MissReason:
    """Return why the chunk after the hits is missing."""
    return next((MissReason(run.reason) for run in seen.runs if run.state != ChunkState.HIT), MissReason.COLD)


class NoPrefix:
    """An empty prefix; ``reason`` says why nothing is there."""

    exactness = Exactness.EXACT
    tier = Tier.NONE
    token_count = 0
    tails: Sequence[pb.PartialTail] = ()
    tail_lengths = b""
    is_provisional = False
    is_leased = True

    def __init__(self, wanted: Wanted, reason: MissReason) -> None:
        self.wanted, self.reason = wanted, reason

    def copy_all(self, *_: object) -> None:
        """Copy nothing."""

    def landing(self, *_: object) -> NoReturn:
        raise AssertionError("nothing lands of what is not there")

    def received(self) -> NoReturn:
        raise AssertionError("nothing is received of what is not there")

    def settle(self, bad: set[int]) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: it holds no lease."""

    cancel = abandon = close


def open_resident(context: Context, wanted: Wanted, prompt: Prompt, *, is_brief: bool = False) -> Prefix:
    """Open the resident chunks; where shared memory shows that there are none, return NoPrefix without a call.
    ``is_brief``: the caller copies them at once, and asks again for any that left meanwhile, so that no lease is needed
    where all of them are in memory."""
    session, name = context.ready(wanted.spec)
    seen = session.presence.look_up([prompt.chain(name, prompt.digests)]) if session.presence is not None else None
    if session.presence is not None and seen is not None:
        if not seen[0].hit_count and not seen[0].has_tails:
            session.presence.count(fetch_calls=1, fetch_miss_chunks=len(prompt.digests))
            return NoPrefix(wanted, MissReason(seen[0].runs[0].reason or MissReason.COLD))
        digests, answer = _with_tail(session.presence, wanted, name, prompt, seen[0])
        is_tail, chain = digests is not prompt.digests, ChainName(name, prompt.exactness, prompt.provenance)
        if is_brief:
            warm = session.open_warm(wanted, chain, digests, answer)
            if warm is not None:
                return _ends_with_tail(warm, _missing(seen[0])) if is_tail else warm
        if is_tail:
            return _ends_with_tail(open_prefix(session, wanted, chain, digests, context.timeout_s), _missing(seen[0]))
    return open_longest(session, name, wanted, prompt, context.timeout_s)


def _with_tail(
    presence: Presence, wanted: Wanted, name: bytes, prompt: Prompt, seen: LookupAnswer
) -> tuple[list[bytes], LookupAnswer]:
    """Return the chain to ask for, and the answer for it: where shared memory shows a partial chunk behind the last hit
    that matches the prompt, the hits and this one. Else the prompt's own chain, and ``seen``."""
    own, hits = (prompt.digests, seen), seen.hit_count
    if wanted.hidden_layers or not seen.has_tails or hits == len(prompt.digests):
        return own
    if any(run.state == ChunkState.PENDING for run in seen.runs):  # a fetch may wait for the whole chunk
        return own
    told = presence.with_tails(prompt.chain(name, prompt.digests), seen)
    tail = peeked_tail(presence, name, prompt, hits * wanted.spec.chunk_tokens, told) if told else None
    if not tail:
        return own
    if not tail[0]:
        return prompt.digests, seen._replace(has_tails=False)
    digests = [*prompt.digests[:hits], tail[1]]
    longer = presence.look_up([prompt.chain(name, digests)])
    return (digests, longer[0]) if longer else own
