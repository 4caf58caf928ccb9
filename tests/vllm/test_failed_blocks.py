"""Blocks of a layerwise load that failed, and vLLM's own prefix cache: its real scheduler, and workers stood in for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_ops.sidecar import Sidecar
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.engine import CONNECTOR, ENVIRONMENT
from tests.vllm.test_end_to_end import LONG

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
BLOCK, BLOCKS = 32, 64
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
HASH = get_hash_fn_by_name("sha256")


class Steps:
    """vLLM's scheduler with our connector, step by step. 192 tokens of ``LONG`` are stored."""

    def __init__(self, model: Path, address: str, kind: type[Scheduler] = Scheduler) -> None:
        os.environ.update(ENVIRONMENT)
        extra = {"address": address, "chunk_tokens": 64, "load": "layerwise"}
        config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, enforce_eager=True, block_size=BLOCK, dtype="float32",
            max_model_len=512, kv_transfer_config=KVTransferConfig(**CONNECTOR, kv_connector_extra_config=extra),
        ).create_engine_config()  # fmt: skip
        config.cache_config.num_gpu_blocks = BLOCKS
        names = [f"model.layers.{index}.self_attn.attn" for index in range(3)]
        caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, FULL)])
        init_none_hash(HASH)
        self.scheduler = kind(config, caches, StructuredOutputManager(config), block_size=BLOCK)
        side = self.scheduler.connector._scheduler
        kv = [(torch.randn(2, 192, 32), torch.randn(2, 192, 32)) for _ in names]
        side._client.store(side._adapters.spec_for(None), LONG[:192], kv).wait(10.0)

    def add(self, name: str) -> None:
        hasher = get_request_block_hasher(BLOCK, HASH)
        self.scheduler.add_request(Request(name, LONG, SamplingParams(max_tokens=4), None, block_hasher=hasher))

    def begin(self) -> Any:
        """Return the next step in which anything runs."""
        until = time.monotonic() + 10.0
        while not (step := self.scheduler.schedule()).num_scheduled_tokens:
            assert time.monotonic() < until
            time.sleep(0.01)
        return step

    def end(self, step: Any, failed: Iterable[int] = ()) -> None:
        names = list(step.num_scheduled_tokens)
        report = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names), kv_connector_output=KVConnectorOutput(invalid_block_ids=set(failed)),
        )  # fmt: skip
        self.scheduler.update_from_output(step, report)


@pytest.mark.parametrize("is_gone_first", [False, True])
def test_nobody_is_given_blocks_of_a_load_that_failed(models: dict[str, Path], is_gone_first: bool) -> None:
    """vLLM leaves them in its prefix cache until their request computes them, which it never does if it goes away."""
    with Sidecar("--capacity", "64 MiB") as sidecar:
        steps = Steps(models["llama"], sidecar.address)
        steps.add("first")
        step = steps.begin()
        (load,) = step.kv_connector_metadata.step.loads
        assert (load.stop, step.num_scheduled_tokens["first"]) == (192, 108)
        if is_gone_first:
            steps.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
        steps.end(step, failed=load.block_ids[0])  # as workers tell
        steps.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
        steps.add("second")
        (second,) = (step := steps.begin()).scheduled_new_reqs
        (load,) = step.kv_connector_metadata.step.loads
        assert (load.start, load.stop, second.num_computed_tokens) == (0, 192, 192), "nothing is vLLM's own"
        steps.end(step)
        steps.add("third")
        third = next(each for each in steps.begin().scheduled_new_reqs if each.req_id == "third")
        assert third.block_ids[0][:9] == second.block_ids[0][:9]
        steps.scheduler.shutdown()


def test_vllm_answers_with_what_it_computed_ahead_over_a_load_that_failed(models: dict[str, Path]) -> None:
    """The reason why layerwise loads are refused with ``--async-scheduling``. Once a vLLM passes no token on here, they
    need not be."""
    with Sidecar("--capacity", "64 MiB") as sidecar:
        steps = Steps(models["llama"], sidecar.address, AsyncScheduler)
        steps.add("first")
        step = steps.begin()
        (load,) = step.kv_connector_metadata.step.loads
        ahead = steps.begin()
        steps.end(step, failed=load.block_ids[0])
        again = steps.begin()
        steps.end(ahead)
        assert list(steps.scheduler.requests["first"].output_token_ids) == [7], "of a step that read what did not land"
        assert again.num_scheduled_tokens["first"] > len(LONG), "tokens that nobody has sampled"
        steps.scheduler.shutdown()
