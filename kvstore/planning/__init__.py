"""Planning: from facts to a plan. The same code for client and server, and for whoever explains or simulates a plan.

    plan = decide(facts)

Everything here is a frozen value or a pure function: no I/O, no clock, no torch, no sockets; the lint allows a list of
imports and no others. ``facts`` is what is known of a prompt, ``plan`` what becomes of it, ``decision`` the step from
one to the other over ``offers``. ``setting`` says how much of a reused cache is computed again and what that costs
(``Recompute.share``), ``profile`` what settings were worth to a pair of models, ``permit`` what follows from that for
these specs, ``sender`` which models' caches can be shared at all. Whether what may be reused is worth loading is the
room ``loading``'s; ``order`` says which of many contexts comes next.
"""

from kvstore.planning.decision import decide
from kvstore.planning.facts import Facts, Holding, StoredE, StoredSegment
from kvstore.planning.permit import FLOOR, Pair, Permit, Ruling
from kvstore.planning.plan import Plan, PlannedRun, StoredCache
from kvstore.planning.profile import Calibration, Point, Profile, Side
from kvstore.planning.sender import check_sender
from kvstore.planning.setting import Recompute

__all__ = [
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
    "Ruling",
    "Side",
    "StoredCache",
    "StoredE",
    "StoredSegment",
    "check_sender",
    "decide",
]
