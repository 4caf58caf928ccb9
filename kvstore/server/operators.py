"""AdminService: the operators' calls."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar

from google.protobuf.message import Message

from kvstore import __version__
from kvstore.controller import Controller, Session, Stats
from kvstore.controller.benefit import Saving
from kvstore.controller.operators import (
    ChangeNews,
    ChunkDetail,
    ChunkEntry,
    HotEntry,
    ListPage,
    ModelTotal,
    Operators,
    Selection,
    ShownChunk,
)
from kvstore.controller.prefills import PartialPrefills
from kvstore.errors import InvalidRequest, PermissionDenied
from kvstore.movement import MeasuredTier, TierAccount
from kvstore.seams import Clock
from kvstore.seams.memory import descriptor_count
from kvstore.server.prefills import render_engine, render_record
from kvstore.server.reloading import Reloading
from kvstore.server.render import parse_digests, parse_query, wire_number
from kvstore.server.rpc import Context
from kvstore.server.services import session_of
from kvstore.spec import Exactness, Provenance
from kvstore.tiers import EncodingFigures
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import admin_pb2
from kvstore.wire import spec_to_message
from kvstore.wire.limits import HOTTEST_MAX
from kvstore.wire.plans import outcome_from_message, prefill_from_message

_log = logging.getLogger("kvstore.server")
Rendered = TypeVar("Rendered", bound=Message)
_PROVENANCE = {
    Provenance.IN_CONTEXT: pb.PROVENANCE_IN_CONTEXT,
    Provenance.STANDALONE: pb.PROVENANCE_STANDALONE,
}
_EXACTNESS = {Exactness.EXACT: pb.EXACTNESS_EXACT, Exactness.DERIVED: pb.EXACTNESS_DERIVED}


class AdminService:
    """The operator's calls, for sessions of one tenant. The tenant's sockets serve only their owner; over TCP the
    remote plane lets in callers with an operator's token."""

    def __init__(
        self, controller: Controller, operators: Operators, prefills: PartialPrefills, clock: Clock, server_pid: int,
        reloading: Reloading | None,
    ) -> None:  # fmt: skip
        """``reloading``: reloads the settings of the whole service; None: this tenant's operators may not do so."""
        self._controller = controller
        self._operators = operators
        self._prefills = prefills
        self._clock = clock
        self._started_s = clock.monotonic()
        self._server_pid = server_pid
        self._reloading = reloading

    async def Stats(self, request: admin_pb2.StatsRequest, context: Context) -> admin_pb2.StatsResponse:
        """Return a consistent snapshot of the tenant's counts."""
        session_of(self._controller, context)
        pauses = self._controller.begin_long_work()  # a rate is fitted to each prefill, and a report may have thousands
        for told in request.computed:
            for each in map(prefill_from_message, told.prefills):
                self._prefills.engines.computed(told.fingerprint, told.step_tokens, each)
                await pauses.between()
        for plan in request.planned:
            self._prefills.told(plan.fingerprint, plan.step_tokens, outcome_from_message(plan))
        uptime = self._clock.monotonic() - self._started_s
        reply = render_stats(
            self._controller.stats(), self._controller.tenant, uptime, self._server_pid, descriptor_count()
        )
        reply.engines.extend(map(render_engine, self._prefills.engines.rates))
        return reply

    async def Tiers(self, request: admin_pb2.TiersRequest, context: Context) -> admin_pb2.TiersResponse:
        """Return the account of each tier, and the reasons why configured tiers are not in use."""
        session_of(self._controller, context)
        tiers = map(_tier, self._operators.tiers())
        return admin_pb2.TiersResponse(tiers=tiers, absent=self._operators.absent, tenant=self._operators.tenant)

    async def ListChunks(
        self, request: admin_pb2.ListChunksRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ListChunksResponse]:
        """Give pages of selected chunks, then the totals."""
        session_of(self._controller, context)
        async with aclosing(self._operators.chunks(parse_selection(request.selection), request.limit)) as pages:
            async for page in pages:
                yield _page(page)

    async def ShowChunk(self, request: admin_pb2.ShowChunkRequest, context: Context) -> admin_pb2.ShowChunkResponse:
        """Return one chunk. For a chunk that is not here the reply has no parts."""
        session_of(self._controller, context)
        return _shown(await self._operators.chunk(request.digest, context.time_remaining()))

    async def Hottest(self, request: admin_pb2.HottestRequest, context: Context) -> admin_pb2.HottestResponse:
        """Return the prefixes that were fetched most of late."""
        session_of(self._controller, context)
        found = await self._operators.hottest(min(request.limit, HOTTEST_MAX))
        return admin_pb2.HottestResponse(prefixes=map(_hot, found))

    async def Reload(self, request: admin_pb2.ReloadRequest, context: Context) -> admin_pb2.ReloadResponse:
        """Reload the settings, and return those that differ from the ones in effect. Settings concern all tenants, so
        only the default tenant's operators may do so."""
        session_of(self._controller, context)
        if self._reloading is None:
            raise PermissionDenied("settings are all tenants': ask by the default tenant's socket (without --tenant)")
        changes = await self._reloading.reload(dry_run=request.dry_run)
        return admin_pb2.ReloadResponse(
            changes=[
                admin_pb2.SettingChange(name=each.name, before=each.before, after=each.after, is_live=each.is_live)
                for each in changes
            ]
        )

    async def Change(
        self, request: admin_pb2.ChangeRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ChangeResponse]:
        """Make a change. Give reports of its progress, the last of which has all outcomes."""
        session = session_of(self._controller, context)
        told = {"change": request.WhichOneof("change"), "session": session.session_id, "dry_run": request.dry_run}
        _log.info("an operator's change begins", extra=told)
        async with aclosing(self._change(session, request)) as changes:
            async for news in changes:
                if news.is_last:
                    _log.info("an operator's change ended", extra={**told, "outcomes": dict(news.tally.counts)})
                yield _news(news)

    async def Plans(self, request: admin_pb2.PlansRequest, context: Context) -> admin_pb2.PlansResponse:
        """Return the last partial prefills, the newest first."""
        session_of(self._controller, context)
        return admin_pb2.PlansResponse(plans=map(render_record, self._prefills.records(request.limit)))

    def _change(self, session: Session, request: admin_pb2.ChangeRequest) -> AsyncGenerator[ChangeNews]:
        """Begin the change that a request names. Raises InvalidRequest for a request that names none."""
        operators, dry_run = self._operators, request.dry_run
        wanted = parse_selection(request.selection)
        match request.WhichOneof("change"):
            case "evict":
                return operators.evict(wanted, dry_run=dry_run)
            case "pin":
                return operators.pin(wanted, request.pin.seconds, dry_run=dry_run)
            case "unpin":
                return operators.unpin(wanted, dry_run=dry_run)
            case "move":
                return operators.move(wanted, request.move.tier, keep=request.move.keep, dry_run=dry_run)
            case "prefetch":
                return operators.prefetch(session, parse_query(request.prefetch.query), dry_run=dry_run)
            case "verify":
                return operators.verify(wanted, dry_run=dry_run)
            case "drain":
                return operators.drain(wanted, end=request.drain.end, service=request.drain.service, dry_run=dry_run)
        raise InvalidRequest("a change is one of evict, pin, unpin, move, prefetch, verify and drain")


def parse_selection(message: admin_pb2.Selection) -> Selection:
    """Return the message as a selection. The controller checks its names."""
    return Selection(
        model=message.model,
        digest=message.digest,
        tier=message.tier,
        older_than_s=message.older_than_seconds,
        byte_count_min=message.byte_count_min,
        byte_count_max=message.byte_count_max,
        chain=tuple(parse_digests(message.chain, "selection.chain")),
        use_count_max=message.use_count_max if message.HasField("use_count_max") else None,
    )


def render_stats(
    stats: Stats, tenant: str, uptime_seconds: float, server_pid: int, descriptor_count: int
) -> admin_pb2.StatsResponse:
    return admin_pb2.StatsResponse(
        version=__version__,
        uptime_seconds=uptime_seconds,
        server_pid=server_pid,
        tenant=tenant,
        arena=_alike(admin_pb2.ArenaStats, stats),
        sessions=_alike(admin_pb2.SessionStats, stats),
        models=[
            admin_pb2.ModelStats(
                model_id=each.model_id,
                fingerprint=each.fingerprint,
                chunk_count=each.chunk_count,
                byte_count=each.byte_count,
                spec=spec_to_message(each.spec),
                served=_saving(each.served.total),
                served_hours=[
                    admin_pb2.ServedHour(start_seconds=hour.start_s, saving=_saving(hour.saving))
                    for hour in each.served.hours
                ],
            )
            for each in stats.models
        ],
        counters=stats.counters,
        tiers=[_alike(admin_pb2.TierStats, each) for each in stats.tiers],
        tier_problem=stats.tier_problem,
        backlog_chunk_count=stats.backlog_count,
        loading_bytes=stats.loading_bytes,
        descriptor_count=descriptor_count,
        rates=map(_rate, stats.rates),
        served_of_forgotten=_saving(stats.forgotten),
    )


def _saving(saving: Saving) -> admin_pb2.Saving:
    return admin_pb2.Saving(
        fetch_count=saving.fetch_count, token_count=saving.token_count, saved_seconds=saving.seconds
    )  # fmt: skip


def _hot(entry: HotEntry) -> admin_pb2.HotPrefix:
    return admin_pb2.HotPrefix(
        above=entry.above + 1, digest=entry.digest, model_id=entry.model_id, fingerprint=entry.fingerprint,
        token_count=entry.token_count, heat=entry.heat, own_heat=entry.own_heat, tier=entry.tier,
    )  # fmt: skip


def _rate(tier: MeasuredTier) -> admin_pb2.TierRate:
    """Return a tier's rate as tenants may see it: rounded, because other tenants' requests influence it."""
    rate = tier.rate
    return admin_pb2.TierRate(
        tier=tier.name,
        kind=wire_number(tier.kind),
        bytes_per_second=rounded(rate.bytes_per_s),
        latency_seconds=rounded(rate.latency_s),
        caution=max(1.0, rounded(rate.caution)),
        confidence=round(rate.confidence, 2),
        sample_count=rate.sample_count,
        queued_bytes=1 << (tier.queued_bytes - 1).bit_length() if tier.queued_bytes else 0,
        least_bytes=rate.least_bytes,
    )


def rounded(value: float) -> float:
    """Return a number rounded to two significant digits."""
    return float(f"{value:.1e}")


def _alike(kind: type[Rendered], value: object) -> Rendered:
    """Return a message of this kind with every attribute of ``value`` for which it has a field."""
    names = [field.name for field in kind.DESCRIPTOR.fields if hasattr(value, field.name)]
    return kind(**{name: getattr(value, name) for name in names})


def _tier(account: TierAccount) -> admin_pb2.TierReport:
    return admin_pb2.TierReport(
        stats=_alike(admin_pb2.TierStats, account.stats),
        kind=wire_number(account.kind),
        durability=wire_number(account.durability),
        backlog_chunk_count=account.backlog_count,
        problem=account.problem,
        stalled_seconds=account.stalled_s,
        write_policy=account.write_policy,
        is_draining=account.is_draining,
        waiting=_alike(admin_pb2.WaitingMoves, account.waiting),
        encodings=map(_encoding, account.stats.encodings),
    )


def _encoding(figures: EncodingFigures) -> admin_pb2.EncodingReport:
    return admin_pb2.EncodingReport(
        fingerprint=figures.fingerprint, encoding=figures.encoding, sample_count=figures.sample_count,
        ratio=figures.ratio, encode_bytes_per_second=figures.encode_bytes_per_s,
        decode_bytes_per_second=figures.decode_bytes_per_s, line_bytes_per_second=figures.line_bytes_per_s,
    )  # fmt: skip


def _news(news: ChangeNews) -> admin_pb2.ChangeResponse:
    tally = news.tally
    outcomes = [
        admin_pb2.Outcome(what=what, chunk_count=count, byte_count=tally.byte_counts[what])
        for what, count in tally.counts.items()
    ]
    return admin_pb2.ChangeResponse(
        done_count=tally.done_count, total_count=tally.total_count, outcomes=outcomes, problem=tally.problem,
        is_last=news.is_last, refuses_stores=tally.refuses_stores,
    )  # fmt: skip


def _page(page: ListPage) -> admin_pb2.ListChunksResponse:
    return admin_pb2.ListChunksResponse(
        chunks=map(_entry, page.chunks), totals=map(_total, page.totals), is_last=page.is_last
    )


def _entry(entry: ChunkEntry) -> admin_pb2.ChunkEntry:
    message = admin_pb2.ChunkEntry(
        digest=entry.digest,
        parent=entry.parent,
        fingerprint=entry.fingerprint,
        model_id=entry.model_id,
        e_layer=entry.e_layer,
        provenance=_PROVENANCE[entry.provenance],
        exactness=_EXACTNESS[entry.exactness],
        token_count=entry.token_count,
        byte_count=entry.byte_count,
        use_count=entry.use_count,
        child_count=entry.child_count,
        is_held=entry.is_held,
        stored_seconds=entry.stored_seconds,
        is_pinned=entry.is_pinned,
    )
    for copy in entry.copies:
        message.copies.add(
            tier=copy.tier,
            kind=int(copy.kind),
            encoding=int(copy.encoding),
            is_proven=copy.is_proven,
            is_shared=copy.is_shared,
        )
    return message


def _total(total: ModelTotal) -> admin_pb2.ModelTotal:
    message = admin_pb2.ModelTotal(
        fingerprint=total.fingerprint, model_id=total.model_id, chunk_count=total.chunk_count,
        byte_count=total.byte_count, profiles=total.profiles,
    )  # fmt: skip
    for name, each in total.tiers.items():
        message.tiers.add(tier=name, chunk_count=each.chunk_count, byte_count=each.byte_count)
    return message


def _shown(shown: ShownChunk) -> admin_pb2.ShowChunkResponse:
    return admin_pb2.ShowChunkResponse(parts=map(_detail, shown.parts), reason=wire_number(shown.reason))


def _detail(detail: ChunkDetail) -> admin_pb2.ChunkDetail:
    message = admin_pb2.ChunkDetail(
        chunk=_entry(detail.chunk),
        header_problem=detail.header_problem,
        ancestors=b"".join(detail.ancestors),
        ancestor_count=detail.ancestor_count,
        children=b"".join(detail.children),
        lease_count=detail.lease_count,
        hold_count=detail.hold_count,
        levels=map(wire_number, detail.levels),
    )
    header = detail.header
    if header is not None:
        message.header.MergeFrom(
            admin_pb2.HeaderFacts(
                kind=header.kind.name.lower(),
                write_id=header.write_id,
                storage_key=header.storage_key,
                first_position=header.first_position,
                token_digest=header.token_digest,
                rope_digest=header.rope_digest,
                strip_count=len(header.checksums),
                tier=detail.header_tier,
            )
        )
    return message
