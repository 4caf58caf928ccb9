"""The profiler: it measures the quality and cost of recompute settings for one pair of models on calibration contexts.

Settings are searched on some contexts, coarse to fine. The settings found are measured again on other contexts, and
only these measurements are the profile's figures: the best of many noisy figures is partly the luckiest.

`subject` is the protocol of a model with contexts, and implements it for the testbed's models; `own` implements it for
a model of the user, on `prompts`. `search` chooses the settings to measure, `journal` keeps every measured point so
that a killed run can continue, `profiler` runs all, `picture` shows the result. The result is a
`kvstore.planning.Profile`, where a client's gate finds it.

Invariants: evaluation seeds never choose; no context of the search counts in a figure; every setting sees the same
contexts, so that losses are compared context by context; a killed and continued run makes the same profile as a run in
one piece. Cost: contexts x settings prefills, less those of settings that are given up early.
Needs torch, transformers; for the plot matplotlib.
"""
