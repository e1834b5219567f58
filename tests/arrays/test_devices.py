"""Devices by name, and what is said where there is no GPU."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import threading

import numpy as np
import pytest

from meshtape import arrays as mt
from meshtape.arrays.core.devices import Device
from meshtape.arrays.core.errors import BackendError, DeviceError

NO_CUPY = importlib.util.find_spec("cupy") is None


@pytest.mark.parametrize("name", ["cpu", "cuda:0", "cuda:1", "cuda:12"])
def test_a_device_is_its_name(name):
    d = mt.device(name)
    assert str(d) == name
    assert mt.device(str(d)) is d
    assert mt.device(d) is d
    assert pickle.loads(pickle.dumps(d)) == d
    assert mt.device(copy.deepcopy(d)) is d
    assert hash(Device(d.kind, d.index)) == hash(d)


def test_short_names():
    assert mt.device("cuda") is mt.device("cuda:0")
    assert mt.device("cpu:0") is mt.device("cpu")
    assert mt.device("cuda:007") is mt.device("cuda:7")


@pytest.mark.parametrize("bad", ["gpu", "", "cpu:1", "cpu:", "cuda:", "cuda:-1", "cuda:x", "CPU", " cpu", 0, None])
def test_unknown_devices(bad):
    with pytest.raises(DeviceError, match="cpu"):
        mt.device(bad)


def test_default_device_is_of_the_thread():
    assert mt.default_device() is mt.device("cpu")
    seen = []
    with mt.use_device("cuda:3") as d:
        assert mt.default_device() is d
        t = threading.Thread(target=lambda: seen.append(mt.default_device()))
        t.start()
        t.join()
        with mt.use_device("cpu"):
            assert str(mt.default_device()) == "cpu"
        assert mt.default_device() is d
    assert seen == [mt.device("cpu")]
    assert str(mt.default_device()) == "cpu"
    with pytest.raises(RuntimeError, match="inside"), mt.use_device("cuda:3"):
        raise RuntimeError("inside")
    assert str(mt.default_device()) == "cpu"


def test_arrays_say_where_they_live():
    x = mt.ones(2)
    assert x.device is mt.device("cpu")
    assert x.to_device("cpu") is x
    assert mt.devices()[0] is mt.device("cpu")
    with pytest.raises(DeviceError, match="stream"):
        x.to_device("cpu", stream=1)


@pytest.mark.skipif(not NO_CUPY, reason="CuPy is installed: tests/gpu covers this")
def test_without_cupy_a_cuda_array_says_how_to_get_it():
    for make in (
        lambda: mt.zeros(2, device="cuda:0"),
        lambda: mt.ones(2).to_device("cuda:0"),
        lambda: mt.asarray([1.0], device="cuda:0"),
        lambda: mt.random.key(0, device="cuda:0"),
    ):
        with pytest.raises(BackendError, match=r"pip install.*cuda"):
            make()
    with mt.use_device("cuda:0"), pytest.raises(BackendError):
        mt.zeros(2)
    assert mt.devices() == [mt.device("cpu")]


class _Far(np.ndarray):
    """A buffer that claims another device: where the error comes from needs no GPU."""


def test_arrays_of_two_devices_in_one_op_are_refused(monkeypatch):
    from meshtape.arrays.backends.backend import NumPyBackend
    from meshtape.arrays.core.dispatch import wrap

    there = mt.device("cuda:0")
    monkeypatch.setattr(NumPyBackend, "device_of", lambda self, b: there if isinstance(b, _Far) else mt.device("cpu"))
    far = wrap(np.ones(3).view(_Far))
    assert far.device is there
    with pytest.raises(DeviceError, match=r"\[add\].*cpu.*cuda:0.*to_device"):
        far + mt.ones(3)
