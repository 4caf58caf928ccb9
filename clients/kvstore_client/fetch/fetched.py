"""Fetches: extents in, owned tensors out. A chunk's bytes count only if its generation is unchanged after the copy."""

from __future__ import annotations

import logging

from kvstore.errors import DeadlineExceeded, Internal
from kvstore.spec import Exactness, MissReason, Tier
from kvstore_client.arrays import Tensor
from kvstore_client.context import Context
from kvstore_client.derived import LayeredKV, now, remember, written_anew
from kvstore_client.fetch.target import Places
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.prefix import Prefix, Target

_log = logging.getLogger("kvstore.client")


class FetchedKV(LayeredKV):
    """Per requested layer (K, V), each [kv_heads, token_count, head_dim], or where a spec keeps E that,
    [token_count, hidden_size]; owned memory. A miss has 0 tokens.

    ``hidden`` maps each requested hidden layer to [token_count, hidden]. ``reason`` says why the prefix ends where
    it does (NONE: the whole prompt was there). ``exactness``: what it may be stored as.
    """

    token_count: int = 0
    tier: Tier = Tier.NONE
    byte_count: int = 0
    reason: MissReason = MissReason.NONE
    hidden: dict[int, Tensor]


def copy_all(prefix: Prefix, target: Target, context: Context) -> int:
    """Copy every requested layer. Returns the tokens that are good; what lies beyond them is garbage. Raises what a
    copy raised; Internal where one may still be writing to the caller's tensors, which is no miss: who takes a miss
    puts what he computes there."""
    try:
        return _copied(prefix, target, context)
    except DeadlineExceeded as error:
        if not target.is_callers:
            raise
        raise Internal(f"{error.message}: one may still write to into: put nothing there any more") from error


def _copied(prefix: Prefix, target: Target, context: Context) -> int:
    bad: set[int] = set()
    began = before(prefix, target)
    prefix.copy_all(target, context.copier, context.faults, bad, context.timeout_s)
    return _settled(prefix, target, bad, began)


def _settled(prefix: Prefix, target: Target, bad: set[int], began: int) -> int:
    if bad:
        _log.error("a chunk failed its checksum: treated as a miss", extra={"chunk_count": len(bad)})
    good = prefix.settle(bad)
    after(prefix, target, good, began)
    return good


def before(prefix: Prefix, target: Target) -> int:
    """What is not exact is known as such before its first byte is there. Returns when that was, for ``after``."""
    if prefix.exactness is not Exactness.EXACT:
        remember(*target.places(prefix.token_count))
    return now()


def after(prefix: Prefix, target: Target, token_count: int, began: int) -> None:
    """So many tokens have come, whatever lay there before they began to; what was merged with them since then is no
    more exact for it."""
    if prefix.exactness is Exactness.EXACT:
        written_anew(*target.places(token_count), since=began)


def gathered(wanted: Wanted, prefix: Prefix, given: Places, context: Context) -> FetchedKV:
    """All of a prefix that is good, in its place."""
    target = given(prefix.token_count)
    good = copy_all(prefix, target, context) if prefix.token_count else 0
    result = FetchedKV(target.layer(position, good) for position in range(len(wanted.layers)))
    result.token_count, result.exactness = good, prefix.exactness
    result.tier = prefix.tier if good else Tier.NONE
    result.reason = prefix.reason
    result.byte_count = wanted.byte_count(good)
    result.hidden = {layer: target.rows(layer, good) for layer in wanted.hidden_layers}
    context.counters["fetched_bytes"] += result.byte_count
    return result
