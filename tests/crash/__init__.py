"""Real crashes: SIGKILL at a named place of a real server under load, a restart, and a look at what is left.

    python -m tests.crash --count 100 --seed 0

A campaign is a list of crashes, made from the seed. Each starts the server with ``KVSTORE_CRASH=point:n`` on a
directory that earlier crashes left, runs clients against it until it is dead, starts it again without and checks:
every chain that was acknowledged LOCAL is served to the bit (on a device too small for them, evicted ones may be
missing), no byte is wrong, the account of the device agrees with its files, and new stores are taken.

SIGKILL leaves the page cache alone: that acknowledged bytes also survive a power cut is the simulated disk's to show.

- ``contexts``  what is stored: tokens, and a cache that is a function of them
- ``ledger``    who was promised what
- ``load``      the clients
- ``plan``      where to crash
- ``campaign``  crash, restart, check
"""
