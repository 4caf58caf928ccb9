"""The whole service at once, on simulated parts, from a seed.

A *run* is one seed: several *lives* of a controller over one simulated disk. In each life a few clients store, fetch,
look up, lease, hold and die, while faults are injected; each life ends with a clean stop, a kill or a power cut, and
the next one recovers what the disk has left. Equal seeds give equal traces.

- ``trace``    what happened, in order; printed when a run fails
- ``disk``     the simulated disk as one process sees it: injected errors, and nothing at all once it is dead
- ``movers``   byte movers whose jobs take virtual time, up to many seconds, while everybody else goes on
- ``models``   the models, chains and bytes that clients use: the bytes of a chunk are a function of its name
- ``oracle``   what must be there: acknowledged copies, and every removal with its cause
- ``life``     one process: a controller with its tier, from recovery to its end
- ``books``    what must add up
- ``knowledge``  what the clients of a run have stored, and may ask for next
- ``clients``  what clients do
- ``warm``     what they fetch without a call, from places that they remember
- ``judge``    what they may be told
- ``nemesis``  errors, delays, rot
- ``run``      one seed, whole
- ``steps``    one fixed scenario, cut at every step of the disk

    python -m tests.sim --crashes 500
"""
