"""``kvstore warm``: a new node brings into its memory what another node fetches most.

The other node only says which prefixes are hot; their bytes come from the tiers that this node has or shares. A hint
that turns out wrong costs a miss. Nothing is evicted for it: what does not fit is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from kvstore.chunk import layout_of
from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec
from kvstore.v1alpha import admin_pb2
from kvstore.wire import spec_from_message
from kvstore_ops.operators import tables
from kvstore_ops.operators.calls import Operator
from kvstore_ops.operators.chains import Chain, chain_to
from kvstore_ops.operators.changing import DryRunOption, followed, tell
from kvstore_ops.operators.reading import operator
from kvstore_ops.options import AddressOption, JsonOption, TenantOption, TlsOption

COUNT_MAX = 64
FULL = 0.9
"""The part of memory beyond which nothing is brought: engines' own stores need room, too."""
NO_ROOM = "left out: memory is nearly full"
ABSENT = "left out: model not registered here yet"
UNNAMED = "left out: too long, or gone there"


def warm(
    source: Annotated[str, typer.Option("--from", help="The node that knows: unix:///PATH or HOST:PORT.")],
    count: Annotated[int, typer.Option("--count", help="Hot prefixes, at most.", min=1, max=COUNT_MAX)] = 16,
    dry_run: DryRunOption = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Bring the prefixes that another node fetches most into this node's memory, from the tiers that both share.

    The hottest comes first; what has no room in memory is left out. Models must be registered here by an engine.

    Example: kvstore warm --from other:9000 --count 16
    """
    with operator(source, tenant, tls) as there, operator(address, tenant, tls) as here:
        found = list(_brought(there, here, count, dry_run=dry_run))
    nothing = f"nothing: nobody fetched a prefix from {source} of late"
    tell(tables.outcomes_together(found), dry_run=dry_run, as_json=as_json, nothing=nothing)


def _brought(there: Operator, here: Operator, count: int, *, dry_run: bool) -> Iterator[admin_pb2.ChangeResponse]:
    """Bring the hottest runs one after the other; a run that goes on from one that was left out is left out, too."""
    hot = there.hottest(count)
    models = {each.fingerprint: spec_from_message(each.spec) for each in there.stats().models if each.spec.layers}
    known = {each.fingerprint for each in here.stats().models if each.spec.layers}
    left = set[int]()
    for number, run in enumerate(hot, start=1):
        front = hot[run.above - 1].token_count if run.above else 0
        spec = models.get(run.fingerprint)
        size = _size_of(spec, run.token_count - front) if spec else (0, 0)
        why = "" if run.fingerprint in known else ABSENT
        if not why and (run.above in left or not _has_room(here, size[1])):
            why = NO_ROOM
        chain = None if why or spec is None else _chain(there, run)
        if chain is None:
            left.add(number)
            outcome = admin_pb2.Outcome(what=why or UNNAMED, chunk_count=size[0], byte_count=size[1])
            yield admin_pb2.ChangeResponse(total_count=size[0], outcomes=[outcome], is_last=True)
        else:
            request = admin_pb2.ChangeRequest(prefetch=admin_pb2.Prefetch(query=chain.query), dry_run=dry_run)
            yield followed(here, request)


def _size_of(spec: ModelSpec, token_count: int) -> tuple[int, int]:
    """Return the chunks and bytes of so many tokens; the last chunk may be a partial one."""
    whole_count, rest = divmod(token_count, spec.chunk_tokens)
    byte_count = whole_count * layout_of(spec, spec.kind, spec.chunk_tokens).total_bytes
    return whole_count + bool(rest), byte_count + (layout_of(spec, spec.kind, rest).total_bytes if rest else 0)


def _has_room(here: Operator, byte_count: int) -> bool:
    arena = here.stats().arena
    return arena.used_bytes + byte_count <= FULL * arena.capacity_bytes


def _chain(there: Operator, run: admin_pb2.HotPrefix) -> Chain | None:
    try:
        return chain_to(there, run.digest.hex(), run.fingerprint.hex())
    except InvalidRequest:
        return None


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(warm)
