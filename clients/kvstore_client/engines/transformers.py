"""Hugging Face transformers: a model that remembers the prompts it has seen.

    model = CachedModel(AutoModelForCausalLM.from_pretrained(...), connect())
    output = model.generate(input_ids, max_new_tokens=64)
    output.sequences, output.report.ttft_s, output.report.reused_token_count

Prefill runs in fixed steps aligned to chunks, cold and warm alike, so that a warm prompt meets the same matmul
shapes as a cold one and gives the same logits to the bit. Whole steps are reused; a fully cached prompt recomputes
its last. Fetched layers land in the cache's own memory; layer l waits for its bytes only, while later ones are on
their way. The store happens in the background once the first token is out, and never fails a generation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.seams import Clock, SystemClock, WorkerThreads
from kvstore.spec import Durability, MissReason, ModelSpec, Tier
from kvstore_client.client import Client
from kvstore_client.engines.transformers_hidden import PromptE
from kvstore_client.engines.transformers_runner import TransformersRunner
from kvstore_client.fetching import LayerStream
from kvstore_client.receipt import Receipt
from kvstore_client.recompute import dense_planes

__all__ = ["CachedModel", "Generated", "Report", "TransformersRunner", "cache_of"]

_log = logging.getLogger("kvstore.client")
_UNSUPPORTED = (
    "past_key_values",
    "inputs_embeds",
    "assistant_model",
    "prompt_lookup_num_tokens",
    "encoder_outputs",
)


@dataclass
class Report:
    """Where a generation's first token came from. Seconds are of the monotonic clock."""

    token_count: int = 0
    reused_token_count: int = 0
    tier: Tier = Tier.NONE
    reason: MissReason = MissReason.NONE
    fetched_bytes: int = 0
    lookup_s: float = 0.0
    """From the call to the answer: what is there, and where."""
    fetch_s: float = 0.0
    """From that answer until the last layer had landed; overlaps with the prefill."""
    prefill_s: float = 0.0
    """From that answer to the first token."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    bypassed: str = ""
    """Why the cache was not used at all; empty when it was."""
    receipt: Receipt | None = field(default=None, repr=False)

    @property
    def fetch_bytes_per_s(self) -> float:
        return self.fetched_bytes / self.fetch_s if self.fetch_s else 0.0

    def wait_stored(self, timeout_s: float | None = None) -> Durability:
        """Wait for the background store; NONE when there was nothing to store or it failed."""
        return self.receipt.wait(timeout_s) if self.receipt else Durability.NONE


@dataclass
class Generated:
    """``sequences`` as transformers' generate returns them (or its output object), and the report."""

    sequences: Any
    report: Report


class _Layer(DynamicLayer):  # type: ignore[misc]  # transformers ships no types
    """A cache layer in memory of fixed capacity: no concatenation per step, and fetched bytes land in place."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, arrive: Callable[[], None]) -> None:
        super().__init__()
        self._k, self._v = k, v
        self._arrive = arrive
        self.show(0)

    def show(self, token_count: int) -> None:
        """The first ``token_count`` tokens are the layer's content (or will be, once they arrive)."""
        self.keys, self.values = self._k[:, :, :token_count], self._v[:, :, :token_count]
        self.dtype, self.device = self._k.dtype, self._k.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        self._arrive()
        start = int(self.keys.shape[-2])
        stop = start + int(key_states.shape[-2])
        if stop > self._k.shape[-2]:
            self._grow(start, stop)
        self._k[:, :, start:stop] = key_states
        self._v[:, :, start:stop] = value_states
        self.show(stop)
        return self.keys, self.values

    def _grow(self, start: int, stop: int) -> None:
        for name in ("_k", "_v"):
            old = getattr(self, name)
            new = old.new_empty((*old.shape[:2], stop + stop // 2, old.shape[-1]))
            new[:, :, :start] = old[:, :, :start]
            setattr(self, name, new)

    def first(self, token_count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, V) of the first tokens, [kv_heads, tokens, head_dim]. They do not change any more."""
        return self._k[0, :, :token_count], self._v[0, :, :token_count]


def cache_of(kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """A cache for transformers' ``generate`` to go on from, over the tensors of a (partial) prefill, zero copy.

    Shapes: ``kv`` per layer (K, V), each [kv_heads, tokens, head_dim]. Give ``generate`` the prompt and at least one
    token more. What it computes is as exact as ``kv`` is: store it with that exactness."""
    cache = DynamicCache()
    cache.layers = [_Layer(k[None], v[None], lambda: None) for k, v in kv]
    for layer, (k, _) in zip(cache.layers, kv, strict=True):
        layer.show(k.shape[1])
    return cache


class _Arrivals:
    """Hands layers to the forward pass in order, pulling the stream only as far as the layer that asks."""

    def __init__(self) -> None:
        self._stream: Iterator[Any] | None = None
        self._next = 0
        self.on_layer: Callable[[int], None] = lambda _: None
        self.on_last: Callable[[], None] = lambda: None

    def attach(self, stream: LayerStream) -> None:
        self._stream = iter(stream)

    def until(self, layer: int) -> None:
        while self._stream is not None and self._next <= layer:
            item = next(self._stream, None)
            if item is None:
                self._end()
                return
            self._next = item[0] + 1
            self.on_layer(item[0])

    def finish(self) -> None:
        """Pull the rest."""
        self.until(1 << 30)

    def _end(self) -> None:
        self._stream = None
        self.on_last()


class _FirstToken(LogitsProcessor):  # type: ignore[misc]  # transformers ships no types
    """Calls once, when the first token's logits are there."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        action, self._action = self._action, None
        if action is not None:
            action()
        return scores


class CachedModel:
    """A causal language model in front of a sidecar.

    ``step_tokens``: rows per prefill step, a multiple of ``chunk_tokens`` (default: one chunk). Models that are to
    share caches to the bit use the same. ``spec``: with ``keeps_e`` the prompt's E is captured, stored and fetched in
    the place of KV, which is projected layer by layer. Raises: InvalidRequest for a model family without a spec.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        *,
        chunk_tokens: int = 256,
        spec: ModelSpec | None = None,
        step_tokens: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.model = model
        self.client = client
        self.spec = spec or ModelSpec.from_transformers(model.config, model, chunk_tokens)
        self.step_tokens = step_tokens or self.spec.chunk_tokens
        if self.step_tokens % self.spec.chunk_tokens:
            raise InvalidRequest(
                f"step_tokens {self.step_tokens} must be a multiple of chunk_tokens {self.spec.chunk_tokens}"
            )
        self._runner = TransformersRunner(model, spec=self.spec) if self.spec.keeps_e else None
        self._clock = clock or SystemClock()
        self._background = WorkerThreads(1, "kvstore-keep")

    def close(self) -> None:
        """Finish storing. The client stays open."""
        self._background.close()

    @torch.inference_mode()
    def generate(self, input_ids: torch.Tensor, **options: Any) -> Generated:
        """transformers' ``generate``, with the prompt's cache fetched where it is stored and kept where it is not."""
        started_s = self._clock.monotonic()
        bypassed = self._why_not(input_ids, options)
        if bypassed:
            report = Report(token_count=int(input_ids.shape[-1]), bypassed=bypassed)
            first = _FirstToken(lambda: self._stamp(report, started_s))
            sequences = self._generate(input_ids, options, first)
        else:
            report, sequences = self._cached(input_ids, options, started_s)
        report.total_s = self._clock.monotonic() - started_s
        return Generated(sequences, report)

    def _why_not(self, input_ids: torch.Tensor, options: dict[str, Any]) -> str:
        """Why a call cannot use the cache; empty when it can."""
        if input_ids.ndim != 2 or input_ids.shape[0] != 1:
            return f"batch of {tuple(input_ids.shape)}: one sequence at a time"
        mask = options.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            return "attention_mask hides tokens"
        used = [name for name in _UNSUPPORTED if options.get(name) is not None]
        if used:
            return f"{used[0]} is given"
        for name in ("num_beams", "num_return_sequences"):
            if (options.get(name) or getattr(self.model.generation_config, name, 1) or 1) != 1:
                return f"{name} is not 1"
        if options.get("use_cache") is False:
            return "use_cache is off"
        return ""

    def _generate(self, input_ids: torch.Tensor, options: dict[str, Any], first: _FirstToken, **more: Any) -> Any:
        processors = LogitsProcessorList([*(options.get("logits_processor") or ()), first])
        return self.model.generate(input_ids, **{**options, **more, "logits_processor": processors})

    def _stamp(self, report: Report, started_s: float) -> None:
        report.ttft_s = self._clock.monotonic() - started_s
        report.prefill_s = report.ttft_s - report.lookup_s

    def _cached(self, input_ids: torch.Tensor, options: dict[str, Any], started_s: float) -> tuple[Report, Any]:
        tokens = input_ids[0].cpu().numpy()
        try:
            return self._attempt(input_ids, tokens, options, started_s, may_reuse=True)
        except KVStoreError as error:
            # Bytes that were announced did not come: the cache holds nothing worth keeping, compute it all.
            _log.warning("kvstore: %s; recomputing the prompt", error.message)
            return self._attempt(input_ids, tokens, options, started_s, may_reuse=False)

    def _attempt(
        self,
        input_ids: torch.Tensor,
        tokens: Any,
        options: dict[str, Any],
        started_s: float,
        *,
        may_reuse: bool,
    ) -> tuple[Report, Any]:
        count = int(input_ids.shape[1])
        last_step = (count - 1) // self.step_tokens * self.step_tokens
        arrivals = _Arrivals()
        layers = self._layers(count + self._new_token_count(options, count), arrivals)
        report = Report(token_count=count)
        prompt_e = PromptE(self._runner, self._whole(count)) if self._runner else None
        reused = 0
        if may_reuse and last_step:
            reused = self._reuse(tokens[:last_step], layers, prompt_e, arrivals, report, started_s)
        cache = DynamicCache(config=self.model.config)
        cache.layers = layers

        def first_token() -> None:
            self._stamp(report, started_s)
            arrivals.finish()
            report.receipt = self._keep(tokens, layers, prompt_e, reused)

        with prompt_e.captured(cache) if prompt_e else nullcontext():
            for start in range(reused, last_step, self.step_tokens):
                self.model.base_model(
                    input_ids=input_ids[:, start : start + self.step_tokens],
                    past_key_values=cache,
                    use_cache=True,
                )
            sequences = self._generate(input_ids, options, _FirstToken(first_token), past_key_values=cache)
        return report, sequences

    def _whole(self, count: int) -> int:
        """How many of so many tokens are whole steps: these are kept."""
        return count // self.step_tokens * self.step_tokens

    def _new_token_count(self, options: dict[str, Any], count: int) -> int:
        limit = options.get("max_new_tokens")
        if limit is None:
            config = options.get("generation_config") or self.model.generation_config
            limit = getattr(config, "max_new_tokens", None)
        if limit is None:
            limit = max(0, (options.get("max_length") or 0) - count)
        return int(limit) + 1

    def _layers(self, capacity: int, arrivals: _Arrivals) -> list[_Layer]:
        """Memory for the whole generation."""
        planes = dense_planes(self.spec, capacity, self.model.device)
        return [
            _Layer(k[None], v[None], lambda layer=layer: arrivals.until(layer))  # type: ignore[misc]
            for layer, (k, v) in enumerate(planes)
        ]

    def _reuse(
        self, tokens: Any, layers: list[_Layer], prompt_e: PromptE | None, arrivals: _Arrivals, report: Report,
        started_s: float,
    ) -> int:  # fmt: skip
        """Open the fetch of the stored prefix. Returns how many tokens of it, whole steps, will arrive."""
        into: list[Any] = [layer.first(len(tokens)) for layer in layers]
        if prompt_e is not None:
            into = [plane[: len(tokens)] for plane in prompt_e.planes]
        stream = self.client.fetch_layers(self.spec, tokens, into=into)
        opened_s = self._clock.monotonic()
        report.lookup_s = opened_s - started_s
        report.reason = stream.reason
        reused = self._whole(stream.token_count)
        if not reused:
            stream.close()
            return 0
        report.reused_token_count, report.tier, report.fetched_bytes = reused, stream.tier, stream.byte_count

        def landed() -> None:
            report.fetch_s = stream.landed_s - opened_s

        def project(layer: int) -> None:
            if prompt_e is not None:
                prompt_e.arrive(layer, reused, layers[layer].first(reused), self.step_tokens)

        if prompt_e is not None:
            prompt_e.announce(reused)
        arrivals.on_layer = project
        arrivals.on_last = landed
        arrivals.attach(stream)
        for layer in layers:
            layer.show(reused)
        return reused

    def _keep(
        self, tokens: Any, layers: list[_Layer], prompt_e: PromptE | None, reused: int
    ) -> Receipt | None:  # fmt: skip
        """Store the whole steps that were computed here, in the background."""
        whole = self._whole(len(tokens))
        if prompt_e is not None:
            whole = min(whole, self._whole(prompt_e.token_count))
        if whole <= reused:
            return None
        kv: list[Any] = [layer.first(whole) for layer in layers]
        if prompt_e is not None:
            kv = [plane[:whole] for plane in prompt_e.planes]
        outcome: Future[tuple[Durability, int, str]] = Future()

        def store() -> None:
            try:
                receipt = self.client.store(self.spec, tokens[:whole], kv)
                level = receipt.wait()
                outcome.set_result((level, receipt.stored_token_count, receipt.reason))
            except Exception as error:  # noqa: BLE001 - a store never fails a generation
                _log.warning("kvstore: the prompt was not kept: %s", error)
                outcome.set_result((Durability.NONE, 0, str(error)))

        self._background.submit(store)
        return Receipt(outcome)
