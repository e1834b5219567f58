"""Trees with leaves of other libraries, and saves into pipes, sockets and compressed streams."""

import gzip
import io
import os
import socket
import threading

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.storage import load, load_safetensors, save, save_async, save_safetensors, verify

ARRAYS = {"a": np.arange(6.0).reshape(2, 3), "b": {"c": np.ones(4, ml_dtypes.bfloat16)}}


class Foreign:
    """An array of a library that speaks DLPack alone, with a dtype and a sharding of its own."""

    dtype = "foreign.dtype"
    sharding = object()

    def __init__(self, a):
        self._a = mt.asarray(a)
        self.shape = a.shape

    def __dlpack__(self, **options):
        return self._a.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._a.__dlpack_device__()


class Tracked(Foreign):
    """One that exports without its tape alone, as PyTorch's parameters do."""

    def __dlpack__(self, **options):
        raise BufferError("cannot export a tensor that requires a gradient")

    def detach(self):
        return Foreign(np.asarray(self._a))


@pytest.mark.parametrize("kind", [Foreign, Tracked])
@pytest.mark.parametrize("dtype", ["f4", "i8", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_leaves_with_dlpack_are_saved(kit, tmp_path, kind, dtype):
    a = np.arange(6).reshape(2, 3).astype(dtype)
    tree = {"theirs": kind(a), "ours": mt.asarray(a), "numpy": a, "many": [kind(a), 3]}
    save(tmp_path / "c", tree)
    save_async(tmp_path / "d", tree).wait()
    save_safetensors(tmp_path / "e", {"theirs": kind(a)})
    for got in (load(tmp_path / "c"), load(tmp_path / "d")):
        assert all(kit.same(np.asarray(x), a) for x in (got["theirs"], got["ours"], got["numpy"], got["many"][0]))
    assert kit.same(load_safetensors(tmp_path / "e")["theirs"], a)


def test_what_is_done_after_save_async_is_not_in_the_file(tmp_path):
    a = np.zeros(1000)
    theirs = Foreign(a)
    held = np.from_dlpack(theirs._a)
    handle = save_async(tmp_path / "c", {"w": theirs})
    held.flags.writeable or held.setflags(write=False)
    theirs._a[...] = 7
    handle.wait()
    np.testing.assert_array_equal(np.asarray(load(tmp_path / "c")["w"]), a)


def test_a_leaf_that_cannot_be_exported_is_named(tmp_path):
    class Refuses(Foreign):
        def __dlpack__(self, **options):
            raise BufferError("sparse")

    for use in (lambda x: save(tmp_path / "c", {"q": x}), lambda x: save_safetensors(tmp_path / "x", {"q": x})):
        with pytest.raises(errors.CheckpointDTypeError, match=r"'q'.*DLPack: .*sparse"):
            use(Refuses(np.ones(2)))

    class Keys:  # as JAX's random keys and pandas' arrays are
        shape, dtype, __array__ = (2,), "key<fry>", None

    with pytest.raises(errors.CheckpointDTypeError, match=r"'q': dtype key<fry> cannot be saved"):
        save(tmp_path / "c", {"q": Keys()})
    assert not os.listdir(tmp_path)


def through_pipe(write):
    r, w = os.pipe()
    got = []

    def read():
        with os.fdopen(r, "rb") as f:
            got.append(f.read())

    t = threading.Thread(target=read)
    t.start()
    with os.fdopen(w, "wb", buffering=0) as f:
        write(f)
    t.join()
    return got[0]


def through_socket(write):
    a, b = socket.socketpair()
    got = bytearray()

    def read():
        while part := b.recv(1 << 16):
            got.extend(part)

    t = threading.Thread(target=read)
    t.start()
    write(a)
    a.close()
    t.join()
    b.close()
    return bytes(got)


def through_gzip(write):
    held = io.BytesIO()
    with gzip.GzipFile(fileobj=held, mode="wb") as f:
        write(f)
    return gzip.decompress(held.getvalue())


@pytest.mark.parametrize("through", [through_pipe, through_socket, through_gzip])
def test_save_into_a_stream_is_a_safetensors_file(tmp_path, through):
    tree = {**ARRAYS, "big": np.arange(400_000)}
    data = through(lambda f: save(f, tree))
    (tmp_path / "x.safetensors").write_bytes(data)
    assert verify(tmp_path / "x.safetensors").arrays == 3
    got = load(tmp_path / "x.safetensors")
    assert got.keys() == {"a", "b.c", "big"}
    np.testing.assert_array_equal(np.asarray(got["big"]), tree["big"])
    assert through(lambda f: save_safetensors(f, {"a": tree["a"]}))[8:].startswith(b"{")


def test_arrays_of_a_mesh_do_not_go_through_a_stream(kit):
    a = kit.split(np.arange(4.0), kit.Sharding(kit.Host({"x": 2}), (0,)))
    with pytest.raises(errors.CheckpointError, match="split over a mesh"):
        save(io.BytesIO(), {"w": a})


def test_a_stream_has_no_place_for_other_things():
    for tree, kw in (({"a": np.ones(2), "epoch": 3}, {}), (ARRAYS, {"step": 3}), (ARRAYS, {"compression": "zstd"})):
        stream = io.BytesIO()
        with pytest.raises(errors.CheckpointError, match="no place"):
            save(stream, tree, **kw)
        assert not stream.getvalue()
    with pytest.raises(errors.CheckpointError, match="binary mode"):
        save(io.StringIO(), ARRAYS)


def test_a_text_of_numpy_is_a_text(tmp_path):
    mt.save(tmp_path / "c", {"kind": np.array(["adam", "sgd"])[0]})
    found = mt.load(tmp_path / "c")["kind"]
    assert (found, type(found)) == ("adam", str)
