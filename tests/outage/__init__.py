"""Outages of shared tiers under load: two real sidecars over a real Redis and a real S3 server, which stand still for
some seconds, one after the other and both at once, and go on.

    python -m tests.outage --seconds 20

Clients of both nodes store, look up and fetch contexts of known bytes all the while. No byte is wrong; no call raises,
or takes longer than its bound; the tier is hit again within some seconds of its return; and the sidecars do not grow.

- ``load``      the clients, and what they met
- ``campaign``  the cluster, its outages, and what is asked of it afterwards
"""
