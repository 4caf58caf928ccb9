"""Saves beside the engine's steps: a thread copies pages to the sidecar while vLLM goes on.

A save reads its blocks until its copy has ended, even after vLLM has freed them: vLLM is not asked to keep them. The
scheduler says with each step which blocks the step may write, and before it writes anything ``give_way`` ends the saves
that still read one of them. Almost always there are none: of its free blocks vLLM gives out first what was freed first.
Not without its prefix cache: then it gives out first what was freed last, so that the next piece of a prompt may take
what has just left a window, and waits until that is copied.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait

from kvstore.errors import Internal, KVStoreError
from kvstore.seams import WorkerThreads
from kvstore.seams.jobs import begun, failure_of
from kvstore_client.client import Client
from kvstore_client.engines.pause import SLOW_S, CallPause
from kvstore_client.engines.vllm.moved import Moved
from kvstore_client.engines.vllm.pages import LAYOUT, PagesOfModel
from kvstore_client.engines.vllm.step import Save
from kvstore_client.fetch.paged import Paged
from kvstore_client.prompt import PageHashes
from kvstore_client.store.writer import StoreWriter

COPY_S_MAX = 2.0
"""Seconds that copying a prompt may take, beside waiting for the sidecar."""
END_S_MAX = 30.0
"""Seconds that a save may go on reading a block that is about to be written, or as long as its calls may take."""
CALLS_MAX = 6
"""Calls of one save, one after another: each may take the client's timeout."""
PENDING_MAX = 64
"""Saves that wait or run at once. Any more are dropped."""
_log = logging.getLogger("kvstore.vllm")


class _Pending:
    """A save that has not ended. ``done`` ends with it."""

    def __init__(self, save: Save, *, is_wanted: bool) -> None:
        self.save = save
        self.done: Future[None] = Future()
        self._lock = threading.Lock()
        self._is_wanted = is_wanted
        self._reads = False

    def may_read(self) -> bool:
        """Return True when its blocks still hold its tokens, and will until it has ended."""
        with self._lock:
            self._reads = self._is_wanted
            return self._reads

    def give_up(self) -> bool:
        """Return True when it reads no block now, and never will. False: it does until ``done``."""
        with self._lock:
            self._is_wanted = False
            return not self._reads or self.done.done()


class Saves:
    """The saves of one worker, counted in ``moved``. No call raises because of the sidecar. ``call_s_max``: the
    client's timeout."""

    def __init__(
        self, client: Client, pages: PagesOfModel, patience: CallPause, moved: Moved, *, call_s_max: float = 0.0
    ) -> None:  # fmt: skip
        self._client = client
        self._calls_s = CALLS_MAX * call_s_max
        self._pages = pages
        self._patience = patience
        self._moved = moved
        self._thread = WorkerThreads(1, "kvstore-save")
        self._pending: list[_Pending] = []

    def begin(self, save: Save, *, is_wanted: bool = True) -> None:
        """Keep blocks that hold their tokens once all is done that this thread has asked of the GPU. ``is_wanted``
        False: the ranks that share this save are told to drop it."""
        self._forget_ended()
        if len(self._pending) >= PENDING_MAX:
            _log.warning("kvstore: the sidecar is slower than the engine; a prompt is not kept")
            self._moved.add("dropped_saves")
            return  # ranks that share it are told by the sidecar, when its reservation ends
        if not is_wanted and not save.ticket:
            return
        pending = _Pending(save, is_wanted=is_wanted)
        pending.done = begun(self._thread, self._keep, pending, self._pages.computed())
        self._pending.append(pending)

    def give_way(self, blocks: Collection[int]) -> None:
        """Return when no save reads one of these blocks, nor will. A save that does not end within ``SLOW_S`` is given
        up, unless it reads already. Raises Internal when one reads on and on: to write under it would store another
        prompt's tokens as this one's."""
        if self._pending and blocks:
            self._forget_ended()
            given = frozenset(blocks)
            self.end([each for each in self._pending if each.save.reads(given)])

    def end(self, some: Collection[_Pending] | None = None) -> None:
        """As ``give_way``, for these saves, or all."""
        waited = list(self._pending if some is None else some)
        if not waited:
            return
        wait([each.done for each in waited], 0.0 if self._patience.is_spent else SLOW_S)
        reading = [each.done for each in waited if not each.give_up()]
        longest_s = max(END_S_MAX, self._calls_s)
        if wait(reading, longest_s).not_done:
            raise Internal(f"a save of pages cannot be stopped within {longest_s} s")

    def _forget_ended(self) -> None:
        for each in self._pending:
            if each.done.done() and (failure := failure_of(each.done)) is not None:
                _log.error("kvstore: %s; a prompt is not kept", failure.message)
                self._moved.add("dropped_saves")
        self._pending = [each for each in self._pending if not each.done.done()]

    def close(self) -> None:
        """Finish the saves."""
        self.end()
        self._thread.close()

    # ------------------------------------------------------------ on the thread

    def _keep(self, pending: _Pending, computed: Callable[[], None]) -> None:
        try:
            copied = self._copied(pending, computed)
        except KVStoreError as error:
            _log.error("kvstore: %s; this prompt is not kept", error.message)
            copied = None
        if copied is None:
            self._moved.add("dropped_saves")
        elif copied:
            self._moved.saved(copied)

    def _copied(self, pending: _Pending, computed: Callable[[], None]) -> int | None:
        """Copy a save's pages. Returns the number of tokens that the sidecar was given: 0 where it wants none, None
        where nothing is kept."""
        if self._patience.is_spent:
            return None
        if pending.save.ticket or len(self._pages.groups) > 1 or pending.save.start:
            return self._by_layers(pending, computed)
        return self._at_once(pending.save, computed) if pending.may_read() else None

    def _at_once(self, save: Save, computed: Callable[[], None]) -> int | None:
        """Copy all layers by one put. Returns when nothing reads the pages. The sidecar does not say here which tokens
        it had already: those of the request's earlier saves are not counted again."""
        computed()
        before = save.preamble or 0
        paged = Paged(self._pages.views, save.slots(0, self._pages.groups[0])[before:], LAYOUT)
        with self._patience.watch(COPY_S_MAX) as watched:
            if save.preamble is None:
                receipt = self._client.store(save.spec, save.tokens, paged, extras=save.extras)
            else:
                assert not isinstance(save.tokens, PageHashes), "no document is kept by vLLM's hashes"
                document, preamble = save.tokens[before:], save.tokens[:before]
                receipt = self._client.store_segment(save.spec, document, paged, preamble=preamble, extras=save.extras)
            if receipt.is_done and not receipt.stored_token_count:
                watched.more_s = 0.0  # nothing was copied: this was waiting for the sidecar
                return None
        return save.new

    def _by_layers(self, pending: _Pending, computed: Callable[[], None]) -> int | None:
        """Copy this rank's share, layer by layer: groups have blocks of their own. Leaving the writer without a commit
        aborts the store, for the other ranks, too."""
        save, pages = pending.save, self._pages
        with self._patience.watch():
            writer = self._begun(save)
        with writer, self._patience.watch(COPY_S_MAX):
            wanted = writer.wanted_token_count
            if not wanted and not writer.failure:
                return 0
            if not wanted or writer.wanted_token_start < save.start:
                return None  # the sidecar keeps no chunk without those before it, whose blocks are gone
            if not pending.may_read():
                return None
            computed()
            for place, group in enumerate(pages.groups):
                slots = save.slots(place, group)
                for layer in (each for each in group.layers if each in pages.kept):
                    paged = Paged([pages.views[layer]], slots, LAYOUT)
                    writer.put_layer(layer, paged, heads=pages.heads, token_start=save.start)
            writer.commit()
        return wanted

    def _begun(self, save: Save) -> StoreWriter:
        if save.ticket:
            return self._client.join_store(save.ticket, 1 + self._pages.rank)
        return self._client.start_store(save.spec, save.tokens, extras=save.extras)
