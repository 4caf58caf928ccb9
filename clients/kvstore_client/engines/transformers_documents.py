"""Documents of a chat: each computed once, behind the beginning that the template gives every prompt. Later prompts
reuse their caches, mended as far as the terms allow.

before, behind = chat_frame(tokenizer, instruction="Answer from these documents.\\n")
preamble = tokenizer.encode(before, add_special_tokens=False)
cached.remember(documents, preamble=preamble)
client.partial_prefill(runner, [*preamble, *documents[1], *documents[0], *question], segments=..., preamble=preamble)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from transformers import DynamicCache

from kvstore.errors import InvalidRequest
from kvstore.keys import Tokens
from kvstore.planning import Recompute, Terms
from kvstore.spec import Durability, ModelSpec
from kvstore_client.arrays import Layer
from kvstore_client.client import Client
from kvstore_client.engines.transformers_layers import cache_of
from kvstore_client.engines.transformers_report import Report
from kvstore_client.prompt import GivenTokens, checked_tokens, preamble_tokens
from kvstore_client.recompute import ModelRunner, recompute
from kvstore_client.recompute.prefill import partial_prefill
from kvstore_client.recompute.request import Request
from kvstore_client.store.receipt import Receipt


def chat_frame(tokenizer: Any, system: str = "", instruction: str = "") -> tuple[str, str]:
    """Return the text that a chat template puts before a user's words, ``instruction`` included, and the text behind
    them, for the assistant to go on. ``tokenizer``: of transformers, with a chat template; ``system`` empty: the
    template's own. Raises: InvalidRequest for a template whose text depends on the words, or changes them."""
    head = [{"role": "system", "content": system}] if system else []
    one, two = (
        tokenizer.apply_chat_template(
            [*head, {"role": "user", "content": instruction + words}], tokenize=False, add_generation_prompt=True
        )
        for words in "ab"
    )
    length = next((index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
    before, behind = one[:length], one[length + 1 :]
    if not length or two != f"{before}b{behind}":
        raise InvalidRequest("the chat template does not keep a user's words as they are: give the preamble's tokens")
    return before, behind


def remember(
    client: Client, runner: ModelRunner, documents: Iterable[GivenTokens], preamble: GivenTokens,
    durability: Durability | None = None,
) -> list[Receipt]:  # fmt: skip
    """Compute and store those of these documents that are not stored, each behind the preamble. Cost: a prefill of
    preamble and document each. Raises: InvalidRequest."""
    spec = runner.spec
    before = preamble_tokens(preamble, spec)
    receipts = []
    for document in documents:
        try:
            given = checked_tokens(document, spec.vocab_size)
        except InvalidRequest as error:
            raise InvalidRequest(f"documents must be a list, each document a run of tokens: {error.message}") from error
        if not given.size:
            raise InvalidRequest("documents must have tokens, one or more each")
        tokens = np.concatenate([before, given])
        found = client.lookup(spec, tokens, segments=[(before.size, tokens.size)], preamble=before)
        if found.segments and found.segments[0].is_whole:
            continue
        layers = range(spec.layer_count) if spec.keeps_e else ()
        made = recompute(runner, tokens, [], Recompute.full(spec.layer_count), hidden_layers=layers)
        kept: list[Layer] = [(k[:, before.size :], v[:, before.size :]) for k, v in made.kv]
        if spec.keeps_e:
            kept = [made.hidden[layer][before.size :] for layer in layers]
        receipts.append(client.store_segment(spec, given, kept, preamble=before, durability=durability))
    return receipts


def documents_in(client: Client, spec: ModelSpec, tokens: Tokens, terms: Terms, preamble: GivenTokens) -> list[range]:
    """Return the documents of a prompt that this client knows, where the terms allow their reuse. Makes no call.
    Raises: InvalidRequest for a preamble that is none."""
    return client.find_segments(spec, tokens, preamble=preamble) if terms.allows_lossy else []


def mended(
    client: Client, runner: ModelRunner, tokens: Tokens, documents: list[range], terms: Terms, preamble: GivenTokens
) -> tuple[Report, DynamicCache]:
    """Prefill a prompt over its documents. Returns the report, and the cache of all tokens but the last, which
    ``generate`` computes itself. Raises: KVStoreError."""
    request = Request.of(runner, tokens, documents, (), None, (), 1, preamble, terms)
    done = partial_prefill(client, request, client.planner.timeout_s, client.planner.clock)
    report = Report(
        token_count=len(request.tokens), reused_token_count=done.plan.reused_token_count,
        lookup_s=done.timeline.prepare_s, plan=done.plan.loading, exactness=done.exactness, mended=done.plan,
    )  # fmt: skip
    return report, cache_of([(k[:, :-1], v[:, :-1]) for k, v in done.kv])
