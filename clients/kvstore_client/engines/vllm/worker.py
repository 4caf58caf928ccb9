"""The workers' side: carries out the scheduler's loads and saves, between the sidecar and the pages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.errors import Internal, KVStoreError
from kvstore.seams import SystemClock
from kvstore_client.client import Client
from kvstore_client.engines.pause import CallPause
from kvstore_client.engines.vllm.groups import LayerGroup
from kvstore_client.engines.vllm.mending import Mender
from kvstore_client.engines.vllm.moved import Moved
from kvstore_client.engines.vllm.pages import LAYOUT, PagesOfModel
from kvstore_client.engines.vllm.saves import Saves
from kvstore_client.engines.vllm.step import Load, Mend, Mended, Save, Step
from kvstore_client.fetch.paged import Paged
from kvstore_client.fetch.transfer import Transfer

LOAD_S_MAX = 30.0
"""Seconds after which a load is given up, and its prompt computed."""
_log = logging.getLogger("kvstore.vllm")


@dataclass
class _Moving:
    """A load in flight, of ``byte_count`` bytes: a transfer for each group of layers. ``is_whole`` False: one of them
    could not even begin. ``is_late``: a layer was computed before it had landed; layers that land later are useless."""

    load: Load
    transfers: list[Transfer]
    began_s: float
    until_s: float
    byte_count: int = 0
    is_whole: bool = True
    is_late: bool = False

    @property
    def failed(self) -> bool:
        return self.is_late or not self.is_whole or any(each.failed for each in self.transfers)

    @property
    def reason(self) -> str:
        """The reason of a failure that was not logged before; empty: it was."""
        errors = [each.error.message for each in self.transfers if each.error is not None]
        late = ["a layer was computed before it had landed"] if self.is_late else []
        return next(iter([*errors, *late] if self.is_whole else []), "")


class WorkerSide:
    """The connector of one worker. No call raises because of the sidecar: ``failed_blocks`` tells of failures, or
    ``failed_requests`` where ``is_one_table`` is False. ``is_waiting``: saves end within their step, because the pages
    may go away between steps. ``call_s_max``: the client's timeout."""

    def __init__(
        self, client: Client, pages: PagesOfModel, *, is_layerwise: bool, is_one_table: bool = True,
        is_waiting: bool = False, call_s_max: float = 0.0, mender: Mender | None = None,
    ) -> None:  # fmt: skip
        self._client = client
        self._pages = pages
        self._is_layerwise = is_layerwise
        self._is_one_table = is_one_table
        self._clock = SystemClock()
        self.moved = Moved()
        """Counts what this worker moves."""
        self._saves = Saves(client, pages, CallPause(self._clock), self.moved, call_s_max=call_s_max)
        self._is_waiting = is_waiting
        self._mender = mender
        self._mended: list[Mended] = []
        self._can_give_way = False
        self._moving: dict[str, _Moving] = {}
        self._waited: set[int] = set()
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._doubtful: Counter[int] = Counter()

    # ------------------------------------------------------------ loads

    def begin(self, step: Step) -> None:
        """Start the step's loads, and compute what it computes over documents."""
        self._doubtful.subtract(step.settled)
        self._doubtful = +self._doubtful
        self._waited.clear()
        for load in step.loads:
            now_s = self._clock.monotonic()
            until_s = now_s + min(load.give_up_s or LOAD_S_MAX, LOAD_S_MAX)
            moving = self._moving[load.request_id] = _Moving(load, [], now_s, until_s)
            try:
                for place, group in enumerate(self._pages.groups):
                    moving.transfers.append(self._begin_group(moving, place, group))
            except KVStoreError as error:
                _log.error("kvstore: %s; the prompt is computed", error.message)
                moving.is_whole = False
                for transfer in moving.transfers:
                    transfer.stop()
        for mend in step.mends:
            self._mend(mend)

    def _mend(self, mend: Mend) -> None:
        done = self._mender.mend(mend) if self._mender is not None else None
        if done is not None:
            self.moved.mended(done.reused, done.computed, done.seconds)
            self._mended.append(done)
            return
        self.moved.add("failed_mends")
        self._failed |= set(mend.block_ids[mend.start // self._pages.groups[0].block_tokens :])

    def mended(self) -> list[Mended]:
        """Return what was computed over documents since the last call."""
        done, self._mended = self._mended, []
        return done

    def _begin_group(self, moving: _Moving, place: int, group: LayerGroup) -> Transfer:
        """Begin to fetch a group's layers into its own blocks. Raises KVStoreError."""
        pages, slots = self._pages, moving.load.slots(place, group)
        moving.byte_count += int((slots >= 0).sum()) * pages.token_bytes(group)
        into = Paged([pages.views[layer] for layer in group.layers], slots, LAYOUT)
        layers = list(group.layers) if len(pages.groups) > 1 else None
        return self._client.start_fetch(moving.load.ticket, into=into, layers=layers, heads=pages.heads)

    def wait_layer(self, layer: int) -> None:
        """Return when each layerwise load has brought this layer, or failed."""
        if not self._is_layerwise:
            return
        self._waited.add(layer)
        for moving in self._moving.values():
            for transfer in moving.transfers:
                if moving.is_late:
                    break
                try:
                    transfer.wait_layer(layer, max(0.0, moving.until_s - self._clock.monotonic()))
                except KVStoreError:
                    moving.is_late = True  # logged once, when the step ends
        if self._moving:
            self._pages.settle()

    def end_layerwise(self) -> None:
        """End the step's loads: nothing writes to the pages afterwards. Raises Internal when a load cannot be stopped:
        to go on would give the pages away while it writes to them."""
        if not self._is_layerwise:
            return
        for moving in list(self._moving.values()):
            moving.is_late = moving.is_late or len(self._waited) < len(self._pages.views)
            for transfer in moving.transfers:
                if not _has_ended(transfer, moving.until_s - self._clock.monotonic()):
                    moving.is_late = True
                    if not transfer.cancel(LOAD_S_MAX):
                        raise Internal(f"a load into pages cannot be stopped within {LOAD_S_MAX} s")
            self._settle(moving)

    def landed(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, well or not."""
        if self._is_layerwise:
            return set()
        done = set()
        for name, moving in list(self._moving.items()):
            running = [each for each in moving.transfers if not each.is_done]
            if running:
                if self._clock.monotonic() > moving.until_s:
                    for transfer in running:
                        transfer.cancel(0.0)
                continue
            self._settle(moving)
            done.add(name)
        return done

    def _settle(self, moving: _Moving) -> None:
        load = moving.load
        del self._moving[load.request_id]
        if not moving.failed:
            self._pages.settle()
            count = load.stop - load.start
            self.moved.loaded(count, moving.byte_count, self._clock.monotonic() - moving.began_s)
            return
        self.moved.add("failed_loads")
        if moving.reason:
            _log.warning("kvstore: %s; the prompt is computed", moving.reason)
        if not self._is_one_table:
            self._failed_requests.add(load.request_id)
            return
        (group,) = self._pages.groups
        blocks = load.written(0, group)
        if self._is_layerwise:
            blocks = load.block_ids[0][load.start // group.block_tokens :]  # the step computed over them
            self._doubtful.update(blocks)
        self._failed |= set(blocks)

    def failed_blocks(self) -> set[int]:
        """Return the blocks whose loads failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def failed_requests(self) -> set[str]:
        """Return the requests whose loads failed since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    # ------------------------------------------------------------ saves

    def give_way(self, step: Step) -> None:
        """Let go of the blocks that this step may write. Call it before the step writes anything."""
        self._can_give_way = True
        self._saves.give_way(step.written)

    def save(self, saves: Iterable[Save]) -> None:
        """Keep the blocks that this step completed. Copies go on after the step, except where nobody says when pages
        change: then this returns when they have ended."""
        for save in saves:
            # Blocks computed over a failed load are not the model's exact cache.
            self._saves.begin(save, is_wanted=not save.reads(self._doubtful.keys()))
        if self._is_waiting or not self._can_give_way:
            self._saves.end()

    def close(self) -> None:
        """Stop the loads in flight, and finish the stores. Raises as ``Saves.give_way``; the loads have stopped then,
        too."""
        try:
            self._saves.close()
        finally:
            for moving in self._moving.values():
                for transfer in moving.transfers:
                    transfer.cancel(LOAD_S_MAX)
            self._client.close()


def _has_ended(transfer: Transfer, timeout_s: float) -> bool:
    try:
        transfer.wait(max(0.0, timeout_s))
    except KVStoreError:
        pass  # the transfer keeps its error
    return transfer.is_done
