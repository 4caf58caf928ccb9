"""Fetches of a prefix: at once, layer by layer, or beside the caller."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.spec import MissReason
from kvstore_client.context import Context
from kvstore_client.fetch.fetched import FetchedKV, gathered
from kvstore_client.fetch.held import open_held
from kvstore_client.fetch.open import NoPrefix, open_resident
from kvstore_client.fetch.stream import LayerStream
from kvstore_client.fetch.target import Into, Places, device_of, given_places
from kvstore_client.fetch.ticket import TicketFields
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.fetch.wanted import Heads, Wanted
from kvstore_client.planes.prefix import Prefix
from kvstore_client.prompt import EXACTNESSES, Prompt


def fetch(context: Context, prompt: Prompt, wanted: Wanted, into: Into) -> FetchedKV:
    """See ``Client.fetch``."""
    given, wanted = given_places(wanted, into), wanted.on(device_of(into))
    if not prompt.digests:
        return gathered(wanted, NoPrefix(wanted, MissReason.NONE), given, context)
    with context.or_miss():
        for is_brief in (True, False):
            prefix = open_resident(context, wanted, prompt, is_brief=is_brief)
            try:
                found = gathered(wanted, prefix, given, context)
            finally:
                prefix.close()
            if found.token_count == prefix.token_count or prefix.is_leased:
                context.count("fetched_bytes", found.byte_count)
                return found
    return gathered(wanted, NoPrefix(wanted, MissReason.UNAVAILABLE), given, context)


def stream(context: Context, prompt: Prompt, wanted: Wanted, into: Into) -> LayerStream:
    """See ``Client.fetch_layers``."""
    given, wanted = given_places(wanted, into), wanted.on(device_of(into))
    if not prompt.digests:
        return LayerStream(NoPrefix(wanted, MissReason.NONE), None, context)
    with context.or_miss():
        return _layers_of(open_resident(context, wanted, prompt), given, context)
    return LayerStream(NoPrefix(wanted, MissReason.UNAVAILABLE), None, context)


def _layers_of(prefix: Prefix, given: Places, context: Context) -> LayerStream:
    if not prefix.token_count:
        prefix.close()
        return LayerStream(NoPrefix(prefix.wanted, prefix.reason), None, context)
    try:
        target = given(prefix.token_count)
    except BaseException:
        prefix.close()
        raise
    return LayerStream(prefix, target, context)


def start_fetch(context: Context, prompt: Prompt, wanted: Wanted, into: Into) -> Transfer:
    """See ``Client.start_fetch_prefix``."""
    layers = stream(context, prompt, wanted, into)
    transfer = Transfer(layers.token_count, wanted.layers, wanted.hidden_layers, layers.reason, layers.exactness)
    try:
        transfer.start(lambda: layers)
    except BaseException:
        layers.close()
        raise
    return transfer


def redeem(
    context: Context, ticket: bytes, into: Into, layers: Sequence[int] | None, heads: Heads | None,
    verify: bool,
) -> Transfer:  # fmt: skip
    """See ``Client.start_fetch``."""
    held = TicketFields(ticket)
    wanted = Wanted.of(held.spec, layers, heads, (), verify)
    given, wanted = given_places(wanted, into), wanted.on(device_of(into))
    given(held.token_count)  # raises now if it does not fit
    transfer = Transfer(held.token_count, wanted.layers, exactness=EXACTNESSES[held.exactness])
    transfer.start(lambda: _layers_of(open_held(context, wanted, held), given, context))
    return transfer
