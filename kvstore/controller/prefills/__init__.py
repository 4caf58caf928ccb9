"""Partial prefills: plans of the part of a prompt that is worth loading, the speeds that engines reported, and results.

A prefill begins with a lookup whose ticket holds the hits; the plan cuts the ticket to the chunks that are to be
loaded. The bytes are fetched by the ticket, like any others. Planning is pure; the facts for it are gathered here.

- ``prefills``  begin, plan, end, and the last records of these
- ``engines``   the speeds of engines
- ``records``   a record of a plan and its results
"""

from kvstore.controller.prefills.engines import EngineRate, Engines
from kvstore.controller.prefills.prefills import PartialPrefills, PlannedPrefill, PrefillRequest
from kvstore.controller.prefills.records import PlanRecord, PlanState, PrefillEnd

__all__ = [
    "EngineRate",
    "Engines",
    "PartialPrefills",
    "PlanRecord",
    "PlanState",
    "PlannedPrefill",
    "PrefillEnd",
    "PrefillRequest",
]
