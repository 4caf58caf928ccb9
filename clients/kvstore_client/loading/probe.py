"""Probes: fetch a few chunks on the side, from a tier that plans leave out. Otherwise nobody would learn that a tier or
a network is fast again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvstore.errors import KVStoreError
from kvstore.keys import Extra, Tokens
from kvstore.seams.scheduler import start_thread
from kvstore.spec import ModelSpec, Tier
from kvstore_client.caches import Caches
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.loading.planner import Probe
from kvstore_client.lookup.match import Match, SegmentMatch
from kvstore_client.prompt import GivenTokens, PageHashes

_log = logging.getLogger("kvstore.client")


def probe(
    client: Caches, spec: ModelSpec, tokens: GivenTokens, loaded_tokens: int, match: Match | None = None, *,
    extras: Sequence[Extra] = (), measures_link: bool = False,
) -> None:  # fmt: skip
    """Fetch a few chunks, if it is time, that a plan to load ``loaded_tokens`` of a prompt left out, and throw it away.
    ``match``: what is stored of the prompt, if known. ``measures_link``: see ``Planner.probe``. Blocks; never
    raises."""
    try:
        found = client.peek(spec, tokens, extras=extras) if match is None else match
        if found is None:
            found = client.lookup(spec, tokens, extras=extras)
        due = client.planner.probe(spec, found.chunks, loaded_tokens, measures_link=measures_link)
        if due is None:
            return
        layers = None if due.tier is Tier.DRAM else spec.slab_layers[:1]
        transfer = client.start_fetch_prefix(spec, _first(tokens, due.token_stop), layers=layers, extras=extras)
        _measure(client, due, transfer)
    except KVStoreError as error:
        _log.info("kvstore: a tier was not measured: %s", error.message)


def _measure(client: Caches, due: Probe, transfer: Transfer) -> None:
    try:
        transfer.wait(client.planner.timeout_s)
    finally:
        transfer.cancel(client.planner.timeout_s)
    if due.tier is Tier.DRAM and transfer.measured is not None:
        client.planner.landed(transfer.measured)


def probe_segment(client: Caches, spec: ModelSpec, tokens: Tokens, found: SegmentMatch, preamble: Tokens) -> None:
    """Fetch a few chunks of a stored document, if it is time, that a plan left out. Blocks; never raises. ``tokens``:
    the prompt's; ``found``: the document."""
    try:
        due = client.planner.probe(spec, found.chunks, found.token_start)
        if due is None:
            return
        first = tokens[found.token_start : due.token_stop]
        transfer = client.start_fetch_segment(spec, first, layers=spec.slab_layers[:1], preamble=preamble)
        _measure(client, due, transfer)
    except KVStoreError as error:
        _log.info("kvstore: a tier was not measured: %s", error.message)


def _first(tokens: GivenTokens, token_count: int) -> GivenTokens:
    return tokens.first(token_count) if isinstance(tokens, PageHashes) else tokens[:token_count]


def measure_beside(client: Caches, measure: Callable[[], None]) -> None:
    """Run ``measure`` on a thread of its own, once a second at most."""
    if not client.planner.may_look():
        return
    try:
        start_thread(measure, "kvstore-probe")
    except KVStoreError as error:
        _log.info("kvstore: a tier was not measured: %s", error.message)
