"""The parts of the router that know no HTTP server.

    hashing.py   rendezvous (consistent) hashing of users to instances
    balancer.py  the instance for a request: hashing, load, circuit breakers, pools
    placements.py  which instance served a user last
    outliers.py  which instance fails or is slow, compared with the others
    stored_lengths.py  how long the histories of stored users are
    ticket.py    signed tickets that name the instance of a user's prefix
    upstream.py  connections to one instance

Touch this when requests find their instance in another way; the app is http/router_app.py.
"""
