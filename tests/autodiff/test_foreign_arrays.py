"""Arrays of other libraries, Python integers and bare arrays in the places of trees: right, or refused with the name of
the leaf."""

from __future__ import annotations

import array
import functools
import importlib
import inspect
import types

import numpy as np
import pytest

import meshtape as mt
from meshtape.autodiff.captures import bytecode
from meshtape.errors import DTypeError, GradientError

pandas = pytest.importorskip("pandas")
dask_array = pytest.importorskip("dask.array")


class Tensor:
    """An array that compares element by element, as PyTorch's do."""

    def __init__(self, value):
        self.value = np.asarray(value, float)

    def __array__(self, dtype=None, copy=None):
        return self.value if dtype is None else self.value.astype(dtype)

    def __eq__(self, other):
        return Comparison()

    __hash__ = object.__hash__


class Comparison:
    def __bool__(self):
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")


class DLPack:
    def __init__(self, value):
        self.value = np.asarray(value, float)

    def __dlpack__(self, **options):
        return self.value.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.value.__dlpack_device__()


class Interface:
    def __init__(self, value):
        self.value = np.asarray(value, float)

    @property
    def __array_interface__(self):
        return self.value.__array_interface__


MAKERS = {
    "__array__": Tensor,
    "__dlpack__": DLPack,
    "__array_interface__": Interface,
    "series": pandas.Series,
    "frame": lambda v: pandas.DataFrame({"a": v}),
    "dask": lambda v: dask_array.from_array(np.asarray(v)),
    "array.array": lambda v: array.array("d", v),
    "memoryview": lambda v: memoryview(np.asarray(v)),
}
CALLS = {
    "grad": lambda f, p: mt.grad(f)(p),
    "value_and_grad": lambda f, p: mt.value_and_grad(f)(p),
    "vjp": lambda f, p: mt.vjp(f, p),
    "jvp": lambda f, p: mt.jvp(f, (p,), (p,)),
    "jacobian": lambda f, p: mt.jacobian(f)(p),
    "hessian": lambda f, p: mt.hessian(f)(p),
    "hvp": lambda f, p: mt.hvp(f, p, p),
    "init": lambda f, p: mt.optim.adam(0.1).init(p),
    "update": lambda f, p: mt.optim.sgd(0.1).update(p, p, {"step": mt.asarray(0)}),
    "watch": lambda f, p: mt.Tape().watch(p),
    "donate": lambda f, p: mt.compile(lambda p: p, donate=0)(p),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", MAKERS)
def test_an_array_of_another_library_is_refused_with_the_remedy(kind, call):
    x = MAKERS[kind]([1.0, 2.0, 3.0])
    with pytest.raises(GradientError, match=r"mt\.asarray"):
        CALLS[call](lambda v: mt.sum(mt.asarray(v) ** 2), x)
    where = "" if call == "watch" else r"(leaf w,|w of) .*"
    with pytest.raises(GradientError, match=where + r"mt\.asarray"):
        CALLS[call](lambda p: mt.sum(mt.asarray(p["w"]) ** 2) + mt.sum(p["b"]), {"w": x, "b": mt.ones(2)})


@pytest.mark.parametrize("kind", MAKERS)
def test_gradients_of_another_library_are_converted(kind):
    g = MAKERS[kind]([1.0, 2.0, 3.0])
    w = mt.asarray(g) * 0.0
    opt = mt.optim.sgd(1.0)
    new, _ = opt.update({"w": w}, {"w": g}, opt.init({"w": w}))
    assert np.asarray(new["w"]).ravel().tolist() == [-1.0, -2.0, -3.0]
    clipped, norm = mt.optim.clip_by_global_norm({"w": g}, 1.0)
    assert float(norm) == pytest.approx(14.0**0.5)
    np.testing.assert_allclose(np.asarray(clipped["w"]).ravel(), np.array([1.0, 2.0, 3.0]) / 14.0**0.5, rtol=1e-6)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_trainer_says_how_to_mend_such_a_parameter(kind):
    data = {"x": np.ones((4, 3), np.float32)}
    trainer = mt.Trainer(
        lambda p, b, k: mt.mean(b["x"] @ p["w"]),
        {"w": MAKERS[kind]([1.0, 2.0, 3.0])},
        mt.optim.sgd(0.1),
        data,
        batch=4,
        steps=1,
    )
    with pytest.raises(GradientError, match=r"w of the parameters is a .*mt\.asarray"):
        trainer.fit()


def test_what_mt_asarray_makes_of_them_has_a_gradient():
    for kind, make in MAKERS.items():
        x = mt.asarray(make([1.0, 2.0, 3.0]))
        found = mt.grad(lambda v: mt.sum(v**2))(x)
        np.testing.assert_array_equal(np.asarray(found).ravel(), [2.0, 4.0, 6.0], err_msg=kind)


# ----- in compiled functions ------------------------------------------------------------------------------------------


class Warns:
    """An object of a module, such as torch.distributed's `reduce_op`, that answers any question with a warning."""

    def __getattribute__(self, name):
        raise RuntimeError("deprecated")


READS = {
    "argument": lambda x: (mt.compile(lambda x, y: mt.asarray(x) * y), lambda f: f(x, mt.ones(3))),
    "in a tree": lambda x: (mt.compile(lambda d, y: mt.asarray(d["k"][0]) * y), lambda f: f({"k": [x]}, mt.ones(3))),
    "closure": lambda x: (mt.compile(lambda y: mt.asarray(x) * y), lambda f: f(mt.ones(3))),
    "attribute": lambda x: (
        mt.compile(lambda h, y: mt.asarray(h.x) * y),
        functools.partial(lambda h, f: f(h, mt.ones(3)), types.SimpleNamespace(x=x)),
    ),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library with a class of arrays, and with an object that warns as PyTorch's do."""
    place = tmp_path_factory.mktemp("lib") / "site-packages"
    place.mkdir()
    source = [inspect.getsource(c) for c in (Tensor, Comparison, Warns)]
    (place / "tensors_for_tests.py").write_text("\n\n".join(["import numpy as np", *source, "warns = Warns()"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        yield importlib.import_module("tensors_for_tests")


@pytest.mark.filterwarnings("ignore:.*traced at every call:RuntimeWarning")
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", [*MAKERS, "library"])
def test_compiled_functions_read_the_numbers_of_today(kind, read, library):
    """Also where `==` compares element by element, and after a write that only the other library knows of."""
    x = {**MAKERS, "library": library.Tensor}[kind]([1.0, 2.0, 3.0])
    if kind == "frame":
        x = x["a"]
    fast, call = READS[read](x)
    for _ in range(2):
        np.testing.assert_array_equal(call(fast), [1.0, 2.0, 3.0])
    if hasattr(x, "value"):
        x.value[0] = 50.0
        np.testing.assert_array_equal(call(fast), [50.0, 2.0, 3.0])


def test_modules_of_objects_that_answer_no_question():
    assert not bytecode._uses_us(Warns())
    assert bytecode._uses_us(mt.sum)
    assert bytecode._uses_us(mt)
    assert bytecode._uses_us(mt.Mesh)
    assert bytecode._uses_us(mt.ones(1))


def test_numbers_of_numpy_are_told_apart_by_value():
    seen = mt.compile(lambda x, s: x * float(s))
    assert [float(seen(mt.ones(()), np.float64(k))) for k in (1, 2, 1, 2)] == [1.0, 2.0, 1.0, 2.0]
    assert seen.signatures == 2


# ----- integers of Python's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, np.int64(3), np.True_], ids=["int", "int64", "bool"])
@pytest.mark.parametrize("call", ["grad", "value_and_grad", "jacobian", "hessian", "hvp"])
def test_an_integer_in_a_tree_is_no_parameter(call, count):
    params = {"w": mt.ones(3), "heads": count}
    with pytest.raises(DTypeError, match="leaf heads"):
        CALLS[call](lambda p: mt.sum(p["w"]) * p["heads"], params)


def test_vjp_leaves_an_integer_in_a_tree_as_it_is():
    def f(p):
        assert type(p["heads"]) is int
        return mt.sum(mt.reshape(p["w"], (p["heads"], -1)) ** 2)

    params = {"w": mt.asarray([1.0, 2.0]), "heads": 2}
    _, pull = mt.vjp(f, params)
    (found,) = pull(mt.asarray(1.0))
    assert found["heads"] is None
    assert found["w"].tolist() == [2.0, 4.0]
    _, slope = mt.jvp(f, (params,), ({"w": mt.ones(2), "heads": None},))
    assert float(slope) == 6.0


def test_an_integer_that_is_the_argument_counts_as_floating():
    def square(x):
        return x * x

    assert float(mt.grad(square)(3)) == 6.0
    assert float(mt.hessian(square)(3)) == 2.0
    assert float(mt.hvp(square, 3, 1)) == 2.0
    assert float(mt.jvp(square, (3,), (1,))[1]) == 6.0
    assert float(mt.vjp(square, 3)[1](mt.asarray(1.0))[0]) == 6.0


@pytest.mark.parametrize("number", [2.0, 2])
def test_compiled_gradients_treat_numbers_in_a_tree_like_plain_ones(number):
    def gradient(p):
        return mt.grad(lambda q: mt.sum(q["w"]) * q["b"])(p)

    params = {"w": mt.ones(2), "b": number}
    if type(number) is int:
        with pytest.raises(DTypeError, match="leaf b"):
            mt.compile(gradient)(params)
        return
    found = mt.compile(gradient)(params)
    assert float(found["b"]) == 2.0
    assert found["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("place", ["primals", "tangents"])
def test_jvp_does_not_unpack_an_array(place):
    x, v = mt.ones(1), mt.ones(1)
    with pytest.raises(GradientError, match=rf"{place} must be a tuple .*\(x,\), \(v,\)"):
        mt.jvp(mt.sin, x if place == "primals" else (x,), v if place == "tangents" else (v,))
