"""Outages of shared tiers under load: two real sidecars over a real Redis and a real S3 server, which stand still for
some seconds, one after the other and both at once, and go on.

    python -m tests.outage --seconds 20

Clients of both nodes store, look up and fetch contexts of known bytes all the while. No byte is wrong; no call raises,
or takes longer than its bound; 99 of 100 lookups take no longer than they may wait for tiers, and 5 ms; the tier is hit
again within 10 s of its return; and neither sidecars nor clients grow.

- ``load``      the clients, and what they met
- ``campaign``  the cluster, its outages, and what is asked of it afterwards
"""
