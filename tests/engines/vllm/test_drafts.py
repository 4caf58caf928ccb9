"""Engines that speculate: which drafts' caches have a name, and which of their blocks are kept and loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client.engines.vllm.drafts import Draft, Undrafted, draft_of
from kvstore_client.engines.vllm.naming import Naming, TokensBehind, check_algorithm
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from tests.engines.vllm.engine import BLOCK, Engine, blocks_of, matched, request, scheduled
from tests.specs import tokens_of

AHEAD = Draft(reads_ahead=True, token_count_max=100)


def configured(method: str, *, n_predict: int | None = None, **more: Any) -> Any:
    """vLLM's configuration of an engine that speculates."""
    hf = SimpleNamespace(n_predict=n_predict) if n_predict else SimpleNamespace()
    model = SimpleNamespace(max_model_len=512, hf_config=hf)
    given = {"disable_padded_drafter_batch": True, **more}
    draft = SimpleNamespace(method=method, num_speculative_tokens=3, draft_model_config=model, **given)
    return SimpleNamespace(
        speculative_config=draft, cache_config=SimpleNamespace(cache_dtype="fp8"),
        model_config=SimpleNamespace(max_model_len=4096),
    )  # fmt: skip


def test_drafts_that_keep_a_cache_are_known() -> None:
    assert draft_of(SimpleNamespace(speculative_config=None)) is None  # type: ignore[arg-type]  # all it looks at
    assert draft_of(configured("ngram")) is draft_of(configured("medusa")) is None
    for method in ("eagle", "eagle3", "mtp"):
        assert draft_of(configured(method, n_predict=1, kv_cache_dtype=None)) == Draft(True, 506)
    assert draft_of(configured("draft_model", kv_cache_dtype="fp8")) == Draft(False, 506)


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        ("dflash", {}, "'dflash' keeps a cache that kvstore cannot name: use one of ngram, .*eagle, .*, or none"),
        ("eagle", {"kv_cache_dtype": "auto"}, "draft's cache is auto, the target's fp8: do without kv_cache_dtype"),
        ("eagle", {"parallel_drafting": True}, "parallel_drafting in --speculative-config"),
        ("eagle", {"num_speculative_tokens_per_batch_size": [(1, 2, 3)]}, "num_speculative_tokens_per_batch_size in"),
        (
            "eagle",
            {"disable_eagle_block_drop": True},
            "disable_eagle_block_drop in .* may then be another prompt's; do",
        ),
        (
            "draft_model",
            {"use_heterogeneous_vocab": True},
            "use_heterogeneous_vocab in .* two tokenizers, .* do without",
        ),
        ("mtp", {"n_predict": 3}, "a draft of 3 layers, one for each token ahead"),
    ],
)
def test_drafts_whose_cache_has_no_name_are_refused(method: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        draft_of(configured(method, **more))


def test_a_draft_that_reads_another_token_behind_a_piece_is_refused() -> None:
    config = configured("eagle", disable_padded_drafter_batch=False)
    with pytest.raises(InvalidRequest, match='set "disable_padded_drafter_batch": true in --speculative-config'):
        draft_of(config)
    config.use_v2_model_runner = True
    assert draft_of(config) == Draft(True, 4096), "it drafts however long a sequence is"
    assert draft_of(configured("draft_model", disable_padded_drafter_batch=False)) == Draft(False, 506)


@pytest.mark.parametrize(("reads_ahead", "loaded"), [(True, 36), (False, 40)])
def test_the_last_block_is_computed_where_the_draft_reads_ahead(
    sidecar: Sidecar, reads_ahead: bool, loaded: int
) -> None:
    engine = Engine(sidecar.address, draft=Draft(reads_ahead, 100))
    tokens = tokens_of(42, 500 + reads_ahead)
    engine.keep(request("kept", tokens), blocks_of(42))
    again = request("again", tokens)
    assert engine.admit(again, blocks_of(42, 20)) == loaded
    step = engine.compute(again, blocks_of(42, 20), loaded, 42 - loaded)
    assert step.loads[0].stop == loaded
    assert not step.saves, "all of it is stored"
    assert engine.landed() == {"again"}
    engine.close()


def test_of_a_prompt_that_ends_with_what_is_stored_no_block_more_is_computed(sidecar: Sidecar) -> None:
    """One token must be computed in any case, and so the last block is."""
    engine = Engine(sidecar.address, draft=AHEAD)
    tokens = tokens_of(48, 502)
    engine.keep(request("kept", tokens), blocks_of(48))
    assert engine.admit(request("again", tokens), blocks_of(48, 20)) == 44
    engine.close()


@pytest.mark.parametrize(("fork", "loaded"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_chunk_is_loaded_where_the_token_behind_it_is_the_same(sidecar: Sidecar, fork: int, loaded: int) -> None:
    """Of a whole chunk nothing is computed again then."""
    engine = Engine(sidecar.address, draft=AHEAD)
    tokens = tokens_of(42, 510 + fork)
    engine.keep(request("kept", tokens), blocks_of(42))
    forked = [*tokens[:fork], 999 - tokens[fork], *tokens[fork + 1 :]]
    assert engine.admit(request("forked", forked), blocks_of(42, 20)) == loaded
    engine.close()


def test_the_image_behind_a_chunk_is_in_its_name() -> None:
    def extras(offset: int, name: str) -> Any:
        item = SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=4))
        return Naming("kvstore", BLOCK, 16).extras(request("a", range(42), mm_features=[item]))

    assert [each.position for each in extras(16, "x")] == [16, 15, 31]
    assert extras(16, "x")[1] != extras(16, "y")[1]
    assert extras(17, "x")[1] == extras(17, "y")[1], "it is not what the draft reads there"
    assert len(Naming("kvstore", BLOCK, 16).extras(request("a", range(32)))) == 1, "behind the last chunk is nothing"
    assert not Naming("kvstore", BLOCK).extras(request("a", range(42)))


def test_vllms_hashes_name_no_token_behind_a_block() -> None:
    check_algorithm("vllm", "sha256_cbor", Draft(False, 100))
    check_algorithm("kvstore", "sha256", AHEAD)
    with pytest.raises(InvalidRequest, match=r'reads a token ahead.*leave "digests" out'):
        check_algorithm("vllm", "sha256_cbor", AHEAD)


def test_what_vllm_has_of_more_than_is_loaded_is_not_loaded(sidecar: Sidecar) -> None:
    engine = Engine(sidecar.address, draft=AHEAD)
    tokens = tokens_of(42, 503)
    engine.keep(request("kept", tokens), blocks_of(42))
    asked = request("again", tokens)
    engine.scheduler.new_request(asked)
    assert matched(engine.scheduler, asked, 36) == (0, False)
    engine.scheduler.allocated(asked, (blocks_of(42, 20),), 0)
    engine.close()


def test_blocks_of_a_step_without_drafts_are_not_kept(sidecar: Sidecar) -> None:
    """A sequence that is too long for the draft keeps it from all of its step."""
    engine = Engine(sidecar.address, draft=AHEAD)
    engine.admit(asked := request("a", tokens_of(42, 504)), blocks_of(42))
    engine.admit(other := request("b", tokens_of(42, 505)), blocks_of(42, 20))
    first, long = scheduled("a", blocks_of(42), 0, 20), scheduled("long", [60], 100, 1)
    first.scheduled_new_reqs += long.scheduled_new_reqs
    first.num_scheduled_tokens |= long.num_scheduled_tokens
    assert not engine.scheduler.step(first).saves
    assert not engine.scheduler.step(scheduled("a", [], 20, 22, is_new=False)).saves, "its first blocks lack it"
    assert len(engine.scheduler.step(scheduled("b", blocks_of(42, 20), 0, 42)).saves) == 1, "of the step after it"
    for each in (asked, other):
        engine.scheduler.finished(each.request_id)
    engine.scheduler.new_request(request("c", asked.all_token_ids))  # vLLM has its blocks, and computes the end alone
    assert not engine.scheduler.step(scheduled("c", blocks_of(42), 40, 2)).saves
    engine.scheduler.finished("c")
    engine.scheduler.new_request(request("d", asked.all_token_ids))
    assert len(engine.scheduler.step(scheduled("d", blocks_of(42), 0, 42)).saves) == 1, "all of it is computed anew"
    engine.close()


def test_a_block_is_whole_once_all_of_it_was_computed_with_drafts() -> None:
    blocks = list(range(10))
    undrafted = Undrafted(AHEAD, BLOCK)
    undrafted.step(100, [(blocks, 0, 100)])
    assert not undrafted.has(blocks), "as long as may be"
    undrafted.step(101, [(blocks, 5, 10)])
    assert [undrafted.has([block]) for block in range(4)] == [False, True, True, False]
    undrafted.step(50, [(blocks, 6, 12)])
    assert [undrafted.has([block]) for block in range(4)] == [False, True, False, False], "of 1 two tokens lack it"
    undrafted.step(50, [(blocks, 4, 6)])
    assert not undrafted.has(blocks), "a block that is begun anew is computed to its end"
    undrafted.step(101, [(blocks, 0, 40)])
    undrafted.loaded(blocks[:9])
    assert [block for block in blocks if undrafted.has([block])] == [9]
    without = Undrafted(None, BLOCK)
    without.step(1 << 30, [(blocks, 0, 40)])
    assert not without.has(blocks)


def test_blocks_that_are_loaded_have_the_drafts_cache(sidecar: Sidecar) -> None:
    engine = Engine(sidecar.address, draft=AHEAD)
    tokens = tokens_of(42, 506)
    engine.keep(request("kept", tokens[:36]), blocks_of(36))
    engine.scheduler._undrafted.step(101, [(blocks_of(42, 20), 0, 42)])
    asked = request("a", tokens)
    assert engine.admit(asked, blocks_of(42, 20)) == 32
    assert len(engine.compute(asked, blocks_of(42, 20), 32, 10).saves) == 1
    assert engine.landed() == {"a"}
    engine.close()


def test_a_block_that_was_computed_before_another_token_is_not_kept(sidecar: Sidecar) -> None:
    """vLLM's prefix cache gives the first of the blocks that have these tokens, whoever computed it."""
    engine = Engine(sidecar.address, draft=AHEAD)
    tokens = tokens_of(42, 520)
    forked = [*tokens[:20], 999 - tokens[20], *tokens[21:]]
    engine.keep(request("a", tokens), blocks_of(42))
    engine.admit(request("b", forked), blocks_of(42, 20))
    assert len(engine.compute(request("b", forked), blocks_of(42, 20), 16, 26).saves) == 1, "its own from 16 on"
    first, second = blocks_of(42), blocks_of(42, 20)
    for name, block, kept in (("of a", first[4], 0), ("of its own", second[4], 1)):
        asked = request(name, [*forked, *tokens_of(22, 521)])
        engine.scheduler.new_request(asked)
        blocks = [*first[:4], block, *second[5:10], *blocks_of(24, 40)]
        assert len(engine.scheduler.step(scheduled(name, blocks, 40, 24)).saves) == kept
        engine.scheduler.finished(name)
    engine.close()


def test_a_session_whose_last_token_is_dropped_is_not_kept(sidecar: Sidecar) -> None:
    engine = Engine(sidecar.address, draft=AHEAD)
    asked = request("a", tokens_of(30, 522), resumable=True)
    engine.admit(asked, blocks := blocks_of(60))
    engine.scheduler.step(scheduled("a", blocks, 0, 30))
    asked.all_token_ids += tokens_of(30, 523).tolist()
    asked.num_tokens = asked.num_prompt_tokens = 60
    assert not engine.scheduler.step(scheduled("a", [], 30, 30, is_new=False)).saves, "of 29 the draft read another"
    engine.scheduler.finished("a")
    engine.scheduler.new_request(request("b", asked.all_token_ids))
    assert not engine.scheduler.step(scheduled("b", blocks, 56, 4)).saves, "and vLLM has its blocks"
    engine.close()


def test_the_token_behind_a_block_is_known_once_it_is_sampled() -> None:
    blocks, asked, longer = list(range(10)), request("a", range(8)), request("b", range(12))
    behind = TokensBehind(BLOCK, 16)
    behind.computed(asked, blocks, 0, 8)
    assert behind.are_of(asked, blocks[:2]), "behind the last one is nothing yet"
    assert not behind.are_of(longer, blocks[:3])
    behind.computed(longer, blocks, 8, 12)
    assert not behind.are_of(longer, blocks[:3]), "it was not its block"
    asked.all_token_ids += [8, 9]
    behind.computed(asked, blocks, 8, 9)
    assert behind.are_of(longer, blocks[:3])
    behind.computed(long := request("c", range(20)), blocks, 0, 20)
    assert behind.are_of(long, blocks[:4])
    assert behind.are_of(request("d", range(16)), blocks[:4])
    other = request("e", [*range(16), 99])
    assert behind.are_of(other, blocks[:3])
    assert not behind.are_of(other, blocks[:4]), "a whole chunk's name has the token"
    item = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=4, length=2))
    assert not behind.are_of(request("f", range(20), mm_features=[item]), blocks[:4]), "an image begins there"
    behind.forget(blocks[:1])
    assert not behind.are_of(long, blocks[:4])
    assert TokensBehind(BLOCK, 0).are_of(long, blocks[:4]), "no draft reads it"


def test_of_what_ends_within_a_block_all_blocks_that_are_sure_are_loaded() -> None:
    """Engines with smaller blocks keep more of a partial chunk."""
    naming = Naming("kvstore", BLOCK, 16)
    assert [naming.sure_tokens(stored) for stored in (0, 16, 22, 24, 32)] == [0, 16, 21, 23, 32]
    assert Naming("kvstore", BLOCK).sure_tokens(24) == 24
