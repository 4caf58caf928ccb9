"""Connectors that break, or tell what they do."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, ClassVar

import torch
from kvstore_client.engines.vllm import KVStoreConnector
from kvstore_client.engines.vllm.encoder import KVStoreECConnector
from kvstore_client.engines.vllm.pages import PagesOfModel
from kvstore_client.planes.shared_memory.session import MappedSession


class BreakingConnector(KVStoreConnector):
    """Every load fails, in the worker, after vLLM was promised its tokens: tickets name no places, and are released."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        MappedSession.maps_chunks = False
        super().__init__(*arguments, **named)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        for load in metadata.step.loads:
            self._scheduler._client.release_ticket(load.ticket)
        return metadata


class RememberingConnector(KVStoreConnector):
    """Remembers what the pages hold of each request when it ends. For an engine of one process."""

    pages: ClassVar[PagesOfModel]
    ended: ClassVar[list[dict[int, tuple[int, Any]]]] = []
    """Per request, and layer: the first token that is there, and K and V from it on, [2, heads, tokens, dim]."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        RememberingConnector.pages = self._worker._pages

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        held = {}
        for group in self.pages.groups:
            slots = group.slots(block_ids[group.index], 0, request.num_tokens - 1)
            first = int((slots < 0).sum())
            for layer in group.layers:
                k, v = (each.transpose(1, 2).flatten(0, 1)[slots[first:]] for each in self.pages.views[layer])
                held[layer] = first, torch.stack([k, v]).transpose(1, 2).numpy()
        self.ended.append(held)
        return super().request_finished_all_groups(request, block_ids)


class SlowMender(RememberingConnector):
    """Remembers, and says that a prompt took an hour that was computed over its documents."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        mender = self._worker._mender
        mend = mender.mend
        mender.mend = lambda each: replace(mend(each), seconds=3600.0)


class TellingECConnector(KVStoreECConnector):
    """Writes what goes and comes to the engine's log."""

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        super().start_load_caches(encoder_cache, **kwargs)
        for _ in self._items().loads:
            print("an item was loaded", file=sys.stderr, flush=True)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        super().save_caches(encoder_cache, mm_hash, **kwargs)
        print("an item was encoded", file=sys.stderr, flush=True)


class BreakingMender(KVStoreConnector):
    """No prompt can be computed over its documents, in the worker, after vLLM was promised its tokens."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker._mender._runner = None
