"""``kvstore locate``: the nodes and tiers that have a prompt's prefix."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvstore_client import Client
from kvstore_client.lookup.locate import Location
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec
from kvstore.wire import spec_from_message
from kvstore_ops.operators.harmless import REASON_CHARACTERS_MAX, cell, reason_of
from kvstore_ops.tier_words import tier_words

FINGERPRINT_DIGITS = 8
"""Least digits of a fingerprint that name a model."""


def find(
    client: Client, model: str, prompt: Path | None, digest: str, tokenizer: str
) -> tuple[list[Location], list[int]]:
    """Locate the contexts that the options name, and count the tokens of each. Raises InvalidRequest."""
    if digest or prompt is None:
        from kvstore_ops.operators.calls import Operator
        from kvstore_ops.operators.chains import chains_of, located

        asked = Operator(client)
        (chain,) = chains_of(asked, model, prompt, digest, tokenizer)
        return [located(asked, chain)], [chain.token_count]
    if not model:
        raise InvalidRequest("--prompt needs --model: whose tokens are they?")
    contexts = read_tokens(prompt, tokenizer)
    return client.locate_each(model_named(client, model), contexts), list(map(len, contexts))


def model_named(client: Client, name: str) -> ModelSpec:
    """Return the one registered model whose id, or the id's last part, is ``name``, or whose fingerprint begins with
    these digits, as the sidecar itself names models. Raises InvalidRequest."""
    models = [each for each in client.stats().models if each.spec.layers]
    found = [each for each in models if each.spec.model_id == name]
    found = found or [each for each in models if each.spec.model_id.rpartition("/")[2] == name]
    if not found and len(name) >= FINGERPRINT_DIGITS:
        found = [each for each in models if each.fingerprint.hex().startswith(name.lower())]
    if len(found) != 1:
        known = ", ".join(sorted(f"{each.spec.model_id} ({each.fingerprint.hex()[:16]})" for each in found or models))
        if found:
            raise InvalidRequest(f"--model {name}: several models are called so: say the digits of one: {known}")
        known = known or "none: an engine registers its model at its start"
        raise InvalidRequest(f"--model {name}: no model is called so here. Registered: {known}")
    return spec_from_message(found[0].spec)


def read_tokens(path: Path, tokenizer: str) -> list[list[int]]:
    """Read the contexts of a file ("-": standard input). With a ``tokenizer`` (a directory, or a name in this machine's
    cache of transformers) the file is a text; else it is JSON, a list of token ids or a list of such lists. Raises
    InvalidRequest."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompt {path} cannot be read: {reason_of(error)}") from error
    if tokenizer:
        return [_tokenized(text, tokenizer)]
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"--prompt {path} is no JSON list of token ids ({error}): name --tokenizer for a text"
        ) from error
    contexts = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    if not all(isinstance(each, list) and all(type(token) is int for token in each) for each in contexts):
        raise InvalidRequest(f"--prompt {path}: a list of token ids, or a list of such lists, is wanted")
    return contexts


def _tokenized(text: str, tokenizer: str) -> list[int]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InvalidRequest("--tokenizer needs transformers: pip install 'kvstore[transformers]'") from error
    try:
        found = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except Exception as error:
        raise InvalidRequest(
            f"--tokenizer {tokenizer}: no tokenizer of transformers is in that directory, or in this machine's cache "
            f"under that name ({str(error).partition(chr(10))[0][:200]}): nothing is downloaded; name a directory with "
            "tokenizer.json"
        ) from error
    return list(found(text)["input_ids"])


def as_dict(location: Location, token_count: int) -> dict[str, Any]:
    """Return one context's answer as plain values for JSON."""
    rows = [{"node": each.node, "tier": each.tier.name, "token_count": each.token_count} for each in location.prefixes]
    unknown = [each.name for each in location.unknown]
    return {
        "token_count": token_count, "asked": location.asked, "prefixes": rows, "reason": location.reason,
        "unknown": unknown,
    }  # fmt: skip


def render(locations: list[Location], token_counts: list[int]) -> Group:
    """Draw a table per context, the longest prefix first."""
    tables: list[Table | Text] = []
    for number, (found, count) in enumerate(zip(locations, token_counts, strict=True), 1):
        title = f"{count:,} tokens" if len(locations) == 1 else f"context {number}: {count:,} tokens"
        title += ", less than a chunk" if found.is_short else ""
        table = Table("node", "tier", "leading tokens", "share", title=title)
        for each in sorted(found.prefixes, key=lambda row: -row.token_count):
            node = each.node or "(all nodes)"
            here = " (asked)" if each.node and each.node == found.asked else ""
            tier = tier_words(each.tier.name.lower())
            table.add_row(cell(node + here), tier, f"{each.token_count:,}", f"{each.token_count / count:.0%}")
        if not found.prefixes:
            table.add_row("nowhere", "", "0", "0%")
        tables.append(table)
    if any(each.is_short for each in locations):
        tables.append(Text("shared tiers have nothing of less than a chunk: they take whole chunks only", "yellow"))
    if unknown := dict.fromkeys(tier for each in locations for tier in each.unknown):
        names = ", ".join(each.name.lower() for each in unknown)
        tables.append(Text(f"not known of {names}: no answer, see kvstore tiers", "yellow"))
    if locations and locations[0].reason:
        tables.append(cell(locations[0].reason, "yellow", REASON_CHARACTERS_MAX))
    return Group(*tables)
