"""Stands in for vLLM: requests and steps as it passes them, and one engine's pages with both sides of the connector."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from kvstore_client import Client, ModelSpec, connect
from kvstore_client.engines.vllm.drafts import Draft
from kvstore_client.engines.vllm.groups import LayerGroup
from kvstore_client.engines.vllm.identity import Adapters
from kvstore_client.engines.vllm.mending import Mender
from kvstore_client.engines.vllm.pages import PagesOfModel
from kvstore_client.engines.vllm.runner import VllmRunner
from kvstore_client.engines.vllm.scheduler import SchedulerSide
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_client.engines.vllm.step import Step
from kvstore_client.engines.vllm.worker import WorkerSide

from kvstore.seams import Clock
from kvstore.spec import LayerSpec
from tests.server.raw import TIMEOUT_S
from tests.specs import small_spec

BLOCK, BLOCKS = 4, 64
Tables: TypeAlias = "tuple[list[int], ...]"

SPEC = small_spec()  # two layers, two heads of 8, chunks of 16

MLA = small_spec(model_id="latent", layers=(LayerSpec(kv_heads=1, k_dim=24, v_dim=8),) * 2, mla=True)


def request(name: str, tokens: Any, **more: Any) -> SimpleNamespace:
    given = {
        "lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None,
        "skip_reading_prefix_cache": False, **more,
    }  # fmt: skip
    ids = [int(each) for each in tokens]
    return SimpleNamespace(request_id=name, all_token_ids=ids, num_tokens=len(ids), num_prompt_tokens=len(ids), **given)


def scheduled(
    name: str, blocks: list[int] | Tables, computed: int, count: int, *, is_new: bool = True, tables: Tables = ()
) -> SimpleNamespace:  # fmt: skip
    """A step that computes ``count`` tokens of one request. ``blocks``: of one group, or by group; ``tables``: all that
    the request has, where that is not what it was given."""
    given = blocks if isinstance(blocks, tuple) else (blocks,)
    new = [SimpleNamespace(req_id=name, block_ids=given, num_computed_tokens=computed)] if is_new else []
    names = [] if is_new else [name]
    cached = SimpleNamespace(
        req_ids=names, new_block_ids=[given], num_computed_tokens=[computed], resumed_req_ids=set()
    )
    state = SimpleNamespace(resolve_block_ids=lambda _: tables or given)
    return SimpleNamespace(
        scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens={name: count},
        kv_connector_block_state=state,
    )  # fmt: skip


def matched(side: SchedulerSide, asked: Any, computed: int) -> tuple[int, bool]:
    """As vLLM does: it asks again while the answer is on its way."""
    until = time.monotonic() + TIMEOUT_S
    while (found := side.matched(asked, computed))[0] is None:
        assert not found[1]
        assert time.monotonic() < until
        time.sleep(0.002)
    return found  # type: ignore[return-value]  # a number now


class Engine:
    """Pages and both sides, as one vLLM has them. Its cache of a token is what the seed makes of its place."""

    def __init__(
        self, address: str, spec: ModelSpec = SPEC, load: str = "async", draft: Draft | None = None,
        groups: Sequence[LayerGroup] = (), model: Any = None, clock: Clock | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """``model``: a stand-in for vLLM's, where documents are mended; ``clock``: the scheduler's."""
        settings = ConnectorSettings(chunk_tokens=16, load=load, **options)
        self.clients = [connect(address, timeout_s=settings.timeout_s) for _ in range(2)]
        each = spec.layers[0]
        shape = (BLOCKS, each.kv_heads, BLOCK, each.k_dim + each.v_dim)
        self.pages = [torch.zeros(shape, dtype=getattr(torch, spec.cache_dtype)) for _ in spec.layers]
        views = PagesOfModel(spec, self.pages, BLOCK, "TRITON_MLA" if spec.mla else "FLASH_ATTN", groups=groups)
        self.scheduler = SchedulerSide(
            self.clients[0], Adapters(spec), settings, BLOCK, draft=draft, groups=groups, clock=clock
        )  # fmt: skip
        mender = None
        if settings.mends is not None:
            mender = Mender(self.clients[1], views, VllmRunner(model, spec, torch.device("cpu")), settings.mends)
        self.worker = WorkerSide(
            self.clients[1], views, is_layerwise=load == "layerwise", is_one_table=not groups, mender=mender
        )  # fmt: skip

    def fill(self, blocks: list[int], seed: int) -> list[Any]:
        """Compute: other numbers into a request's blocks. What they hold, per layer."""
        made = torch.Generator().manual_seed(seed)
        for pages in self.pages:
            pages[blocks] = torch.randn(pages[blocks].shape, generator=made).to(pages.dtype)
        return self.content(blocks)

    def content(self, blocks: list[int]) -> list[Any]:
        return [pages[blocks].clone() for pages in self.pages]

    def compute(self, asked: Any, blocks: list[int] | Tables, computed: int, count: int, **more: Any) -> Step:
        step = self.scheduler.step(scheduled(asked.request_id, blocks, computed, count, **more))
        self.worker.begin(step)
        for layer in range(len(self.pages)):
            self.worker.wait_layer(layer)
        self.worker.end_layerwise()
        self.worker.save(step.saves)
        return step

    def admit(self, asked: Any, blocks: list[int] | Tables, computed: int = 0) -> int:
        """As vLLM does before a request runs, of which it has some tokens: how many will be loaded."""
        self.scheduler.new_request(asked)
        count, is_async = matched(self.scheduler, asked, computed)
        tracked = self.scheduler._tracked.get(asked.request_id)  # None: it has no name
        is_mended = tracked is not None and tracked.documents is not None
        assert is_async == (count > 0 and self.scheduler._settings.load == "async" and not is_mended)
        self.scheduler.allocated(asked, blocks if isinstance(blocks, tuple) else (blocks,), count)
        return count

    def landed(self) -> set[str]:
        until = time.monotonic() + TIMEOUT_S
        while not (done := self.worker.landed()):
            assert time.monotonic() < until
            time.sleep(0.005)
        return done

    def keep(self, asked: Any, blocks: list[int], seed: int = 1) -> list[Any]:
        """Compute a whole prompt and wait until it is stored."""
        assert self.admit(asked, blocks) == 0
        filled = self.fill(blocks, seed)
        step = self.compute(asked, blocks, 0, asked.num_tokens)
        for save in step.saves:
            wait_stored(self.clients[0], save)
        self.scheduler.finished(asked.request_id)
        return filled

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def wait_stored(client: Client, save: Any) -> None:
    until = time.monotonic() + TIMEOUT_S
    while client.lookup(save.spec, save.tokens, extras=save.extras).prefix_token_count < save.tokens.size:
        assert time.monotonic() < until
        time.sleep(0.005)


def blocks_of(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + -(-count // BLOCK)))[::-1]
