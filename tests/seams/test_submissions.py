"""Every place that hands work to movers, threads or lanes, and the test that has that work fail. A place that is not in
the list makes this test fail: work that nobody saw fail is work whose failure nobody handles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("kvstore", "clients", "kernels")
CALLS = {
    "begun", "done", "commit_beside", "submit", "halves", "run_in_executor", "to_thread", "wrap_future", "start_thread",
    "Thread", "Timer", "Process", "ThreadPoolExecutor", "ProcessPoolExecutor", "fork", "run_read",
}  # fmt: skip
BY_RECEIVER = {"copier.split", "copier.share", "_copier.share", "self._run"}
"""Calls whose name alone does not tell: the client's copies, and the device's jobs."""
FROM_HERE = ("begun", "done")
"""Functions of ``kvstore.seams.jobs``: other things have these names, too."""

MOVERS = "tests/seams/test_movers.py::test_movers"
JOBS = "tests/seams/test_jobs.py::test_a_refusal_is_how_the_job_ended"
THREADS = "tests/seams/test_jobs.py::test_a_call_that_found_no_thread_never_runs"
STORES = "tests/controller/test_moves.py::test_each_job_of_a_store_in_turn_fails_and_nothing_wrong_is_served"
DEVICE = "tests/tiers/test_failing_movers.py::test_each_job_of_a_life_fails_in_turn"
SHARED = "tests/tiers/shared/test_jobs.py::test_each_job_of_a_shared_tier_fails_in_turn"
HBM = "tests/movement/test_hbm.py::test_each_job_fails_in_turn"
HBM_CLOSE = "tests/movement/test_hbm.py::test_the_tiers_below_are_closed_before_a_device_that_hangs_is_waited_for"
HBM_OPEN = "tests/server/test_pool_opening.py::test_a_driver_that_does_not_answer_costs_the_pool_alone"
DRAM = "tests/tiers/test_dram.py::test_a_job_that_no_mover_takes_changes_nothing"
PREFAULT = "tests/arena/test_arena.py::test_a_prefault_that_no_mover_takes_ends_and_the_arena_still_serves"
FETCH = "tests/e2e/test_failing_threads.py::test_a_fetch_of_which_a_copy_fails_has_no_holes"
LAYERS = "tests/e2e/test_failing_threads.py::test_layers_of_which_a_copy_fails_are_not_shown"
IN_TURN = "tests/e2e/test_gpu_by_cpu.py::test_layers_in_turn_of_which_a_copy_fails_are_not_shown"
STORE = "tests/e2e/test_failing_threads.py::test_a_store_of_which_a_job_fails_keeps_what_is_right_or_nothing"
VALUES = "tests/e2e/test_failing_threads.py::test_values_of_which_a_job_fails_are_whole_or_nothing"
NO_THREAD = "tests/e2e/test_failing_threads.py::test_without_a_thread_of_its_own_a_call_is_a_miss_or_a_typed_error"
IDLE = "tests/e2e/test_staging.py::test_a_store_whose_idle_staging_nobody_could_look_for_is_stored"
ENCODER = "tests/engines/vllm/test_embeddings.py::test_an_item_that_no_thread_fetches_is_encoded"
RATES = "tests/server/test_rates.py::test_a_write_that_nobody_makes_ends_nothing_and_is_owed"
PROCESS = "tests/e2e/remote/test_bad_peers.py::test_the_remote_planes_process_ends_with_the_sidecar"

SITES = {
    ("kvstore/seams/jobs.py", "begun"): JOBS,
    ("kvstore/seams/jobs.py", "done"): JOBS,
    (
        "kvstore/seams/jobs.py",
        "given_up",
    ): "tests/seams/test_jobs.py::test_jobs_that_are_given_up_do_not_run_afterwards",
    ("kvstore/seams/scheduler.py", "WorkerThreads.__init__"): THREADS,
    ("kvstore/seams/scheduler.py", "WorkerThreads.submit"): THREADS,
    ("kvstore/seams/scheduler.py", "start_thread"): NO_THREAD,
    ("kvstore/seams/movers/child.py", "_Mover._order_lane"): MOVERS,
    ("kvstore/seams/movers/processes.py", "MoverProcesses._start"): MOVERS,
    ("kvstore/seams/movers/processes.py", "Lane._submit_here"): MOVERS,
    ("kvstore/remote/__main__.py", "_serve"): PROCESS,
    ("kvstore/arena/prefault.py", "prefault"): PREFAULT,
    ("kvstore/controller/stores/fill.py", "Fills.start"): STORES,
    ("kvstore/movement/loads.py", "Loads._finish"): DEVICE,
    ("kvstore/server/kept.py", "KeptFile.follow"): RATES,
    **{("kvstore/tiers/dram/tier.py", name): DRAM for name in ("DramTier.write", "DramChunk.read", "DramChunk.check")},
    **{("kvstore/tiers/hbm/tier.py", f"HbmTier.{name}"): HBM for name in ("_begun", "are_right")},
    ("kvstore/tiers/hbm/tier.py", "HbmTier.close"): HBM_CLOSE,
    ("kvstore/server/tenant.py", "Tenant._attach_hbm"): HBM_OPEN,
    ("kvstore/tiers/nvme/reading.py", "NvmeChunk._read"): DEVICE,
    ("kvstore/tiers/nvme/recovery.py", "_read_all"): DEVICE,
    ("kvstore/tiers/nvme/sync.py", "GroupSync.wait"): DEVICE,
    **{
        ("kvstore/tiers/nvme/tier.py", f"NvmeTier.{name}"): DEVICE
        for name in ("__init__", "_run", "run_read", "_outgoing", "_erase", "_fill", "open", "renew")
    },
    ("kvstore/tiers/nvme/free_slots.py", "FreeSlots._find_room"): DEVICE,
    ("kvstore/tiers/nvme/erasures.py", "Erasures.note"): DEVICE,
    ("kvstore/tiers/nvme/erasures.py", "Erasures.tidy"): DEVICE,
    **{
        (f"kvstore/tiers/{file}", name): SHARED
        for file, name in (
            ("redis/reads.py", "Reads._start"),
            ("redis/tier.py", "RedisTier._move_once"),
            ("redis/tier.py", "RedisTier._write"),
            ("s3/reading.py", "S3Chunk._fetch"),
            ("s3/tier.py", "S3Tier._ask_for_bucket"),
            ("s3/tier.py", "S3Tier._judge"),
            ("s3/tier.py", "S3Tier._put"),
            ("s3/tier.py", "S3Tier._run"),
            ("s3/tier.py", "S3Tier.prepare"),
            ("s3/tier.py", "S3Tier.probe"),
            ("s3/tier.py", "S3Tier.remove"),
            ("s3/tier.py", "S3Tier.run_check"),
            ("s3/tier.py", "S3Tier.run_read"),
        )
    },
    ("clients/kvstore_client/copying.py", "commit_beside"): STORE,
    ("clients/kvstore_client/copying.py", "_OwnThread.submit"): NO_THREAD,
    ("clients/kvstore_client/copying.py", "Copier.submit"): FETCH,
    ("clients/kvstore_client/copying.py", "Copier.split"): STORE,
    ("clients/kvstore_client/copying.py", "Copier.share"): FETCH,
    ("clients/kvstore_client/copying.py", "Copier.halves"): FETCH,
    ("clients/kvstore_client/planes/shared_memory/resident.py", "ResidentPrefix.copy_all"): FETCH,
    ("clients/kvstore_client/planes/shared_memory/landing.py", "MappedLanding._copy_hidden"): LAYERS,
    ("clients/kvstore_client/planes/shared_memory/landing.py", "MappedLanding._copy"): LAYERS,
    ("clients/kvstore_client/planes/shared_memory/landing.py", "MappedLanding._copied_in_turn"): IN_TURN,
    ("clients/kvstore_client/store/calls.py", "keep"): STORE,
    ("clients/kvstore_client/planes/shared_memory/store.py", "StagedUpload._copy_batch"): STORE,
    ("clients/kvstore_client/store/gathering.py", "gather"): STORE,
    ("clients/kvstore_client/store/writer.py", "StoreWriter._copy"): STORE,
    ("clients/kvstore_client/store/writer.py", "StoreWriter.commit"): STORE,
    ("clients/kvstore_client/planes/stream/store.py", "StreamUpload._outgoing"): STORE,
    ("clients/kvstore_client/opaque/calls.py", "_begun_put"): VALUES,
    ("clients/kvstore_client/opaque/reader.py", "Reader._copy"): VALUES,
    ("clients/kvstore_client/planes/shared_memory/mapped.py", "MappedMemory.__init__"): NO_THREAD,
    ("clients/kvstore_client/planes/shared_memory/staging.py", "StagingPool._watch"): IDLE,
    ("clients/kvstore_client/planes/stream/session.py", "StreamSession.__init__"): NO_THREAD,
    ("clients/kvstore_client/planes/returns.py", "Returns.start"): NO_THREAD,
    ("clients/kvstore_client/planes/incoming.py", "Ends.start"): NO_THREAD,
    ("clients/kvstore_client/lookup/feed.py", "Feed.__init__"): NO_THREAD,
    ("clients/kvstore_client/fetch/transfer.py", "Transfer.start"): NO_THREAD,
    ("clients/kvstore_client/engines/vllm/embeddings.py", "Fetching._ask"): ENCODER,
}
MOVES_NO_BYTES = {
    ("kvstore/spec/weights.py", "digested"): "raises what a job raised; a digest of less is no digest",
    ("clients/kvstore_client/context.py", "Context.close"): "without it the caller waits by itself",
    ("kvstore/server/web/listener.py", "Web.start"): "the page: where no thread can be had the start says so",
    ("kvstore/telemetry/spans.py", "Spans.close"): "spans: what was not sent is lost",
    (
        "kvstore/server/reloading.py",
        "Reloading.reload",
    ): "settings: without a thread the command fails, and changes none",
    (
        "kvstore/server/web/site.py",
        "WebQuestion.get",
    ): "a question to the service for the page: without an answer, a 503",
    (
        "clients/kvstore_client/loading/call.py",
        "PrefillCall._begin",
    ): "without it nobody plans: the prompt is looked up as ever",
    (
        "clients/kvstore_client/planes/session.py",
        "check_threads",
    ): "does nothing: whether a thread can be had, for calls of gRPC's that would hang without",
    ("clients/kvstore_client/loading/patience.py", "Patience.__enter__"): "without it a load is waited for as ever",
    (
        "clients/kvstore_client/loading/patience.py",
        "result_in_time",
    ): "a question: without a thread it is asked on this one",
    ("clients/kvstore_client/loading/planner.py", "Planner._tell_soon"): "a report: without a thread nobody hears it",
    ("clients/kvstore_client/gate/exchange.py", "ProfileExchange.tell"): "a report: the next session makes it again",
    ("clients/kvstore_client/loading/probe.py", "measure_beside"): "a measurement on the side",
    ("clients/kvstore_client/aio.py", "connect_async"): "whole calls of a client, each handed on with what it raised",
    ("clients/kvstore_client/aio.py", "AsyncClient.call"): "as connect_async",
    ("clients/kvstore_client/aio.py", "AsyncClient._drop"): "a ticket that is not released expires",
    ("clients/kvstore_client/aio.py", "AsyncClient.release_ticket"): "a ticket that is not released expires",
    ("clients/kvstore_client/aio.py", "AsyncClient.aclose"): "raises where no thread can be had",
    **{
        ("kvstore/tiers/redis/control.py", f"Control.{name}"): "a question to the server, on the loop"
        for name in ("_there", "_claim", "_touch")
    },
    **{("kvstore/tiers/redis/embedded.py", f"EmbeddedServer.{name}"): "a process" for name in ("start", "_run_again")},
    ("kvstore/remote/renewal.py", "keep_renewing"): "files that are looked at again some seconds later",
    ("kvstore/tiers/redis/errands.py", "Errands.begin"): "a task of the loop",
    ("kvstore/tiers/s3/connection.py", "S3Connection.__init__"): "a mover's own loop: without it its jobs fail",
    ("clients/kvstore_client/engines/transformers.py", "CachedModel._keep"): "a whole store: its receipt says so",
    ("clients/kvstore_client/engines/transformers.py", "CachedModel._attempt.first_token"): "a measurement on the side",
    ("clients/kvstore_client/engines/vllm/lookups.py", "PrefixLookups._ask"): "a look-up: refused, it is a miss",
    (
        "clients/kvstore_client/engines/vllm/lookups.py",
        "PrefixLookups._begin_release",
    ): "a ticket that is not released expires",
    (
        "clients/kvstore_client/engines/vllm/saves.py",
        "Saves.begin",
    ): "a whole store: one that finds no thread has read no block, and is not kept",
    (
        "clients/kvstore_client/engines/vllm/tier.py",
        "KVStoreTier._submit",
    ): "whole calls: a job that failed moved no block",
}
"""Whole calls beside an engine's thread, or nothing that is stored: no test of theirs here, and why."""


def sites() -> Iterator[tuple[tuple[str, str], str]]:
    """((file, function), call) of each place."""
    for root in ROOTS:
        for file in sorted((ROOT / root).rglob("*.py")):
            text = file.read_text()
            tree = ast.parse(text)
            path = str(file.relative_to(ROOT))
            yield from ((site, call) for site, call in _in(tree, path, ()) if "jobs import" in text or _counts(call))


def _counts(call: str) -> bool:
    return call.split("(")[0].split(".")[-1] not in FROM_HERE


def _in(node: ast.AST, path: str, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, str], str]]:
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = (*names, child.name) if is_named else names  # type: ignore[attr-defined]
        if isinstance(child, ast.Call):
            called = ast.unparse(child.func)
            name = called.rsplit(".", 1)[-1]
            is_job = name in CALLS and not (name in FROM_HERE and "." in called)
            if is_job or any(called.endswith(each) for each in BY_RECEIVER):
                yield (path, ".".join(names)), ast.unparse(child)
        yield from _in(child, path, inner)


def test_every_submission_is_in_the_list_and_every_entry_is_a_submission() -> None:
    assert {site for site, _ in sites()} == {*SITES, *MOVES_NO_BYTES}


def test_only_the_seam_submits() -> None:
    """A ``submit`` anywhere else could raise between two jobs."""
    seams = {path for path, _ in SITES if path.startswith("kvstore/seams/")}
    seams |= {"clients/kvstore_client/copying.py"}
    for (path, function), call in sites():
        if ".submit(" in call.split("(")[0] + "(" and path not in seams:
            assert "_copier.submit(" in call, f"{path}: {function}: use kvstore.seams.jobs: {call}"


@pytest.mark.parametrize("test", sorted(set(SITES.values())), ids=lambda test: test.rsplit("::", 1)[-1])
def test_the_tests_that_are_named_are_there(test: str) -> None:
    path, name = test.split("::")
    assert f"def {name}(" in (ROOT / path).read_text()
