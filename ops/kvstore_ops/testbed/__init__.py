"""The quality testbed: small trained models whose answers show the quality of a reused KV, without any download.

`task` makes their questions: variables bound across chunks. `models` names them: two base models (6 and 12 layers) from
two seeds, and siblings that answer otherwise (`plus3` and `plus11`, harsh; `mild`). `net` and `train` make them,
`store` ships and loads them. `seeds` has the seeds of contexts that may choose settings, and of contexts for reported
figures only. `evaluate` draws the contexts and scores answers.

    model, recipe = load("l6-s2")
    found = contexts(calibration(), 64)
    full_prefill(model, found, recipe.answers)

Invariants: evaluation seeds never choose (`Seeds.to_choose_with`); all weights together stay under 30 MB; weights come
from `python -m kvstore_ops.testbed train NAME` and nothing else. Needs torch; loading a model, transformers.
"""

from kvstore_ops.testbed.evaluate import Score, contexts, full_prefill, score
from kvstore_ops.testbed.models import Recipe, recipe
from kvstore_ops.testbed.seeds import Seeds, calibration, evaluation
from kvstore_ops.testbed.store import directory, load, shipped
from kvstore_ops.testbed.task import Contexts, Shape

__all__ = [
    "Contexts",
    "Recipe",
    "Score",
    "Seeds",
    "Shape",
    "calibration",
    "contexts",
    "directory",
    "evaluation",
    "full_prefill",
    "load",
    "recipe",
    "score",
    "shipped",
]
