"""Waits for network stores end: in a forked child, at an interrupt, and where a server says nothing or next to it."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import dask
import numpy as np
import pytest
from serving import Handler, Served

from meshtape import errors
from meshtape.storage import load, open_checkpoint, save, serve
from meshtape.storage.base import waiting
from meshtape.storage.stores import store

LIMIT = 120  # seconds after which a test takes a process for one that does not end

CHILD = """
import os, signal, sys
import numpy as np
import meshtape as mt
from meshtape.errors import StoreError

def forked(work, leave=os._exit):
    "The exit status of a child that does some work."
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            work()
        except BaseException as e:
            print(type(e).__name__, e, flush=True)
            os._exit(1)
        leave(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def refused(work):
    try:
        work()
    except StoreError as e:
        assert "spawn" in str(e) and "survive a fork" in str(e), e
    else:
        raise AssertionError("it was not refused")

"""


def run(code, *args):
    """The output of a process that forks, and must end well."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD + code, *map(str, args)], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Silent:
    """A server that takes connections and says nothing; ``asked`` is set by the first."""

    def __init__(self):
        self.socket, self.asked, self.held = socket.create_server(("127.0.0.1", 0)), threading.Event(), []
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self):
        while True:
            try:
                self.held.append(self.socket.accept())
            except OSError:
                return
            self.asked.set()

    def close(self):
        self.socket.close()
        for held, _ in self.held:
            held.close()


@pytest.fixture
def silent(monkeypatch):
    pytest.importorskip("obstore")
    server = Silent()
    for name, value in {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield server
    server.close()


@pytest.fixture
def short():
    with dask.config.set({"meshtape.timeouts.store": 1.0}):
        yield


# ----- forks ----------------------------------------------------------------------------------------------------------

USED = """
url, again = sys.argv[1], sys.argv[2:]
OPTIONS = {} if "icechunk" in url else {"overwrite": True}
load = lambda: mt.load(url)["w"].tolist()
acts = [load, *(lambda to=to: mt.save(to, {"w": np.ones(3)}, **OPTIONS) for to in again)]
assert load() == [1, 1, 1]
for leave in (os._exit, sys.exit):  # the second takes down what the child inherited
    for act in acts:
        assert forked(lambda: refused(act), leave) == 0
        for act in acts:
            act()
assert forked(lambda: forked(lambda: refused(load)) == 0 or sys.exit(1)) == 0  # a grandchild
"""


def test_a_child_of_a_process_that_used_a_bucket_is_refused_and_harms_nobody(s3):
    save(f"{s3.url}/a", {"w": np.ones(3)})
    run(USED, f"{s3.url}/a", f"{s3.url}/b")


def test_a_child_of_a_process_that_read_by_http_is_refused_and_harms_nobody(tmp_path):
    pytest.importorskip("obstore")
    save(tmp_path / "c", {"w": np.ones(3)})
    with serve(tmp_path / "c") as server:
        run(USED, f"{server.url}safetensors")


def test_a_child_of_a_process_that_used_icechunk_is_refused_and_harms_nobody(tmp_path):
    pytest.importorskip("icechunk")
    url = f"icechunk://{tmp_path}/repo"
    save(url, {"w": np.ones(3)})
    run(USED, url, url)


def test_a_child_is_the_first_to_use_a_bucket(s3):
    save(f"{s3.url}/a", {"w": np.ones(3)})
    run(
        """
import obstore
load = lambda: mt.load(sys.argv[1])["w"].tolist() == [1, 1, 1] or sys.exit(1)
assert forked(load) == forked(load) == 0
load()
""",
        f"{s3.url}/a",
    )


def test_local_files_memory_and_fsspec_work_in_a_child(tmp_path):
    pytest.importorskip("obstore")
    fsspec = pytest.importorskip("fsspec")
    assert fsspec
    save(tmp_path / "c", {"w": np.ones(3)})
    run(
        """
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Plain(LocalFileSystem):
    protocol = "plain"

fsspec.register_implementation("plain", Plain)
places = [sys.argv[1], f"plain://{sys.argv[1]}", "memory://a/b"]
mt.save("memory://a/b", {"w": np.ones(3)})

def act():
    for place in places:
        assert mt.load(place)["w"].tolist() == [1, 1, 1]
    big = np.ones(3 << 20)  # in parts, where there are threads
    mt.save("memory://a/big", {"w": big}, overwrite=True)
    assert (np.asarray(mt.load("memory://a/big")["w"]) == big).all()

act()
assert forked(act) == 0
act()
""",
        tmp_path / "c",
    )


def test_locks_that_a_thread_of_the_parent_holds_are_free_in_a_child(tmp_path):
    run(
        """
import threading
from meshtape.storage.base import waiting
from meshtape.storage.saving import background
from meshtape.storage.stores import object_store

made = waiting.lock()
for lock in (made, background._lock, object_store._lock):
    held, done = threading.Event(), threading.Event()
    def hold():
        with lock:
            held.set()
            done.wait()
    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    def free():
        lock.acquire()
        lock.release()
        mt.storage.save_async(sys.argv[1] + f"/{os.getpid()}", {"w": np.ones(3)}).wait()
    assert forked(free) == 0
    assert lock.locked()
    done.set()
""",
        tmp_path,
    )


# ----- interrupts -----------------------------------------------------------------------------------------------------

INTERRUPTED = """
import sys
import numpy as np
import meshtape as mt
what, url = sys.argv[1:]
tree = {f"w{i}": np.ones((8 << 20 if what == "large" else 1000) // 8) for i in range(40 if what == "save" else 3)}
print("begins", flush=True)
try:
    mt.load(url) if what == "load" else mt.save(url, tree, **({"pack": False} if url.startswith("s3") else {}))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def interrupt(asked, *args):
    """Interrupt a process once it has ``asked`` a server; it must end long before the limit of its request."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *args],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout.readline() == "begins\n"
        assert asked.wait(LIMIT)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=LIMIT)[0] == "interrupted\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("load", "{}/x.safetensors"),
        ("load", "s3://bucket/c"),
        ("save", "s3://bucket/c"),
        ("load", "icechunk://s3://bucket/c"),
        ("save", "icechunk://s3://bucket/c"),
    ],
)
def test_an_interrupt_ends_the_wait_for_a_silent_server(silent, what, place):
    if place.startswith("icechunk"):
        pytest.importorskip("icechunk")
    interrupt(silent.asked, what, place.format(silent.url))


@pytest.mark.parametrize("what", ["load", "save", "large"])
def test_an_interrupt_ends_the_threads_that_wait_for_a_silent_server(s3, what):
    """Some of the objects are answered, those of the arrays are not."""
    asked, until = threading.Event(), threading.Event()
    place = s3.url.removeprefix("s3:/")  # late requests of another test's process are none of this one
    if what == "load":
        save(f"{s3.url}/c", {f"w{i}": np.ones(1000) for i in range(40)}, pack=False)

    def fault(number, method, path):
        if re.search(rf"{place}/c/w\d+/c", path) and (method == "GET") == (what == "load"):
            asked.set()
            return until
        return None

    s3.proxy.reset(fault)
    try:
        interrupt(asked, what, f"{s3.url}/c")
    finally:
        until.set()


# ----- silent servers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["{}/x.safetensors", "s3://bucket/c", "icechunk://s3://bucket/c"])
def test_a_silent_server_is_an_error_that_names_the_limit(silent, short, place):
    if place.startswith("icechunk"):
        pytest.importorskip("icechunk")
    url = place.format(silent.url)
    # A table of contents is asked for with its first 64 KiB, which may take a second more.
    acts = [(1 + place.startswith("s3"), lambda: load(url))]
    acts += [] if place.startswith("{") else [(1, lambda: save(url, {"w": np.ones(3)}))]
    for limit, act in acts:
        with pytest.raises(errors.StoreError, match=rf"within {limit} s.*meshtape\.timeouts\.store") as told:
            act()
        assert told.value.errno == errno.ETIMEDOUT
        assert str(told.value).startswith(url)
    # Nobody was asked again after the limit.
    assert len(silent.held) == len(acts)


def test_a_server_that_falls_silent_later(s3):
    save(f"{s3.url}/c", {f"w{i}": np.ones(1000) for i in range(40)}, pack=False)
    ckpt = open_checkpoint(f"{s3.url}/c")
    until = threading.Event()
    s3.proxy.reset(lambda n, method, path: until)
    try:
        for act in (lambda: ckpt["w3"][:], lambda: load(ckpt), lambda: save(f"{s3.url}/d", {"w": np.ones(4)})):
            with dask.config.set({"meshtape.timeouts.store": 1.0}), pytest.raises(errors.StoreError) as told:
                act()
            assert "meshtape.timeouts.store" in str(told.value)
    finally:
        until.set()


def test_an_upload_in_parts_to_a_server_that_falls_silent(s3, short, monkeypatch):
    monkeypatch.setattr(waiting, "RATE", 1 << 30)
    until = threading.Event()
    s3.proxy.reset(lambda n, method, path: until if "partNumber" in path else None)
    try:
        with pytest.raises(errors.StoreError):
            store.at(s3.url).put("x", lambda: iter([bytes(8 << 20)] * 4))
    finally:
        until.set()


def test_a_server_that_trickles(short, monkeypatch):
    """A byte comes now and then, so that no read of the client ever stalls."""
    pytest.importorskip("obstore")
    monkeypatch.setattr(waiting, "RATE", 1 << 20)
    done = threading.Event()

    class Trickling(Handler):
        def do_GET(self):
            self.send_response_only(206)
            self.send_header("Content-Range", "bytes 0-23/1000")
            self.send_header("Content-Length", "24")
            self.send_header("ETag", '"1"')
            self.end_headers()
            for _ in range(23):
                self.wfile.write(b"x")
                if done.wait(0.2):
                    return

    server = Served(Trickling)
    try:
        with pytest.raises(errors.StoreError, match=r"bytes 0 to 24.*within 1 s.*meshtape\.timeouts\.store"):
            load(f"{server.url}/x.safetensors")
    finally:
        done.set()
        server.close()


def test_a_request_for_more_bytes_has_longer(monkeypatch):
    monkeypatch.setattr(waiting, "RATE", 1000)
    with dask.config.set({"meshtape.timeouts.store": 0.01}):
        assert waiting.limited(lambda: time.sleep(0.3) or 7, "s3://b", "bytes", nbytes=10_000_000) == 7
        with pytest.raises(errors.StoreError, match="asked for bytes"):
            waiting.limited(lambda: time.sleep(0.3), "s3://b", "bytes")


@pytest.mark.parametrize("value", ["soon", 0, -1, None, float("nan"), True])
def test_settings_that_are_no_limit(value):
    with (
        dask.config.set({"meshtape.timeouts.store": value}),
        pytest.raises(errors.StoreError, match="seconds above 0"),
    ):
        open_checkpoint("s3://bucket/c")


def test_a_calls_own_error_comes_through():
    def fails():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        waiting.limited(fails, "s3://b", "bytes")
    assert os.getpid() == waiting.limited(os.getpid, "s3://b", "bytes")
