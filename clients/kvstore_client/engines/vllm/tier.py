"""vLLM's second, smaller entry point: a secondary tier of its CPU offloading. Chunks in vLLM's own CPU cache go to the
sidecar, too, and every engine process with the same offloading can load them back.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [{
            "type": "KVStoreTier", "module_path": "kvstore_client.engines.vllm.tier", "weights_digest": "<hex>"}]}}'

All methods run in vLLM's scheduler; bytes move in two threads, one each way, so that no load waits for stores.
Every job ends: a sidecar that is gone or stalls makes it a failure, which vLLM takes as a miss.

Source: vLLM 0.32, vllm/v1/kv_offload/tiering/base.py, and async_lookup.py beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, ClassVar

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.version import __version__ as vllm_version

from kvstore.seams import SystemClock, WorkerThreads
from kvstore.seams.jobs import begun
from kvstore.seams.memory import Bytes
from kvstore_client.arrays import memory_at
from kvstore_client.begin import connect
from kvstore_client.engines.vllm.objects import OffloadJob, OffloadRequest
from kvstore_client.engines.vllm.offloaded import Offloaded, offload_namespace
from kvstore_client.engines.vllm.settings import OffloadTierSettings
from kvstore_client.engines.vllm.versions import TIER, check_interface, check_version

_log = logging.getLogger("kvstore.vllm")
_Move = Callable[[list[bytes], list[Bytes]], list[bool]]


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # vLLM is not there where types are checked
    """vLLM's own bookkeeping of lookups; ``batch_lookup`` answers them, in vLLM's lookup thread."""

    def __init__(self, values: Offloaded, tier_type: str) -> None:
        self._values = values
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: object) -> list[bool]:
        return self._values.has(keys)


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Keeps vLLM's offloaded chunks in a kvstore sidecar. Raises, at the start only: InvalidRequest."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: object = None,
        **options: object,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = OffloadTierSettings.of(options)
        check_version(vllm_version, settings.allow_unknown_version)
        check_interface(SecondaryTierManager, type(self), vllm_version, TIER)
        assert settings.weights_digest is not None
        self.locality = Locality(settings.locality)
        # An address, not a view: vLLM unmaps this memory, which is impossible while views of it exist.
        self._memory = int(np.asarray(primary_kv_view).ctypes.data)
        namespace = offload_namespace(
            offloading_spec.config, self.block_size_bytes, settings.weights_digest, vllm_version,
            str(current_platform.fp8_dtype()),
        )  # fmt: skip
        self._client = connect(settings.address, required=False, timeout_s=settings.timeout_s)
        self._values = Offloaded(self._client, namespace)
        self._lookups = _Lookups(self._values, tier_type)
        self._storing, self._loading = WorkerThreads(1, "kvstore-offload"), WorkerThreads(1, "kvstore-promote")
        self._clock = SystemClock()
        self._running: dict[int, tuple[OffloadJob, Future[tuple[list[bool], float]]]] = {}

    # ------------------------------------------------------------ what is there

    def on_new_request(self, req_context: object) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: object) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: object) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: OffloadRequest) -> None:
        self._lookups.cleanup(req_context.req_id)

    # ------------------------------------------------------------ jobs

    def submit_store(self, job_metadata: OffloadJob) -> None:
        self._submit(job_metadata, self._storing, self._values.store)

    def submit_load(self, job_metadata: OffloadJob) -> None:
        self._submit(job_metadata, self._loading, self._values.load)

    def _submit(self, job: OffloadJob, threads: WorkerThreads, move: _Move) -> None:
        keys = [bytes(key) for key in job.keys]
        rows = [self._row(int(number)) for number in job.chunk_ids]

        def run() -> tuple[list[bool], float]:
            started_s = self._clock.monotonic()
            return move(keys, rows), self._clock.monotonic() - started_s

        self._running[job.job_id] = job, begun(threads, run)

    def _row(self, number: int) -> Bytes:
        return memory_at(self._memory + number * self.block_size_bytes, self.block_size_bytes)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        done = [name for name, (_, future) in self._running.items() if future.done()]
        return [self._result(*self._running.pop(name)) for name in done]

    def _result(self, job: OffloadJob, future: Future[tuple[list[bool], float]]) -> JobResult:
        keys, error = list(job.keys), future.exception()
        if error is not None:  # a bug of ours must not keep vLLM's blocks for ever
            _log.error("kvstore: moving offloaded blocks failed", exc_info=error)
        done, seconds = future.result() if error is None else ([False] * len(keys), 0.0)
        good = [key for key, is_done in zip(keys, done, strict=True) if is_done]
        if job.is_promotion:
            self._lookups.mark_miss([key for key, is_done in zip(keys, done, strict=True) if not is_done])
        return JobResult(
            job_id=job.job_id, success=len(good) == len(keys), transfer_time=seconds,
            successful_keys=tuple(good) if job.is_promotion and good else None,
            transfer_bytes=len(good) * self.block_size_bytes,
        )  # fmt: skip

    def drain_jobs(self) -> None:
        """Wait for all jobs: every job ends by itself, within the deadlines of its calls."""
        wait([future for _, future in self._running.values()])

    def shutdown(self) -> None:
        """End all jobs. Idempotent. Nothing touches vLLM's memory afterwards."""
        self._lookups.shutdown()
        self._storing.close()
        self._loading.close()
        self._client.close()
        self._running.clear()
