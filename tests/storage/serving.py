"""Servers of the tests: how one is started and stopped, a proxy that harms what passes, and a bucket of S3."""

from __future__ import annotations

import http.client
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time


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


class Proxy(Served):
    """A real HTTP proxy before the server. ``fault(number, method, path)`` says what happens to a request: None, "500"
    (an answer of the server's own making), "cut" (half of the answer, then the end of the connection), "lost" (the
    request is carried out, the answer never comes), "slow" (the answer comes in drops), "stall" (no answer for long),
    an event until which there is no answer, or a process to kill before it is passed on."""

    def __init__(self, upstream):
        self.upstream, self.fault, self.count, self.sent, self.log = upstream, None, 0, 0, []
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
                there = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=200)
                there.request(self.command, self.path, body, dict(self.headers))
                got = there.getresponse()
                data = got.read()
                there.close()
                if fault == "lost":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.answer(got.status, dict(got.getheaders()), data, fault)

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


# The application of S3 itself: the one before it, which finds the service of a request, looks at every file of moto for
# each, and takes as long as all the rest.
_MOTO = """
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, create_backend_app("s3"), threaded=True, request_handler=MotoRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class S3:
    """A bucket of a moto server in a process of its own, seen through a `Proxy`."""

    KEY, SECRET = "AKIAmeshtapetest", "wJalrXUtnFEMIverysecret"

    def __init__(self):
        # It says which port it got: one that is chosen here could be somebody else's until it starts.
        command = [sys.executable, "-c", _MOTO]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        said = self.process.stdout.readline()
        assert said, "the moto server ended"
        self.port = int(said)
        self.request("PUT", "/bucket")
        self.proxy = Proxy(self.port)
        self.environment = {
            "AWS_ACCESS_KEY_ID": self.KEY,
            "AWS_SECRET_ACCESS_KEY": self.SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
        }

    def request(self, method, path, **headers):
        headers["Authorization"] = f"AWS4-HMAC-SHA256 Credential={self.KEY}/x/us-east-1/s3/aws4_request"
        there = http.client.HTTPConnection("127.0.0.1", self.port, timeout=200)
        there.request(method, path, None, headers)
        return there.getresponse().read()

    def publish(self, url):
        """Let everybody read what lies below; returns where it is for a browser."""
        from meshtape.storage.stores import store

        bucket_path = url.removeprefix("s3:/")
        for e in store.at(url).entries():
            self.request("PUT", f"{bucket_path}/{e.name}?acl", **{"x-amz-acl": "public-read"})
        return f"http://127.0.0.1:{self.proxy.port}{bucket_path}"

    def close(self):
        self.proxy.close()
        self.process.terminate()
        self.process.wait(200)
