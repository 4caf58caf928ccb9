"""Calls that are cancelled: whatever they wait for, they end, and give back what their clients could not."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CLAIM = "kvstore/controller/stores/claim.py"
CHANGES = "kvstore/controller/operators/changes.py"
STORES = "tests/server/test_cut_stores.py"
READS = "tests/server/test_cut_reads.py"
CUT_CHANGES = "tests/server/test_cut_changes.py"

MUTANTS = [
    Mutant(
        "cancelled-and-its-memory-stored",
        "clients/kvstore_client/aio.py",
        "            while _uses_memory(function, options) and not late.done():\n",
        "            while False:\n",
        "what a cancelled task's caller writes next to its tensors is stored under the prompt's name",
        ("tests/e2e/test_async.py::test_when_a_cancelled_call_has_ended_the_memory_that_it_used_is_its_callers",),
    ),
    Mutant(
        "cancelled-and-yet-claimed",
        CLAIM,
        "        except BaseException:\n            self._reservations.end(reservation)\n",
        "        except Exception:\n            self._reservations.end(reservation)\n",
        "the chunks of a client that went can be stored by nobody",
        (f"{STORES}::test_a_step_of_a_store",),
    ),
    Mutant(
        "answered-when-nobody-hears",
        CLAIM,
        "min(self._parts.policies.demotion_wait_s, deadline.answerable_s)",
        "self._parts.policies.demotion_wait_s",
        "a reservation whose caller has gone stays until it is too old",
        ("tests/controller/test_deadlines.py::test_a_store_that_finds_no_room_hears_of_it_before_it_gives_up",),
    ),
    Mutant(
        "stored-and-taken-for-failed",
        "kvstore/controller/controller.py",
        "settle(result.rows, Durability.LOCAL, until.answerable_s)",
        "settle(result.rows, Durability.LOCAL, until.left_s)",
        "a writer hears nothing of a store that the device is slow to take",
        (f"{STORES}::test_a_commit_says_that_the_device_stalls_before_its_caller_gives_up",),
    ),
    Mutant(
        "shards-that-nobody-publishes",
        "kvstore/controller/stores/commit.py",
        "            reservation.is_publishing = False  # after a cancellation, a repeated commit goes on\n",
        "            pass\n",
        "no writer of a store can publish it once a commit was cancelled",
        (f"{STORES}::test_a_step_of_a_store",),
    ),
    Mutant(
        "released-only-after-errors",
        "kvstore/server/services.py",
        "            except BaseException:  # the call was cancelled: its client does not know this lease and cannot "
        "release it\n",
        "            except Exception:\n",
        "chunks stay leased to a client that has gone",
        (f"{READS}::test_a_call_of_a_reader",),
    ),
    Mutant(
        "arrivals-for-nobody",
        "kvstore/controller/fetches/arrivals.py",
        "                async with asyncio.timeout(deadline.left_s):  # not around a yield: it would cancel the "
        "listener\n                    await event.wait()\n",
        "                await asyncio.wait_for(event.wait(), deadline.left_s)\n",
        "a fetch goes on whose caller has gone",
        (f"{READS}::test_a_call_of_a_reader",),
    ),
    Mutant(
        "plan-with-a-ticket-of-nobody",
        "kvstore/controller/prefills/prefills.py",
        "        except BaseException:\n            self._tickets.release(found.ticket)\n",
        "        except Exception:\n            self._tickets.release(found.ticket)\n",
        "chunks stay held for a prompt that nobody computes any more",
        (f"{READS}::test_a_call_of_a_reader",),
    ),
    Mutant(
        "pinned-by-half",
        CHANGES,
        "            except BaseException:  # the limit was reached after all, or the caller went: all or nothing\n",
        "            except Exception:\n",
        "an operator who gives a pin up has pinned some of it",
        (f"{CUT_CHANGES}::test_a_change",),
    ),
    Mutant(
        "held-by-a-change-that-ended",
        CHANGES,
        "        finally:\n            self._let_go(held)\n",
        "        except Exception:\n            self._let_go(held)\n",
        "chunks that an operator brought into memory never leave it",
        (f"{CUT_CHANGES}::test_a_change",),
    ),
    Mutant(
        "shown-and-held",
        "kvstore/controller/operators/showing.py",
        "        finally:\n            self._catalog.unhold(row)\n        return",
        "        except Exception:\n            self._catalog.unhold(row)\n        return",
        "a chunk that an operator looked at never leaves",
        (f"{CUT_CHANGES}::test_a_look",),
    ),
]
