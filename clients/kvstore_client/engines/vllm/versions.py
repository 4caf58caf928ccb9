"""The vLLM versions that this connector supports, and the check that the installed one has the interface it needs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from kvstore.errors import InvalidRequest

PROVEN = ("0.32",)
BY_INTERFACE = ("0.33",)
"""0.33.0's own classes pass those tests of tests/vllm that start no engine; no CPU build of it exists to run them
all."""
WANTED = {
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "request_finished": ("request", "block_ids"),
    "update_connector_output": ("connector_output",),
    "register_kv_caches": ("kv_caches",),
    "handle_preemptions": ("kv_connector_metadata",),
    "start_load_kv": ("forward_context",),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "get_transfer_results": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "build_connector_worker_meta": (),
    "bind_connector_metadata": ("connector_metadata",),
    "shutdown": (),
}
"""The connector's methods, and the arguments that vLLM must pass them."""
OF_GROUPS = {"request_finished_all_groups": ("request", "block_ids")}
"""Those of the class that tells vLLM that its hybrid allocator may stay on."""
TIER = {
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "on_new_request": ("req_context",),
    "on_request_finished": ("req_context",),
    "on_schedule_end": ("context",),
    "drain_jobs": (),
    "shutdown": (),
}
"""The secondary tier's methods."""
ENCODER = {
    "ensure_cache_available": ("request", "num_computed_tokens"),
    "request_finished": ("request",),
    "has_cache_item": ("identifier",),
    "update_state_after_alloc": ("request", "index"),
    "build_connector_meta": ("scheduler_output",),
    "start_load_caches": ("encoder_cache",),
    "save_caches": ("encoder_cache", "mm_hash"),
    "bind_connector_metadata": ("connector_metadata",),
    "clear_connector_metadata": (),
    "shutdown": (),
}
"""The encoder-cache connector's methods."""


def known_versions() -> str:
    return f"vLLM {', '.join(PROVEN)} (tested end to end) and {', '.join(BY_INTERFACE)} (by its interface)"


def check_version(version: str, allow_unknown: bool) -> None:
    """Raise InvalidRequest for a vLLM that this release does not know."""
    if allow_unknown or ".".join(version.split(".")[:2]) in PROVEN + BY_INTERFACE:
        return
    raise InvalidRequest(
        f"this is vLLM {version}; kvstore's connector knows {known_versions()}: install one of these, or try with "
        '"allow_unknown_version": true in kv_connector_extra_config'
    )


def check_interface(
    base: type[Any], mine: type[Any], version: str, wanted_of: Mapping[str, tuple[str, ...]] = WANTED
) -> None:
    """Raise InvalidRequest naming methods that vLLM's class lacks, arguments that differ, and methods that ours
    lacks."""
    wrong = []
    for name, wanted in wanted_of.items():
        method = getattr(base, name, None)
        if method is None:
            wrong.append(f"{name} is gone")
            continue
        found = [
            each.name
            for each in list(inspect.signature(method).parameters.values())[1:]
            if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        ]
        if tuple(found) != wanted:
            wrong.append(f"{name} takes ({', '.join(found)}), not ({', '.join(wanted)})")
    missing = sorted(getattr(mine, "__abstractmethods__", ()))
    wrong += [f"{name} is new and must be there" for name in missing]
    if wrong:
        raise InvalidRequest(
            f"vLLM {version} has an interface of {base.__name__} that kvstore does not know: {'; '.join(wrong)}; known "
            f"are {known_versions()}"
        )
