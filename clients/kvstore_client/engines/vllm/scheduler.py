"""The scheduler's side: decides how much of a stored prefix is loaded, and which computed blocks are kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvstore.errors import KVStoreError
from kvstore.seams import Clock, SystemClock
from kvstore.spec import ModelSpec
from kvstore_client.client import Client
from kvstore_client.engines.pause import CallPause
from kvstore_client.engines.vllm.drafts import Draft, Undrafted
from kvstore_client.engines.vllm.groups import LayerGroup
from kvstore_client.engines.vllm.handover import handed_over, prefilled_tokens
from kvstore_client.engines.vllm.identity import Adapters
from kvstore_client.engines.vllm.lookups import PrefixLookups
from kvstore_client.engines.vllm.naming import Naming, TokensBehind
from kvstore_client.engines.vllm.objects import EngineRequest, ScheduledStep, WorkersReport, scheduled_requests
from kvstore_client.engines.vllm.planning import RequestPlanner
from kvstore_client.engines.vllm.requests import TrackedRequest
from kvstore_client.engines.vllm.reuse import DocumentReuse
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_client.engines.vllm.step import Load, Mend, Save, Step
from kvstore_client.engines.vllm.worth import MendWorth

_log = logging.getLogger("kvstore.vllm")


class SchedulerSide:
    """The connector of one scheduler. ``block_tokens``: the unit in which the blocks of all ``groups`` end together.
    No call raises because of the sidecar."""

    def __init__(
        self, client: Client, adapters: Adapters, settings: ConnectorSettings, block_tokens: int, *,
        groups: Sequence[LayerGroup] = (), loads: bool = True, saves: bool = True, ranks: int = 1, step_tokens: int = 0,
        draft: Draft | None = None, clock: Clock | None = None, is_alone: bool = True,
    ) -> None:  # fmt: skip
        """``is_alone`` False: other connectors may have what this one would wait for."""
        self._client = client
        self._adapters = adapters
        self._settings = settings
        self._block_tokens = block_tokens
        self._chunk_tokens = adapters.spec_for(None).chunk_tokens
        self._groups = tuple(groups) or (LayerGroup(0, (), block_tokens),)
        self._tables = [(each.index, each.block_tokens) for each in self._groups]
        self._has_windows = any(each.window for each in self._groups)
        reads_ahead = draft is not None and draft.reads_ahead
        ahead_tokens = self._chunk_tokens if reads_ahead else 0
        self._naming = Naming(settings.digests, block_tokens, ahead_tokens)
        is_simple = ranks == 1 and draft is None and len(self._groups) == 1 and not self._has_windows
        self._does_load, self._does_save, self._is_alone = loads, saves, is_alone
        self._ranks = ranks
        clock = clock or SystemClock()
        self._patience = CallPause(clock)
        self._planner = RequestPlanner(
            client, adapters.spec_for(None), clock, step_tokens=step_tokens, is_layerwise=settings.load == "layerwise",
            times_steps=settings.mends is not None,
        )  # fmt: skip
        worth = MendWorth(self._planner, clock, block_tokens)
        self._documents = DocumentReuse(settings, self._naming, block_tokens, worth, is_possible=is_simple)
        self._lookups = PrefixLookups(
            client, self._naming, self._planner, self._patience, clock, block_tokens=block_tokens,
            readers=ranks * len(self._groups),
            may_mend=self._documents.may_mend,
        )  # fmt: skip
        self._undrafted = Undrafted(draft, block_tokens)
        self._behind = TokensBehind(block_tokens, ahead_tokens)
        self._tracked: dict[str, TrackedRequest] = {}
        self._unnamed: set[str] = set()
        self._loads: list[Load] = []
        self._mends: list[Mend] = []
        self._filling: list[tuple[EngineRequest, int]] = []
        """The requests whose blocks, from a token on, the coming step fills before it computes anything."""
        self._settled: list[int] = []
        self._written: list[int] = []
        self._had: dict[str, int] = {}
        """The tokens of which vLLM had blocks when it last asked for a request that it has not admitted since."""

    # ------------------------------------------------------------ before a request runs

    def matched(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        """Return the number of tokens beyond ``computed`` to load, in whole blocks, and True when they load while other
        requests run. At least one token of the prompt is left to compute. None: ask again at the next step."""
        self._had[str(request.request_id)] = computed
        if computed and self._does_save:
            self._doubt_mixed(request)
        if computed and self._awaits(request, computed):
            return None, False
        useful = self._whole(int(request.num_tokens) - 1)
        if not self._does_load or useful <= computed or request.skip_reading_prefix_cache:
            return 0, False
        tracked = self._track(request)
        if tracked is None:
            return 0, False
        if any(tracked.block_ids):  # it was preempted, and these are other requests' by now
            tracked.block_ids = self._no_blocks()
            tracked.prefilled = 0  # what another engine kept came before it ran, or never
        found = self._lookups.find(request, tracked, useful, computed)
        if found is None:
            return None, False
        found.computed = computed
        found.is_mended = self._documents.may_mend(tracked, found.match, computed)
        if found.is_mended:
            return useful - computed, False
        if found.stop <= computed:
            return 0, False
        return found.stop - computed, self._settings.load == "async"

    def _awaits(self, request: EngineRequest, computed: int) -> bool:
        """Return True where vLLM has blocks of a request that another one's load or mend fills within the coming step.
        Where that fails, vLLM would compute this one over them at once, though the other may compute them later."""
        for filled, start in self._filling:
            block = slice(start, start + self._block_tokens)
            if computed >= block.stop and filled.all_token_ids[block] == request.all_token_ids[block]:
                return True
        return False

    def _track(self, request: EngineRequest) -> TrackedRequest | None:
        """Return the tracked request; None for a request whose cache cannot be named. vLLM asks for the first one that
        waits in each step: its adapter is looked at, and found to have no name, once."""
        name = str(request.request_id)
        tracked = self._tracked.get(name)
        if tracked is None:
            if name in self._unnamed or not self._naming.can_name(request):
                return None
            spec = self._spec_of(request, "neither loaded nor kept")
            if spec is None:
                self._unnamed.add(name)
                return None
            tracked = self._tracked[name] = TrackedRequest(request, spec, self._no_blocks())
            self._documents.look(tracked)
            tracked.prefilled = prefilled_tokens(request) if self._is_alone and self._naming.is_common else 0
        return tracked

    def _spec_of(self, request: EngineRequest, fate: str) -> ModelSpec | None:
        """Return the spec of a request's adapter; None, and say what becomes of the request, where it has no name."""
        try:
            return self._adapters.spec_for(getattr(request, "lora_request", None))
        except (KVStoreError, OSError) as error:
            _log.warning("kvstore: %s; this request is %s", error, fate)
            return None

    def _is_named(self, tracked: TrackedRequest) -> bool:
        """Return True while the request's adapter has the files by which the request was named: vLLM may have read the
        files later than that."""
        tracked.is_doubtful = self._spec_of(tracked.request, "not kept") is not tracked.spec
        return not tracked.is_doubtful

    def _doubt_mixed(self, request: EngineRequest) -> None:
        """Note that a request whose first tokens vLLM has is not kept, where these may be another adapter's."""
        lora = getattr(request, "lora_request", None)
        if lora is not None and (tracked := self._track(request)) is not None and self._adapters.are_mixed(lora):
            tracked.is_doubtful = True

    def allocated(self, request: EngineRequest, block_ids: Sequence[list[int]], external: int) -> None:
        """Note that vLLM gave the request its blocks, ``external`` tokens of which are to be loaded."""
        name = str(request.request_id)
        had = self._had.pop(name, None)
        if had is not None:  # another connector of a MultiConnector may load into them before a step names them
            for index, size in self._tables:
                self._written += block_ids[index][had // size :]
        found = self._lookups.take(name)
        if found is None:
            return
        if found.decision is not None:
            self._planner.follow(name, found.decision)
        tracked = self._tracked[name]
        tracked.block_ids = self._of_groups(block_ids)
        if not external or found.match.ticket is None or found.is_mended:
            self._lookups.release(found.match)
            if external and found.is_mended:
                self._mends.append(self._documents.mend(tracked, found, found.computed + external))
                self._filling.append((request, found.computed))
            return
        tracked.held = found.match
        if self._settings.load == "async":
            self._lookups.loads(name)
        else:
            self._filling.append((request, found.computed))
        start, count = found.computed, found.match.prefix_token_count
        load = Load(name, found.match.ticket, count, self._of_groups(block_ids), start, start + external)
        self._loads.append(self._planner.handed(load, found.decision))
        self._undrafted.loaded(load.written(0, self._groups[0]))
        self._behind.computed(request, load.block_ids[0], load.start, load.stop)

    def _no_blocks(self) -> list[list[int]]:
        return [[] for _ in self._groups]

    def _of_groups(self, block_ids: Sequence[list[int]]) -> list[list[int]]:
        """Return copies of vLLM's lists of blocks, by our groups."""
        return [list(block_ids[each.index]) for each in self._groups]

    # ------------------------------------------------------------ every step

    def step(self, output: ScheduledStep) -> Step:
        """Return the workers' loads and saves in the step that ``output`` describes."""
        self._lookups.step_begins()
        number = self._planner.step_begins(output, loads=bool(self._loads), mends=bool(self._mends))
        step = Step(self._loads, self._mends, [], self._settled, self._written, number)
        self._loads, self._mends, self._settled, self._written, self._filling = [], [], [], [], []
        if not self._does_save:
            return step
        longest, computing = 0, []
        for name, block_ids, is_whole, computed in scheduled_requests(output):
            stop = computed + output.num_scheduled_tokens.get(name, 0)
            if stop > longest:
                longest = stop
            tracked = self._tracked.get(name)
            if tracked is not None and tracked.has_failed:  # it computes blocks again that it has
                for known, (_, size) in zip(tracked.block_ids, self._tables, strict=True):
                    step.written += known[computed // size :]
            if tracked is not None and is_whole:
                tracked.block_ids = self._no_blocks()
            if block_ids:  # few need more in a step of a thousand requests, which has no time for copies
                for place, (index, size) in enumerate(self._tables):
                    given = block_ids[index]
                    step.written += given[computed // size :] if is_whole else given
                    if tracked is not None:
                        tracked.block_ids[place] += given
            if tracked is None:
                self._behind.forget(block_ids[self._tables[0][0]] if block_ids else ())
                continue
            self._behind.computed(tracked.request, tracked.block_ids[0], computed, stop)
            computing.append((tracked, computed, stop))
        self._undrafted.step(longest, ((tracked.block_ids[0], start, stop) for tracked, start, stop in computing))
        for tracked, start, stop in computing:
            save = self._save(tracked, start, stop, output)
            if save is not None:
                step.saves.append(save)
                tracked.promised = tracked.kept
        return step

    def _save(self, tracked: TrackedRequest, start: int, stop: int, output: ScheduledStep) -> Save | None:
        """Return a save of the blocks that are complete once the tokens ``start .. stop`` are computed: all whole
        blocks at the prompt's end, whole chunks before and after."""
        request, chunk = tracked.request, self._chunk_tokens
        if tracked.preamble is not None:
            is_kept = self._documents.is_complete(tracked, start, stop) and self._is_named(tracked)
            return self._documents.save(tracked, tracked.preamble) if is_kept else None
        if tracked.has_failed:
            tracked.kept = min(tracked.kept, self._whole(start))
        prompt, stop = self._whole(request.num_prompt_tokens), min(stop, int(request.num_tokens))
        limit = stop if self._settings.save_output else prompt
        until = prompt if start < request.num_prompt_tokens and prompt <= stop else min(stop, limit) // chunk * chunk
        if until <= tracked.kept or tracked.is_doubtful:
            return None
        if not self._is_named(tracked):
            return None
        try:  # read now: a session that streams its input has more images with each turn
            extras = self._naming.extras(request)
        except KVStoreError as error:
            _log.warning("kvstore: %s; this request is not kept", error.message)
            tracked.is_doubtful = True
            return None
        new, tracked.kept = until - tracked.kept, until
        first, blocks = self._there(tracked, until, output)
        if first >= until:
            return None
        if self._undrafted.has(blocks[0]):
            return None
        if not self._behind.are_of(request, blocks[0]):
            return None
        save = Save(tracked.spec, self._naming.prompt(request, until), extras, blocks, start=first, new=new)
        return save if self._ranks == 1 else self._shared(save)

    def _there(self, tracked: TrackedRequest, until: int, output: ScheduledStep) -> tuple[int, list[list[int]]]:
        """Return the first chunk from which on all blocks of a request are there, by its first token, and the blocks
        from there to the token ``until``. Those that have left a window vLLM may have given to others."""
        stops = [until // each.block_tokens for each in self._groups]
        if not self._has_windows:
            return 0, [table[:stop] for table, stop in zip(tracked.block_ids, stops, strict=True)]
        state = getattr(output, "kv_connector_block_state", None)  # a vLLM that is not known may tell no tables
        if state is None:
            return until, []
        tables = self._of_groups(state.resolve_block_ids(tracked.request.request_id))
        held = [each.held_from(table[:stop]) for table, stop, each in zip(tables, stops, self._groups, strict=True)]
        first = -(-max(held) // self._chunk_tokens) * self._chunk_tokens
        starts = [first // each.block_tokens for each in self._groups]
        return first, [table[start:stop] for table, start, stop in zip(tables, starts, stops, strict=True)]

    def _shared(self, save: Save) -> Save | None:
        """Start a store that the ranks join, one shard each. Ours is the first shard, and empty."""
        if self._patience.is_spent:
            return None
        try:
            with self._patience.watch():
                writer = self._client.start_store(save.spec, save.tokens, shards=1 + self._ranks, extras=save.extras)
        except KVStoreError as error:
            _log.error("kvstore: %s; this prompt is not kept", error.message)
            return None
        with writer:
            if not writer.wanted_token_count or writer.wanted_token_start < save.start:
                return None
            ticket = writer.ticket
            writer.commit()
        return replace(save, ticket=ticket)

    def received(self, output: WorkersReport) -> set[int]:
        """Take the workers' report of a step: results, loads that have ended, and blocks or requests whose loads
        failed. Returns the blocks that vLLM's prefix cache must drop."""
        failed = set(output.invalid_block_ids or ())
        wrong = self.reported(failed) if failed else set()
        for name in getattr(output, "failed_recving", None) or ():
            if (tracked := self._tracked.get(name)) is not None:
                self._cut(tracked)
        landed = output.finished_recving or ()
        for name in landed:
            self._lookups.landed(name)
        # A rank may have said so in an earlier step than the one in which the load ended.
        cut = {name for name in landed if name in self._tracked and self._tracked[name].was_cut}
        self._planner.landed(landed, cut)
        told = getattr(output, "kv_connector_worker_meta", None)
        self._planner.step_ended(getattr(told, "number", 0))
        self._documents.worth.mended(getattr(told, "mended", ()))
        return wrong

    def reported(self, failed_blocks: Iterable[int]) -> set[int]:
        """Note blocks that workers could not load, where there is one table; vLLM computes them, so nobody loads them
        again. Blocks computed beside them in the same step (layerwise, or over documents) may have read them, and are
        not kept. Returns these and the failed ones: vLLM's prefix cache has them already, and the requests that would
        compute them may go away before they do, or are gone."""
        failed, is_layerwise = set(failed_blocks), self._settings.load == "layerwise"
        self._settled += failed
        wrong = set(failed)
        for tracked in self._tracked.values():
            blocks = tracked.block_ids[0]
            first = next((index for index, block in enumerate(blocks) if block in failed), None)
            if first is not None:
                self._cut(tracked)
                tracked.is_doubtful = tracked.is_doubtful or is_layerwise
                if tracked.is_doubtful:
                    wrong.update(blocks[first:])
        return wrong

    def _cut(self, tracked: TrackedRequest) -> None:
        """Note that a rank could not load a request."""
        tracked.has_failed = tracked.was_cut = True
        self._lookups.release(tracked.held)  # a load that fails need not have redeemed its ticket

    # ------------------------------------------------------------ the end

    def finished(self, request_id: str) -> dict[str, object] | None:
        """Forget a request. Returns what its answer says to the engine that goes on with it."""
        self._planner.forget(request_id)
        tracked = self._tracked.pop(request_id, None)
        self._had.pop(request_id, None)
        self._unnamed.discard(request_id)
        self._lookups.end(request_id)
        if tracked is None or tracked.is_doubtful or not self._naming.is_common:
            return None
        return handed_over(tracked.request, tracked.promised)

    def new_request(self, request: EngineRequest) -> None:
        self._lookups.waiting.add(str(request.request_id))
        if self._does_save:
            self._track(request)

    def reset(self) -> None:
        """Drop the caches: the weights may have changed. Nothing kept so far is loaded from now on. New caches are kept
        under a name of their own, except those of requests that have computed blocks already."""
        self._naming.begin_anew()
        self._adapters.cache_cleared()
        self._lookups.forget_all()
        for name, tracked in list(self._tracked.items()):
            if any(tracked.block_ids):
                tracked.has_failed = tracked.is_doubtful = True
            else:
                del self._tracked[name]
                self._track(tracked.request)

    def _whole(self, token_count: int) -> int:
        return token_count // self._block_tokens * self._block_tokens

    def close(self) -> None:
        self._lookups.close()
        self._client.close()
