"""Devices by name, and what is said where there is no GPU."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from meshtape import arrays as mt
from meshtape.arrays.core.devices import Device, use_device
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
    with use_device("cuda:3") as d:  # which does not ask whether there is one
        assert mt.default_device() is d
        t = threading.Thread(target=lambda: seen.append(mt.default_device()))
        t.start()
        t.join()
        with mt.use_device("cpu"):
            assert str(mt.default_device()) == "cpu"
        assert mt.default_device() is d
    assert seen == [mt.device("cpu")]
    assert str(mt.default_device()) == "cpu"
    with pytest.raises(RuntimeError, match="inside"), use_device("cuda:3"):
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
    assert mt.devices() == [mt.device("cpu")]


@pytest.mark.skipif(mt.devices() != [mt.device("cpu")], reason="there is a GPU: tests/gpu covers this")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", mt.device("cuda:3")])
def test_a_default_device_that_is_not_there_is_refused_at_once(name: Any) -> None:
    with pytest.raises(BackendError) as of_array:
        mt.zeros(2, device=name)
    with pytest.raises(BackendError) as at_once:
        mt.use_device(name)  # before any block is entered
    assert str(at_once.value) == str(of_array.value)
    assert mt.default_device() is mt.device("cpu")
    with pytest.raises(DeviceError, match="unknown device"):
        mt.use_device("gpu")


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
