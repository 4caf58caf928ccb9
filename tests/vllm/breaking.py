"""Connectors that break, or tell what they do."""

from __future__ import annotations

import sys
from typing import Any

from kvstore_client.engines.vllm import KVStoreConnector
from kvstore_client.engines.vllm.encoder import KVStoreECConnector
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


class TellingECConnector(KVStoreECConnector):
    """Writes what goes and comes to the engine's log."""

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        super().start_load_caches(encoder_cache, **kwargs)
        for _ in self._items().loads:
            print("an item was loaded", file=sys.stderr, flush=True)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        super().save_caches(encoder_cache, mm_hash, **kwargs)
        print("an item was encoded", file=sys.stderr, flush=True)
