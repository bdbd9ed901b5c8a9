"""Servers for the object-store tests: moto's S3, a small GCS, and a front that fails on demand.

The GCS fake speaks the XML API's conditional writes as documented: generations that rise with every write,
`x-goog-if-generation-match` (0 = must not exist), 412 when it does not hold.
"""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_XML = '<?xml version="1.0" encoding="UTF-8"?>'


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """Serve `handler` on a free loopback port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def moto_s3() -> Iterator[str]:
    """moto's server on a free loopback port, in this process; yields host:port."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"{host}:{port}"
    finally:
        server.stop()


def make_bucket(address: str, name: str) -> None:
    connection = http.client.HTTPConnection(address)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def fake_gcs() -> type[BaseHTTPRequestHandler]:
    """A fresh GCS with every bucket name existing."""
    objects: dict[str, tuple[bytes, int, dict[str, str]]] = {}
    state = {"generation": 1000}
    lock = threading.Lock()

    class Gcs(_Quiet):
        def headers_of(self, key: str) -> dict[str, str]:
            _, generation, marks = objects[key]
            date = "Wed, 21 Oct 2026 07:28:00 GMT"
            return {
                "ETag": f'"{generation:x}"',
                "x-goog-generation": str(generation),
                "Last-Modified": date,
            } | marks

        def do_PUT(self) -> None:
            key, data = urllib.parse.unquote(self.path), self.body()
            with lock:
                want = self.headers.get("x-goog-if-generation-match")
                now = objects[key][1] if key in objects else 0
                if want is not None and int(want) != now:
                    return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                state["generation"] += 1
                marks = {k: v for k, v in self.headers.items() if k.lower().startswith("x-goog-meta-")}
                objects[key] = (data, state["generation"], marks)
                self.answer(200, headers=self.headers_of(key))

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            key = urllib.parse.unquote(path)
            with lock:
                if "list-type=2" in query:
                    return self.answer(200, self.listing(key, urllib.parse.parse_qs(query)))
                if key not in objects:
                    return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                self.answer(200, objects[key][0], self.headers_of(key))

        do_HEAD = do_GET

        def listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
            start = bucket.rstrip("/") + "/"
            under = start + query.get("prefix", [""])[0]
            items = "".join(
                f"<Contents><Key>{key.removeprefix(start)}</Key><LastModified>2026-10-21T07:28:00Z</LastModified>"
                f"<ETag>x</ETag><Size>{len(objects[key][0])}</Size></Contents>"
                for key in sorted(objects)
                if key.startswith(under)
            )
            return f"{_XML}<ListBucketResult>{items}</ListBucketResult>".encode()

        def do_DELETE(self) -> None:
            with lock:
                gone = objects.pop(urllib.parse.unquote(self.path), None)
            self.answer(204 if gone else 404)

    return Gcs


def flaky(upstream: str, faults: list[str], seen: list[str]) -> type[BaseHTTPRequestHandler]:
    """A front for `upstream` that spends one of `faults` on each request, then passes everything on.

    A status code answers with it at once; 'hang' never answers; 'lost' passes the request on and drops the
    reply; 'cut' passes it on and drops the connection half-way through the reply; 'ok' passes it on.
    """

    class Front(_Quiet):
        def do_PUT(self) -> None:
            data = self.body()
            fault = faults.pop(0) if faults else "ok"
            seen.append(f"{self.command} {fault}")
            if fault.isdigit():
                code = {"503": "SlowDown", "403": "AccessDenied", "409": "ConditionalRequestConflict"}
                text = f"{_XML}<Error><Code>{code.get(fault, 'InternalError')}</Code></Error>"
                return self.answer(int(fault), text.encode(), {"Content-Type": "application/xml"})
            if fault == "hang":
                self.connection.settimeout(10)
                with suppress(OSError):
                    self.rfile.read(1)  # until the client gives up
                self.close_connection = True
                return None
            reply, content = self.forward(data)
            if fault in ("lost", "cut"):
                if fault == "cut":
                    self.answer_half(reply, content)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return None
            headers = {k: v for k, v in reply.getheaders() if k.lower() not in _HOP}
            self.answer(reply.status, content, headers)

        do_GET = do_DELETE = do_POST = do_HEAD = do_PUT

        def forward(self, data: bytes) -> tuple[http.client.HTTPResponse, bytes]:
            connection = http.client.HTTPConnection(upstream, timeout=20)
            connection.request(self.command, self.path, data, dict(self.headers.items()))
            reply = connection.getresponse()
            content = reply.read()
            connection.close()
            return reply, content

        def answer_half(self, reply: http.client.HTTPResponse, content: bytes) -> None:
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()

    return Front


_HOP = {"content-length", "transfer-encoding", "connection", "date", "server"}
