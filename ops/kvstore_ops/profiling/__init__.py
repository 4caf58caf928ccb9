"""The profiler: which settings of recompute are worth it for one pair of models, measured on calibration contexts.

Settings are searched on some contexts, coarse to fine, and what was found is measured again on others, which the
profile's figures are of: the best of many noisy figures is partly the luckiest.

`subject` is what is measured on (a small protocol, and the testbed's models), `own` a model of the user's, on
`prompts`. `search` says which settings, `journal` keeps every measured point so that a killed run goes on, `profiler`
runs, `picture` shows. The result is a `kvstore.planning.Profile`, where a client's gate finds it.

Invariants: evaluation seeds never choose; no context that was searched on is behind a figure; every setting sees the
same contexts, so that losses are compared context by context; a run that was killed and went on makes the profile that
one in one piece makes. Cost: contexts x settings prefills, less those of settings that are given up after a glance.
Needs torch, transformers; for the plot matplotlib.
"""
