"""The page that operators read in a browser, and the metrics that Prometheus scrapes: one port, read-only HTTP.

HTTP runs in a thread with an event loop of its own. The number of connections is bounded, and so is the time of each:
past the bound, browsers wait or are told to try again. The service's loop is asked for counts at most a few times a
second, however many readers there are; it renders nothing. The page names no resource outside itself, and scripts and
styles come from files of this room alone.

- ``listener``  requests, their bounds, and the readers' rights
- ``site``      the paths, and the answer to each
- ``history``   the last hour, in rings
- ``facts``     the page's content, as JSON
- ``page.*``    the page itself
"""
