"""Fetches into owned tensors. A chunk's bytes count only if its generation is unchanged after the copy."""

from __future__ import annotations

import logging

from kvstore.errors import DeadlineExceeded, Internal
from kvstore.spec import Exactness, MissReason, Tier
from kvstore_client.arrays import Tensor
from kvstore_client.context import Context
from kvstore_client.derived import LayeredKV, has_marks, mark_derived, now, written_anew
from kvstore_client.fetch.target import Places
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.prefix import Prefix, Target

_log = logging.getLogger("kvstore.client")


class FetchedKV(LayeredKV):
    """A fetched cache in owned memory: per requested layer (K, V), each [kv_heads, token_count, head_dim], or E,
    [token_count, hidden_size], where a spec keeps E. A miss has 0 tokens, and is false: ``if fetched`` asks for tokens.

    ``hidden`` maps each requested hidden layer to [token_count, hidden]. ``reason`` says why the prefix ends where it
    does (NONE: the whole prompt was there). ``exactness``: the exactness to store it with.
    """

    token_count: int = 0
    tier: Tier = Tier.NONE
    byte_count: int = 0
    reason: MissReason = MissReason.NONE
    hidden: dict[int, Tensor]

    def __bool__(self) -> bool:
        return self.token_count > 0


def copy_all(prefix: Prefix, target: Target, context: Context) -> int:
    """Copy every requested layer. Returns the number of good tokens; memory beyond them is garbage. Raises the error of
    a failed copy. Raises Internal where a copy may still be writing to the caller's tensors: as a miss, the caller
    would compute into them meanwhile."""
    bad: set[int] = set()
    began = before(prefix, target)
    try:
        prefix.copy_all(target, context.copier, context.faults, bad, context.timeout_s)
    except DeadlineExceeded as error:
        if not target.is_callers:
            raise
        raise Internal(f"{error.message}: one may still write to into: put nothing there any more") from error
    if bad:
        _log.error("a chunk failed its checksum: treated as a miss", extra={"chunk_count": len(bad)})
    good = prefix.settle(bad)
    after(prefix, target, good, began)
    return good


def before(prefix: Prefix, target: Target) -> int:
    """Mark the target as derived before its first byte arrives, if the prefix is not exact. Returns the number of that
    moment, for ``after``."""
    if prefix.exactness is not Exactness.EXACT:
        mark_derived(*target.places(prefix.token_count))
    return now()


def after(prefix: Prefix, target: Target, token_count: int, began: int) -> None:
    """Unmark the memory of the fetched tokens, if the prefix is exact. Memory marked since ``began`` stays marked: a
    derived cache was merged into it meanwhile."""
    if prefix.exactness is Exactness.EXACT and has_marks():
        written_anew(*target.places(token_count), since=began)


def gathered(wanted: Wanted, prefix: Prefix, given: Places, context: Context) -> FetchedKV:
    """Return all good tokens of a prefix, copied to their destination."""
    target = given(prefix.token_count)
    good = copy_all(prefix, target, context) if prefix.token_count else 0
    result = FetchedKV(target.layers(good))
    result.token_count, result.exactness = good, prefix.exactness
    result.tier = prefix.tier if good else Tier.NONE
    result.reason = prefix.reason
    result.byte_count = wanted.byte_count(good)
    result.hidden = {layer: target.rows(layer, good) for layer in wanted.hidden_layers}
    return result
