"""Planning: from facts to a plan. Client and server run the same code, and so do explanations and simulations of plans.

    plan = decide(facts)

Everything here is a frozen value or a pure function: no I/O, no clock, no torch, no sockets; the lint allows a list of
imports and no others. ``facts`` holds the inputs, ``plan`` the result; ``decision`` makes the one from the other by way
of ``offers``. ``setting`` says how much of a reused cache is computed again and what that costs (``Recompute.share``).
``profile`` holds the measured quality of settings for a pair of models, ``permit`` the setting that a profile allows
for given specs. ``sender`` checks that two models can share caches at all. ``terms`` holds a caller's conditions:
quality, deadline, class. The package ``loading`` decides whether
loading is faster than computing; ``blends`` gives it the reuse of documents and siblings to choose from.
``order`` chooses which of many waiting contexts comes next.
"""

from kvstore.planning.decision import decide
from kvstore.planning.facts import Facts, Holding, StoredE, StoredSegment
from kvstore.planning.permit import FLOOR, Pair, Permit, Ruling
from kvstore.planning.plan import Plan, PlannedRun, StoredCache
from kvstore.planning.profile import Calibration, Point, Profile, Side
from kvstore.planning.sender import check_sender
from kvstore.planning.setting import Recompute
from kvstore.planning.terms import ANY_TERMS, RequestClass, Terms

__all__ = [
    "ANY_TERMS",
    "FLOOR",
    "Calibration",
    "Facts",
    "Holding",
    "Pair",
    "Permit",
    "Plan",
    "PlannedRun",
    "Point",
    "Profile",
    "Recompute",
    "RequestClass",
    "Ruling",
    "Side",
    "StoredCache",
    "StoredE",
    "StoredSegment",
    "Terms",
    "check_sender",
    "decide",
]
