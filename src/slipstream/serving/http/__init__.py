"""Serving over HTTP: messages, endpoints, limits, the apps of instance and router, the client.

    messages.py, endpoints.py     the interface as data
    http_app.py, limits.py        what both apps share: API keys, rates, decoding, errors
    instance_*.py, router_*.py    the apps, and the processes that run them
    process.py                    the process around an app: socket, signals, drain
    client.py                     the endpoints as Python methods

Touch this when the HTTP interface changes.
"""
