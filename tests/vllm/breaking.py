"""A connector whose held prefixes are let go of before the workers fetch them."""

from __future__ import annotations

from typing import Any

from kvstore_client.engines.vllm import KVStoreConnector


class BreakingConnector(KVStoreConnector):
    """Every load fails, in the worker, after vLLM was promised its tokens."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        for load in metadata.step.loads:
            self._scheduler._client.release_ticket(load.ticket)
        return metadata
