"""Our safetensors against the reference's vectors, and against the reference itself."""

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshtape import errors
from meshtape.storage import load_safetensors, read_header, save_safetensors
from meshtape.storage.readers.safetensors import MAX_HEADER, build_header, parse_header
from meshtape.storage.stores.filesystem import Files, using


def blob(header, data=b""):
    raw = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype="I32", shape="[2,2]", offsets="[0,16]", extra=""):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}{extra}}}'


def one(name="a", **kw):
    return f'{{"{name}":{entry(**kw)}}}'


SIXTEEN = bytes(16)

REFUSED = [
    # (what, bytes, the reference's error)
    ("empty input", b"", "HeaderTooSmall"),
    ("length alone", b"\0" * 7, "HeaderTooSmall"),
    ("length, no header", bytes([8]) + b"\0" * 7, "InvalidHeaderLength"),
    ("not utf-8", b"\x01" + b"\0" * 7 + b"\xff", "InvalidHeader"),
    ("half an object", b"\x01" + b"\0" * 7 + b"\x7b", "InvalidHeaderDeserialization"),
    ("N = 0", b"\0" * 8, "InvalidHeaderDeserialization"),
    ("huge N", bytes.fromhex("3c00000000ffffff"), "HeaderTooLarge"),
    ("N above the cap", struct.pack("<Q", MAX_HEADER + 1) + b"{}", "HeaderTooLarge"),
    ("header beyond the file", struct.pack("<Q", 1000) + b"{}", "InvalidHeaderLength"),
    ("polyglot tail", blob(one(), SIXTEEN + b"extra_bogus_data_for_polyglot_file"), "MetadataIncompleteBuffer"),
    ("two bytes short", blob(one(), SIXTEEN[:-2]), "MetadataIncompleteBuffer"),
    ("too few bytes for the shape", blob(one(offsets="[0,4]"), bytes(4)), "TensorInvalidInfo"),
    ("overflow of size", blob(one(shape="[2,18446744073709551614]"), SIXTEEN), "ValidationOverflow"),
    ("overflow of bytes", blob(one(shape="[2,9223372036854775807]"), SIXTEEN), "ValidationOverflow"),
    (
        "overflow before the zero",
        blob(one(shape="[9223372036854775808,9223372036854775808,0]", offsets="[0,0]")),
        "Overflow",
    ),
    (
        "ten at one place",
        blob("{" + ",".join(f'"weight_{i}":{entry()}' for i in range(10)) + "}", SIXTEEN),
        "InvalidOffset",
    ),
    ("hole at the start", blob(one(offsets="[4,20]"), bytes(20)), "InvalidOffset"),
    ("hole in the middle", blob(f'{{"a":{entry()},"b":{entry(offsets="[20,36]")}}}', bytes(36)), "InvalidOffset"),
    ("reversed", blob(one(offsets="[16,0]"), SIXTEEN), "InvalidOffset"),
    ("three offsets", blob(one(offsets="[0,16,16]"), SIXTEEN), "Deserialization"),
    ("duplicate, same place", blob(f'{{"a":{entry()},"a":{entry()}}}', SIXTEEN), "Deserialization"),
    ("duplicate, other place", blob(f'{{"a":{entry()},"a":{entry(offsets="[16,32]")}}}', bytes(32)), "Deserialization"),
    ("duplicate __metadata__", blob('{"__metadata__":{},"__metadata__":{}}'), "Deserialization"),
    ("missing dtype", blob('{"a":{"shape":[],"data_offsets":[0,4]}}', bytes(4)), "Deserialization"),
    ("unknown dtype", blob(one(dtype="Q32"), SIXTEEN), "Deserialization"),
    ("dtype in lower case", blob(one(dtype="i32"), SIXTEEN), "Deserialization"),
    ("float size", blob(one(shape="[1.0]", offsets="[0,4]"), bytes(4)), "Deserialization"),
    ("exponent", blob(one(shape="[1e0]", offsets="[0,4]"), bytes(4)), "Deserialization"),
    ("negative size", blob(one(shape="[-1]", offsets="[0,4]"), bytes(4)), "Deserialization"),
    ("minus zero", blob(one(shape="[-0]", offsets="[0,0]")), "Deserialization"),
    ("size as text", blob(one(shape='["1"]', offsets="[0,4]"), bytes(4)), "Deserialization"),
    ("size true", blob(one(shape="[true]", offsets="[0,4]"), bytes(4)), "Deserialization"),
    ("size of 5000 digits", blob(one(shape=f"[{'9' * 5000}]"), SIXTEEN), "Deserialization"),
    ("metadata number", blob('{"__metadata__":{"a":1}}'), "Deserialization"),
    ("metadata nested", blob('{"__metadata__":{"a":{}}}'), "Deserialization"),
    ("metadata list", blob('{"__metadata__":[]}'), "Deserialization"),
    ("lone surrogate", blob(one(name="\\ud800"), SIXTEEN), "Deserialization"),
    ("trailing JSON", blob("{}{}"), "Deserialization"),
    ("an array", blob("[]"), "Deserialization"),
    ("NaN", blob(one(extra=',"x":NaN'), SIXTEEN), "Deserialization"),
    ("trailing NUL", blob("{}\0"), "Deserialization"),
    ("deep nesting", blob(one(extra=f',"x":{"[" * 200}{"]" * 200}'), SIXTEEN), "Deserialization"),
    ("very deep nesting", blob(one(extra=f',"x":{"[" * 100_000}{"]" * 100_000}'), SIXTEEN), "Deserialization"),
    ("entry is a list", blob('{"a":[]}'), "Deserialization"),
    ("half a byte", blob(one(dtype="F4", shape="[1,3]", offsets="[0,2]"), bytes(2)), "MisalignedSlice"),
    ("F4 too long", blob(one(dtype="F4", shape="[1,2]", offsets="[0,2]"), bytes(2)), "TensorInvalidInfo"),
    ("100 dimensions", blob(one(shape=f"[{','.join(['1'] * 100)}]", offsets="[0,4]"), bytes(4)), "NumPy cannot hold"),
    (
        "zero times huge",
        blob(one(shape="[0,9223372036854775808,9223372036854775808]", offsets="[0,0]")),
        "NumPy cannot hold",
    ),
]


@pytest.mark.parametrize(("data", "error"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_as_by_the_reference(tmp_path, data, error):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(errors.CorruptCheckpoint, match=error) as e:
        read_header(path)
    assert str(path) in str(e.value)


ACCEPTED = [
    ("scalar", one(shape="[]", offsets="[0,4]"), 4),
    ("zero size", one(shape="[2,0]", offsets="[0,0]"), 0),
    ("white space behind", "{}\r \t\n", 0),
    ("white space around", "\t\n{}\r ", 0),
    ("extra field", one(extra=',"x":{"y":[1.5,null]}'), 16),
    ("metadata null", '{"__metadata__":null}', 0),
    ("NUL in a name", one(name="a\\u0000b"), 16),
    ("empty name", one(name=""), 16),
    ("name like a path", one(name="../../etc/passwd"), 16),
    ("surrogate pair", one(name="\\ud83d\\ude00"), 16),
    ("packed", one(dtype="F4", shape="[1,2]", offsets="[0,1]"), 1),
]


@pytest.mark.parametrize(("header", "n"), [r[1:] for r in ACCEPTED], ids=[r[0] for r in ACCEPTED])
def test_accepted_as_by_the_reference(tmp_path, header, n):
    from safetensors import safe_open

    path = tmp_path / "x.safetensors"
    path.write_bytes(blob(header, bytes(n)))
    with safe_open(path, "np") as f:
        assert set(read_header(path).tensors) == set(f.keys())


def test_writer_yields_the_documented_bytes(tmp_path):
    def written(tensors, metadata=None):
        save_safetensors(tmp_path / "x", tensors, metadata=metadata, overwrite=True, checksums=False)
        return (tmp_path / "x").read_bytes()

    a = np.arange(6, dtype="f4").reshape(1, 2, 3)
    head = b'{"attn.0":{"dtype":"F32","shape":[1,2,3],"data_offsets":[0,24]}}'
    assert written({"attn.0": a}) == struct.pack("<Q", 0x40) + head + a.tobytes()
    got = written({"attn0": a.reshape(1, 1, 2, 3)})
    assert got[:8] == struct.pack("<Q", 72)
    assert got[8:80].endswith(b"}" + b" " * 7)
    assert written({}) == bytes.fromhex("0800000000000000") + b"{}      "
    assert written({}, {"framework": "pt"})[:8] == struct.pack("<Q", 40)
    t1, t2 = np.zeros((2, 2), "i4"), np.zeros((2, 2), "f2")
    both = written({"test1": t1, "test2": t2})
    assert both == written({"test2": t2, "test1": t1})
    assert both[:8] == struct.pack("<Q", 0x80)
    assert both[8:0x88].endswith(b" " * 6)
    assert written({"x": np.array([1], ">i4")})[-4:] == b"\1\0\0\0"


def test_writer_agrees_with_the_reference_byte_for_byte(kit, tmp_path):
    from safetensors.numpy import save_file

    every = {f"{d.name}é{s}": kit.random(d, s, i) for i, d in enumerate(kit.DTYPES) if d != "c16" for s in kit.SHAPES}
    save_file(every, tmp_path / "theirs", metadata={"format": "pt", "ü": "ä"})
    save_safetensors(tmp_path / "ours", every, metadata={"format": "pt", "ü": "ä"}, checksums=False)
    theirs, ours = (tmp_path / "theirs").read_bytes(), (tmp_path / "ours").read_bytes()
    # The reference keeps metadata in an unordered map: compare its place by value.
    assert len(theirs) == len(ours)
    assert read_header(tmp_path / "theirs").tensors == read_header(tmp_path / "ours").tensors
    n = read_header(tmp_path / "ours").data_start
    assert theirs[n:] == ours[n:]


@pytest.mark.parametrize("make", [lambda a: a.T, lambda a: a[::2], lambda a: a[::-1, ::3], np.asfortranarray])
def test_layout_in_memory_does_not_change_values(tmp_path, make):
    a = make(np.random.default_rng(0).normal(size=(3000, 700)))
    save_safetensors(tmp_path / "x", {"a": a})
    assert np.array_equal(load_safetensors(tmp_path / "x")["a"], a)


def test_writer_refuses_what_it_could_not_read(tmp_path):
    a = np.ones(1)
    for tensors, metadata, kind, text in [
        ({"__metadata__": a}, None, errors.CheckpointKeyError, "__metadata__"),
        ({"c": a.astype("c16")}, None, errors.CheckpointDTypeError, "'c'"),
        ({"a": a}, {"n": 1}, TypeError, "texts"),
        ({"\ud800": a}, None, errors.CheckpointKeyError, "surrogate"),
        ({"a": a}, {"m": "x" * MAX_HEADER}, errors.CheckpointError, "HeaderTooLarge"),
    ]:
        with pytest.raises(kind, match=text):
            save_safetensors(tmp_path / "x", tensors, metadata=metadata)
    assert list(tmp_path.iterdir()) == []
    save_safetensors(tmp_path / "x", {"a": a})
    with pytest.raises(errors.CheckpointExists, match="overwrite=True"):
        save_safetensors(tmp_path / "x", {"a": a})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | st.text(max_size=4),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I8", "BOOL", "F4", "f32"]) | json_values,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=1, max_size=3) | json_values,
    }
)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), entries | json_values, max_size=4),
    st.integers(0, 60),
)
@example({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 8)
def test_any_header_is_read_as_the_reference_reads_it(top, n):
    """Either both read the same tensors, or we raise our one error. What we alone refuse is listed."""
    from safetensors import SafetensorError, deserialize

    data = blob(json.dumps(top), bytes(n))
    try:
        theirs = {k: (v["dtype"], tuple(v["shape"])) for k, v in deserialize(data)}
    except SafetensorError:
        theirs = None
    try:
        ours = {k: (t.dtype, t.shape) for k, t in parse_header(data, len(data)).tensors.items()}
    except errors.CorruptCheckpoint as e:
        ours = theirs if "NumPy cannot hold" in str(e) else None
    assert ours == theirs


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=20), st.integers(0, 100))
def test_random_damage_never_escapes_the_error_type(noise, tail, at):
    head, _ = build_header([("a", "F32", (2,)), ("b", "I8", (3,))], {"k": "v"})
    data = bytearray(head + bytes(11))
    at %= len(data)
    data[at : at + len(noise)] = noise
    data += tail
    with contextlib.suppress(errors.CorruptCheckpoint):
        parse_header(bytes(data), len(data))


def test_many_overlapping_entries_are_refused():
    """Looked at one by one: what compared each with each would not end within the time that a test has."""
    e = entry(offsets="[200,200]", shape="[0]")
    data = blob("{" + ",".join(f'"w{i}":{e}' for i in range(50_000)) + "}")
    with pytest.raises(errors.CorruptCheckpoint, match="InvalidOffset"):
        parse_header(data, len(data))


# ----- streams --------------------------------------------------------------------------------------------------------


def test_a_pipe_will_do(kit, tmp_path):
    """No seeking, short writes, and views that lie in memory in another order."""
    a = kit.random(np.dtype("f4"), (300, 400))
    arrays = {"a": a[::2].T, "b": kit.random(np.dtype("u1"), (70_001,)), "s": np.float64(1), "e": np.zeros((0, 3))}
    reader, writer = os.pipe()
    got = []

    def drain():
        with open(reader, "rb") as stream:
            got.append(stream.read())

    thread = threading.Thread(target=drain)
    thread.start()
    with open(writer, "wb", buffering=0) as stream:
        save_safetensors(stream, arrays, metadata={"format": "pt"})
    thread.join()
    save_safetensors(tmp_path / "x.safetensors", arrays, metadata={"format": "pt"})
    assert got[0] == (tmp_path / "x.safetensors").read_bytes()
    memory = io.BytesIO()
    save_safetensors(memory, arrays, metadata={"format": "pt"})
    assert memory.getvalue() == got[0]


@pytest.mark.parametrize("at", [0, 5, 100, 5000])
def test_a_stream_that_breaks_is_an_error(at):
    class Breaks(io.RawIOBase):
        n = 0

        def writable(self):
            return True

        def write(self, data):
            self.n += len(data)
            if self.n > at:
                raise OSError(28, "no space")
            return len(data)

    with pytest.raises(OSError, match="no space"):
        save_safetensors(Breaks(), {"a": np.zeros(1000)})


def test_a_writer_that_breaks_leaves_the_file_of_before(tmp_path):
    class Breaks(Files):
        def write(self, fd, buffers, offset):
            if offset > 0:
                raise OSError(28, "no space")
            return super().write(fd, buffers, offset)

    path = tmp_path / "x.safetensors"
    with using(Breaks()), pytest.raises(errors.StorageFull):
        save_safetensors(path, {"a": np.zeros(10_000)})
    assert list(tmp_path.iterdir()) == []
    save_safetensors(path, {"a": np.ones(10_000)})
    with using(Breaks()), pytest.raises(errors.StorageFull):
        save_safetensors(path, {"a": np.zeros(10_000)}, overwrite=True)
    assert load_safetensors(path)["a"].tolist() == [1] * 10_000
    assert len(list(tmp_path.iterdir())) == 1


_MEMORY = """
import numpy as np, sys, os
from meshtape.storage import save_safetensors
a = np.ones((int(sys.argv[1]) << 20) // 8 // 1024 * 1024).reshape(-1, 1024)
save_safetensors(sys.argv[2], {"a": np.ones((2, 3)).T})
def peak():  # getrusage would count the process that started this one
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
before = peak()
with open(os.devnull, "wb", buffering=0) as f:
    save_safetensors(f, {"a": a.T, "b": a[::2]})
print((peak() - before) >> 10)
"""


@pytest.mark.parametrize("megabytes", [192, pytest.param(1024, marks=pytest.mark.slow)])
def test_memory_grows_by_less_than_64_megabytes(tmp_path, megabytes):
    out = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(megabytes), str(tmp_path / "x")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) < 64
