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
import math
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList

from kvstore.errors import DataLoss, DeadlineExceeded, InvalidRequest, KVStoreError
from kvstore.planning import RequestClass, Terms
from kvstore.planning.loading import BusyTime
from kvstore.seams import Clock, SystemClock, WorkerThreads
from kvstore.seams.jobs import begun, failure_of
from kvstore.spec import Durability, MissReason, ModelSpec, Tier
from kvstore_client.arrays import Layer, Tensor
from kvstore_client.client import Client
from kvstore_client.engines.pause import CallPause
from kvstore_client.engines.transformers_documents import chat_frame, documents_in, mended, remember
from kvstore_client.engines.transformers_hidden import PromptE
from kvstore_client.engines.transformers_layers import CacheLayer, LayerArrivals, cache_of
from kvstore_client.engines.transformers_options import room_tokens, why_left, why_rotation
from kvstore_client.engines.transformers_planning import FirstToken, PromptPlan, Stopwatch
from kvstore_client.engines.transformers_report import Generated, Report
from kvstore_client.engines.transformers_runner import TransformersRunner
from kvstore_client.engines.transformers_spec import CausalModel, adapters_of, followed, is_of, spec_and_steps
from kvstore_client.forks import in_children
from kvstore_client.loading.patience import Patience, prior_s, with_budget
from kvstore_client.prompt import GivenTokens
from kvstore_client.recompute import dense_planes
from kvstore_client.store.calls import check_durability
from kvstore_client.store.receipt import Receipt, Settle, Settling

__all__ = ["CachedModel", "Generated", "Report", "TransformersRunner", "cache_of", "chat_frame"]

_log = logging.getLogger("kvstore.client")
PENDING_MAX = 8
"""The most prompts that are still to be kept: each has a cache in the engine's memory until the sidecar took it."""


@dataclass(frozen=True)
class _Whose:
    """The model that a call's cache belongs to, from its start to its end: another thread may find that the model has
    changed."""

    spec: ModelSpec
    runner: TransformersRunner | None

    @staticmethod
    def of(model: CausalModel, spec: ModelSpec) -> _Whose:
        return _Whose(spec, TransformersRunner(model, spec=spec) if spec.keeps_e else None)


def _length(input_ids: Tensor) -> int:
    """Return a prompt's token count; 0 where it is unknown."""
    shape: tuple[int, ...] = getattr(input_ids, "shape", ())
    return int(shape[-1]) if len(shape) else 0


class CachedModel:
    """A causal language model in front of a sidecar.

    ``chunk_tokens``: the spec's, or 256 without a ``spec``. ``step_tokens``: rows per prefill step, a multiple of it
    (default: one chunk). Models that are to share caches to the bit use the same. ``spec``: with ``keeps_e`` the
    prompt's E is captured, stored and fetched in the place of KV, which is projected layer by layer. The spec is
    compared with the model, and follows it: each call looks at a sample of the weights, and digests them again when
    they changed. A spec 'unverified:<name>' vouches for the weights, also while they change. ``durability``: the level
    to ask ``Client.store`` for, of each prompt.
    Raises: InvalidRequest for a model family without a spec, a model that its configuration and weights do not
    describe, a spec that is another model's, and arguments that do not fit.
    """

    def __init__(
        self,
        model: CausalModel,
        client: Client,
        *,
        chunk_tokens: int | None = None,
        spec: ModelSpec | None = None,
        step_tokens: int | None = None,
        durability: Durability | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not isinstance(client, Client):
            raise InvalidRequest(f"client is a {type(client).__name__}: give what kvstore_client.connect() returns")
        self.model = model
        self.client = client
        check_durability(durability)
        self._durability = durability
        spec, self.step_tokens = spec_and_steps(model, spec, chunk_tokens, step_tokens)
        self._whose, self._adapters = _Whose.of(model, spec), adapters_of(model)
        self._clock = clock or SystemClock()
        self._pause = CallPause(self._clock)
        self._begin()
        in_children(self._begin)  # a child has no thread of its parent's, and would queue its prompts for ever

    def _begin(self) -> None:
        self._background = WorkerThreads(1, "kvstore-keep")
        self._pending: list[Future[tuple[Durability, int, str]]] = []

    @property
    def spec(self) -> ModelSpec:
        """The model's spec, as of the last call."""
        return self._whose.spec

    def close(self) -> None:
        """Finish storing. The client stays open."""
        self._background.close()

    def remember(self, documents: Iterable[GivenTokens], *, preamble: GivenTokens = ()) -> list[Receipt]:
        """Compute and store each document (its tokens) behind a ``preamble``, the beginning that a chat template gives
        every prompt (``chat_frame``), so that ``Client.partial_prefill`` finds it at any place in a prompt. Stored
        documents are not computed again: the receipts are of the others. Raises: InvalidRequest."""
        self._adopt(followed(self.spec, self.model, self._adapters))
        runner = TransformersRunner(self.model, spec=self.spec)
        return remember(self.client, runner, documents, preamble, self._durability)

    def refresh(self) -> None:
        """Read every byte of the weights again. Use it after changing a few numbers in place: see
        ``ModelSpec.refreshed``."""
        self._adopt(self.spec.refreshed(self.model))

    def _adopt(self, spec: ModelSpec) -> None:
        if spec != self.spec:
            self._whose = _Whose.of(self.model, spec)

    @torch.no_grad()  # as transformers' own: tensors of inference mode are of no use to a training step behind it
    def generate(
        self, input_ids: torch.Tensor | None = None, *, quality: float | None = None,
        deadline_ms: float | None = None, deterministic: bool = False, request_class: str = RequestClass.INTERACTIVE,
        preamble: GivenTokens = (), **options: Any,
    ) -> Generated:  # fmt: skip
        """Call transformers' ``generate``; fetch the prompt's cache where it is stored, and store it where it is
        not.

        ``quality``: below 1, documents that ``remember`` kept (behind this ``preamble``) are reused, too, and mended by
        the cheapest setting whose profile keeps that share of a full prefill's quality. ``deadline_ms``: from now, for
        the first token: plans prefer ways that keep it, and after it nothing is loaded. ``deterministic``: reuse only
        what is exact, and plan by nothing that was measured. ``request_class``: "batch" where nobody waits.
        Raises: InvalidRequest for one of these out of its range, before anything is computed."""
        started_s = self._clock.monotonic()
        terms = Terms.of(quality, deadline_ms, deterministic, request_class)
        if input_ids is None:
            input_ids = options.pop("inputs", None)  # transformers' own name of it
        bypassed = self._why_not(input_ids, options)
        if bypassed:
            report = Report(token_count=_length(input_ids), bypassed=bypassed)
            first = FirstToken(lambda: self._stamp(report, started_s))
            sequences = self._generate(input_ids, options, first)
        else:
            report, sequences = self._cached(input_ids, options, started_s, terms, preamble)
        report.deadline_s = terms.deadline_s
        report.total_s = self._clock.monotonic() - started_s
        return Generated(sequences, report)

    def _why_not(self, input_ids: torch.Tensor, options: dict[str, Any]) -> str:
        """Return why a call cannot use the cache; empty when it can, and then ``spec`` is the model's current spec."""
        left = why_left(self.model, input_ids, options, self.spec.rope.kind)
        if left:
            return left
        try:
            self._adopt(followed(self.spec, self.model, self._adapters))
        except InvalidRequest as error:
            return error.message
        return why_rotation(self.spec.rope.kind)  # the model may have another one than at its last call

    def _generate(self, input_ids: torch.Tensor, options: dict[str, Any], first: FirstToken, **more: Any) -> Any:
        processors = LogitsProcessorList([*(options.get("logits_processor") or ()), first])
        return self.model.generate(input_ids, **{**options, **more, "logits_processor": processors})

    def _stamp(self, report: Report, started_s: float) -> None:
        report.ttft_s = self._clock.monotonic() - started_s
        report.prefill_s = report.ttft_s - report.lookup_s

    def _cached(
        self, input_ids: torch.Tensor, options: dict[str, Any], started_s: float, terms: Terms, preamble: GivenTokens
    ) -> tuple[Report, Any]:  # fmt: skip
        # a copy: the caller may change its tensor before the store in the background has named the prompt by it
        tokens, whose = input_ids[0].cpu().numpy().copy(), self._whose
        documents = documents_in(self.client, whose.spec, tokens, terms, preamble)
        reason = MissReason.UNAVAILABLE
        if not self._pause.is_spent:
            try:
                if documents:
                    return self._mended(whose, input_ids, tokens, options, started_s, documents, terms, preamble)
                return self._attempt(whose, input_ids, tokens, options, started_s, terms)
            except KVStoreError as error:
                # Announced bytes did not come: the cache is incomplete, so compute all of it.
                _log.warning("kvstore: %s; recomputing the prompt", error.message)
                if isinstance(error, DeadlineExceeded):
                    self._pause.end()
                elif isinstance(error, DataLoss):
                    reason = MissReason.CORRUPT
        report, sequences = self._attempt(whose, input_ids, tokens, options, started_s, None)
        report.reason = reason
        return report, sequences

    def _mended(
        self, whose: _Whose, input_ids: torch.Tensor, tokens: Tensor, options: dict[str, Any], started_s: float,
        documents: list[range], terms: Terms, preamble: GivenTokens,
    ) -> tuple[Report, Any]:  # fmt: skip
        """Generate over documents that were stored. What is computed behind them is not kept."""
        runner = whose.runner or TransformersRunner(self.model, spec=whose.spec)
        terms = terms.after(self._clock.monotonic() - started_s)
        report, cache = mended(self.client, runner, tokens, documents, terms, preamble)
        if not report.reused_token_count:  # where something came, the service is slow, and worth it
            self._pause.took(report.lookup_s)
        first = FirstToken(lambda: self._stamp(report, started_s))
        return report, self._generate(input_ids, options, first, past_key_values=cache)

    def _attempt(
        self, whose: _Whose, input_ids: torch.Tensor, tokens: Tensor, options: dict[str, Any], started_s: float,
        terms: Terms | None,
    ) -> tuple[Report, Any]:  # fmt: skip
        """``terms`` None: nothing is reused."""
        count = int(input_ids.shape[1])
        last_step = (count - 1) // self.step_tokens * self.step_tokens
        arrivals = LayerArrivals(self._clock)
        layers = self._layers(whose.spec, count + room_tokens(self.model, options, count), arrivals)
        report = Report(token_count=count)
        prompt_e = PromptE(whose.runner, self._whole(count)) if whose.runner else None
        reused, planned = 0, None
        unmeasured_s = prior_s(whose.spec, count, self.model.device.type)
        watch = Stopwatch(self.client, whose.spec, self.step_tokens, self._clock)
        if terms is not None and last_step:
            prefill_s = self.client.planner.prefill_s(whose.spec, count, self.step_tokens) or unmeasured_s
            late_s = started_s + with_budget(prefill_s)
            left_s = late_s - self._clock.monotonic()
            terms = terms.after(self._clock.monotonic() - started_s)
            with self._pause.watch() as watched:
                planned = PromptPlan(self.client, whose.spec, tokens, last_step, self.step_tokens, terms, left_s)
                report.reason = planned.reason
                report.plan, wanted = planned.plan, tokens[: planned.token_count]
                with planned.unless_it_fails():
                    reused = self._reuse(planned, wanted, layers, prompt_e, arrivals, report, started_s, late_s)
                watched.more_s = math.inf if reused else 0.0  # as above
        cache = DynamicCache(config=self.model.config)
        cache.layers = layers

        def first_token() -> None:
            self._stamp(report, started_s)
            told = planned is not None and planned.is_called
            computed = watch.ended(count, is_told=told)
            arrivals.finish()
            patience.end()
            if planned is not None:
                planned.ended(report.ttft_s, arrivals.blocked_s, computed)
            report.receipt = self._keep(whose.spec, tokens, layers, prompt_e, reused)
            if planned is not None and planned.plan is not None:
                begun(self._background, planned.probe)

        patience = Patience(
            self.client, report.plan, started_s, lambda: arrivals.is_blocked, arrivals.give_up,
            unmeasured_s if reused else 0.0,
        )  # fmt: skip
        with (
            closing(planned) if planned else nullcontext(),
            closing(arrivals),  # who keeps the error of a call that fails keeps what it had, too
            patience,
            prompt_e.captured(cache) if prompt_e else nullcontext(),
        ):
            for start in range(reused, last_step, self.step_tokens):
                watch.computes(start, waits=arrivals.is_waiting)
                rows = input_ids[:, start : start + self.step_tokens]
                self.model.base_model(input_ids=rows, past_key_values=cache, use_cache=True)
            watch.computes(max(reused, last_step), waits=arrivals.is_waiting)
            if options.get("streamer") is not None:
                arrivals.finish()  # a later failure would begin again, and a streamer cannot take tokens back
            sequences = self._generate(input_ids, options, FirstToken(first_token), past_key_values=cache)
        return report, sequences

    def _whole(self, count: int) -> int:
        """Return how many of ``count`` tokens are in whole steps: these are kept."""
        return count // self.step_tokens * self.step_tokens

    def _layers(self, spec: ModelSpec, capacity: int, arrivals: LayerArrivals) -> list[CacheLayer]:
        """Return layers with memory for the prompt and the tokens likely to follow."""
        planes = dense_planes(spec, capacity, self.model.device)
        return [
            CacheLayer(k[None], v[None], lambda layer=layer: arrivals.until(layer))  # type: ignore[misc]  # no type of a lambda's default
            for layer, (k, v) in enumerate(planes)
        ]

    def _reuse(
        self, planned: PromptPlan, tokens: Tensor, layers: list[CacheLayer], prompt_e: PromptE | None,
        arrivals: LayerArrivals, report: Report, started_s: float, late_s: float,
    ) -> int:  # fmt: skip
        """Open the fetch of the stored prefix. Returns the number of its tokens, in whole steps, that will arrive."""
        if not len(tokens):
            report.lookup_s = self._clock.monotonic() - started_s
            return 0
        into: list[Layer] = [layer.first(len(tokens)) for layer in layers]
        if prompt_e is not None:
            into = [plane[: len(tokens)] for plane in prompt_e.planes]
        stream = planned.opened(tokens, into, late_s - self._clock.monotonic())
        opened_s = self._clock.monotonic()
        report.lookup_s = opened_s - started_s
        if stream is None:
            report.reason = MissReason.UNAVAILABLE
            return 0
        report.reason = stream.reason
        reused = self._whole(stream.token_count)
        if not reused:
            stream.close()
            return 0
        report.reused_token_count, report.tier, report.fetched_bytes = reused, stream.tier, stream.byte_count

        def landed() -> None:
            report.fetch_s = stream.landed_s - opened_s
            if stream.tier is Tier.DRAM:
                self.client.planner.landed(BusyTime(stream.byte_count, report.fetch_s))

        def given_up() -> None:
            if stream.tier is Tier.DRAM:
                self.client.planner.landed(BusyTime(stream.byte_count, self._clock.monotonic() - opened_s, is_cut=True))
            stream.cancel()

        def project(layer: int) -> None:
            if prompt_e is not None:
                prompt_e.arrive(layer, reused, layers[layer].first(reused), self.step_tokens)

        if prompt_e is not None:
            prompt_e.announce(reused)
        arrivals.on_layer = project
        arrivals.on_last = landed
        arrivals.attach(stream)
        arrivals.give_up = given_up
        for layer in layers:
            layer.show(reused)
        return reused

    def _keep(
        self, spec: ModelSpec, tokens: Tensor, layers: list[CacheLayer], prompt_e: PromptE | None, reused: int
    ) -> Receipt | None:  # fmt: skip
        """Store the whole steps computed here, in the background, if the model has not changed since."""
        whole = self._whole(len(tokens))
        if prompt_e is not None:
            whole = min(whole, self._whole(prompt_e.token_count))
        if whole <= reused:
            return None
        kv: list[Layer] = [layer.first(whole) for layer in layers]
        if prompt_e is not None:
            kv = [plane[:whole] for plane in prompt_e.planes]

        made: list[Receipt] = []

        def ask(token_count: int, wait_s: float) -> Settling:
            settle = made[0].settle
            assert settle is not None, "a level below memory is asked for"
            return settle.ask(token_count, wait_s)

        self._pending = [each for each in self._pending if not each.done()]
        if len(self._pending) >= PENDING_MAX:
            return Receipt.nothing(f"{PENDING_MAX} prompts before it are still to be kept")
        outcome = begun(self._background, lambda: self._store(spec, tokens[:whole], kv, made))
        if outcome.done() and (refusal := failure_of(outcome)) is not None:
            return Receipt.nothing(refusal.message)
        self._pending.append(outcome)
        # No store waits for the device of the one before it: who wants to know of the level asks.
        return Receipt(outcome, Settle(self._durability or Durability.LOCAL, ask))

    def _store(
        self, spec: ModelSpec, tokens: Tensor, kv: list[Layer], made: list[Receipt]
    ) -> tuple[Durability, int, str]:  # fmt: skip
        """Store a prompt, unless the sidecar is left alone for a while; add the receipt to ``made``. Never raises: a
        store does not fail a generation."""
        if self._pause.is_spent:
            return Durability.NONE, 0, "the sidecar did not answer in time, and is left alone for a while"
        started_s = self._clock.monotonic()
        try:
            if not is_of(spec, self.model):
                raise InvalidRequest("the model changed while it computed the prompt")
            receipt = self.client.store(spec, tokens, kv, durability=self._durability)
            made.append(receipt)
            level = max(receipt.reached, default=Durability.NONE)
            if level is Durability.NONE:
                self._pause.took(self._clock.monotonic() - started_s)
            return level, receipt.stored_token_count, receipt.reason
        except Exception as error:  # noqa: BLE001 - as the docstring says
            _log.warning("kvstore: the prompt was not kept: %s", error)
            return Durability.NONE, 0, str(error)
