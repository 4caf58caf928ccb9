"""Partial prefills: what of a prompt is worth loading, what engines told of their speed, and what came of each plan.

A prefill begins with a lookup that holds what it finds; the plan cuts what is held to what is to be loaded. The bytes
are fetched by the ticket, like any others. All of it is pure planning over facts that are gathered here.

- ``prefills``  begin, plan, end
- ``engines``   how fast engines compute
- ``records``   the last plans, and what became of them
"""

from kvstore.controller.prefills.engines import EngineRate, Engines
from kvstore.controller.prefills.prefills import PartialPrefills, PlannedPrefill, PrefillRequest
from kvstore.controller.prefills.records import MODES, PLANS_KEPT, PlanRecord, PlanState, PrefillEnd

__all__ = [
    "MODES",
    "PLANS_KEPT",
    "EngineRate",
    "Engines",
    "PartialPrefills",
    "PlanRecord",
    "PlanState",
    "PlannedPrefill",
    "PrefillEnd",
    "PrefillRequest",
]
