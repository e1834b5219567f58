"""Servers of the tests: how one is started and stopped, and a bucket of S3 that harms requests."""

from __future__ import annotations

import contextlib
import http.server
import io
import os
import signal
import socket
import sys
import threading
import time
import urllib.parse


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers of HTTP/1.1 that nobody prints. A subclass has ``do_GET`` and the like."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is written in two pieces; else each waits 40 ms

    def log_message(self, *args):
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = (
        128  # clients connect many at a time, and where the queue is full the system drops them in silence
    )

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # not a client that was killed or hung up


class Served:
    """A server on loopback, from when it is made until ``close``: ``url``, ``port``."""

    def __init__(self, handler):
        self.server = _Server(("127.0.0.1", 0), handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def one_in_three(fault):
    """A ``fault`` of each third request; but not of one that is tried again, which beside others could be the third
    every time."""
    harmed = set()

    def harms(number, method, path):
        if number % 3 or (method, path) in harmed:
            harmed.discard((method, path))
            return None
        harmed.add((method, path))
        return fault

    return harms


def _environ(method, path, headers, body):
    """What an application of WSGI is told of a request."""
    bare, _, query = path.partition("?")
    environ = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    return environ | {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": urllib.parse.unquote_to_bytes(bare).decode("latin-1"),
        "QUERY_STRING": query,
        "RAW_URI": path,
        "REQUEST_URI": path,
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_LENGTH": str(len(body)),
        "CONTENT_TYPE": environ.pop("HTTP_CONTENT_TYPE", ""),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }


class Proxy(Served):
    """A real HTTP server before an application of WSGI. ``fault(number, method, path)`` says what happens to a request:
    None, "500" (an answer of the server's own making), "cut" (half of the answer, then the end of the connection),
    "lost" (the request is carried out, the answer never comes), "slow" (the answer comes in drops), "stall" (no answer
    for long), an event until which there is no answer, or a process to kill before it is passed on."""

    def __init__(self, ask):
        self.fault, self.count, self.sent, self.log = None, 0, 0, []
        self._lock = threading.Lock()
        proxy = self

        class Proxying(Handler):
            def handle_one(self):
                length = int(self.headers.get("content-length") or 0)
                body = self.rfile.read(length)
                if len(body) < length:  # of a client that was killed: the server behind would wait for the rest
                    self.close_connection = True
                    return
                with proxy._lock:
                    proxy.count += 1
                    number = proxy.count
                    proxy.log.append((self.command, self.path))
                    fault = proxy.fault(number, self.command, self.path) if proxy.fault else None
                if isinstance(fault, int):
                    os.kill(fault, signal.SIGKILL)
                    self.close_connection = True
                    return
                if isinstance(fault, threading.Event):
                    fault.wait(120)
                    self.close_connection = True
                    return
                if fault == "stall":
                    time.sleep(3)
                if fault == "500":
                    self.answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
                    return
                status, headers, data = ask(self.command, self.path, self.headers, body)
                if fault == "lost":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.answer(status, headers, data, fault)

            def answer(self, status, headers, data, fault=None):
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                with proxy._lock:
                    proxy.sent += 0 if self.command == "HEAD" else len(data)
                length = headers.get("Content-Length") if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(length or 0))
                self.end_headers()
                if self.command == "HEAD":
                    return
                if fault == "cut" and len(data) > 1:
                    self.wfile.write(data[: len(data) // 2])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                elif fault == "slow":
                    for i in range(0, len(data), max(1, len(data) // 8)):
                        self.wfile.write(data[i : i + max(1, len(data) // 8)])
                        self.wfile.flush()
                        time.sleep(0.01)
                else:
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

        super().__init__(Proxying)

    def reset(self, fault=None):
        self.count, self.sent, self.log, self.fault = 0, 0, [], fault


class S3:
    """A bucket of moto, seen through a `Proxy` whose threads run moto's application: a server of its own takes as long
    as all the rest, and so does the application before that of S3, which finds the service of a request."""

    KEY, SECRET = "AKIAmeshtapetest", "wJalrXUtnFEMIverysecret"

    def __init__(self):
        from moto.moto_server.werkzeug_app import create_backend_app

        self.application = create_backend_app("s3")
        self.proxy = Proxy(self._ask)
        self.environment = {
            "AWS_ACCESS_KEY_ID": self.KEY,
            "AWS_SECRET_ACCESS_KEY": self.SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
        }

    def _ask(self, method, path, headers, body=b""):
        begun = []
        answer = self.application(
            _environ(method, path, headers, body), lambda status, headers, error=None: begun.extend((status, headers))
        )
        with contextlib.closing(answer):
            data = b"".join(answer)
        return int(begun[0][:3]), dict(begun[1]), data

    def request(self, method, path, **headers):
        """The headers of an answer to a request that does not count."""
        headers["Authorization"] = f"AWS4-HMAC-SHA256 Credential={self.KEY}/x/us-east-1/s3/aws4_request"
        return self._ask(method, path, {"Host": f"127.0.0.1:{self.proxy.port}", **headers})[1]

    def empty(self):
        """A bucket without objects, which moto goes through for each list."""
        from moto.s3.models import s3_backends

        for backends in s3_backends.values():
            backends["aws"].reset()
        self.request("PUT", "/bucket")

    def publish(self, url):
        """Let everybody read what lies below; returns where it is for a browser."""
        from meshtape.storage.stores import store

        bucket_path = url.removeprefix("s3:/")
        for e in store.at(url).entries():
            self.request("PUT", f"{bucket_path}/{e.name}?acl", **{"x-amz-acl": "public-read"})
        return f"http://127.0.0.1:{self.proxy.port}{bucket_path}"

    def close(self):
        self.proxy.close()
