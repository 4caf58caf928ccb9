"""Lookups for the requests that wait. One that finds something holds it, until vLLM has blocks for the request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from itertools import takewhile

from kvstore.errors import Exhausted, KVStoreError
from kvstore.keys import Extra, Tokens
from kvstore.seams import Clock, WorkerThreads
from kvstore.seams.jobs import NotBegun, begun
from kvstore_client.client import Client
from kvstore_client.engines.pause import SLOW_S, CallPause
from kvstore_client.engines.vllm.handover import PART_S_MAX, WAIT_S_MAX, pause_s
from kvstore_client.engines.vllm.naming import Naming
from kvstore_client.engines.vllm.objects import EngineRequest
from kvstore_client.engines.vllm.planning import RequestPlanner
from kvstore_client.engines.vllm.requests import NOTHING, FoundPrefix, PrefixAnswer, PrefixLookup, TrackedRequest
from kvstore_client.lookup.match import Match
from kvstore_client.prompt import PageHashes

FOUND_AGE_S_MAX = 5.0
"""Seconds that an answer may be used while vLLM asks again and again; well below a ticket's age."""
WAIT_S = 0.005
"""The most seconds that the engine's loop waits for answers in a step, in all; a later answer is taken at a later
step."""
LOOKUP_THREADS = 2
AHEAD_COUNT_MAX = 32
"""Requests for which something is held, or looked up to be held, before vLLM has blocks for them. Those behind them are
looked up in a later step: what a long queue holds is memory that those whose turn it is have no room in."""
REFUSED_S_MAX, REFUSED_PAUSE_S = 5.0, 0.02
"""Seconds for which a request that could hold nothing is looked up again, and from one time to the next."""
_log = logging.getLogger("kvstore.vllm")


class PrefixLookups:
    """The lookups of one scheduler. To hold something takes a call; the engine's loop does not wait for that call. No
    method raises because of the sidecar. ``readers``: the fetches that bring what is held. ``may_mend``: see
    ``DocumentReuse``."""

    def __init__(
        self, client: Client, naming: Naming, planner: RequestPlanner, patience: CallPause, clock: Clock, *,
        block_tokens: int, readers: int, may_mend: Callable[[TrackedRequest, Match, int], bool],
    ) -> None:  # fmt: skip
        self._client = client
        self._naming = naming
        self._planner = planner
        self._patience = patience
        self._clock = clock
        self._block_tokens = block_tokens
        self._readers = readers
        self._may_mend = may_mend
        self._workers = WorkerThreads(LOOKUP_THREADS, "kvstore-lookup")
        self._wait_s = WAIT_S
        self._asked: dict[str, PrefixLookup] = {}
        self._found: dict[str, FoundPrefix] = {}
        self._ahead: dict[str, None] = {}
        """Requests for which something is held, or may be about to be, and that vLLM has no blocks for, in the order in
        which they were asked for."""
        self._is_first = True
        self._ahead_max = AHEAD_COUNT_MAX
        self._loading: set[str] = set()
        """Requests whose loads are on their way: they still hold what they load."""
        self._releases: list[Future[None]] = []
        """Calls by which something is let go of; some may have ended."""
        self.waiting: set[str] = set()
        """Requests that vLLM has no blocks for."""
        self._awaiting: set[str] = set()
        """Those of them that are looked up again, until another engine keeps more."""

    def find(self, request: EngineRequest, tracked: TrackedRequest, useful: int, computed: int) -> FoundPrefix | None:
        """Return what is stored, and held, of the first ``useful`` tokens of a request. None: ask again at the next
        step."""
        name, now_s = str(request.request_id), self._clock.monotonic()
        is_first, self._is_first = self._is_first, False
        found = self._found.get(name)
        if found is not None and found.useful == useful and now_s - found.at_s < FOUND_AGE_S_MAX:
            return found
        asked = self._asked.get(name)
        if asked is not None and (
            asked.useful != useful or (asked.answer.done() and now_s - asked.since_s > FOUND_AGE_S_MAX)
        ):
            asked = None
        if tracked.has_failed or self._patience.is_spent:
            self.forget(name)
            return FoundPrefix(NOTHING.match, useful, 0, now_s)
        if asked is None:
            self.forget(name)
            if now_s < tracked.look_again_s:
                return None
            if len(self._ahead) >= self._ahead_max:
                if not is_first or now_s < (tracked.prefilled_until_s or 0.0):  # those behind it may run meanwhile
                    return None
                self.forget(next(reversed(self._ahead)))  # what those behind it hold would take its blocks
            asked = self._ask(name, request, tracked, useful, computed)
        answer = self._answer(name, asked)
        if answer is None:
            return None
        if answer.refusal and self._may_wait(name, tracked, answer.refusal, is_alone=asked.is_alone, is_first=is_first):
            return None
        if answer.match.is_answered and self._is_about_to_come(tracked, answer.stored, computed, useful, asked.took_s):
            self._ahead.pop(name, None)
            self.release(answer.match)
            return None
        if answer.match.ticket is None:
            self._ahead.pop(name, None)
        else:
            tracked.refused_s = None
        tracked.kept = max(tracked.kept, self._whole(answer.stored))
        tracked.promised = max(tracked.promised, self._whole(answer.stored))
        stop = min(self._whole(self._naming.sure_tokens(answer.match.prefix_token_count)), useful)
        found = self._found[name] = FoundPrefix(answer.match, useful, stop, asked.since_s, answer.decision)
        return found

    def _may_wait(
        self, name: str, tracked: TrackedRequest, refusal: str, *, is_alone: bool, is_first: bool
    ) -> bool:  # fmt: skip
        """Return True where a request that could hold nothing is looked up again: others of ours held what is free
        soon, or by now. As many as now may hold something from now on, and one more with each that vLLM has blocks for.
        One that is refused for long may be larger than what is ever free."""
        self._ahead.pop(name, None)
        now_s = self._clock.monotonic()
        tracked.refused_s = now_s if tracked.refused_s is None else tracked.refused_s
        if not is_alone and now_s - tracked.refused_s < REFUSED_S_MAX:
            tracked.look_again_s = now_s + REFUSED_PAUSE_S
            if is_first and self._ahead:
                self.forget(next(reversed(self._ahead)))
            self._ahead_max = max(1, len(self._ahead))
            return True
        _log.warning("kvstore: %s; the prompt is computed", refusal)
        return False

    def _is_awaited(self, tracked: TrackedRequest, stored: int, computed: int, useful: int) -> bool:
        """Return True while another engine may yet keep more of the prompt than can be had by now."""
        until_s = tracked.prefilled_until_s
        is_short = max(self._whole(stored), computed) < min(self._whole(tracked.prefilled), useful)
        return is_short and (until_s is None or self._clock.monotonic() < until_s)

    def _is_about_to_come(
        self, tracked: TrackedRequest, stored: int, computed: int, useful: int, look_s: float
    ) -> bool:  # fmt: skip
        """Return True where a request is looked up again, because another engine may yet keep more of its prompt.
        ``look_s``: the time that the loop took to ask, and waited for the answer."""
        now_s = self._clock.monotonic()
        wanted, had = min(self._whole(tracked.prefilled), useful), max(self._whole(stored), computed)
        if self._is_awaited(tracked, stored, computed, useful):
            if tracked.prefilled_until_s is None:
                tracked.prefilled_until_s = now_s + self._planner.wait_s_max(had, wanted, WAIT_S_MAX)
            chunk, promised = tracked.spec.chunk_tokens, min(tracked.prefilled, int(tracked.request.num_tokens))
            if had >= promised // chunk * chunk:
                tracked.prefilled_until_s = min(tracked.prefilled_until_s, now_s + PART_S_MAX)
            self._awaiting.add(str(tracked.request.request_id))
            next_s = now_s + pause_s(look_s, len(self._awaiting))
            tracked.look_again_s = min(next_s, tracked.prefilled_until_s)
            return True
        self._awaiting.discard(str(tracked.request.request_id))
        if had < wanted:
            _log.warning(
                "kvstore: another engine computed %d tokens of a prompt, and %d of them came in time; the others are "
                "computed", wanted, had,
            )  # fmt: skip
            tracked.prefilled = 0
        return False

    def _ask(
        self, name: str, request: EngineRequest, tracked: TrackedRequest, useful: int, computed: int
    ) -> PrefixLookup:
        """Look a prompt up: at once where shared memory answers, else on a thread of ours, which also holds the
        chunks."""
        is_alone = not (self._ahead or self._loading) and all(each.done() for each in self._releases)
        asked = self._asked[name] = PrefixLookup(useful, self._clock.monotonic(), is_alone)
        has_documents = tracked.documents is not None  # the last one may end within a block
        prompt = self._naming.prompt(request, request.num_tokens if has_documents else self._whole(request.num_tokens))
        try:
            extras = self._naming.extras(request)
            match = None if has_documents else self._client.peek(tracked.spec, prompt, hold=True, extras=extras)
        except KVStoreError as error:
            _log.warning("kvstore: %s; the prompt is computed", error.message)
            match = NOTHING.match
        if match is not None:
            asked.answer.set_result(PrefixAnswer(match, match.prefix_token_count))
        else:
            for each in self._asked.values():  # this one may be faster than those before it
                each.is_alone = each is asked and is_alone
            self._ahead[name] = None
            others = len(self.waiting - {name})
            asked.answer = begun(self._workers, self._hold, asked, tracked, prompt, extras, computed, others)
        asked.took_s = self._clock.monotonic() - asked.since_s
        return asked

    def _answer(self, name: str, asked: PrefixLookup) -> PrefixAnswer | None:
        """Return the answer, which is nothing where it is given up; None while it is in flight."""
        started_s = self._clock.monotonic()
        try:
            answer = asked.answer.result(self._wait_s)
        except NotBegun as error:
            _log.warning("kvstore: %s; the prompt is computed", error.message)
            answer = NOTHING
        except TimeoutError:
            if asked.begun_s is None or started_s - asked.begun_s <= SLOW_S:
                return None
            self._patience.end()
            self.forget(name)
            return NOTHING
        finally:
            waited_s = self._clock.monotonic() - started_s
            self._wait_s = max(0.0, self._wait_s - waited_s)
            asked.took_s += waited_s
        del self._asked[name]
        return answer

    def _hold(
        self, asked: PrefixLookup, tracked: TrackedRequest, prompt: Tokens | PageHashes, extras: tuple[Extra, ...],
        computed: int, others: int,
    ) -> PrefixAnswer:  # fmt: skip
        """Hold the stored prefix, or the part of it that loads sooner than it computes. Runs on a thread of ours."""
        asked.begun_s = self._clock.monotonic()
        if self._patience.is_spent:
            return NOTHING
        try:
            with self._patience.watch():
                match = self._lookup(tracked, prompt, extras)
                stored = match.prefix_token_count
                if self._may_mend(tracked, match, computed) or self._is_awaited(
                    tracked, stored, computed, asked.useful
                ):
                    return PrefixAnswer(match, stored)
                decision = self._planner.decide(match, int(tracked.request.num_tokens), computed, others)
                if decision is not None:
                    self._planner.look(tracked.spec, prompt, extras, decision, stored)
                if decision is not None and self._planner.mode == "on" and decision.stop < stored:
                    self._client.release_ticket(match.ticket)
                    cut = self._naming.prompt(tracked.request, decision.stop)
                    match = self._lookup(tracked, cut, extras) if decision.stop > computed else Match(0, ())
                return PrefixAnswer(match, stored, decision)
        except Exhausted as error:
            return PrefixAnswer(NOTHING.match, 0, refusal=error.message)
        except KVStoreError as error:
            _log.warning("kvstore: %s; the prompt is computed", error.message)
            return NOTHING

    def _lookup(self, tracked: TrackedRequest, prompt: Tokens | PageHashes, extras: tuple[Extra, ...]) -> Match:
        documents = tracked.documents
        if documents is None or isinstance(prompt, PageHashes):
            return self._client.lookup(tracked.spec, prompt, hold=True, readers=self._readers, extras=extras)
        runs = [run for run in documents.runs if run.stop <= prompt.size]
        return self._client.lookup(
            tracked.spec, prompt, hold=True, readers=self._readers, extras=extras, segments=runs,
            preamble=prompt[: documents.preamble],
        )  # fmt: skip

    # ------------------------------------------------------------ what is held

    def take(self, name: str) -> FoundPrefix | None:
        """Return what was found for a request that vLLM has blocks for, and hold it no more: the caller does. None
        where it goes on without an answer."""
        self.waiting.discard(name)
        self._awaiting.discard(name)
        found = self._found.pop(name, None)
        if found is None:
            self.forget(name)
        elif name in self._ahead:
            del self._ahead[name]
            self._ahead_max = min(self._ahead_max + 1, AHEAD_COUNT_MAX)
        return found

    def loads(self, name: str) -> None:
        """Note that a request that was taken loads what it holds while others run."""
        self._loading.add(name)

    def landed(self, name: str) -> None:
        """Note that a load has ended."""
        self._loading.discard(name)

    def step_begins(self) -> None:
        """Let go of what is held for requests that vLLM has not come back for: they are looked up again then."""
        self._wait_s, self._is_first = WAIT_S, True
        until_s = self._clock.monotonic() - FOUND_AGE_S_MAX
        old = [name for name, _ in takewhile(lambda each: each[1].at_s < until_s, self._found.items())]
        old += [
            name for name, asked in takewhile(lambda each: each[1].since_s < until_s, self._asked.items())
            if asked.answer.done()
        ]  # fmt: skip
        for name in old:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Give up a request's lookup, and let go of what it holds."""
        found, asked = self._found.pop(name, None), self._asked.pop(name, None)
        self._ahead.pop(name, None)
        if found is not None:
            self.release(found.match)
        if asked is not None and not asked.answer.cancel():
            self._begin_release(lambda: self._let_go(asked.answer.result().match))

    def end(self, name: str) -> None:
        """Forget a request that has ended."""
        self.waiting.discard(name)
        self._awaiting.discard(name)
        self._loading.discard(name)
        self.forget(name)

    def forget_all(self) -> None:
        """Give up all lookups."""
        for name in {*self._found, *self._asked}:
            self.forget(name)

    def release(self, match: Match) -> None:
        """Let go of what a match holds."""
        if match.ticket is not None:
            self._begin_release(lambda: self._let_go(match))

    def _begin_release(self, release: Callable[[], None]) -> None:
        self._releases = [each for each in self._releases if not each.done()]
        self._releases.append(begun(self._workers, release))

    def _let_go(self, match: Match) -> None:
        """Release a match's ticket. Runs on a thread of ours."""
        if not self._patience.is_spent:  # else the ticket expires by itself
            with self._patience.watch():
                self._client.release_ticket(match.ticket)

    def _whole(self, token_count: int) -> int:
        return token_count // self._block_tokens * self._block_tokens

    def close(self) -> None:
        """Give up all lookups, and begin none any more."""
        self.forget_all()
        self._workers.close()
