"""Computes a prompt over the stored caches of its documents, within a step, and writes the result into vLLM's pages."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvstore.errors import KVStoreError
from kvstore.planning import Recompute
from kvstore.seams import SystemClock
from kvstore_client.client import Client
from kvstore_client.engines.pause import CallPause
from kvstore_client.engines.vllm.pages import PagesOfModel
from kvstore_client.engines.vllm.runner import VllmRunner
from kvstore_client.engines.vllm.step import Mend, Mended
from kvstore_client.recompute.prefill import partial_prefill
from kvstore_client.recompute.request import Request
from kvstore_client.recompute.result import PartialPrefill

_log = logging.getLogger("kvstore.vllm")


class Mender:
    """Mends the prompts of one worker, by one ``setting``."""

    def __init__(self, client: Client, pages: PagesOfModel, runner: VllmRunner, setting: Recompute) -> None:
        self._client = client
        self._pages = pages
        self._runner = runner
        self._setting = setting
        self._clock = SystemClock()
        self._patience = CallPause(self._clock)

    def mend(self, mend: Mend) -> Mended | None:
        """Compute a prompt; None: too little of it is stored by now, or it cannot be computed, and its blocks have
        nothing. Raises nothing: the engine goes on. A sidecar that stalls is waited for once, because all requests of
        the step wait, too."""
        if self._patience.is_spent:
            return None
        began_s = self._clock.monotonic()
        try:
            with torch.inference_mode(False):  # threads that are in no such mode write what is fetched
                done = self._mended(mend)
            seconds = self._clock.monotonic() - began_s
            reused = done.plan.reused_token_count
            computed = done.plan.token_count - reused + round(done.share * reused)
            return Mended(done.plan.token_count, reused, computed, seconds)
        except KVStoreError as error:
            self._patience.took(self._clock.monotonic() - began_s)  # nobody knows how much of it was waiting
            _log.warning("kvstore: %s; the prompt is computed", error.message)
        except Exception:  # noqa: BLE001 - whatever a module of vLLM's raises when it is called alone
            _log.exception("kvstore: a prompt could not be computed over its documents; it is computed without them")
        return None

    def _mended(self, mend: Mend) -> PartialPrefill:
        self._runner.spec = mend.spec  # it has the weights' identity
        request = Request.of(
            self._runner, mend.tokens, mend.documents.runs, (), self._setting, mend.extras, 1,
            mend.tokens[: mend.documents.preamble], reused_min=mend.reused_min,
        )  # fmt: skip
        done = partial_prefill(self._client, request, self._client.planner.timeout_s, self._clock)
        self._patience.took(done.timeline.prepare_s + done.timeline.load_s)
        self._write(done.kv, mend)
        return done

    @torch.inference_mode()
    def _write(self, kv: Any, mend: Mend) -> None:
        """Write the wanted tokens into their pages: each page, [heads, slots, dim], has some slots of a block."""
        slots = torch.from_numpy(self._pages.groups[0].slots(mend.block_ids, mend.start, mend.stop)[mend.start :])
        for into, planes in zip(self._pages.views, kv, strict=True):
            for pages, plane in zip(into, planes, strict=True):
                size = pages.shape[2]
                of_page, in_page = (slots // size).to(pages.device), (slots % size).to(pages.device)
                pages[of_page, :, in_page] = plane[:, mend.start : mend.stop].transpose(0, 1).to(pages.dtype)
