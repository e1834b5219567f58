"""Data sets with ``__len__`` and ``__getitem__``: read in order, shuffled by key, resumed exactly, and refused where
samples differ."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

import meshtape as mt

tr = mt.training
X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = (X @ np.arange(3)).astype(np.float32)


class Torch:
    """As PyTorch's ``Dataset``: never raises IndexError, which would end an iteration."""

    def __init__(self, size=24):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        assert isinstance(i, int)
        self.asked.append(i)
        return {"x": X[i % 24], "y": Y[i % 24]}


class Tuples(Torch):
    def __getitem__(self, i):
        return X[i], Y[i]


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class Named(Torch):
    def __getitem__(self, i):
        return Pair(X[i], Y[i])


class Table(Torch):
    """As ``datasets.Dataset``: numbers and lists of numbers, and many samples at once."""

    column_names = ("x", "y")

    def __getitem__(self, i):
        raise AssertionError("one by one")

    def __getitems__(self, ids):
        return [{"x": [float(v) for v in X[i]], "y": float(Y[i])} for i in ids]


class Tensor:
    """As a tensor of another library."""

    def __init__(self, a):
        self.a = a

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.a, dtype)


class Tensors(Torch):
    def __getitem__(self, i):
        return {"x": Tensor(X[i]), "y": mt.asarray(Y[i])}


KINDS = {
    "torch": Torch(),
    "tuples": Tuples(),
    "named tuples": Named(),
    "table": Table(),
    "tensors": Tensors(),
    "list of dicts": [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],
}


def loss(params, batch, key):
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])
    return mt.mean((x.astype(mt.float32) @ params - y.astype(mt.float32)) ** 2)


def run(data, mesh=None, **options):
    options = {"batch": 4, "steps": 9, "log_every": 1, "seed": 4} | options
    return mt.Trainer(loss, mt.zeros(3, dtype=mt.float32), mt.optim.sgd(0.1), data, mesh=mesh, **options)


@pytest.fixture(scope="module")
def arrays():
    """The run on the arrays themselves: the same samples, in the same shuffled order."""
    return [h["loss"] for h in run({"x": X, "y": Y}).fit().history]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [None, {"data": 2}])
def test_a_map_style_data_set_is_read_as_its_arrays_would_be(arrays, kind, axes):
    t = run(KINDS[kind], None if axes is None else mt.Mesh(axes))
    np.testing.assert_allclose([h["loss"] for h in t.fit().history], arrays, rtol=1e-6)


def test_an_interrupted_run_on_a_data_set_goes_on_at_the_next_sample(arrays, tmp_path):
    run(Torch(), steps=4, directory=tmp_path).fit()
    again = Torch()
    result = run(again, directory=tmp_path, ahead=0).fit()
    assert [h["loss"] for h in result.history] == arrays[4:]
    assert (
        again.asked[1:5] == tr.Sampler(24, seed=4).take(16, 4)[0].tolist()
    )  # the first sample was looked at when it was made


def test_a_data_set_on_worker_processes(processes, arrays):
    with mt.Mesh({"data": 2}, client=processes) as mesh:
        found = [h["loss"] for h in run(Torch(), mesh, steps=3).fit().history]
    np.testing.assert_allclose(found, arrays[:3], rtol=1e-6)


def test_a_range_and_a_scalar_sample():
    source = tr.Loader(range(5, 11), tr.batch_sizes(3, ranks=1), tr.Sampler(6, shuffle=False)).source
    assert isinstance(source, tr.MapSource)
    assert source.read(np.array([5, 0])).tolist() == [10, 5]
    assert source.read(np.array([], np.int64)).shape == (0,)


class Odd(Torch):
    def __init__(self, odd, size=24, at=7):
        super().__init__(size)
        self.odd, self.at = odd, at

    def __getitem__(self, i):
        return self.odd() if i == self.at else {"x": X[0], "y": Y[0]}


def failing():
    raise KeyError("lost file")


class Length(Torch):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


class Few(Torch):
    def __getitems__(self, ids):
        return []


class Failing(Torch):
    def __len__(self):
        raise RuntimeError("no length")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: Length(0), "Length is empty"),
        (lambda: Length(-1), "length of the data set Length.*>= 0"),
        (lambda: Length(2.5), "length of the data set Length.*TypeError"),
        (Failing, "length of the data set Failing.*no length"),
        (lambda: Few(), "gave 0 samples for 1 numbers"),
        (lambda: Odd(failing, at=0), "length 24, failed at 0: KeyError: 'lost file'"),
        (lambda: Odd(lambda: {"x": "a text"}, at=0), "sample 0 .* holds a str at x: arrays hold numbers"),
        (lambda: Odd(lambda: {"x": [[1, 2], [3]]}, at=0), "sample 0 .* no array at x"),
        (lambda: Odd(dict, at=0), "sample 0 .* holds nothing"),
        (lambda: {"x": Torch()}, "a Torch is no array of samples: give it as the data itself"),
        (lambda: (Torch(), Torch()), "a Torch is no array of samples"),
        (lambda: object(), "first dimension"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused_at_once(data, words):
    with pytest.raises(mt.errors.DataError, match=words):
        run(data())


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (failing, "length 24, failed at 7: KeyError: 'lost file'"),
        (lambda: [][0], "failed at 7: IndexError"),
        (lambda: {"x": X[0]}, "sample 7 .* unlike sample 0: it has less, and sample 0 y: float32"),
        (lambda: {"x": X[0], "y": Y[0], "z": 1}, "sample 7 .* it has z: int64"),
        (lambda: {"x": X[0][:2], "y": Y[0]}, r"sample 7 .* it has x: float32\(2,\), and sample 0 x: float32\(3,\)"),
        (lambda: {"x": X[0].astype(np.float64), "y": Y[0]}, "sample 7 .* it has x: float64"),
        (lambda: (X[0], Y[0]), "sample 7 .* unlike sample 0"),
        (lambda: {"x": None, "y": Y[0]}, "sample 7"),
    ],
)
@pytest.mark.parametrize("axes", [None, {"data": 2}])
def test_a_sample_unlike_the_others_ends_the_run(odd, words, axes):
    t = run(Odd(odd), None if axes is None else mt.Mesh(axes))
    with pytest.raises(mt.errors.DataError, match=words):
        t.fit()


def test_trees_of_arrays_stay_trees():
    for tree in ({"x": X, "y": Y}, (X, Y), [X, Y], X, mt.asarray(X)):
        assert isinstance(run(tree).source, tr.ArraySource)
