"""A profile of a model in a directory, on prompts in a file: agreement with its own full prefill."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.gate import Gate
from kvstore_client.recompute import recompute
from kvstore_ops.profiling.command import Own, run
from kvstore_ops.profiling.own import OwnSubject, local_model
from kvstore_ops.profiling.profiler import journal_of, point_of
from kvstore_ops.profiling.prompts import PROMPTS_MIN, Prompt, read_prompts
from kvstore_ops.profiling.subject import Measured
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvstore.errors import InvalidRequest
from kvstore.planning import Profile, Recompute
from kvstore.planning.profile import Origin
from tests.recompute.models import VOCABULARY, model_of, prompt, sibling_of

MODEL = model_of("llama", num_hidden_layers=2)
RUNNER = TransformersRunner(MODEL)
SIBLING = TransformersRunner(sibling_of(MODEL, 3))
EVERY = range(4)


def asked(count: int) -> list[Prompt]:
    return [
        Prompt(prompt(60, 70 + seed).numpy().astype("uint32"), (range(3, 25), range(25, 52))) for seed in range(count)
    ]


def written(path: Path, count: int, **changes: Any) -> Path:
    lines = [
        {"tokens": each.tokens.tolist(), "segments": [[run.start, run.stop] for run in each.segments], **changes}
        for each in asked(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    MODEL.save_pretrained(place / "model")
    SIBLING.model.save_pretrained(place / "sibling")
    model_of("qwen2", num_hidden_layers=2, num_key_value_heads=4).save_pretrained(place / "other")
    return place


@pytest.mark.parametrize("reuse", ["position", "sibling", "both"])
def test_quality_is_agreement_with_the_full_prefill(reuse: str) -> None:
    answered: list[int] = []
    subject = OwnSubject(RUNNER, None if reuse == "position" else SIBLING, reuse, asked(4), 5, answered.append)
    assert answered == [1, 2, 3, 4]
    assert subject.full().by_context == (1.0,) * 4
    made = subject.calibration
    assert (made.search_contexts, made.contexts, made.answers) == (2, 2, 2)
    done: list[int] = []
    same = subject.measure(Recompute(0, 0, 1.0), EVERY, done.append)
    assert done == [1, 2, 3, 4]
    assert (same.by_context, same.misled, same.tokens) == ((1.0,) * 4, 0.0, 1.0)
    assert same.share == 1.0
    assert same.kl == pytest.approx(0.0, abs=1e-5)
    lossy = subject.measure(Recompute.reuse(), EVERY, done.append)
    parts = [subject.measure(Recompute.reuse(), those, done.append) for those in (range(1), range(1, 4))]
    assert (parts[0] + parts[1]).by_context == lossy.by_context
    assert (parts[0] + parts[1]).misled == pytest.approx(lossy.misled)
    assert lossy.share == 0.0
    assert 0.0 <= sum(lossy.by_context) / 4 < 1.0
    assert lossy.tokens is not None
    assert sum(lossy.by_context) / 4 <= lossy.tokens < 1.0, "an answer is kept whole or not at all"
    assert lossy.kl is not None
    assert lossy.kl > 0.01
    group = Recompute(1, 1) if reuse != "position" else Recompute(0, 0)
    again = OwnSubject(RUNNER, None if reuse == "position" else SIBLING, reuse, asked(4), 5)
    assert subject.measure(group, EVERY, done.append) == again.measure(group, EVERY, done.append)


def test_penalties_of_the_models_generation_take_nothing_from_its_own_prefill() -> None:
    """Many chat models come with a repetition penalty: by it no setting would ever keep an answer."""
    plain = OwnSubject(RUNNER, None, "position", asked(4), 5)
    model = copy.deepcopy(MODEL)
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.suppress_tokens = plain._asked[0].answer[:1].tolist()
    subject = OwnSubject(TransformersRunner(model), None, "position", asked(4), 5)
    assert [each.answer.tolist() for each in subject._asked] == [each.answer.tolist() for each in plain._asked]
    assert subject.measure(Recompute(0, 0, 1.0), EVERY, lambda _: None).by_context == (1.0,) * 4
    first = subject._asked[0].answer[:2].tolist()
    for ends in (first[1], [first[1], 0]):
        model.generation_config.eos_token_id = ends
        stopped = OwnSubject(TransformersRunner(model), None, "position", asked(2), 5)._asked[0].answer.tolist()
        assert stopped == first[: first.index(first[1]) + 1], "an answer ends as the model's own does"


def test_documents_behind_a_preamble_are_profiled_as_they_are_used() -> None:
    """The first one is exact, and not counted among what is computed again."""
    prompts = [Prompt(each.tokens, (range(7, 25), range(25, 52)), 7) for each in asked(4)]
    subject = OwnSubject(RUNNER, None, "position", prompts, 3)
    assert subject.origin is Origin.PREAMBLE
    made = subject.calibration
    assert (made.token_count_max, made.run_count_max) == (60, 2)
    runs = list(subject._runs(0, prompts[0], Recompute.reuse()))
    assert [(run.token_start, run.rotated_from, run.is_exact) for run in runs] == [(7, 7, True), (25, 7, False)]
    whole = recompute(RUNNER, prompts[0].tokens[:25].astype("int64"), [], Recompute.full(2)).kv
    for (k, v), (k_whole, v_whole) in zip(runs[0].source._kv, whole, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(k, k_whole[:, 7:])
        assert torch.equal(v, v_whole[:, 7:])
    only_first = [Prompt(each.tokens, (range(7, 25),), 7) for each in prompts]
    exact = OwnSubject(RUNNER, None, "position", only_first, 3).measure(Recompute.reuse(), EVERY, lambda _: None)
    assert exact.by_context == (1.0,) * 4
    with pytest.raises(InvalidRequest, match="3 of 4 prompts have a preamble"):
        OwnSubject(RUNNER, None, "position", [*prompts[:3], asked(4)[3]], 3)


def test_a_profile_covers_what_its_figures_were_measured_on() -> None:
    """A prompt of the search alone, every third one, shows nothing of the setting that is taken."""
    prompts = asked(4)
    tokens = np.concatenate([prompts[0].tokens, prompts[1].tokens])
    prompts[0] = Prompt(tokens, (range(20), range(20, 40), range(40, 80)))
    made = OwnSubject(RUNNER, None, "position", prompts, 1).calibration
    assert (made.token_count_max, made.run_count_max) == (60, 2)


def test_questions_about_the_same_documents_are_one_context() -> None:
    """Their answers are kept and lost together: counted one by one they look surer than they are, and a search that saw
    the documents would be judged by them."""
    sets, ends = [each.tokens[:52] for each in asked(6)], [prompt(8, 300 + number).numpy() for number in range(3)]
    places = (range(3, 25), range(25, 52))
    prompts = [Prompt(np.concatenate([one, end]).astype("uint32"), places) for end in ends for one in sets]
    subject = OwnSubject(RUNNER, None, "position", prompts, 3)
    made = subject.calibration
    assert (made.search_contexts, made.contexts) == (2, 4)
    assert subject.full().by_context == (1.0,) * 6
    full = Measured((1.0,) * 4, 1.0, 0.0)
    assert point_of(Recompute.reuse(), full, full, made.answers).loss_error == 1 / 4, "four without a loss show no more"
    done: list[int] = []
    lossy = subject.measure(Recompute.reuse(), range(6), done.append)
    assert done == [1, 2, 3, 4, 5, 6]
    assert {round(3 * each, 6) for each in lossy.by_context} <= {0.0, 1.0, 2.0, 3.0}
    parts = [subject.measure(Recompute.reuse(), those, done.append) for those in (range(2), range(2, 6))]
    assert (parts[0] + parts[1]).by_context == lossy.by_context
    documents = [each.prompt.tokens[3:52].tobytes() for each in subject._asked]
    assert not set(documents[:6]) & set(documents[6:]), "what is searched on judges nothing"


def test_prompts_about_too_few_documents_are_refused(tmp_path: Path) -> None:
    ends = [prompt(8, 300 + number).tolist() for number in range(24)]
    lines = [{"tokens": prompt(52, 70).tolist() + end, "segments": [[3, 25], [25, 52]]} for end in ends]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidRequest, match="1 set of documents"):
        read_prompts(path, None, VOCABULARY)


def test_caches_that_do_not_fit_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = OwnSubject(RUNNER, SIBLING, "sibling", asked(2), 3)
    group = Recompute(1, 1)
    kept = subject.measure(group, range(2), lambda _: None)
    monkeypatch.setattr(subject._caches, "_room", 0)
    subject._caches._kv.clear()
    subject._caches._hidden.clear()
    assert subject.measure(group, range(2), lambda _: None) == kept
    assert not subject._caches._kv


def test_the_command_writes_a_profile_that_a_gate_finds(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a run that was stopped goes on with the points it has."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    own = Own(directory / "model", written(tmp_path / "p.jsonl", PROMPTS_MIN), directory / "sibling", 1)
    measure, left = OwnSubject.measure, [3]

    class StoppedError(Exception):
        pass

    def stopping(self: OwnSubject, setting: Recompute, those: range, report: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise StoppedError
        return measure(self, setting, those, report)

    monkeypatch.setattr(OwnSubject, "measure", stopping)
    with pytest.raises(StoppedError):
        run(own, None, None, None, 0, 0.5, "calibration", None, fresh=False, as_json=False)
    (points,) = (tmp_path / "kvstore" / "profiles").glob("*.points.jsonl")
    before = points.read_bytes()
    assert len(before.splitlines()) == 5
    left[0] = 1000
    run(own, None, None, None, 0, 0.5, "calibration", None, fresh=False, as_json=True)
    assert points.read_bytes().startswith(before)
    found = Profile.from_json(capsys.readouterr().out)
    assert found.full_quality == 1.0
    assert found.calibration.contexts + found.calibration.search_contexts == PROMPTS_MIN
    loaded = AutoModelForCausalLM.from_pretrained(directory / "model", dtype="auto")
    receiver = replace(TransformersRunner(loaded).spec, model_id="in use", tokenizer_digest="aa" * 32)
    permit = Gate(floor=0.0).permit(receiver, SIBLING.spec, "sibling")
    assert permit.setting == found.cheapest(0.0).setting  # type: ignore[union-attr]
    assert journal_of(tmp_path / "x.json").name == "x.points.jsonl"


def test_text_is_cut_part_by_part(directory: Path, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    path = tmp_path / "text.jsonl"
    each = (
        {"segments": ["w5 w6", f"w7 w8 w{9 + number % 4}"], "suffix": f"w{number + 1}"} for number in range(PROMPTS_MIN)
    )
    path.write_text("".join(json.dumps(prompt) + "\n\n" for prompt in each))
    found = read_prompts(path, None, VOCABULARY, tokenizer)
    assert len(found) == PROMPTS_MIN
    assert found[0].tokens.tolist() == [5, 6, 7, 8, 9, 1]
    assert found[0].segments == (range(2), range(2, 5))
    assert found[0].preamble_count == 0
    path.write_text(path.read_text().replace('{"segments"', '{"preamble": "w1 w2", "segments"'))
    behind = read_prompts(path, None, VOCABULARY, tokenizer)
    assert behind[0].tokens.tolist() == [1, 2, 5, 6, 7, 8, 9, 1]
    assert (behind[0].segments, behind[0].preamble_count) == ((range(2, 4), range(4, 7)), 2)
    model = tmp_path / "model"
    MODEL.save_pretrained(model)
    tokenizer.save_pretrained(model)
    runner, loaded = local_model(model)
    assert loaded.encode("w3") == [3]
    assert runner.spec.tokenizer_digest
    assert runner.spec.weights_digest == RUNNER.spec.weights_digest
    assert runner.spec.model_id == "model"
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        read_prompts(path, None, VOCABULARY)


@pytest.mark.parametrize(
    ("count", "contexts", "told"),
    [(23, None, "23 prompts, 24 are wanted"), (30, 8, "at least 24"), (30, 40, "smaller --contexts")],
)
def test_too_few_prompts_are_refused(tmp_path: Path, count: int, contexts: int | None, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        read_prompts(written(tmp_path / "p.jsonl", count), contexts, VOCABULARY)


def test_a_prompt_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "prompts", 24)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:20], lines[3], *lines[20:]]))
    with pytest.raises(InvalidRequest, match="line 21: the prompt of line 4 again"):
        read_prompts(path, None, 1000)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens": [VOCABULARY] * 60}, "line 1: token 96"),
        ({"segments": []}, "line 1: there must be a segment"),
        ({"segments": [[0, 60]]}, "line 1: there must be"),
        ({"segments": [[0, 10], [5, 20]]}, "line 1: segments\\[1\\]"),
        ({"labels": []}, "line 1 must have"),
        ({"preamble": 4}, "line 1: preamble 4 must be"),
        ({"preamble": "text"}, "line 1: preamble 'text' must be"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        read_prompts(written(tmp_path / "p.jsonl", PROMPTS_MIN, **changes), None, VOCABULARY)


def test_what_cannot_be_profiled_is_refused(directory: Path, tmp_path: Path) -> None:
    prompts = written(tmp_path / "p.jsonl", PROMPTS_MIN)
    for own, reuse, told in (
        (Own(tmp_path / "nothing", prompts, None, 4), None, "no config.json"),
        (Own(directory / "model", tmp_path / "nothing", None, 4), None, "cannot be read"),
        (Own(directory / "model", prompts, directory / "other", 4), None, "kv_heads 4"),
        (Own(directory / "model", prompts, directory / "sibling", 4), "position", "takes none"),
        (Own(directory / "model", prompts, None, 4), "both", "take a --sender"),
        (Own(directory / "model", prompts, None, 0), None, "answer-tokens"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            run(own, None, reuse, None, 0, 0.5, "calibration", tmp_path / "x.json", fresh=False, as_json=False)
    (directory / "model" / "unsafe").mkdir(exist_ok=True)
    torch.save({}, directory / "model" / "unsafe" / "pytorch_model.bin")
    (directory / "model" / "unsafe" / "config.json").write_text((directory / "model" / "config.json").read_text())
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        local_model(directory / "model" / "unsafe")
    assert not (tmp_path / "x.json").exists()
