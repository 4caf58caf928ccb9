"""The operators' page and the metrics for Prometheus: one port, read-only, HTTP in a thread of its own.

The thread has an event loop of its own and a bounded number of connections, each with a bound on its time: a thousand
browsers wait, or are told to come again. The service's loop is asked for counts, at most a few times a second however
many ask; it renders nothing. A page names no resource outside itself, and scripts and styles come from files of this
room alone.

- ``listener``  requests, bounds, who may read what
- ``history``   the last hour, in rings
- ``facts``     what the page shows, as JSON
- ``page.*``    the page itself
"""
