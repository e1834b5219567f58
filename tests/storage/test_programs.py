"""Program files: what is written comes back the same, and runs, differentiates and compiles like the code it came
from."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from same_programs import same_program

import meshtape as mt
from meshtape.arrays.core.op import ShapeDtype
from meshtape.storage.programs import encode as pj
from meshtape.storage.stores import object_store
from meshtape.storage.stores import store as stores


def arr(*values, dtype=mt.float64):
    return mt.asarray(list(values), dtype=dtype)


def round_trip(program):
    document, constants = pj.to_json(program)
    back = pj.from_json(json.loads(json.dumps(document, allow_nan=False)), constants)
    assert same_program(back, program)
    return back


# Each a function of one array of shape (4, 3), with what it puts into a program.
X = np.random.default_rng(0).standard_normal((4, 3))
ODD = mt.asarray(np.array([np.nan, np.inf, -np.inf, -0.0, 1e-310]))
FLOAT8 = mt.asarray(np.array([1.5, np.nan, 448.0]).astype(ml_dtypes.float8_e4m3fn))
BFLOAT = mt.asarray(np.array([1.5, np.nan, np.inf]).astype(ml_dtypes.bfloat16))
COMPLEX = mt.asarray(np.array([1 + 2j, complex(np.nan, -0.0), complex(np.inf, np.nan)]))
ROWS, MASK = mt.asarray([0, -1, 0]), mt.asarray([True, False, True, True])
CASES = {
    "scalars": lambda x: x * 2 + 2.0 - (x > float("-inf")) * (1 + 2j),
    "NaN and infinities": lambda x: mt.where(mt.isnan(x), x, float("nan")) + float("inf") * -0.0,
    "odd constants": lambda x: x[0, 0] * ODD,
    "float8 constants": lambda x: mt.astype(FLOAT8, mt.float32) * mt.astype(x[0, 0], mt.float32),
    "bfloat16 constants": lambda x: BFLOAT * mt.astype(x[0], mt.bfloat16),
    "complex constants": lambda x: COMPLEX * x[0],
    "0-d and zero-size": lambda x: x[1, 2] + x[:0].sum() * mt.asarray(3.0),
    "indices": lambda x: (
        x[::-1, None, 1:],
        x[ROWS, :, None],
        x[..., ROWS, ROWS],
        x.at[MASK].set(0.0),
        x[True],
        x[0, ..., 1],
    ),
    "shared and repeated": lambda x: (lambda y: (y, y + y, x))(x * x),
    "axes and dtypes": lambda x: mt.permute_dims(mt.sum(x, axis=(0,), keepdims=True).astype("float32"), (1, 0)),
    "norms": lambda x: mt.layer_norm(x, 3, eps=1e-3),
    "random": lambda x: x * mt.random.normal(mt.random.key(1), x.shape),
    "a gradient": mt.grad(lambda x: mt.nn.cross_entropy(x, mt.asarray([0, 1, 2, 0]))),
    "nothing but a constant": lambda x: ODD,
}


def bits(tree):
    return [(a.dtype, a.shape, np.asarray(a).tobytes()) for a in mt.tree.flatten(tree)[0]]


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_comes_back(name, tmp_path):
    fn, x = CASES[name], mt.asarray(X)
    round_trip(mt.compile(fn).program(x))
    mt.save_program(tmp_path / "p", fn, x)
    loaded = mt.load_program(tmp_path / "p")
    assert same_program(loaded.program, mt.compile(fn).program(x))
    assert bits(loaded(x)) == bits(mt.compile(fn)(x))
    assert bits(mt.compile(loaded)(x)) == bits(mt.compile(fn)(x))


def test_trees_statics_and_another_process(tmp_path):
    def fn(p, scale, flags):
        y = p["w"] @ p["b"][0] * scale
        return {"y": y, "all": [p["b"][0], (3, None)], "name": flags["name"]}

    args = ({"w": arr(1, 2).reshape(1, 2), "b": (arr(3, 4), None)}, 2.0, {"name": "n", "bad": float("nan")})
    mt.save_program(tmp_path / "p", fn, *args)
    loaded = mt.load_program(tmp_path / "p")
    out = loaded(*args)
    assert (out["y"].tolist(), out["all"][0].tolist(), out["all"][1], out["name"]) == ([22.0], [3, 4], (3, None), "n")
    for bad, match in [
        ((args[0], 3.0, args[2]), r"argument 1 is 3\.0, the program was made for 2\.0"),
        ((args[0], 2, args[2]), r"argument 1 is 2, the program was made for 2\.0"),
        (args[:2], r"takes 3 argument"),
        (
            ({"w": args[0]["w"]}, *args[1:]),
            r"argument 0 is a dict of \['w'\], the program takes a dict of \['w', 'b'\]",
        ),
        (({"w": mt.ones((1, 3)), "b": args[0]["b"]}, *args[1:]), r"argument 0, w is float64\[1,3\], .*float64\[1,2\]"),
        (({"w": args[0]["w"], "b": [arr(3, 4), None]}, *args[1:]), r"argument 0, b is a list of"),
    ]:
        with pytest.raises(mt.errors.ShapeError, match=match):
            loaded(*bad)
    code = (
        "import sys, meshtape as mt; f = mt.load_program(sys.argv[1]);"
        "print(f({'w': mt.asarray([[1.0, 2.0]]), 'b': (mt.asarray([3.0, 4.0]), None)}, 2.0,"
        " {'name': 'n', 'bad': float('nan')})['y'].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "p")], capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "[22.0]\n", done.stderr


def test_a_loaded_program_is_differentiated_compiled_and_split(tmp_path):
    fn = lambda x: (mt.layer_norm(mt.tanh(x), 4) ** 2 * mt.sin(x)).sum()  # noqa: E731
    x = mt.asarray(np.random.default_rng(1).standard_normal((4, 4)))
    mt.save_program(tmp_path / "p", mt.compile(fn), x)
    loaded = mt.load_program(tmp_path / "p")
    expected = mt.grad(fn)(x)
    assert bits(mt.grad(loaded)(x)) == bits(expected)
    np.testing.assert_allclose(np.asarray(mt.hessian(loaded)(x)), np.asarray(mt.hessian(fn)(x)), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.asarray(mt.compile(mt.grad(loaded))(x)), np.asarray(expected), rtol=1e-12)
    split = mt.distribute(x, mt.Mesh({"a": 2}), a=mt.Shard(0))
    g = mt.grad(loaded)(split)
    assert g.sharding is not None
    np.testing.assert_allclose(np.asarray(g), np.asarray(expected), rtol=1e-9, atol=1e-12)


def test_a_derivative_that_the_program_does_not_hold_is_refused_and_not_another(tmp_path):
    doubled = mt.custom_vjp(lambda x: x * x)
    doubled.defvjp(lambda x: (x * x, x), lambda x, g: (4.0 * x * g,))
    x = arr(1.0, 2.0)
    for fn in (doubled, lambda x: mt.gradient_hook(x * x, lambda g: 2.0 * g)):
        total = lambda x, fn=fn: mt.sum(fn(x))  # noqa: E731
        loaded = mt.load_program(mt.storage.program_document(total, x))
        assert float(loaded(x)) == float(mt.compile(loaded)(x)) == 5.0
        for slope in (mt.grad(loaded), mt.grad(mt.compile(loaded)), mt.compile(mt.grad(loaded))):
            with pytest.raises(mt.errors.GradientError, match="whose derivative is not in its program"):
                slope(x)
        assert mt.load_program(mt.storage.program_document(mt.grad(total), x))(x).tolist() == [4.0, 8.0]
    again = mt.load_program(mt.storage.program_document(mt.checkpoint(lambda x: mt.sum(x * x)), x))
    assert mt.grad(again)(x).tolist() == [2.0, 4.0]


def test_results_are_the_callers(tmp_path):
    mt.save_program(tmp_path / "p", lambda x: (x, ODD), arr(1.0))
    loaded = mt.load_program(tmp_path / "p")
    x = arr(1.0)
    y, c = loaded(x)
    y[0], c[0] = 5.0, 5.0
    assert x.tolist() == [1.0]
    assert np.isnan(loaded(x)[1].tolist()[0])


def test_a_program_that_was_traced_on_a_mesh_is_refused_by_name(tmp_path):
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(arr(1, 2), mesh, a=mt.Shard(0))
    with pytest.raises(mt.errors.ProgramError, match=r"entry 1 \(reshard\), parameter layout: a Layout"):
        mt.save_program(tmp_path / "p", lambda x: mt.reshard(x * 2.0, a=mt.Replicate()), x)
    with pytest.raises(mt.errors.ProgramError, match=r"constant %\d+ .* is split over a mesh"):
        mt.save_program(tmp_path / "p", lambda y: y + x, mt.distribute(arr(1, 2), mesh))
    assert list(tmp_path.iterdir()) == []


class Pair(NamedTuple):
    a: object


@pytest.mark.parametrize(
    ("fn", "arg", "match"),
    [
        (lambda p: p.a, Pair(mt.ones(2)), "argument 0 is a Pair"),
        (lambda x: {1: x}, mt.ones(2), r"the result has the keys \[1\]"),
        (lambda x: (x, object), mt.ones(2), "the result, 1: a type"),
    ],
)
def test_what_has_no_form_is_refused_by_name(fn, arg, match, tmp_path):
    with pytest.raises(mt.errors.ProgramError, match=match):
        mt.save_program(tmp_path / "p", fn, arg)
    assert list(tmp_path.iterdir()) == []


def good():
    return pj.to_json(mt.compile(lambda x: x * 2.0 + ODD).program(mt.ones(5)))


def test_versions():
    document, constants = good()
    assert document["version"] == pj.VERSION
    with pytest.raises(mt.errors.UnsupportedVersion, match=rf"version {pj.VERSION + 1}; .* up to version {pj.VERSION}"):
        pj.from_json({**document, "version": pj.VERSION + 1}, constants)
    for version in (0, -1, "1", None, True):
        with pytest.raises(mt.errors.ProgramError, match="is not a version"):
            pj.from_json({**document, "version": version}, constants)
    # Fields of others are no obstacle.
    assert pj.from_json({**document, "author": "somebody"}, constants)


def test_migrations_are_applied_in_order(monkeypatch):
    document, constants = good()
    one = lambda d: {**d, "entries": d["entries"][:1], "note": "one"}  # noqa: E731
    two = lambda d: {**d, "outputs": [d["entries"][0]["outputs"][0]], "note": d["note"] + " two"}  # noqa: E731
    monkeypatch.setattr(pj, "MIGRATIONS", [one, two])
    new = pj.current(document)
    assert (new["version"], new["note"]) == (3, "one two")
    assert pj.current(new) == new
    assert len(pj.from_json(document, constants).entries) == 1
    assert document["version"] == 1


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d, c: d["entries"][1].update(op="frobnicate"), r"entry 1 \(frobnicate\): unknown op 'frobnicate'"),
        (lambda d, c: d["entries"].reverse(), r"entry 0 \(add\): %\d+ is not defined there"),
        (lambda d, c: d["outputs"].append(99), r"does not say the types of \[99\]"),
        (lambda d, c: d.pop("entries"), "damaged: KeyError"),
        (lambda d, c: d["types"].update({"0": ["float63", [5]]}), "damaged"),
        (
            lambda d, c: d["entries"][0].update(params={"x": {"odd": 1}}),
            r"entry 0 \(multiply\), parameter x: unknown kind",
        ),
        (lambda d, c: c.clear(), r"the values of constant\.\d+ are missing"),
        (lambda d, c: c.update({k: v[:2] for k, v in c.items()}), r"has float64\[2\], the program says float64\[5\]"),
        (lambda d, c: d.update(format="other"), "this is no program"),
    ],
)
def test_damage_is_named(damage, match):
    document, constants = good()
    damage(document, constants)
    with pytest.raises((mt.errors.ProgramError), match=match):
        pj.from_json(document, constants)


def test_paths(tmp_path):
    with pytest.raises(mt.errors.NotACheckpoint, match=r"holds no program: there is no program\.json"):
        mt.load_program(tmp_path / "nothing")
    mt.save_program(tmp_path / "p", lambda x: x + 1.0, mt.ones(2))
    with pytest.raises(mt.errors.CheckpointExists):
        mt.save_program(tmp_path / "p", lambda x: x + 2.0, mt.ones(2))
    mt.save_program(tmp_path / "p", lambda x: x + 2.0, mt.ones(2), overwrite=True)
    assert mt.load_program(tmp_path / "p")(mt.ones(2)).tolist() == [3, 3]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(mt.errors.CheckpointExists):
        mt.save_program(tmp_path / "other", lambda x: x, mt.ones(2), overwrite=True)
    (tmp_path / "p" / "program.json").write_text("{")
    with pytest.raises(mt.errors.ProgramError, match="is no JSON document"):
        mt.load_program(tmp_path / "p")


@pytest.fixture(params=["a directory", "memory", "s3"])
def place(request, tmp_path):
    if request.param == "a directory":
        return str(tmp_path / "p")
    pytest.importorskip("obstore")
    if request.param == "memory":
        return f"memory://{abs(hash(request.node.nodeid)):x}/p"
    return f"{request.getfixturevalue('s3').url}/p"


def test_wherever_checkpoints_lie(place):
    """Whole or not at all; only a program replaces a program; what is replaced is gone."""
    for k in (1.0, 2.0):
        held = mt.asarray([k, -k])
        mt.save_program(place, lambda x: x + held, mt.zeros(2), overwrite=k > 1)  # noqa: B023
        assert mt.load_program(place)(mt.zeros(2)).tolist() == [k, -k]
    with pytest.raises(mt.errors.CheckpointExists, match="overwrite=True"):
        mt.save_program(place, lambda x: x, mt.zeros(2))
    store = stores.at(place)
    assert len(list(store.entries())) == 2
    with pytest.raises(mt.errors.NotACheckpoint, match=r"is a program file.*load_program"):
        mt.open_checkpoint(place)
    with pytest.raises(mt.errors.CheckpointExists, match="not a checkpoint"):
        mt.save(place, {"w": mt.ones(2)}, overwrite=True)
    checkpoint = stores.join(stores.split(place)[0], "c")
    mt.save(checkpoint, {"w": mt.ones(2)})
    with pytest.raises(mt.errors.CheckpointExists, match="not a"):
        mt.save_program(checkpoint, lambda x: x, mt.zeros(2), overwrite=True)
    with pytest.raises(mt.errors.NotACheckpoint, match="holds no program"):
        mt.load_program(checkpoint)
    (constants,) = [e.name for e in store.entries() if e.name != "program.json"]
    data = bytearray(store.get(constants))
    data[-1] ^= 1
    store.put(constants, bytes(data))
    with pytest.raises(mt.errors.CorruptCheckpoint, match=r"constant.* does not fit its crc32c"):
        mt.load_program(place)
    store.delete([constants])
    with pytest.raises(mt.errors.ProgramError, match=r"constants.*is missing"):
        mt.load_program(place)
    mt.save_program(place, lambda x: x * 3.0, mt.ones(2), overwrite=True)
    assert mt.load_program(place)(mt.ones(2)).tolist() == [3, 3]


def test_over_http_and_where_nothing_may_be_written(s3):
    mt.save_program(f"{s3.url}/p", lambda x: x + ODD, mt.zeros(5))
    web = s3.publish(f"{s3.url}/p")
    assert bits(mt.load_program(web)(mt.zeros(5))) == bits(ODD + 0.0)
    with pytest.raises(mt.errors.StoreError, match="only be read"):
        mt.save_program(f"{web}2", lambda x: x, mt.zeros(2))


def test_a_writer_that_fails_leaves_the_old_program(s3, monkeypatch):
    """The server stops to answer at the N-th request of a save that replaces."""
    monkeypatch.setattr(object_store, "RETRIES", 0)
    monkeypatch.setattr(object_store, "ATTEMPTS", 1)
    monkeypatch.setattr(object_store, "_clients", {})
    url = f"{s3.url}/p"
    for n in range(1, 100, 5):
        mt.save_program(url, lambda x: x + ODD, mt.zeros(5), overwrite=True)
        s3.proxy.reset(lambda number, method, path, n=n: "500" if number >= n else None)
        failed = False
        try:
            mt.save_program(url, lambda x: x - ODD, mt.zeros(5), overwrite=True)
        except mt.errors.StoreError:
            failed = True
        count = s3.proxy.count
        s3.proxy.reset()
        got = bits(mt.load_program(url)(mt.zeros(5)))
        assert got in (bits(0.0 + ODD), bits(0.0 - ODD))
        assert failed or got == bits(0.0 - ODD)
        if count < n:
            break
    assert n > 6
    mt.save_program(url, lambda x: x + ODD, mt.zeros(5), overwrite=True)
    assert len(list(stores.at(url).entries())) == 2


def test_inside_a_checkpoint(tmp_path):
    """A document of the checkpoint, with its constants; it goes along wherever the arrays go."""
    params = {"w": mt.asarray(X), "b": mt.ones(3)}
    fn = lambda p, x: mt.layer_norm(x @ p["w"] + p["b"] + ODD[3], 3) + BFLOAT.astype(mt.float64)  # noqa: E731
    x = mt.asarray(np.arange(8.0).reshape(2, 4))
    document = mt.storage.program_document(fn, params, x)
    mt.save(tmp_path / "c", params, documents={"forward": document, "config": {"width": 3}})
    mt.merge(tmp_path / "c", tmp_path / "hf")
    mt.storage.reshard(tmp_path / "c", tmp_path / "r", mesh={"m": 2}, shardings={"w": {"m": 1}})
    for place in ("c", "hf", "r"):
        run = mt.load_program(mt.open_checkpoint(tmp_path / place).documents["forward"])
        assert bits(run(mt.load(tmp_path / place), x)) == bits(fn(params, x))
    with pytest.raises(mt.errors.CheckpointKeyError, match=r"cannot be named 'program\.json'"):
        mt.save(tmp_path / "d", params, documents={"program": document})
    document["values"].popitem()
    with pytest.raises(mt.errors.CorruptCheckpoint, match="does not fit its crc32c"):
        mt.load_program(document)
    del document["crc32c"]  # as somebody does who edits it on purpose
    with pytest.raises(mt.errors.ProgramError, match="are missing"):
        mt.load_program(document)


def test_whatever_bytes_a_program_file_holds(tmp_path):
    """An error of ours, or the very same function: never another one, and never another kind of error."""
    mt.save_program(tmp_path / "p", lambda x: (mt.tanh(x * 2.5) + ODD[0]) / FLOAT8[0].astype(mt.float64), mt.ones(3))
    wanted = bits(mt.load_program(tmp_path / "p")(mt.ones(3)))
    rng, refused = random.Random(7), 0
    for file in ("program.json", "constants.safetensors"):
        path = tmp_path / "p" / file
        good = path.read_bytes()
        for i in range(300):
            data = bytearray(good)
            at = rng.randrange(len(data))
            if i % 3:
                data[at] ^= 1 << rng.randrange(8)
            else:
                del data[at : at + rng.choice((1, 8, 400))]
            path.write_bytes(data)
            try:
                got = bits(mt.load_program(tmp_path / "p")(mt.ones(3)))
            except (mt.errors.ProgramError, mt.errors.CheckpointError):
                refused += 1
            else:
                assert got == wanted, (file, i)
        path.write_bytes(good)
    assert refused > 400


def stored(fn, *args):
    """The document of a program without its checksums, as somebody writes it who may write anything."""
    document = mt.storage.program_document(fn, *args)
    return {k: v for k, v in document.items() if k not in ("crc32c", "checksums")}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda d: d["entries"][0]["params"].update(axis=7),
            r"entry 0 \(softmax\), parameter axis: 7 is not a dimension",
        ),
        (lambda d: d["entries"][0]["params"].update(axis=True), r"parameter axis: True is not a dimension"),
        (lambda d: d["entries"][0]["params"].update(speed=1), r"takes the parameters axis, masked; .* 'speed'"),
        (lambda d: d["entries"][0].pop("params"), r"takes the parameters axis, masked; the file has none"),
        (lambda d: d["entries"][0]["inputs"].append(0), r"entry 0 \(softmax\) takes the operands x, and 2 are there"),
        (
            lambda d: d["types"].update({"1": ["float32", [2, 3]]}),
            r"gives float64\[2,3\], and the program says float32",
        ),
        (lambda d: d["types"].update({"0": ["float64", [-2, 3]]}), r"-2 is no size of a dimension"),
        (lambda d: d.update(result={"kind": "array", "variable": 0}), r"result has the variables \[0\].* gives \[1\]"),
    ],
)
def test_a_call_that_is_none_is_refused_when_it_is_loaded(change, match):
    document = stored(lambda x: mt.nn.softmax(x, axis=1), mt.ones((2, 3)))
    assert mt.load_program(document)(mt.ones((2, 3))).shape == (2, 3)
    change(document)
    with pytest.raises(mt.errors.ProgramError, match=match):
        mt.load_program(document)


@pytest.mark.parametrize(
    ("name", "fn", "saved"),
    [
        ("attention", lambda x: mt.nn.scaled_dot_product_attention(x, x, x, is_causal=True), (4, 5)),
        ("cross_entropy", lambda x: mt.nn.cross_entropy(x, mt.asarray([0, 1]), reduction="none"), (1, 4)),
    ],
)
def test_calls_from_before_the_log_sum_exp_was_saved_are_refused(name, fn, saved):
    """Forward with one result, backward without the operands that are or go with it."""
    x = mt.asarray([[1.0, 2.0, 0.5], [0.25, -1.0, 3.0]])
    gradient = mt.grad(lambda x: mt.sum(fn(x) ** 2))
    for program, op, at, old in ((fn, name, "outputs", (1,)), (gradient, f"{name}_backward", "inputs", saved)):
        document = stored(program, x)
        np.testing.assert_array_equal(mt.load_program(document)(x), program(x))
        entry = next(e for e in document["entries"] if e["op"] == op)
        entry[at] = [v for i, v in enumerate(entry[at]) if i not in old]
        with pytest.raises(mt.errors.ProgramError, match=rf"\({op}\) (gives|takes the operands)"):
            mt.load_program(document)


def test_what_only_values_show_is_an_error_that_names_the_call():
    run = mt.load_program(stored(lambda x, i: x[i] + 1.0, mt.ones(3), mt.asarray([0])))
    assert run(mt.ones(3), mt.asarray([2])).tolist() == [2.0]
    with pytest.raises(
        mt.errors.ArrayIndexError, match=r"entry 0 \(getitem\) of the program: index 9 is out of bounds"
    ):
        run(mt.ones(3), mt.asarray([9]))
    run = mt.load_program(stored(mt.linalg.inv, mt.ones((2, 2))))
    with pytest.raises(mt.errors.LinAlgError, match=r"\[inv\]") as caught:
        run(mt.zeros((2, 2)))
    assert caught.value.__notes__ == ["in entry 0 (inv) of the program"]


def test_files_from_before_checksums_are_read(tmp_path):
    mt.save_program(tmp_path / "p", lambda x: x + ODD, mt.zeros(5))
    path = tmp_path / "p" / "program.json"
    document = json.loads(path.read_bytes())
    for name in ("crc32c", "checksums", "file"):
        del document[name]
    path.write_text(json.dumps(document))
    assert bits(mt.load_program(tmp_path / "p")(mt.zeros(5))) == bits(ODD + 0.0)
    for file in ("../x", "/etc/passwd", 3):
        path.write_text(json.dumps({**document, "file": file}))
        with pytest.raises((mt.errors.CorruptCheckpoint, mt.errors.ProgramError)):
            mt.load_program(tmp_path / "p")


GOLDEN = {
    "format": "meshtape.program",
    "version": 1,
    "inputs": [0],
    "outputs": [3],
    "types": {"0": ["float32", [2, 3]], "1": ["float32", [3]], "2": ["float32", [2, 3]], "3": ["float32", [2, 2]]},
    "constants": {"1": "constant.1"},
    "entries": [
        {"op": "multiply", "inputs": [0, 1], "outputs": [2], "origin": "scale"},
        {
            "op": "getitem",
            "inputs": [2],
            "outputs": [3],
            "params": {"template": {"tuple": [{"span": [None, None, None]}, {"span": [1, None, None]}]}},
        },
    ],
}


def test_the_first_version_is_read_for_ever():
    program = pj.from_json(GOLDEN, {"constant.1": np.array([1, 2, 3], np.float32)})
    assert program.avals[3] == ShapeDtype((2, 2), np.dtype(np.float32))
    run = mt.storage.LoadedProgram(
        program,
        {"arguments": [{"kind": "array", "variable": 0}], "result": {"kind": "array", "variable": 3}},
    )
    assert run(mt.ones((2, 3), dtype=mt.float32)).tolist() == [[2, 3], [2, 3]]
    assert pj.to_json(program)[0] == GOLDEN


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_file_with_a_number_that_json_has_not_is_refused(tmp_path, number):
    where = tmp_path / "p"
    mt.save_program(str(where), lambda x: mt.sum(x * 2.0), mt.ones(3))
    file = where / "program.json"
    document = json.loads(file.read_text())
    del document["crc32c"]
    whole = json.dumps(document)
    for old in ("[3]", '"const": 2.0', '"version": 1'):
        assert old in whole
        bad = whole.replace(old, old.replace("3", number).replace("2.0", number).replace("1", number), 1)
        file.write_text(bad)
        with pytest.raises(mt.errors.ProgramError, match=r"no JSON|beyond all numbers"):
            mt.load_program(str(where))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_document_with_a_shape_that_is_no_number_is_refused(number):
    document = mt.storage.program_document(lambda x: mt.sum(x * 2.0), mt.ones(3))
    del document["crc32c"]
    document["types"]["0"][1][0] = number
    with pytest.raises(mt.errors.ProgramError, match="is no integer"):
        mt.load_program(document)
