"""Traces of requests and their times: one JSON object a line, in the format of Mooncake's published traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore_ops.operators.harmless import reason_of

TOKENS_MAX = 1 << 24


@dataclass(frozen=True)
class TracedRequest:
    """A prompt of ``token_count`` tokens that came after ``at_s`` seconds. ``blocks``: the names of its blocks; a name
    stands for all tokens up to the block's end. The last block may be shorter."""

    at_s: float
    token_count: int
    blocks: tuple[int, ...]


def read_trace(path: Path, request_count: int | None = None) -> list[TracedRequest]:
    """Read the requests of a trace in the order of their times. The file has lines with ``timestamp`` (ms),
    ``input_length`` (tokens) and ``hash_ids``. ``request_count``: read only so many lines; None: all. Raises
    InvalidRequest naming the line."""
    try:
        with path.open(encoding="utf-8") as lines:
            found = list(_requests(path, lines, request_count))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: the trace cannot be read: {reason_of(error)}") from error
    if not found:
        raise InvalidRequest(f"{path}: the trace has no request")
    return sorted(found, key=lambda each: each.at_s)


def _requests(path: Path, lines: Iterable[str], request_count: int | None) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, 1):
        if request_count is not None and number > request_count:
            return
        try:
            yield _request(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequest(
                f"{path}, line {number}: a request has timestamp, input_length and hash_ids; this one cannot be read: "
                f"{error!r:.200}"
            ) from error


def _request(value: Any) -> TracedRequest:
    at_s, tokens = float(value["timestamp"]) / 1000, int(value["input_length"])
    if not 0 <= at_s < 1e9 or not 0 < tokens <= TOKENS_MAX:
        raise ValueError(f"timestamp {at_s * 1000:.0f} or input_length {tokens} is none")
    return TracedRequest(at_s, tokens, tuple(int(each) for each in value["hash_ids"]))
