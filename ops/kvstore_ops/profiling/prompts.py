"""Calibration prompts of the user: a JSON object a line, each a prompt whose documents are known.

    {"tokens": [1, 2, 3, ...], "segments": [[0, 120], [120, 300]]}
    {"segments": ["a document", "another"], "suffix": "the question"}
    {"preamble": "a chat template's beginning", "segments": ["a document", "another"], "suffix": "the question"}

Tokens outside all segments are computed. The suffix behind the last segment must not be empty. With a preamble (a text,
or its number of tokens) documents are cached behind it, as they are in use; all prompts have a preamble, or none has.
Text is cut by the model's tokenizer, each part by itself, so that a document has the same tokens in every prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from kvstore_client.segments.runs import checked_runs

from kvstore.errors import InvalidRequest
from kvstore.keys import Tokens, token_array
from kvstore_ops.operators.harmless import reason_of

PROMPTS_MIN = 24
"""Fewest prompts. Two thirds of them have about 250 answer tokens: enough to show 0.99 when nothing is lost."""
DOCUMENT_SETS_MIN = 4
"""Fewest sets of documents: two to search on and two to measure on, which a standard error needs."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt. ``tokens``: u32 [tokens]. ``segments``: its documents, in order; the last ends before the prompt
    does. ``preamble_count``: number of tokens at the start behind which each document is computed; 0: none."""

    tokens: Tokens
    segments: tuple[range, ...]
    preamble_count: int = 0

    @property
    def context_stop(self) -> int:
        """The token at which the last segment ends and the suffix begins."""
        return self.segments[-1].stop


def read_prompts(path: Path, count: int | None, vocab_size: int, tokenizer: Any = None) -> list[Prompt]:
    """Read the first ``count`` prompts of a file; None: all. ``tokenizer``: of transformers, for prompts of text.

    Raises: InvalidRequest for fewer prompts than ``count`` or PROMPTS_MIN, for prompts about fewer sets of documents
    than DOCUMENT_SETS_MIN, and naming the line that is wrong.
    """
    if count is not None and count < PROMPTS_MIN:
        raise InvalidRequest(f"--contexts {count}: at least {PROMPTS_MIN}, a useful profile has a hundred")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompts {path} cannot be read: {reason_of(error)}") from error
    wanted = PROMPTS_MIN if count is None else count
    if len(lines) < wanted:
        raise InvalidRequest(
            f"--prompts {path} has {len(lines)} prompts, {wanted} are wanted: fewer say nothing; give more"
            + ("" if count is None or count == PROMPTS_MIN else f", or a smaller --contexts of at least {PROMPTS_MIN}")
        )
    prompts: list[Prompt] = []
    known: dict[tuple[bytes, tuple[range, ...]], int] = {}
    for number, line in enumerate(lines[:count], start=1):
        prompt = _prompt_of(line, f"--prompts {path}, line {number}", vocab_size, tokenizer)
        first = known.setdefault((prompt.tokens.tobytes(), prompt.segments), number)
        if first != number:
            raise InvalidRequest(
                f"--prompts {path}, line {number}: the prompt of line {first} again: what is counted twice looks surer "
                "than it is; leave one out"
            )
        prompts.append(prompt)
    sets = len(by_documents(prompts))
    if sets < DOCUMENT_SETS_MIN:
        raise InvalidRequest(
            f"--prompts {path} is about {sets} set{'s' * (sets > 1)} of documents, {DOCUMENT_SETS_MIN} are wanted, and "
            "dozens are useful: answers about the same documents are kept and lost together"
        )
    return prompts


def by_documents(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Return the prompts in lists of those with the same documents, in any order, by the first of each."""
    found: dict[frozenset[bytes], list[Prompt]] = {}
    for prompt in prompts:
        documents = frozenset(prompt.tokens[run.start : run.stop].tobytes() for run in prompt.segments)
        found.setdefault(documents, []).append(prompt)
    return list(found.values())


def digest_of(prompts: list[Prompt], answer_tokens: int) -> str:
    """Return the digest of the prompts and of the number of answer tokens."""
    hasher = blake3(f"kvstore/prompts/2 {answer_tokens}\0".encode())
    for prompt in prompts:
        bounds = [[run.start, run.stop] for run in prompt.segments]
        hasher.update(json.dumps([prompt.preamble_count, *bounds]).encode())
        hasher.update(prompt.tokens.tobytes())
    return hasher.hexdigest()


def _prompt_of(line: str, what: str, vocab_size: int, tokenizer: Any) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what}: not JSON: {error}") from error
    names = set(found) - {"preamble"} if isinstance(found, dict) else set()
    if names == {"segments", "suffix"}:
        if tokenizer is None:
            raise InvalidRequest(f"{what} is text, and the model's directory has no tokenizer: give token ids")
        tokens, bounds, before = _cut(found, what, lambda text: tokenizer.encode(text, add_special_tokens=False))
    elif names == {"segments", "tokens"}:
        tokens, bounds, before = found["tokens"], found["segments"], found.get("preamble", 0)
    else:
        wrong = ", ".join(sorted(names)) or "something else"
        raise InvalidRequest(
            f"{what} must have 'tokens' and 'segments', or 'segments' and 'suffix'; it has {wrong:.80}"
        )
    try:
        array = token_array(tokens, vocab_size)
        segments = tuple(checked_runs(bounds, array.size))
    except InvalidRequest as error:
        raise InvalidRequest(f"{what}: {error.message}") from error
    if not segments or segments[-1].stop >= array.size:
        raise InvalidRequest(f"{what}: there must be a segment, and a token at least behind the last one")
    if not isinstance(before, int) or isinstance(before, bool) or not 0 <= before <= segments[0].start:
        raise InvalidRequest(f"{what}: preamble {before!r:.40} must be a number of tokens before the first segment")
    return Prompt(array, segments, before)


def _cut(found: dict[str, Any], what: str, encode: Callable[[str], list[int]]) -> tuple[list[int], list[Any], int]:
    """Return the tokens of a prompt of text, the bounds of its segments, and the number of preamble tokens."""
    texts, preamble = found["segments"], found.get("preamble", "")
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in [*texts, found["suffix"], preamble]):
        raise InvalidRequest(f"{what}: segments must be a list of texts, preamble and suffix a text each")
    tokens = encode(preamble) if preamble else []
    before = len(tokens)
    bounds: list[tuple[int, int]] = []
    for text in texts:
        start = len(tokens)
        tokens += encode(text)
        bounds.append((start, len(tokens)))
    return tokens + encode(found["suffix"]), bounds, before
