"""Byte movers: what a job's memory and files mean in another process, and how its end is noticed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHILD = "kvstore/seams/movers/child.py"
CROSSING = "kvstore/seams/movers/crossing.py"
PROCESSES = "kvstore/seams/movers/processes.py"
T_MOVERS = "tests/seams/test_movers.py"


def of(scenario: str) -> tuple[str, ...]:
    return (f"{T_MOVERS}::test_movers[{scenario}]",)


MUTANTS = [
    Mutant(
        "memory-beyond-what-is-lent",
        CROSSING,
        "            if offset + memory.size <= lent.byte_count:\n",
        "            if True:\n",
        "a job's memory is something else in the mover's process",
        ("tests/seams/test_crossing.py::test_only_runs_inside_lent_memory_cross",),
    ),
    Mutant(
        "memory-in-steps",
        CROSSING,
        "        if index >= 0 and memory.flags.c_contiguous and memory.ndim == 1:\n",
        "        if index >= 0:\n",
        "every second byte crosses as a run of bytes",
        ("tests/seams/test_crossing.py::test_only_runs_inside_lent_memory_cross",),
    ),
    Mutant(
        "numbers-used-again",
        PROCESSES,
        '            number = next(self._numbers)\n            self._pass(descriptor, number, "file")\n',
        '            number = 1 + descriptor\n            self._pass(descriptor, number, "file")\n',
        "a late job writes to the file that took another's place",
        of("a_number_is_never_taken_for_a_later_file"),
    ),
    Mutant(
        "sealed-before-it-is-mapped",
        PROCESSES,
        "        answers = [self._heard(control) for control in told] if is_answered else []\n",
        "        answers: list[bytes] = []\n",
        "the arena is sealed before all movers can write to it",
        of("memory_is_sealed_when_movers_that_are_late_have_it"),
    ),
    Mutant(
        "movers-that-ended-are-waited-for",
        PROCESSES,
        '                future.set_exception(Internal("the byte movers do not answer"))\n',
        "                pass\n",
        "who waits for a mover that was killed waits for ever",
        of("a_mover_that_ends_is_told_of_and_its_jobs_end"),
        hangs=True,
    ),
    Mutant(
        "jobs-that-nobody-wants",
        PROCESSES,
        "            if future.cancelled():\n",
        "            if False:\n",
        "a job writes into memory that its caller gave back",
        of("a_job_that_nobody_waits_for_any_more_is_not_begun"),
    ),
    Mutant(
        "movers-outlive-their-service",
        CHILD,
        "        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)\n",
        "        pass\n",
        "a mover goes on writing to a device that another server has",
        (
            f"{T_MOVERS}::test_movers_end_with_their_process",
            "tests/server/test_life.py::test_a_killed_server_leaves_no_byte_mover_behind",
        ),
    ),
    Mutant(
        "movers-keep-what-is-not-theirs",
        CHILD,
        "        _keep_only(control.fileno())\n",
        "        pass\n",
        "movers hold the service's output and each other's sockets: nobody notices its end",
        (f"{T_MOVERS}::test_movers_end_with_their_process",),
    ),
    Mutant(
        "memory-stays-in-the-movers",
        CHILD,
        "            thing = self._things.pop(number, None)\n",
        "            thing = self._things.get(number, None)\n",
        "what was given back stays mapped in every mover",
        of("what_is_taken_back_is_let_go_by_the_movers"),
    ),
]
