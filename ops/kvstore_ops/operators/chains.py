"""Chains of chunks that commands name by a prompt, or by the digest of a chunk that the node has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from kvstore_client.lookup.locate import Location, location_of
from kvstore_client.prompt import Prompt

from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from kvstore.spec import Exactness
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import admin_pb2
from kvstore_ops.locate import FINGERPRINT_DIGITS, read_tokens
from kvstore_ops.operators.calls import Operator
from kvstore_ops.operators.tables import DIGITS

ContextsOption = Annotated[
    Path | None, typer.Option("--prompt", help="JSON token ids, one context or a list; text with --tokenizer.")
]
LastDigestOption = Annotated[
    str,
    typer.Option("--digest", help="Instead of --prompt: the first digits of the prefix's last chunk, as ls has it."),
]
ATTENTION = -1
"""``e_layer`` of a chunk of the attention cache."""


@dataclass(frozen=True)
class Chain:
    """A prompt's chunks. ``step``: tokens of a whole chunk."""

    query: pb.ChainQuery
    token_count: int
    step: int


def chains_of(asked: Operator, model: str, prompt: Path | None, digest: str, tokenizer: str) -> list[Chain]:
    """Return the chains that the options name. Raises InvalidRequest naming the option."""
    if (prompt is None) == (not digest):
        raise InvalidRequest("say which prompt: --model and --prompt, or the --digest of its last chunk")
    if prompt is None:
        return [chain_to(asked, digest, model)]
    if not model:
        raise InvalidRequest("--prompt needs --model: whose tokens are they?")
    spec = asked.model(model)
    found = []
    for tokens in read_tokens(prompt, tokenizer):
        digests = b"".join(Prompt.of(spec, tokens, (), Exactness.EXACT).digests)
        query = pb.ChainQuery(fingerprint=fingerprint(spec, spec.kind), digests=digests)
        found.append(Chain(query, len(tokens), spec.chunk_tokens))
    return found


def chain_to(asked: Operator, digest: str, model: str) -> Chain:
    """Return the chain that ends with the chunk whose digest begins with these digits; ``model``: of this model, where
    several have the same tokens. Raises InvalidRequest."""
    parts = [part for part in asked.show(digest).parts if part.chunk.e_layer == ATTENTION]
    parts = [part for part in parts if not model or _is_called(part.chunk, model)]
    if not parts:
        of = f" of {model}" if model else ""
        raise InvalidRequest(f"--digest {digest[:64]}: this node has no such chunk{of}: kvstore ls shows what it has")
    if len(parts) > 1:
        several = ", ".join(
            f"{each.chunk.model_id} ({each.chunk.fingerprint.hex()[:DIGITS]})".strip() for each in parts
        )
        raise InvalidRequest(f"--digest {digest[:64]}: several models have it, say --model: {several}")
    (part,) = parts
    if 32 * part.ancestor_count != len(part.ancestors):
        raise InvalidRequest(
            f"--digest {digest[:64]}: its chain has {part.ancestor_count:,} chunks: name it by --prompt"
        )
    if not part.chunk.model_id:
        raise InvalidRequest(f"--digest {digest[:64]}: no engine has registered its model since the service's start")
    above = [part.ancestors[at : at + 32] for at in range(0, len(part.ancestors), 32)]
    query = pb.ChainQuery(
        fingerprint=part.chunk.fingerprint, digests=b"".join([*reversed(above), part.chunk.digest]),
        exactness=part.chunk.exactness, provenance=part.chunk.provenance,
    )  # fmt: skip
    step = asked.model(part.chunk.fingerprint.hex()).chunk_tokens
    return Chain(query, part.ancestor_count * step + part.chunk.token_count, step)


def _is_called(chunk: admin_pb2.ChunkEntry, name: str) -> bool:
    """True for the id of the chunk's model, the id's last part, or the first digits of its fingerprint."""
    if name in (chunk.model_id, chunk.model_id.rpartition("/")[2]):
        return True
    return len(name) >= FINGERPRINT_DIGITS and chunk.fingerprint.hex().startswith(name.lower())


def located(asked: Operator, chain: Chain) -> Location:
    """Ask which nodes and tiers have the chain."""
    reply = asked.locate(chain.query)
    return location_of(reply.chains[0], reply, chain.step, chain.token_count)
