"""Clusters for the tests of ``parallel``: real worker processes, started once."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import dask
import pytest
from distributed import Client

from meshtape.parallel.dask.cluster import local_cluster
from meshtape.parallel.transports.rendezvous import DataPlane

# Workers that import a library, or that a busy machine keeps waiting, are not to be taken for stopped: tests that stop
# one say how long they wait.
dask.config.set({"meshtape.timeouts.silence": 60.0})

MESH, SECRET = b"m" * 16, b"s" * 32
"""Of the mesh that the ``planes`` admit."""


@pytest.fixture
def planes() -> Iterator[list[DataPlane]]:
    """The data planes of three processes of one mesh, in this process."""
    made = [DataPlane("127.0.0.1") for _ in range(3)]
    for p in made:
        p.register_mesh(MESH, SECRET)
    yield made
    for p in made:
        p.close()
    for p in made:
        assert p._listener.join(60)


@pytest.fixture(scope="session")
def processes() -> Iterator[Client]:
    """A client of a cluster of two worker processes. Tests that kill workers take ``mortal``."""
    with local_cluster(2) as client:
        yield client


@pytest.fixture(scope="session")
def threads() -> Iterator[Client]:
    """A client of a cluster whose two workers are threads of this process."""
    with local_cluster(2, processes=False) as client:
        yield client


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """``eventually(condition)`` waits until something is so; a busy machine gets its time."""

    def wait(condition: Callable[[], object]) -> None:
        until = time.monotonic() + 200.0
        while not condition():
            assert time.monotonic() < until, "it never happened"
            time.sleep(0.05)

    return wait


def _whole(client: Client) -> bool:
    """Whether two workers are there and answer; one that was killed may still be listed."""
    answers = client.run(os.getpid, on_error="return")
    return sum(isinstance(a, int) for a in answers.values()) == len(answers) == 2


@pytest.fixture(scope="session")
def _mortal() -> Iterator[Callable[[], Client]]:
    with contextlib.ExitStack() as stack:
        held: list[Client] = []

        def whole() -> Client:
            until = time.monotonic() + 15.0
            while held and time.monotonic() < until:
                with contextlib.suppress(OSError):
                    if _whole(held[0]):
                        return held[0]
                time.sleep(0.1)
            # On a busy machine a nanny gives up starting a worker; that is not what is tested here.
            stack.close()
            held[:] = [stack.enter_context(local_cluster(2))]
            return held[0]

        yield whole


@pytest.fixture
def mortal(_mortal: Callable[[], Client]) -> Client:
    """A client of a cluster of two workers that a test may kill: theirs come back, or the next test gets a new
    cluster."""
    return _mortal()


@pytest.fixture(scope="session")
def gpus() -> Callable[..., contextlib.AbstractContextManager[ModuleType]]:
    """``with gpus(2) as cupy:`` emulates CuPy with this many devices in this process (``emulated_gpu``)."""
    name = "emulated_gpu"  # a neighbour of this file, which the importlib mode of pytest does not put on the path
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name].installed


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mesh")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "mesh.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path
