"""Tickets: what holds a prefix until its readers have come."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FETCH = "kvstore/controller/fetches/fetch.py"
TICKETS = "kvstore/controller/fetches/tickets.py"
T_TICKETS = "tests/controller/test_tickets.py"

MUTANTS = [
    Mutant(
        "a-long-lookup-of-what-left-meanwhile",
        "kvstore/controller/fetches/lookup.py",
        "        if catalog.withdrawn_count == withdrawn_count:\n",
        "        if True:\n",
        "a ticket holds rows that other chunks have by now",
        ("tests/controller/test_long_lookups.py::test_what_leaves_between_two_steps_is_a_miss_and_no_ticket_holds_it",),
    ),
    Mutant(
        "ticket-without-an-end",
        TICKETS,
        "if each.expires_s <= now_s]",
        "if False]",
        "what a router held and forgot is held for ever",
        (f"{T_TICKETS}::test_a_ticket_expires_and_gives_back_what_it_held",),
    ),
    Mutant(
        "ticket-used-for-ever",
        TICKETS,
        "        if not ticket.readers_left:\n",
        "        if False:\n",
        "a ticket that all readers used goes on holding its chunks",
        (f"{T_TICKETS}::test_held_chunks_stay_until_every_reader_came",),
    ),
    Mutant(
        "tickets-without-a-limit",
        TICKETS,
        "        if self.held_bytes + byte_count > self._limits.ticket_bytes_max:\n",
        "        if False:\n",
        "one client's tickets hold all of memory",
        (f"{T_TICKETS}::test_limits_are_named",),
    ),
    Mutant(
        "what-several-tickets-hold-counts-for-each",
        TICKETS,
        "        byte_count = self.byte_count({row for row in rows if row not in self._holds})",
        "        byte_count = self.byte_count(set(rows))",
        "a hundred requests behind one system prompt reach the limit, and compute what is stored",
        (f"{T_TICKETS}::test_what_several_tickets_hold_counts_once",),
    ),
    Mutant(
        "ticket-redeemed-in-part",
        FETCH,
        "        if is_whole and self._tickets.find(ticket_id):\n            self._tickets.redeemed(ticket_id)\n",
        "        if True:\n            self._tickets.redeemed(ticket_id)\n",
        "less comes under a ticket than it holds, and nobody says so",
        (f"{T_TICKETS}::test_what_was_lost_under_a_ticket_is_said",),
    ),
    Mutant(
        "a-chunk-that-a-chain-names-twice",
        TICKETS,
        "        last = {row for row in ticket.rows if not self._holds[row]}\n",
        "        last = [row for row in ticket.rows if not self._holds[row]]\n",
        "the end of one client's ticket ends the service",
        (f"{T_TICKETS}::test_a_chunk_that_a_chain_names_twice_is_held_and_given_back",),
    ),
]
