"""Arrivals: the transfers of a plan, which bring its runs to the memory where they are merged."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import Any

import torch

from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted
from kvstore.planning import Plan, PlannedRun, StoredCache, StoredE
from kvstore.planning.loading import BusyTime
from kvstore.spec import Exactness, ModelSpec
from kvstore_client.caches import Caches
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.prompt import Prompt
from kvstore_client.recompute.inquiry import Held, answer_in_time, end_s_max, give_back
from kvstore_client.recompute.merged import dense_planes
from kvstore_client.recompute.request import Request
from kvstore_client.recompute.runs import Run
from kvstore_client.recompute.sources import Ahead, FetchedRun, ProjectedRun, places
from kvstore_client.segments.runs import segment_prompt

PlanePairs = list[tuple[torch.Tensor, torch.Tensor]]


class Arrivals:
    """The transfers of one prompt, and their targets. ``held``: the tickets and the call that hold its chunks until
    then."""

    def __init__(self, client: Caches, request: Request, timeout_s: float) -> None:
        self._client, self._request, self._timeout_s = client, request, timeout_s
        self.held = Held()
        self._given: list[bytes] = []
        self._sources: list[FetchedRun] = []
        self._transfers: dict[StoredCache, Transfer] = {}
        self._ahead: dict[tuple[StoredCache, int], Transfer] = {}

    def fetch_e(self, cache: StoredCache, layer: int) -> StoredE:
        """Fetch E of a layer, and KV of layer 0, which is always loaded then. Returns when the sidecar has said how
        much is stored."""
        transfer = self._ahead[cache, layer] = self._asked(cache, (0,), None, (layer,))
        return StoredE(cache, layer, transfer.token_count, transfer.reason)

    def run(self, plan: Plan) -> tuple[list[Run], PlanePairs]:
        """Start the plan's fetches. Returns its runs, and the memory where they land. The merge of these runs waits for
        each layer that is fetched: after it nothing writes there any more."""
        runner = self._request.runner
        planes = dense_planes(runner.spec, plan.token_count, runner.device)
        starts, parts = sorted(each.token_start for each in plan.runs), dict[StoredCache, list[PlannedRun]]()
        for planned in plan.runs:
            parts.setdefault(planned.cache, []).append(planned)
        runs = []
        for planned in plan.runs:
            source = self._source(plan, planned)
            self._sources.append(source)
            self._follow(source, planned, planes, parts[planned.cache], starts)
            runs.append(
                Run(planned.token_start, planned.token_count, source, planned.rotated_from, planned.sender,
                    planned.is_exact)
            )  # fmt: skip
        self._release([])
        self._ahead.clear()  # the runs keep these transfers until each took its E
        return runs, planes

    @property
    def is_waiting(self) -> bool:
        """True while a transfer has not ended."""
        return not all(each.is_done for each in self._in_flight())

    def stop(self) -> None:
        """Have the transfers that have not ended end soon, as if their chunks were lost. Any thread may call it."""
        for transfer in self._in_flight():
            late = transfer.overdue
            transfer.stop()
            if late is not None:
                self._client.planner.landed(late)

    def _in_flight(self) -> list[Transfer]:
        """Return the transfers of all runs, each once; those of E, too, until their run took it."""
        return list(dict.fromkeys(transfer for source in self._sources for transfer in source.transfers))

    def _every(self) -> list[Transfer]:
        """Return the transfers that were begun for this prompt and are kept, each once."""
        return list(dict.fromkeys([*self._in_flight(), *self._ahead.values(), *self._transfers.values()]))

    def measured(self) -> list[BusyTime]:
        """Return bytes and seconds of each transfer that came whole from the sidecar's memory."""
        return [each.measured for each in self._transfers.values() if each.measured is not None]

    def close(self) -> bool:
        """Stop the transfers in flight, and hold nothing. Returns True when nothing writes to their targets any more.
        Where plans are carried out a sidecar that stands still is not waited for. Idempotent."""
        every = self._every()
        for transfer in every:
            transfer.stop()
        clock = self._client.planner.clock
        until_s = clock.monotonic() + end_s_max(self._client, self._request, self._timeout_s)
        have_ended = [transfer.cancel(max(0.0, until_s - clock.monotonic())) for transfer in every]
        self.held.is_silent = self.held.is_silent or not all(have_ended)
        self._release(self._given)  # a ticket of which a chunk was lost stays open: the transfer could not redeem it
        return all(each.is_quiet for each in self._transfers.values())

    def _release(self, given: list[bytes]) -> None:
        """Release the tickets that no transfer was given, and these."""
        tickets = [*self.held.tickets.values(), *given]
        if tickets:
            give_back(self._client, self._request, self.held, tickets)
        self.held.tickets.clear()  # now only: a release that is interrupted is made again
        given.clear()

    def _source(self, plan: Plan, run: PlannedRun) -> FetchedRun:
        runner = self._request.runner
        rows = slice(run.rows.start, run.rows.stop)
        if self._spec(run.cache).keeps_e:
            hidden_layer = plan.recompute.first_layer if plan.recompute else 0
            return ProjectedRun(self._timeout_s, runner, rows, run.token_start, hidden_layer)
        if run.hidden_layer is None:
            return FetchedRun(self._timeout_s, runner.device)
        ahead = Ahead(self._ahead[run.cache, run.hidden_layer], run.hidden_layer, rows)
        return FetchedRun(self._timeout_s, runner.device, ahead)

    def _follow(
        self, source: FetchedRun, run: PlannedRun, planes: PlanePairs, parts: Sequence[PlannedRun],
        starts: Sequence[int],
    ) -> None:  # fmt: skip
        """Bring the source's other layers by the one transfer of its cache; the first layer came with E, if E was
        fetched. ``parts``: all runs of this cache. ``starts``: the first tokens of all runs, in order."""
        layers = run.layers if run.hidden_layer is None else run.layers[1:]
        if not layers:
            return
        if run.cache not in self._transfers:
            self._transfers[run.cache] = self._started(run, layers, planes, parts, starts)
        source.follow(self._transfers[run.cache])

    def _started(
        self, run: PlannedRun, layers: tuple[int, ...], planes: PlanePairs, parts: Sequence[PlannedRun],
        starts: Sequence[int],
    ) -> Transfer:  # fmt: skip
        cache, spec, into = run.cache, self._spec(run.cache), None
        if not spec.keeps_e:
            window = slice(cache.token_start, cache.token_stop)
            windows = [(k[:, window], v[:, window]) for k, v in planes]
            wanted = [
                range(each.token_start - cache.token_start, each.token_stop - cache.token_start) for each in parts
            ]
            behind = bisect_left(starts, parts[-1].token_stop)
            is_last = behind == len(starts) or starts[behind] >= cache.token_stop
            into = places(windows, layers, wanted, is_last=is_last)
        if not cache.is_standalone:
            transfer = self._client.start_fetch(self.held.tickets[spec], into=into, layers=layers)
            # The transfer redeems the ticket; a transfer that could not begin does not.
            self._given.append(self.held.tickets.pop(spec))
            return transfer
        transfer = self._asked(cache, layers, into)
        if transfer.token_count < parts[-1].rows.stop:
            transfer.cancel(self._timeout_s)
            raise DataLoss(f"a segment was lost since it was looked up: {transfer.reason.name}")
        return transfer

    def _asked(
        self, cache: StoredCache, layers: tuple[int, ...], into: Any, hidden_layers: tuple[int, ...] = ()
    ) -> Transfer:
        """Begin to fetch a cache by the tokens that it is stored under. Raises DeadlineExceeded where the sidecar does
        not say in time what is stored."""
        spec, tokens, extras, client = self._spec(cache), self._request.tokens, self._request.extras, self._client
        what: dict[str, Any] = {"into": into, "layers": layers, "hidden_layers": hidden_layers}
        begin = partial(client.start_fetch_prefix, spec, tokens, extras=extras, **what)
        if cache.is_standalone:
            whole = Prompt.of(spec, tokens, extras, Exactness.EXACT)
            alone = segment_prompt(whole, range(cache.token_start, cache.token_stop), Exactness.EXACT)
            what |= {"extras": alone.extras, "preamble": self._request.preamble}
            begin = partial(client.start_fetch_segment, spec, alone.tokens, **what)
        transfer = answer_in_time(client, self._request, self.held, partial(self._begun, begin), Transfer.stop)
        if transfer is None:
            raise DeadlineExceeded("the sidecar did not say in time what it has")
        return transfer

    def _begun(self, begin: Callable[[], Transfer]) -> Transfer:
        """Begin a transfer. Where the session may have no more of them, wait until one of this prompt's has ended: a
        prompt may have more documents than a session has streams. Raises Exhausted where it has none under way, or
        none ends in time."""
        while True:
            under_way = [each.ending for each in self._every() if not each.is_done]
            try:
                return begin()
            except Exhausted:
                if not wait(under_way, self._timeout_s, FIRST_COMPLETED).done:
                    raise

    def _spec(self, cache: StoredCache) -> ModelSpec:
        return cache.sender or self._request.runner.spec
