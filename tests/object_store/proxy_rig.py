"""A server in front of a store that passes requests on, and does so badly when it is told to."""

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP = ("connection", "transfer-encoding")
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"

FAULTS = ("slow down", "reset", "answer lost", "cut upload", "cut download")
"""503; closed before the store has seen it; after the store has done it; half of the content up, or down."""


@contextmanager
def proxy(
    endpoint: str, *, dropped: tuple[str, ...] = (), fault: Callable[[str, Any], str] = lambda command, headers: ""
) -> Iterator[str]:
    """Its endpoint, while the block runs.

    Args:
        endpoint: of the store behind it, which may be gone at times.
        dropped: headers that are not passed on.
        fault: is asked for every request, by its command and headers; one of FAULTS, or nothing.
    """
    behind = urlsplit(endpoint).netloc

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            what = fault(self.command, self.headers)
            if what == "slow down":
                self.send_response(503)
                self.send_header("content-length", str(len(SLOW_DOWN)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else SLOW_DOWN)
                return
            if what == "reset":
                self.hang_up()
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() not in (*HOP, *dropped)}
            connection = http.client.HTTPConnection(behind, timeout=60)
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body[: len(body) // 2] if what == "cut upload" else body)
                if what == "cut upload":
                    self.hang_up()
                    return
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException):  # the store is gone
                self.hang_up()
                return
            finally:
                connection.close()
            if what == "answer lost":
                self.hang_up()
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in (*HOP, *dropped):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if what == "cut download" else content)
            if what == "cut download":
                self.hang_up()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        def hang_up(self) -> None:
            """Close the connection in the middle of what is going on."""
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

        def handle(self) -> None:
            try:
                super().handle()
            except (OSError, ValueError):  # whoever asked is dead, or was hung up on
                self.close_connection = True

        def finish(self) -> None:
            try:
                super().finish()
            except (OSError, ValueError):
                return

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
