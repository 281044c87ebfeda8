"""Whether a process of a deployment is ready: over TCP, TLS or a Unix socket.

Touch this when processes are reached in another way.
"""

import http.client
import socket
import ssl
from urllib.parse import urlsplit

ANSWER_SECONDS = 1.0


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Connect to the path instead of to a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def is_ready(url: str) -> bool:
    """Whether the process at `url` (http://, https:// or unix:PATH) answers that it is ready."""
    try:
        connection = _connection(url)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return False


def _connection(url: str) -> http.client.HTTPConnection:
    if url.startswith("unix:"):
        return _UnixConnection(url.removeprefix("unix:"))
    address = urlsplit(url)
    if address.hostname is None:
        raise OSError(f"'{url}' names no host")
    if address.scheme == "https":
        # No secret is sent, and the answer decides nothing but how long to wait.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(
            address.hostname, address.port, timeout=ANSWER_SECONDS, context=context
        )
    return http.client.HTTPConnection(address.hostname, address.port, timeout=ANSWER_SECONDS)
