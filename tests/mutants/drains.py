"""What a drain of the service promises before a stop."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CLAIM = "kvstore/controller/stores/claim.py"
T_DRAINS = "tests/e2e/test_drains.py"
T_AGAIN = "tests/tiers/shared/test_tried_again.py"

MUTANTS = (
    Mutant(
        "a-drained-service-takes-stores",
        CLAIM,
        "        while not self._is_elsewhere(entry) and not refusal:\n",
        "        while not self._is_elsewhere(entry):\n",
        "a service that was drained to be stopped has chunks that the stop loses",
        (f"{T_DRAINS}::test_a_drained_service_takes_no_stores_and_a_stop_loses_nothing",),
    ),
    Mutant(
        "a-refused-value-takes-the-old-one-along",
        CLAIM,
        "                if self.refusal:\n",
        "                if False:\n",
        "a drained service loses values that it acknowledged, and has none in their place",
        (f"{T_DRAINS}::test_a_drained_service_keeps_the_value_that_it_does_not_replace",),
    ),
    Mutant(
        "drained-by-hearsay",
        "ops/kvstore_ops/operators/draining.py",
        "        if not (request.dry_run or request.drain.end or found.refuses_stores):\n",
        "        if False:\n",
        "a service that goes on taking stores is said to be safe to stop",
        (f"{T_DRAINS}::test_a_service_that_goes_on_taking_stores_is_not_called_drained",),
    ),
    Mutant(
        "a-chunk-in-a-parked-row-is-taken-for-the-one-that-was-refused",
        "kvstore/movement/parked.py",
        "        return parked.identity == self._table.identity(row)\n",
        "        return True\n",
        "another chunk is sent to a tier that is not to have it, and a drain calls it refused",
        (
            f"{T_AGAIN}::test_a_chunk_in_the_row_of_one_that_was_refused_is_not_sent_in_its_place",
            f"{T_DRAINS}::test_a_chunk_that_is_damaged_where_it_leaves_is_not_blamed_on_the_tier_that_lacks_it",
        ),
    ),
    Mutant(
        "a-move-that-failed-happens-later",
        "kvstore/movement/relocation.py",
        "                each.to.demand(each.row, is_once=True)\n",
        "                each.to.demand(each.row)\n",
        "a bucket that is never to be written to is, after the command has said that it failed",
        (f"{T_AGAIN}::test_a_move_that_failed_does_not_happen_later_behind_its_operators_back",),
    ),
    Mutant(
        "a-move-that-failed-takes-a-stores-word-back",
        "kvstore/movement/writes.py",
        "is_once and not self.parked.waits(row) and (",
        "is_once and (",
        "a store that asked for OBJECT is not tried again, because an operator tried in vain, too",
        (f"{T_AGAIN}::test_what_a_store_asked_for_goes_also_after_a_move_that_failed",),
    ),
    Mutant(
        "a-move-beside-a-try-takes-a-stores-word-back",
        "kvstore/movement/writes.py",
        " and (row not in self._queue or row in self._demands)\n",
        "\n",
        "a store that asked for OBJECT is not tried again, because an operator moved it in vain meanwhile",
        (f"{T_AGAIN}::test_a_move_that_fails_beside_a_try_for_a_store_does_not_end_the_tries",),
    ),
    Mutant(
        "a-drain-takes-a-stores-word-back",
        "kvstore/movement/writes.py",
        "        if self.parked.are_due and not self.is_draining:\n",
        "        if self.parked.are_due:\n",
        "a store that asked for OBJECT is not tried again after the drain of a tier that was away",
        (f"{T_AGAIN}::test_what_a_store_asked_for_goes_also_after_a_drain_of_the_tier",),
    ),
    Mutant(
        "one-tenants-socket-speaks-for-all",
        "ops/kvstore_ops/operators/draining.py",
        "is_whole and door.socket is not None and own == DEFAULT_TENANT",
        "is_whole and door.socket is not None",
        "a service that takes stores of other tenants is said to be safe to stop",
        (f"{T_DRAINS}::test_the_socket_of_one_tenant_drains_no_other_and_says_so",),
    ),
    Mutant(
        "unseen-tenants-are-called-drained",
        "ops/kvstore_ops/operators/draining.py",
        "    if is_all and (problem := tenants.unseen(door)):\n",
        "    if False and (problem := tenants.unseen(door)):\n",
        "a service whose other tenants cannot be seen is said to be safe to stop",
        (f"{T_DRAINS}::test_tenants_that_cannot_be_seen_are_not_called_drained",),
    ),
    Mutant(
        "a-stop-that-loses-chunks-is-called-safe",
        "kvstore/controller/operators/drains.py",
        "self._parts.catalog.is_visible(row) and not self._survives(row):\n",
        "self._parts.catalog.is_visible(row) and False:\n",
        "who stops the service loses what memory alone had",
        (f"{T_DRAINS}::test_what_a_stop_would_lose_is_counted",),
    ),
    Mutant(
        "written-while-it-looks-is-not-counted",
        "kvstore/controller/operators/drains.py",
        "        total = max(total + len(asked), left) + refused\n",
        "        total = max(total, left) + refused\n",
        "a drain says that it wrote fewer chunks than it did, and than its dry run said",
        ("tests/controller/test_drains.py::test_chunks_that_are_written_while_it_looks_for_more_are_counted",),
    ),
    Mutant(
        "refused-chunks-that-are-called-written",
        "kvstore/controller/operators/drains.py",
        "                count += is_here and is_lacking and asked.get(row) is not writes\n",
        "                count += is_here and is_lacking\n",
        "a drain of a full device says that it wrote what it did not",
        ("tests/controller/test_drains.py::test_what_a_tier_refuses_is_not_called_written",),
    ),
    Mutant(
        "a-closed-directory-hides-a-tenant",
        "ops/kvstore_ops/door.py",
        "        except PermissionError:\n            return False\n",
        "        except PermissionError:\n            return True\n",
        "a service is said to be safe to stop whose other tenants go on storing",
        ("tests/ops/test_door.py::test_tenants_in_closed_directories_are_tenants",),
    ),
)
