"""A stand-in for the one part of vLLM's offloading that wants a GPU: its copies between pages and its CPU cache.

vLLM's connector, scheduler, tiering manager and CPU cache are its own."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, blocks of one group, each a row of the CPU cache."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._pairs = [
            (each.tensor, region.create_next_worker_view(each.page_size_bytes)) for each in kv_caches.tensors
        ]
        self._done: list[TransferResult] = []

    def _copy(self, job_id: int, pages: Any, rows: Any, *, is_load: bool) -> bool:
        for tensor, view in self._pairs:
            for page, row in zip(pages.block_ids, rows.block_ids, strict=True):
                source, target = (view[row], tensor[page]) if is_load else (tensor[page], view[row])
                target.copy_(source)
        self._done.append(TransferResult(job_id=job_id, success=True))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_load=True)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever on its way."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class OnACpu(TieringOffloadingSpec):  # type: ignore[misc]
    """Offloads from the pages of a CPU, which vLLM's own refuses."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker
