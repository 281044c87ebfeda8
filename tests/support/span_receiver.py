"""A receiver of OpenTelemetry spans by OTLP over HTTP, on loopback."""

import gzip
import http.server
import threading
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service


class Receiver:
    """An OTLP receiver over HTTP on loopback: the spans it was sent."""

    def __init__(self) -> None:
        spans: list[tuple[str, Any]] = []
        self.spans = spans

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                found = service.ExportTraceServiceRequest.FromString(body)
                for resource in found.resource_spans:
                    about = {a.key: a.value.string_value for a in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        spans.extend((about["service.instance.id"], span) for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
