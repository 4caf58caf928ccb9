"""The documents of a request: the runs of its prompt that were computed alone, and may be reused where they stand.

A cache that is mended is not the model's exact one, so it must reach nobody who did not ask for it. vLLM's own prefix
cache knows a block by its tokens and the request's ``cache_salt``. A request therefore asks for mended caches by its
salt, ``DERIVED``; what has this salt is neither kept nor given to requests with another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.planning import Recompute
from kvstore_client.engines.vllm.geometry import Geometry
from kvstore_client.engines.vllm.objects import EngineConfig, EngineRequest
from kvstore_client.lookup.match import Match
from kvstore_client.segments.runs import checked_runs

DERIVED = "kvstore:derived"
"""The salt of requests that take mended caches; behind it, after a colon, the salt that they would have without."""
DOCUMENTS, PREAMBLE = "kvstore_documents", "kvstore_preamble"
"""The keys of a request's ``kv_transfer_params``."""
RUNS_MAX = 256
"""The most documents of one request: all requests of a step wait while they are looked up and merged."""
WORTH_MAX = 2 / 3
"""The most that is computed of a prompt over its documents, as a share of what vLLM would compute of it. A mend is many
small steps: in ``bench vllm-documents`` each token takes 1.4 times as long as in vLLM's, and other requests wait. What
a mend costs beside its tokens is measured (``MendWorth``)."""


@dataclass(frozen=True)
class NamedDocuments:
    """The runs of a prompt that are documents, behind its first ``preamble`` tokens, with which each of them was, or
    is, computed."""

    runs: tuple[range, ...]
    preamble: int

    @staticmethod
    def of(request: EngineRequest) -> NamedDocuments | None:
        """Return the documents that a request names; None: it names none. Raises InvalidRequest for what names none of
        its prompt's."""
        given: Any = getattr(request, "kv_transfer_params", None)
        if not isinstance(given, dict) or DOCUMENTS not in given:
            return None
        count, preamble = int(request.num_prompt_tokens), given.get(PREAMBLE, 0)
        if not isinstance(preamble, int) or isinstance(preamble, bool) or not 0 <= preamble < count:
            raise InvalidRequest(
                f"{PREAMBLE} {preamble!r:.80} must be a whole number below the prompt's {count} tokens"
            )
        try:
            runs = checked_runs(given[DOCUMENTS], count)
        except InvalidRequest as error:
            raise InvalidRequest(f"{DOCUMENTS}: {error.message}") from error
        if len(runs) > RUNS_MAX:
            raise InvalidRequest(f"{DOCUMENTS} names {len(runs)} runs, and may name {RUNS_MAX}")
        if not runs or runs[0].start < preamble:
            raise InvalidRequest(f"{DOCUMENTS} must be one run or more, behind the {preamble} tokens of {PREAMBLE}")
        return NamedDocuments(tuple(runs), preamble)

    def are_all_of(self, token_count: int) -> bool:
        """Return True for a prompt of so many tokens that is the preamble and one document, and nothing else."""
        return self.runs == (range(self.preamble, token_count),)

    def reusable(self, match: Match) -> int:
        """Return the number of their tokens that are stored, behind the stored prefix."""
        before = match.prefix_token_count
        stops = (
            each.token_start + each.standalone_token_count - max(each.token_start, before) for each in match.segments
        )
        return sum(max(0, each) for each in stops)


def check_documents(vllm_config: EngineConfig, geometry: Geometry, setting: Recompute, *, is_alone: bool) -> None:
    """Raise InvalidRequest where prompts cannot be computed over their documents, or not with this setting.
    ``is_alone`` False: other connectors see the same blocks. They would keep what a mend that failed has left in them,
    some of them without the salt."""
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    has_windows = any(each.window for each in geometry.layers)
    wrong = {
        "--tensor-parallel-size above 1": geometry.ranks > 1,
        "--speculative-config": geometry.draft is not None,
        "--enable-lora (adapters change layers by a batch's requests)": getattr(vllm_config, "lora_config", None),
        "layers with several block tables, or windows": not geometry.is_one_table or has_windows,
        "MLA": geometry.mla,
        "a MultiConnector (its other connectors would keep what is not the model's exact cache)": not is_alone,
        f"a cache of {geometry.cache_dtype} beside a model of {dtype}": geometry.cache_dtype != dtype,
    }
    found = [name for name, is_so in wrong.items() if is_so]
    if found:
        raise InvalidRequest(
            f'documents cannot be mended with {", ".join(found)}: leave "recompute" out of kv_connector_extra_config'
        )
    try:
        setting.check(len(geometry.layers))
    except InvalidRequest as error:
        raise InvalidRequest(f"recompute in kv_connector_extra_config: {error.message}") from error
    if (again := setting.share(len(geometry.layers))) > WORTH_MAX:
        raise InvalidRequest(
            f"recompute in kv_connector_extra_config computes {again:.0%} of documents again, and prompts are faster "
            f"over them up to {WORTH_MAX:.0%}: lower ratio or last_layer"
        )


def takes_derived(request: EngineRequest) -> bool:
    """Return True for a request that takes mended caches, and may have blocks of such in vLLM's own prefix cache."""
    salt = getattr(request, "cache_salt", None) or ""
    return salt == DERIVED or salt.startswith(f"{DERIVED}:")


def own_salt(request: EngineRequest) -> str:
    """Return a request's salt, without the word by which it takes mended caches."""
    salt = str(getattr(request, "cache_salt", None) or "")
    return salt[len(DERIVED) + 1 :] if takes_derived(request) else salt
