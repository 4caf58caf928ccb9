"""The scheduler's part of reusing documents: which requests are computed over them, and which are documents to keep."""

from __future__ import annotations

import logging
import math

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore_client.engines.vllm.documents import DERIVED, DOCUMENTS, NamedDocuments, takes_derived
from kvstore_client.engines.vllm.naming import Naming, items_of
from kvstore_client.engines.vllm.requests import FoundPrefix, TrackedRequest
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_client.engines.vllm.step import Mend, Save
from kvstore_client.engines.vllm.worth import MendWorth
from kvstore_client.lookup.match import Match
from kvstore_client.prompt import PageHashes

_log = logging.getLogger("kvstore.vllm")


class DocumentReuse:
    """Decides for one scheduler. ``is_possible`` False: each of several ranks, tables or models has a part of a
    cache."""

    def __init__(
        self, settings: ConnectorSettings, naming: Naming, block_tokens: int, worth: MendWorth, *, is_possible: bool
    ) -> None:  # fmt: skip
        self._setting = settings.mends
        self._is_possible = is_possible and settings.digests == "kvstore"
        self._naming = naming
        self._block_tokens = block_tokens
        self.worth = worth
        self._has_told = False

    def look(self, tracked: TrackedRequest) -> None:
        """Note which documents a request names: it is computed over them, or it is one, to be kept by itself. Blocks
        of a request that takes mended caches are never kept: vLLM may have had them from another one's."""
        request = tracked.request
        tracked.is_doubtful = takes_derived(request)
        try:
            documents = NamedDocuments.of(request)
            if documents is None or not self._is_possible:
                return
            if items_of(request):
                raise InvalidRequest(f"{DOCUMENTS} beside images or sounds")
        except KVStoreError as error:
            _log.warning("kvstore: %s; the documents of this request are neither kept nor reused", error.message)
            return
        if tracked.is_doubtful:
            tracked.documents = documents if self._setting is not None else None
        elif documents.are_all_of(int(request.num_prompt_tokens)):
            tracked.preamble = documents.preamble
        elif self._setting is not None and not self._has_told:
            self._has_told = True
            _log.warning(
                "kvstore: a request names documents without a cache_salt that begins with %r: it is computed without "
                "them, because what is computed over them must reach nobody who did not ask for it",
                DERIVED,
            )

    def may_mend(self, tracked: TrackedRequest, match: Match, computed: int) -> bool:
        """Return True where enough of the request's documents is stored. Any thread may ask."""
        documents = tracked.documents
        if documents is None:
            return False
        return match.prefix_token_count + documents.reusable(match) >= self._reused_min(tracked, match, computed)

    def _reused_min(self, tracked: TrackedRequest, match: Match, computed: int) -> int:
        """Return how many tokens of a request must be reused at least, its stored prefix among them, for it to be
        computed over its documents: ``worth`` says how much may be computed. vLLM computes what it neither has nor can
        load; a mend uses nothing of what vLLM has."""
        assert self._setting is not None, "documents are not possible then"
        count, prefix = int(tracked.request.num_tokens), match.prefix_token_count
        again = self._setting.share(tracked.spec.layer_count)
        by_vllm = count - max(computed, min(prefix, count - 1))
        most = self.worth.computed_max(count, by_vllm)
        if most <= 0.0:
            return count + 1
        return prefix + max(1, math.ceil((count - prefix - most) / (1.0 - again)))

    def mend(self, tracked: TrackedRequest, found: FoundPrefix, stop: int) -> Mend:
        """Return the order to compute a request over its documents, into the blocks of its tokens up to ``stop`` that
        vLLM does not have."""
        request, documents = tracked.request, tracked.documents
        tokens = self._naming.prompt(request, int(request.num_tokens))
        assert documents is not None, "it was asked if it may be mended"
        assert not isinstance(tokens, PageHashes), "documents are not possible then"
        extras, blocks = self._naming.extras(request), list(tracked.block_ids[0])
        return Mend(
            str(request.request_id), tracked.spec, tokens, documents, extras, blocks, found.computed, stop,
            self._reused_min(tracked, found.match, found.computed),
        )  # fmt: skip

    def is_complete(self, tracked: TrackedRequest, start: int, stop: int) -> bool:
        """Return True when the step that computes these tokens completes the document that a request is."""
        return start < int(tracked.request.num_prompt_tokens) <= stop and not tracked.is_doubtful

    def save(self, tracked: TrackedRequest, preamble: int) -> Save:
        """Return a save of the document that a request is, behind its ``preamble``."""
        request = tracked.request
        count = int(request.num_prompt_tokens)
        tokens, extras = self._naming.prompt(request, count), self._naming.extras(request)
        blocks = tracked.block_ids[0][: -(-count // self._block_tokens)]
        return Save(tracked.spec, tokens, extras, [blocks], new=count - preamble, preamble=preamble)
