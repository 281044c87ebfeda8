"""The HTTP interface: what can be asked, how it is checked, and the processes that answer.

    endpoints.py, messages.py, limits.py  the interface as data
    http_app.py                           what every app does with a request
    instance_service.py, user_endpoints.py, instance_lifecycle.py  what an instance answers
    instance_app.py, instance_process.py  an instance behind HTTP
    router_app.py, router_process.py      the router behind HTTP
    process.py                            sockets, signals, orderly ends
    client.py                             the endpoints as Python methods

Touch this when clients see something else.
"""
