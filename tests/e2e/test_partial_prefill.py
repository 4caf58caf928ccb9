"""Partial prefill over a real sidecar: the same computation as over tensors in hand, to the bit; and whatever happens,
the right answer or a worse one that says so and is never taken for exact."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch
from kvstore_client import Client, Exactness, Recompute, connect
from kvstore_client.engines.transformers import CachedModel, TransformersRunner, cache_of, chat_frame
from kvstore_client.fetch.target import DenseTarget
from kvstore_client.recompute import GivenKV, Recomputed, Run, recompute
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from tests.e2e.prefills import (
    FULL,
    FUSED,
    LOOKING,
    MODEL,
    RECEIVER,
    SENDER,
    STEP,
    alone,
    computed,
    given,
    in_full,
    keep,
    keep_alone,
    same,
)
from tests.recompute.models import LAYERS, model_of, prompt, sibling_of


def test_nothing_there_is_a_plain_prefill(client: Client) -> None:
    tokens = prompt(50, 100)
    found = client.partial_prefill(RECEIVER, tokens)
    in_full(found, tokens)
    assert found.plan.reason == ""
    asked = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=FUSED)
    in_full(asked, tokens)
    assert "nobody has anything" in asked.plan.reason


@pytest.mark.parametrize("stored", [48, 53, 60])
def test_an_exact_prefix_is_reused_as_it_is(client: Client, stored: int) -> None:
    """Whole chunks, a ragged tail, and all of the prompt: then its last token is computed again."""
    tokens = prompt(60, 200 + stored)
    made = keep(client, RECEIVER, tokens[:stored])
    reused = min(stored, 59)
    found = client.partial_prefill(RECEIVER, tokens)
    same(found, recompute(RECEIVER, tokens, [given(made, 0, reused)], Recompute.reuse()))
    assert found.exactness is Exactness.EXACT
    assert found.plan.reused_token_count == reused
    assert found.plan.recompute is None
    assert torch.allclose(found.logits, computed(RECEIVER, tokens).logits, atol=1e-4)
    assert found.timeline.total_s >= found.timeline.load_s + found.timeline.suffix_s > 0
    assert found.timeline.recompute_s == 0


SIBLINGS = [
    Recompute.droidspeak(0, 1),
    Recompute.droidspeak(1, 2),
    Recompute.droidspeak(1, 3),
    Recompute(1, 2, 0.3),
    FUSED,
]


@pytest.mark.parametrize("exact", [0, 20])
@pytest.mark.parametrize("setting", SIBLINGS, ids=str)
def test_a_siblings_cache_is_reused_as_the_setting_says(client: Client, setting: Recompute, exact: int) -> None:
    """E from the sidecar, KV layer by layer; behind an exact prefix, too, which stays as it is."""
    tokens = prompt(70, 300 + 10 * SIBLINGS.index(setting) + (exact > 0))
    theirs = keep(client, SENDER, tokens[:64], 1)
    runs = [given(theirs, exact, 64, setting.first_layer, SENDER.spec)]
    if exact:
        runs = [given(keep(client, RECEIVER, tokens[:exact]), 0, exact), *runs]
    found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=setting, logit_count=3)
    same(found, recompute(RECEIVER, tokens, runs, setting, logit_count=3))
    assert found.exactness is Exactness.DERIVED
    assert (found.plan.recompute, found.plan.reason) == (setting, "")
    assert [(run.token_start, run.token_count) for run in found.plan.runs] == [
        (run.token_start, run.token_count) for run in runs
    ]
    assert found.plan.runs[-1].layers == setting.loaded_layers(LAYERS)
    assert found.timeline.recompute_s > 0


SEGMENTS = [Recompute.reuse(), Recompute.cacheblend(1, 0.2), Recompute(1, 1, 0.3), Recompute(0, -1, 0.2, "product")]


@pytest.mark.parametrize("setting", SEGMENTS, ids=str)
def test_documents_in_another_order_are_moved_and_blended(client: Client, setting: Recompute) -> None:
    """Two documents, swapped; what lies between and behind them is computed. The first stands where it was computed."""
    seed = 500 + SEGMENTS.index(setting)
    one, two, rest = prompt(37, seed), prompt(21, 10 + seed), prompt(12, 20 + seed)
    kept = [keep_alone(client, RECEIVER, tokens, 1) for tokens in (one, two)]
    tokens = torch.cat((two, rest[:3], one, rest[3:]))
    segments = [(0, 21), range(24, 61)]
    found = client.partial_prefill(RECEIVER, tokens, segments=segments, recompute=setting)
    first = setting.first_layer
    same(found, recompute(RECEIVER, tokens, [alone(kept[1], 0), alone(kept[0], 24, hidden=first)], setting))
    assert [(run.token_start, run.is_standalone, run.is_exact) for run in found.plan.runs] == [
        (0, True, True),
        (24, True, False),
    ]
    assert found.exactness is Exactness.DERIVED
    unprofiled = client.partial_prefill(RECEIVER, tokens, segments=segments)
    assert [(run.token_start, run.is_exact) for run in unprofiled.plan.runs] == [(0, True)]
    assert unprofiled.exactness is Exactness.EXACT
    alone_at_the_start = client.partial_prefill(RECEIVER, tokens, segments=segments[:1], recompute=setting)
    assert (alone_at_the_start.exactness, alone_at_the_start.plan.recompute) == (Exactness.EXACT, None)


def test_a_document_reaches_behind_the_exact_prefix_and_a_siblings_is_moved_too(client: Client) -> None:
    one, two, rest = prompt(40, 520), prompt(33, 521), prompt(6, 522)
    tokens = torch.cat((one, two, rest))
    kept = keep_alone(client, RECEIVER, two, 1)
    exact = keep(client, RECEIVER, tokens[:48])
    setting = Recompute(1, 1, 0.3)
    found = client.partial_prefill(RECEIVER, tokens, segments=[(40, 73)], recompute=setting)
    same(found, recompute(RECEIVER, tokens, [given(exact, 0, 48), alone(kept, 48, 8, 1)], setting))
    theirs = keep_alone(client, SENDER, rest := prompt(30, 523), 1)
    tokens = torch.cat((prompt(7, 524), rest, prompt(4, 525)))
    found = client.partial_prefill(RECEIVER, tokens, segments=[(7, 37)], senders=[SENDER.spec], recompute=setting)
    same(found, recompute(RECEIVER, tokens, [alone(theirs, 7, 0, 1, SENDER.spec)], setting))
    assert found.plan.runs[0].sender == SENDER.spec


def test_hidden_states_are_waited_for_where_they_are_needed(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 0 is computed while E of layer 1 is still on its way; here it waits for that."""
    tokens, was_computed, seen = prompt(70, 350), Event(), []
    finish, copy_hidden = RECEIVER.finish, DenseTarget.copy_hidden

    def finishing(layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        was_computed.set()
        return finish(layer, hidden, attention)

    def copying(target: DenseTarget, layer: int, *rest: Any) -> None:
        seen.append(was_computed.wait(5.0))
        copy_hidden(target, layer, *rest)

    with connect(local_sidecar.address) as client:
        theirs = keep(client, SENDER, tokens[:64], 1)
        expected = recompute(RECEIVER, tokens, [given(theirs, 0, 64, 1, SENDER.spec)], SIBLINGS[3])
        monkeypatch.setattr(RECEIVER, "finish", finishing)
        monkeypatch.setattr(DenseTarget, "copy_hidden", copying)
        found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=SIBLINGS[3])
        assert seen == [True]
        same(found, expected)


def test_a_full_recompute_fetches_nothing_of_a_sender(client: Client) -> None:
    tokens = prompt(40, 400)
    keep(client, SENDER, tokens)
    in_full(client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=FULL), tokens)


def test_without_a_profile_nothing_but_the_exact_prefix_is_reused(client: Client) -> None:
    tokens = prompt(40, 401)
    keep(client, SENDER, tokens, 1)
    found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec])
    in_full(found, tokens)
    assert "profile" in found.plan.reason


def test_a_sender_without_hidden_states_is_left_and_the_next_is_asked(client: Client) -> None:
    tokens = prompt(40, 402)
    keep(client, SENDER, tokens)
    found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=FUSED)
    in_full(found, tokens)
    assert "no E of layer 1" in found.plan.reason
    other = TransformersRunner(sibling_of(MODEL, 4), chunk_tokens=STEP)
    keep(client, other, tokens[:32], 1)
    found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec, other.spec], recompute=FUSED)
    assert [run.sender for run in found.plan.runs] == [other.spec]
    assert found.plan.reason == ""


@pytest.mark.parametrize("setting", [Recompute.reuse(), FUSED], ids=str)
def test_the_model_itself_is_no_sender_however_much_is_stored_meanwhile(
    client: Client, setting: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a second lookup of the same cache found more would be taken for fetched, and nobody had fetched it."""
    seed = 640 + setting.first_layer
    tokens = prompt(70, seed)
    made = computed(RECEIVER, tokens)
    counts = iter((16, 64, 64))

    def store() -> None:
        count = next(counts)
        kv = [(k[:, :count], v[:, :count]) for k, v in made.kv]
        hidden = {1: made.hidden[1][:count]}
        client.store(RECEIVER.spec, tokens[:count], kv, hidden=hidden).wait(10.0)

    plain = client.lookup

    def lookup(*args: Any, **options: Any) -> Any:
        store()
        return plain(*args, **options)

    planned = client.planner.begin

    def begin(*args: Any) -> Any:
        store()
        return planned(*args)

    monkeypatch.setattr(client, "lookup", lookup)
    monkeypatch.setattr(client.planner, "begin", begin)
    found = client.partial_prefill(RECEIVER, tokens, senders=[RECEIVER.spec, RECEIVER.spec], recompute=setting)
    same(found, recompute(RECEIVER, tokens, [given(made, 0, 16)], setting))
    assert found.exactness is Exactness.EXACT


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"vocab_size": 100}, "vocab_size"),
        ({"head_dim": 8}, "layers\\[0\\].k_dim"),
        ({"num_hidden_layers": 3}, "layer"),
    ],
)
def test_a_sender_of_another_architecture_is_refused_by_field(
    client: Client, change: dict[str, Any], field: str
) -> None:
    other = TransformersRunner(model_of("qwen3", **change))
    with pytest.raises(InvalidRequest, match=field):
        client.partial_prefill(RECEIVER, prompt(40, 403), senders=[other.spec], recompute=FUSED)


def test_a_sender_of_another_tokenizer_is_refused_and_shares_no_cache(client: Client) -> None:
    """Also one of which nobody says what its tokenizer is, to a receiver of which somebody does."""
    tokens = prompt(40, 411)
    made = keep(client, SENDER, tokens, 1)
    ours, theirs, same = (
        replace(runner.spec, tokenizer_digest=digest)
        for runner, digest in ((RECEIVER, "aa" * 32), (SENDER, "bb" * 32), (SENDER, "aa" * 32))
    )
    runner = TransformersRunner(MODEL, spec=ours)
    for sender, told in ((theirs, "tokenizer_digest bbbb"), (SENDER.spec, "tokenizer_digest unset")):
        with pytest.raises(InvalidRequest, match=told):
            client.partial_prefill(runner, tokens, senders=[sender], recompute=FUSED)
    with pytest.raises(InvalidRequest, match="the receiver unset"):
        client.partial_prefill(RECEIVER, tokens, senders=[theirs], recompute=FUSED)
    assert client.partial_prefill(runner, tokens, senders=[same], recompute=FUSED).plan.runs == ()
    client.store(same, tokens, made.kv, hidden={1: made.hidden[1]}).wait(10.0)
    assert client.partial_prefill(runner, tokens, senders=[same], recompute=FUSED).plan.runs[0].sender == same


def test_arguments_are_named(client: Client) -> None:
    tokens = prompt(40, 404)
    for options, match in [
        ({"senders": ["qwen3"]}, "senders\\[0\\]"),
        ({"senders": SENDER.spec}, "senders must be a list"),
        ({"senders": None}, "senders must be a list"),
        ({"logit_count": 41}, "logit_count"),
        ({"logit_count": 1.5}, "logit_count"),
        ({"recompute": 0.2}, "recompute must be a Recompute"),
        ({"recompute": Recompute.full(9)}, "4 layers"),
        ({"segments": [(0, 10), (5, 20)]}, "segments\\[1\\]"),
        ({"segments": [(30, 50)]}, "segments\\[0\\]"),
    ]:
        with pytest.raises(InvalidRequest, match=match):
            client.partial_prefill(RECEIVER, tokens, **options)
    with pytest.raises(InvalidRequest, match="token 96"):
        client.partial_prefill(RECEIVER, [1, 2, 96])
    with pytest.raises(InvalidRequest, match=r"tokens must be .* one or more"):
        client.partial_prefill(RECEIVER, [])
    with pytest.raises(InvalidRequest, match="give TransformersRunner"):
        client.partial_prefill(MODEL, tokens)


def test_what_is_derived_never_leaks(client: Client) -> None:
    """Blend, decode 300 tokens, store: an exact lookup misses, and so does an engine's own prefix reuse."""
    tokens = prompt(70, 405)
    keep(client, SENDER, tokens[:64], 1)
    blended = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=FUSED)
    assert blended.exactness is Exactness.DERIVED
    with pytest.raises(InvalidRequest, match="DERIVED"):
        client.store(RECEIVER.spec, tokens, blended.kv)
    cache = cache_of(blended.kv)
    ids = torch.cat((tokens, blended.logits[-1].argmax()[None]))[None]
    whole = MODEL.generate(ids, past_key_values=cache, max_new_tokens=300, do_sample=False)[0]
    assert len(whole) == 371
    kept = whole[: cache.get_seq_length()]
    kv = [layer.first(len(kept)) for layer in cache.layers]
    client.store(RECEIVER.spec, kept, kv, exactness=blended.exactness).wait(10.0)
    assert client.lookup(RECEIVER.spec, kept).prefix_token_count == 0
    assert client.lookup(RECEIVER.spec, kept, exactness=Exactness.DERIVED).prefix_token_count == 370
    assert client.partial_prefill(RECEIVER, kept).plan.runs == ()
    report = CachedModel(MODEL, client, chunk_tokens=STEP).generate(kept[None], max_new_tokens=1).report
    assert report.reused_token_count == 0


def test_a_merged_cache_that_is_exact_is_kept_and_decoded_from(client: Client) -> None:
    tokens = prompt(50, 406)
    keep(client, RECEIVER, tokens[:32])
    found = client.partial_prefill(RECEIVER, tokens)
    client.store(RECEIVER.spec, tokens, found.kv).wait(10.0)
    assert client.lookup(RECEIVER.spec, tokens).prefix_token_count == 50
    ids = torch.cat((tokens, found.logits[-1].argmax()[None]))[None]
    decoded = MODEL.generate(ids, past_key_values=cache_of(found.kv), max_new_tokens=20, do_sample=False)
    assert torch.equal(decoded, MODEL.generate(tokens[None], max_new_tokens=21, do_sample=False))


def keep_behind(client: Client, preamble: torch.Tensor, tokens: torch.Tensor) -> Recomputed:
    made = computed(RECEIVER, torch.cat((preamble, tokens)))
    kv = [(k[:, len(preamble) :], v[:, len(preamble) :]) for k, v in made.kv]
    client.store_segment(RECEIVER.spec, tokens, kv, preamble=preamble).wait(10.0)
    return made


@pytest.mark.parametrize("setting", [Recompute.reuse(), Recompute.cacheblend(1, 0.3), LOOKING])
def test_documents_behind_a_preamble_move_from_where_they_stood(client: Client, setting: Recompute) -> None:
    """The first one stands where it stood: of it nothing is computed again."""
    preamble, one, two, tail = prompt(7, 900), prompt(40, 901), prompt(35, 902), prompt(6, 903)
    made = [keep_behind(client, preamble, document) for document in (one, two)]
    kv = [[(k[:, 7:], v[:, 7:]) for k, v in each.kv] for each in made]
    tokens = torch.cat((preamble, one, two, tail))
    runs = [Run(7, 40, GivenKV(kv[0]), 7, is_exact=True), Run(47, 35, GivenKV(kv[1]), 7)]
    places = [(7, 47), (47, 82)]
    found = client.partial_prefill(RECEIVER, tokens, segments=places, preamble=preamble, recompute=setting)
    same(found, recompute(RECEIVER, tokens, runs, setting))
    assert found.exactness is Exactness.DERIVED
    assert [run.is_exact for run in found.plan.runs] == [True, False]
    for k, kept in zip((pair[0] for pair in found.kv), (pair[0] for pair in kv[0]), strict=True):
        assert torch.equal(k[:, 7:47], kept)
    other = torch.cat((preamble, two, one, tail))
    swapped = client.partial_prefill(
        RECEIVER, other, segments=[(7, 42), (42, 82)], preamble=preamble, recompute=setting
    )  # fmt: skip
    runs = [Run(7, 35, GivenKV(kv[1]), 7, is_exact=True), Run(42, 40, GivenKV(kv[0]), 7)]
    same(swapped, recompute(RECEIVER, other, runs, setting))


def test_the_first_document_behind_its_preamble_needs_no_profile(client: Client) -> None:
    preamble, one, two, tail = prompt(7, 910), prompt(40, 911), prompt(35, 912), prompt(6, 913)
    for document in (one, two):
        keep_behind(client, preamble, document)
    tokens = torch.cat((preamble, one, two, tail))
    found = client.partial_prefill(RECEIVER, tokens, segments=[(7, 47), (47, 82)], preamble=preamble)
    assert found.exactness is Exactness.EXACT
    assert [(run.token_start, run.token_stop) for run in found.plan.runs] == [(7, 47)]
    assert "no valid profile" in found.plan.reason
    assert torch.allclose(found.logits, computed(RECEIVER, tokens).logits, atol=1e-4)
    with pytest.raises(InvalidRequest, match="preamble: the prompt does not begin"):
        client.partial_prefill(RECEIVER, tokens[1:], segments=[(6, 46)], preamble=preamble)


def test_remembered_documents_are_found_and_reused_as_if_stored_by_hand(client: Client) -> None:
    """Computed once, behind the preamble; what is there is not computed again."""
    preamble, one, two, tail = prompt(7, 920), prompt(40, 921), prompt(35, 922), prompt(6, 923)
    cached = CachedModel(MODEL, client, spec=RECEIVER.spec)
    receipts = cached.remember([one, two], preamble=preamble)
    for receipt in receipts:
        receipt.wait(10.0)
    assert [receipt.stored_token_count for receipt in receipts] == [40, 35]
    assert cached.remember([two, one], preamble=preamble) == []
    alone = cached.remember([one])
    assert [receipt.wait(10.0) and receipt.stored_token_count for receipt in alone] == [40]
    tokens = torch.cat((preamble, two, one, tail))
    places = client.find_segments(RECEIVER.spec, tokens, preamble=preamble)
    assert places == [range(7, 42), range(42, 82)]
    found = client.partial_prefill(
        RECEIVER, tokens, segments=places, preamble=preamble, recompute=Recompute.cacheblend(1, 0.3)
    )
    whole = [computed(RECEIVER, torch.cat((preamble, document))) for document in (two, one)]
    kv = [[(k[:, 7:], v[:, 7:]) for k, v in each.kv] for each in whole]
    runs = [Run(7, 35, GivenKV(kv[0]), 7, is_exact=True), Run(42, 40, GivenKV(kv[1]), 7)]
    same(found, recompute(RECEIVER, tokens, runs, Recompute.cacheblend(1, 0.3)))
    with pytest.raises(InvalidRequest, match="one or more each"):
        cached.remember([[]], preamble=preamble)
    with pytest.raises(InvalidRequest, match="documents must be a list"):
        cached.remember(one, preamble=preamble)
    cached.close()


class Template:
    """A tokenizer as far as its chat template goes."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return self.pattern.format(messages[-1]["content"])


def test_what_a_chat_template_puts_around_a_users_words() -> None:
    assert chat_frame(Template("<s>Hello\n{}</s>\n"), instruction="Read:\n") == ("<s>Hello\nRead:\n", "</s>\n")
    for odd in ("always the same", "{0} and {0}"):
        with pytest.raises(InvalidRequest, match="does not keep a user's words"):
            chat_frame(Template(odd))
