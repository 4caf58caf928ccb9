"""A fleet in virtual time: engines on some nodes, a trace of requests, tiers that they share; with plans and without.

``trace`` reads who asked for what, ``hardware`` says how fast everything is, ``nodes`` keeps what is stored where and
what was measured there, ``simulation`` plays the requests out, ``command`` is ``kvstore fleet``. Plans are made by
``kvstore.planning.loading``, as the service's are; everything else here is a model of the world.
"""
