"""Probes: fetch one chunk on the side, from a tier that plans leave out. Otherwise nobody would learn that a tier or a
network is fast again."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.errors import KVStoreError
from kvstore.seams.scheduler import start_thread
from kvstore.spec import ModelSpec, Tier
from kvstore_client.lookup.match import Match

if TYPE_CHECKING:
    from kvstore_client.client import Client

_log = logging.getLogger("kvstore.client")


def probe(client: Client, spec: ModelSpec, tokens: Any, loaded_tokens: int, match: Match | None = None) -> None:
    """Fetch a chunk, if it is time, that a plan to load ``loaded_tokens`` of a prompt left out, and throw it away.
    ``match``: what is stored of the prompt, if known. Blocks; never raises."""
    try:
        found = client.peek(spec, tokens) if match is None else match
        if found is None:
            found = client.lookup(spec, tokens)
        due = client.planner.probe(spec, found.chunks, loaded_tokens)
        if due is None:
            return
        layers = None if due.tier is Tier.DRAM else spec.slab_layers[:1]
        transfer = client.start_fetch_prefix(spec, tokens[: due.token_stop], layers=layers)
        try:
            transfer.wait(client.planner.timeout_s)
        finally:
            transfer.cancel(client.planner.timeout_s)
        if due.tier is Tier.DRAM and transfer.measured is not None:
            client.planner.landed(transfer.measured.byte_count, transfer.measured.busy_s)
    except KVStoreError as error:
        _log.info("kvstore: a tier was not measured: %s", error.message)


def begin_probe(client: Client, spec: ModelSpec, tokens: Any, loaded_tokens: int) -> None:
    """Run ``probe`` on a thread of its own, once a second at most."""
    if not client.planner.may_look():
        return
    try:
        start_thread(partial(probe, client, spec, tokens, loaded_tokens), "kvstore-probe")
    except KVStoreError as error:
        _log.info("kvstore: a tier was not measured: %s", error.message)
