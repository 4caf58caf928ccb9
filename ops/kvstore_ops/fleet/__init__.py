"""A simulated fleet in virtual time: engines on some nodes, a trace of requests, and tiers that they share; with
loading plans and without.

``trace`` reads the requests, ``hardware`` has all speeds, ``nodes`` keeps the stored blocks and the measurements of
tiers, ``playout`` gives the times of one request, ``papers`` has the published controllers, unchanged, to be measured
against, ``simulation`` plays all of them out, ``command`` is ``kvstore
fleet``. ``kvstore.planning.loading`` makes the plans, as in the service; everything else here is a model of the world.
"""
