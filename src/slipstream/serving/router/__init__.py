"""The parts of the router that know no HTTP server.

    hashing.py   rendezvous (consistent) hashing of users to instances
    balancer.py  the instance for a request: hashing, load, circuit breakers, pools
    ticket.py    signed tickets that name the instance of a user's prefix
    upstream.py  connections to one instance

Touch this when requests find their instance in another way; the app is http/router_app.py.
"""
