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
from kvstore_client.engines.vllm.step import Mend

_log = logging.getLogger("kvstore.vllm")


class Mender:
    """Mends the prompts of one worker, by one ``setting``."""

    def __init__(self, client: Client, pages: PagesOfModel, runner: VllmRunner, setting: Recompute) -> None:
        self._client = client
        self._pages = pages
        self._runner = runner
        self._setting = setting
        self._patience = CallPause(SystemClock())

    def mend(self, mend: Mend) -> int | None:
        """Compute a prompt, and return how many of its tokens were reused; None: it could not be, and its blocks have
        nothing. Raises nothing: the engine goes on. A sidecar that stalls is waited for once, because all requests of
        the step wait, too."""
        if self._patience.is_spent:
            return None
        try:
            with torch.inference_mode(False):  # threads that are in no such mode write what is fetched
                return self._mended(mend)
        except KVStoreError as error:
            _log.error("kvstore: %s; the prompt is computed", error.message)
        except Exception:  # noqa: BLE001 - whatever a module of vLLM's raises when it is called alone
            _log.exception("kvstore: a prompt could not be computed over its documents; it is computed without them")
        return None

    def _mended(self, mend: Mend) -> int:
        self._runner.spec = mend.spec  # it has the weights' identity
        result = self._client.partial_prefill(
            self._runner, mend.tokens, segments=mend.documents.runs, recompute=self._setting,
            extras=mend.extras, preamble=mend.tokens[: mend.documents.preamble],
        )  # fmt: skip
        self._patience.took(result.timeline.prepare_s)  # also what a load took that did not come
        self._write(result.kv, mend)
        return result.plan.reused_token_count

    @torch.inference_mode()
    def _write(self, kv: Any, mend: Mend) -> None:
        """Write the wanted tokens into their pages: each page, [heads, slots, dim], has some slots of a block."""
        slots = torch.from_numpy(self._pages.groups[0].slots(mend.block_ids, mend.start, mend.stop)[mend.start :])
        for into, planes in zip(self._pages.views, kv, strict=True):
            for pages, plane in zip(into, planes, strict=True):
                size = pages.shape[2]
                of_page, in_page = (slots // size).to(pages.device), (slots % size).to(pages.device)
                pages[of_page, :, in_page] = plane[:, mend.start : mend.stop].transpose(0, 1).to(pages.dtype)
