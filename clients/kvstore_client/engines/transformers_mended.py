"""Prompts with documents that were remembered: their caches are reused and mended as far as the terms allow."""

from __future__ import annotations

from typing import NamedTuple

from transformers import DynamicCache

from kvstore.keys import Tokens
from kvstore.planning import Terms
from kvstore.spec import ModelSpec
from kvstore_client.client import Client
from kvstore_client.engines.transformers_layers import cache_of
from kvstore_client.engines.transformers_report import Report
from kvstore_client.prompt import GivenTokens
from kvstore_client.recompute import ModelRunner
from kvstore_client.recompute.prefill import partial_prefill
from kvstore_client.recompute.request import Request


class Documents(NamedTuple):
    """The documents of one prompt, and the terms under which they may be reused. Empty: there are none."""

    runs: tuple[range, ...]
    terms: Terms

    def __bool__(self) -> bool:
        return bool(self.runs)


def documents_in(
    client: Client, spec: ModelSpec, tokens: Tokens, terms: Terms, preamble: GivenTokens
) -> Documents:  # fmt: skip
    """Return the documents of a prompt that this client knows, where the terms allow their reuse. Makes no call.
    Raises: InvalidRequest for a preamble that is none."""
    if not terms.allows_lossy:
        return Documents((), terms)
    return Documents(tuple(client.find_segments(spec, tokens, preamble=preamble)), terms)


def mended(
    client: Client, runner: ModelRunner, tokens: Tokens, documents: Documents, preamble: GivenTokens
) -> tuple[Report, DynamicCache]:  # fmt: skip
    """Prefill a prompt over its documents. Returns the report, and the cache of all tokens but the last, which
    ``generate`` computes itself. Raises: KVStoreError."""
    segments = [(run.start, run.stop) for run in documents.runs]
    request = Request.of(runner, tokens, segments, (), None, (), 1, preamble, documents.terms)
    done = partial_prefill(client, request, client.planner.timeout_s, client.planner.clock)
    report = Report(
        token_count=len(request.tokens), reused_token_count=done.plan.reused_token_count,
        lookup_s=done.timeline.prepare_s, plan=done.plan.loading, exactness=done.exactness, mended=done.plan,
    )  # fmt: skip
    return report, cache_of([(k[:, :-1], v[:, :-1]) for k, v in done.kv])
