"""Fetches: extents in, owned tensors out. A chunk's bytes count only if its generation is unchanged after the copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvstore.chunk import layout_of
from kvstore.errors import DataLoss, DeadlineExceeded, Internal
from kvstore.seams import Clock, FaultPoints
from kvstore.spec import Exactness, MissReason, Tier
from kvstore_client.copying import Copier, stopped, wait_all
from kvstore_client.derived import LayeredKV, now, remember, written_anew
from kvstore_client.prefix import AnyPrefix, ChunkRun, Prefix, open_prefix, runs_of
from kvstore_client.remote.fetching import RemoteLanding, RemotePrefix
from kvstore_client.target import AnyTarget
from kvstore_client.wanted import Wanted

__all__ = ["AnyPrefix", "FetchedKV", "LayerStream", "Prefix", "Wanted", "copy_all", "open_prefix", "runs_of"]

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
    hidden: dict[int, Any]


def copy_all(prefix: AnyPrefix, target: AnyTarget, copier: Copier, faults: FaultPoints, timeout_s: float) -> int:
    """Copy every requested layer. Returns the tokens that are good; what lies beyond them is garbage. Raises what a
    copy raised; Internal where one may still be writing to the caller's tensors, which is no miss: who takes a miss
    puts what he computes there."""
    try:
        return _copied(prefix, target, copier, faults, timeout_s)
    except DeadlineExceeded as error:
        if not target.is_callers:
            raise
        raise Internal(f"{error.message}: one may still write to into: put nothing there any more") from error


def _copied(prefix: AnyPrefix, target: AnyTarget, copier: Copier, faults: FaultPoints, timeout_s: float) -> int:
    bad: set[int] = set()
    began = _before(prefix, target)
    if isinstance(prefix, RemotePrefix) or prefix.is_arriving:
        landing = landing_of(prefix, target, copier, faults, bad, _nothing)
        try:
            while landing.is_waiting and landing.advance():
                pass
            landing.finish(timeout_s)
        except BaseException:
            landing.stop(timeout_s)
            raise
        return _settled(prefix, target, bad, began)
    cache = prefix.runs(0)
    work = [partial(target.copy_layer, each, cache, bad, faults) for each in range(len(prefix.wanted.layers))]
    for part, layer in enumerate(prefix.wanted.hidden_layers, start=1):
        work.append(partial(target.copy_hidden, layer, prefix.runs(part), bad))
    copier.split(_each, work, timeout_s)
    return _settled(prefix, target, bad, began)


def _settled(prefix: AnyPrefix, target: AnyTarget, bad: set[int], began: int) -> int:
    if bad:
        _log.error("a chunk failed its checksum: treated as a miss", extra={"chunk_count": len(bad)})
    good = prefix.settle(bad)
    _after(prefix, target, good, began)
    return good


def _before(prefix: AnyPrefix, target: AnyTarget) -> int:
    """What is not exact is known as such before its first byte is there. Returns when that was, for ``_after``."""
    if prefix.exactness is not Exactness.EXACT:
        remember(*target.places(prefix.token_count))
    return now()


def _after(prefix: AnyPrefix, target: AnyTarget, token_count: int, began: int) -> None:
    """So many tokens have come, whatever lay there before they began to; what was merged with them since then is no
    more exact for it."""
    if prefix.exactness is Exactness.EXACT:
        written_anew(*target.places(token_count), since=began)


class Landing:
    """Copies of a prefix that is still arriving: what memory has at once, the rest layer by layer as it lands."""

    def __init__(
        self,
        prefix: Prefix,
        target: AnyTarget,
        copier: Copier,
        faults: FaultPoints,
        bad: set[int],
        on_copied: Callable[[], None],
    ) -> None:
        self._prefix = prefix
        self._on_copied = on_copied
        self._target = target
        self._copier = copier
        self._faults = faults
        self._bad = bad
        slabs = layout_of(prefix.wanted.spec, prefix.wanted.spec.kind, 1).slab_of_layer
        self._coming = [(0, slabs[layer], position) for position, layer in enumerate(prefix.wanted.layers)]
        self._coming += [(part, 0, part) for part in range(1, len(prefix.wanted.hidden_layers) + 1)]
        self.layers: list[list[Future[Any]]] = [[] for _ in prefix.wanted.layers]
        self._hidden: list[Future[Any]] = []
        here = {part: prefix.runs(part) for part in range(1 + len(prefix.wanted.hidden_layers))}
        for part, _, position in self._coming:
            self._copy(part, position, here[part])

    def _copy(self, part: int, position: int, runs: list[ChunkRun]) -> None:
        if not runs:
            return
        if part == 0:
            self.layers[position].append(self._copier.submit(self._copy_layer, position, runs))
        else:
            layer = self._prefix.wanted.hidden_layers[part - 1]
            self._hidden.append(self._copier.submit(self._target.copy_hidden, layer, runs, self._bad))

    def _copy_layer(self, position: int, runs: list[ChunkRun]) -> None:
        self._target.copy_layer(position, runs, self._bad, self._faults)
        self._on_copied()

    def advance(self) -> bool:
        """Wait for news and start the copies it allows. False when nothing is arriving any more."""
        more = self._prefix.advance()
        waiting = []
        for part, slab, position in self._coming:
            chunks = self._prefix.arrived(part, slab)
            if chunks is None:
                waiting.append((part, slab, position))
            else:
                self._copy(part, position, runs_of(chunks))
        self._coming = waiting
        return more

    @property
    def is_waiting(self) -> bool:
        """Whether something that is wanted has not landed yet."""
        return bool(self._coming)

    def has_landed(self, position: int) -> bool:
        """Whether all copies of a layer have been started."""
        return (0, position) not in {(part, number) for part, _, number in self._coming}

    def stop(self, timeout_s: float) -> None:
        """Begin no more copies, wait for those that run, at most ``timeout_s`` s, and let go of all of them: one that
        failed keeps its frame, which keeps the landing and where it lands."""
        stopped(self._jobs(), timeout_s)
        self.layers.clear()
        self._hidden.clear()

    def _jobs(self) -> list[Future[Any]]:
        return [future for layer in self.layers for future in layer] + self._hidden

    def finish(self, timeout_s: float) -> None:
        """Wait for the copies. Raises DeadlineExceeded while one may still be running."""
        wait_all(self._jobs(), timeout_s)


def landing_of(
    prefix: AnyPrefix, target: AnyTarget, copier: Copier, faults: FaultPoints, bad: set[int],
    on_copied: Callable[[], None],
) -> Landing | RemoteLanding:  # fmt: skip
    """The copies of a prefix that is still coming, by whichever plane."""
    if isinstance(prefix, RemotePrefix):
        return RemoteLanding(prefix, target, faults, bad, on_copied)
    return Landing(prefix, target, copier, faults, bad, on_copied)


def _nothing() -> None:
    return None


def _each(work: Sequence[Callable[[], None]]) -> None:
    for copy in work:
        copy()


class LayerStream:
    """Yields (layer, (K, V)), or (layer, E) where a spec keeps E, in order while later layers are still being copied.

    ``token_count`` is known before the first layer; 0 is a miss, and nothing is yielded. Raises: DataLoss when a
    chunk was lost under the copy, DeadlineExceeded when a copy hangs: discard what came, recompute.
    ``hidden``: E of the requested hidden layers, [token_count, hidden_size], once the iteration has ended.
    ``exactness``: what it may be stored as.
    ``landed_s``: when the last layer was there; ``good_token_count``: what is left of it when chunks were lost.
    """

    def __init__(
        self,
        prefix: AnyPrefix | None,
        target: AnyTarget | None,
        copier: Copier,
        faults: FaultPoints,
        clock: Clock,
        reason: MissReason,
        timeout_s: float,
    ) -> None:
        self._prefix = prefix
        self._target = target
        self._copier = copier
        self._faults = faults
        self._clock = clock
        self._timeout_s = timeout_s
        self.reason = reason
        self.hidden: dict[int, Any] = {}
        self.landed_s = 0.0
        self.token_count = self.good_token_count = prefix.token_count if prefix else 0
        self.exactness = prefix.exactness if prefix else Exactness.EXACT
        hit = prefix if self.token_count else None
        self.tier = hit.tier if hit else Tier.NONE
        self.byte_count = hit.wanted.byte_count(self.token_count) if hit else 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        prefix, target = self._prefix, self._target
        if prefix is None or target is None or not self.token_count:
            self.close()
            return
        layers = prefix.wanted.layers
        bad: set[int] = set()
        began = _before(prefix, target)
        # What memory has is copied at once: nothing is gained by holding copies back; two threads bound them.
        landing = landing_of(prefix, target, self._copier, self._faults, bad, self._landed)
        try:
            for position, layer in enumerate(layers):
                while not landing.has_landed(position) and landing.advance():
                    pass
                wait_all(landing.layers[position], self._timeout_s)
                self.good_token_count = prefix.settle(bad)
                if self.good_token_count < self.token_count:
                    raise DataLoss(f"a chunk was lost while layer {layer} was copied", layer=layer)
                yield layer, target.layer(position, self.token_count)
            self._await_hidden(prefix, target, landing, bad)
            self._await_commit(prefix, landing, bad)
            _after(prefix, target, self.token_count, began)
        finally:
            landing.stop(self._timeout_s)
            self.close()

    def _await_hidden(
        self, prefix: AnyPrefix, target: AnyTarget, landing: Landing | RemoteLanding, bad: set[int]
    ) -> None:
        layers = prefix.wanted.hidden_layers
        if not layers:
            return
        while landing.is_waiting and landing.advance():
            pass
        landing.finish(self._timeout_s)
        self.good_token_count = prefix.settle(bad)
        if self.good_token_count < self.token_count:
            raise DataLoss("a chunk was lost while hidden states were copied")
        self.hidden = {layer: target.rows(layer, self.token_count) for layer in layers}

    def _await_commit(self, prefix: AnyPrefix, landing: Landing | RemoteLanding, bad: set[int]) -> None:
        """Layers of a store in flight count once it is committed."""
        if not prefix.is_provisional:
            return
        while prefix.is_provisional and landing.advance():
            pass
        self.good_token_count = prefix.settle(bad)
        if self.good_token_count < self.token_count:
            raise DataLoss("a store was not committed that this fetch had joined: discard what came")

    def _landed(self) -> None:
        self.landed_s = self._clock.monotonic()

    def cancel(self) -> None:
        """From another thread: wait no longer for what has not landed. The iteration ends soon, as when it is lost."""
        if self._prefix is not None:
            self._prefix.cancel()

    def abandon(self) -> None:
        """As ``cancel``, from a destructor: the call that it takes is made elsewhere."""
        if self._prefix is not None:
            self._prefix.abandon()

    def close(self) -> None:
        """Give the lease back; done by itself at the end of the iteration."""
        if self._prefix is not None:
            self._prefix.close()
