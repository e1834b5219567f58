"""Optimizers, schedules, clipping and averages, against PyTorch's numbers and the requirements' cases."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt

# torch_numbers.json was written by torch 2.13.0 in an environment of its own: for each case a torch.optim optimizer got
# the gradients of "grads" one after the other (`p.grad = g; opt.step()`), and "steps" holds the parameters after each
# step. "schedules" holds `param_groups[0]["lr"]` before each of 8 steps, from a rate of 0.5: LinearLR(1.0, 0.1, 5),
# CosineAnnealingLR(7, 0.05), ExponentialLR(0.8), StepLR(3, 0.1), and SequentialLR of LinearLR(1e-12, 1, 3) and
# LinearLR(1, 0, 4). "clip_norm" and "clip_value" are clip_grad_norm_ and clip_grad_value_ on the first gradients; "ema"
# is AveragedModel with get_ema_multi_avg_fn(0.9) from 1 over 2, 3, -1.
TORCH = json.loads((Path(__file__).parent / "torch_numbers.json").read_text())

CASES = {
    "sgd": mt.optim.sgd(0.1),
    "sgd_decay": mt.optim.sgd(0.1, weight_decay=0.2),
    "sgd_momentum": mt.optim.momentum(0.1),
    "sgd_momentum_decay": mt.optim.sgd(0.05, momentum=0.8, weight_decay=0.1),
    "sgd_nesterov": mt.optim.momentum(0.1, 0.9, nesterov=True, weight_decay=0.01),
    "adam": mt.optim.adam(0.1),
    "adam_decay": mt.optim.adam(0.05, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1),
    "adamw": mt.optim.adamw(0.1),
    "adamw_decay": mt.optim.adamw(0.02, b1=0.85, b2=0.99, eps=1e-5, weight_decay=0.3),
}


def tree(numbers, dtype=mt.float64):
    return {k: mt.asarray(v, dtype=dtype) for k, v in numbers.items()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [mt.float64, mt.float32])
@pytest.mark.parametrize("name", list(CASES))
def test_steps_are_those_of_pytorch(name, dtype, compiled):
    opt = CASES[name]
    update = mt.compile(opt.update) if compiled else opt.update
    params = tree(TORCH["start"], dtype)
    state = opt.init(params)
    for grads, expected in zip(TORCH["grads"], TORCH["steps"][f"{name}/{dtype.name}"], strict=True):
        params, state = update(params, tree(grads, dtype), state)
        for k, p in params.items():
            assert p.dtype == dtype
            np.testing.assert_allclose(np.asarray(p), expected[k], rtol=1e-6, atol=1e-6)
    assert int(state["step"]) == len(TORCH["grads"])
    if compiled:
        assert update.signatures == 1


def test_every_case_of_the_table_is_run():
    assert {n.partition("/")[0] for n in TORCH["steps"]} == set(CASES)


SCHEDULES = {
    "linear": mt.optim.linear(0.5, 0.05, 5),
    "cosine": mt.optim.cosine(0.5, 7, 0.05),
    "exponential": mt.optim.exponential(0.5, 0.8),
    "step": mt.optim.exponential(0.5, 0.1, 3),
    "warmup_linear": mt.optim.warmup_linear(0.5, 3, 7),
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules_are_those_of_pytorch(name):
    schedule = SCHEDULES[name]
    eager = [float(schedule(mt.asarray(i))) for i in range(8)]
    np.testing.assert_allclose(eager, TORCH["schedules"][name], rtol=1e-9, atol=1e-11)
    fast = mt.compile(schedule)
    assert [float(fast(mt.asarray(i))) for i in range(8)] == eager
    assert fast.signatures == 1


def test_warmup_cosine():
    s = mt.optim.warmup_cosine(2.0, 4, 12, 0.5)
    found = [float(s(mt.asarray(i))) for i in range(15)]
    assert found[:5] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert found[8] == pytest.approx(1.25)
    assert found[12:] == pytest.approx([0.5] * 3)
    assert all(b < a for a, b in itertools.pairwise(found[4:13]))
    assert float(mt.optim.warmup_cosine(2.0, 0, 4)(mt.asarray(0))) == 2.0  # no warm-up


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.cosine("a", 4),
        lambda s: s.cosine(1.0, -4),
        lambda s: s.linear(1.0, None, 4),
        lambda s: s.constant(math.nan),
        lambda s: s.exponential(1.0, 0.5, every=0),
        lambda s: s.warmup_linear(1.0, 5, 4),
        lambda s: s.warmup_cosine(1.0, "2", 4),
    ],
)
def test_senseless_schedules_are_refused_where_they_are_made(call):
    with pytest.raises(mt.errors.ArgumentError, match="must be a number from"):
        call(mt.optim)


def test_a_schedule_drives_an_optimizer():
    opt = mt.optim.sgd(mt.optim.linear(1.0, 0.0, 2))
    params, state = mt.asarray(0.0), None
    state = opt.init(params)
    seen = []
    for _ in range(3):
        params, state = opt.update(params, mt.asarray(1.0), state)
        seen.append(float(params))
    assert seen == [-1.0, -1.5, -1.5]


@pytest.mark.parametrize("name", ["adam", "adamw", "lazy_adam"])
def test_a_schedule_gives_each_step_its_rate(name):
    make, rates = getattr(mt.optim, name), [0.5, 0.25, 0.0, 0.0]
    driven = make(mt.optim.linear(0.5, 0.0, 2))
    x, g = mt.asarray([1.0, -2.0, 3.0]), mt.asarray([0.3, 0.2, -0.1])
    y, state, other = x, driven.init(x), driven.init(x)
    for rate in rates:
        x, state = driven.update(x, g, state)
        y, other = make(rate).update(y, g, other)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-15)


@pytest.mark.parametrize("case", TORCH["clip_norm"], ids=lambda c: str(c["limit"]))
def test_clip_by_global_norm_is_that_of_pytorch(case):
    clipped, norm = mt.optim.clip_by_global_norm(tree(TORCH["grads"][0]), case["limit"])
    assert float(norm) == pytest.approx(case["norm"])
    for g, expected in zip(clipped.values(), case["grads"], strict=True):
        np.testing.assert_allclose(np.asarray(g), expected, rtol=1e-9)


@pytest.mark.parametrize(
    "shape", [(), (5,), (50_000,), (7, 31), (7, 32), (300, 7), (2, 3, 100), (3, 16_385), (0, 40), (4, 0)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.float16])
def test_the_norm_of_leaves_of_any_shape(shape, dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * (1 + 2j if np.dtype(dtype).kind == "c" else 1)).astype(dtype)
    wide = np.abs(x.astype(np.complex128))
    found = mt.optim.global_norm([mt.asarray(x), mt.asarray(3.0)])
    assert float(found) == pytest.approx(math.sqrt((wide**2).sum() + 9.0), rel=1e-6)


def test_the_norm_of_many_equal_numbers_keeps_its_digits():
    """A sum of float32 in one place loses a percent of these."""
    x = mt.full((8192, 8192), 0.1, dtype=mt.float32)
    assert float(mt.optim.global_norm([x])) == pytest.approx(8192 * float(np.float32(0.1)), rel=1e-6)


def test_clip_by_value_is_that_of_pytorch():
    (case,) = TORCH["clip_value"]
    clipped = mt.optim.clip_by_value(tree(TORCH["grads"][0]), case["limit"])
    assert [g.tolist() for g in clipped.values()] == [pytest.approx(np.asarray(g)) for g in case["grads"]]


def test_clipping_at_the_edges():
    zero = {"w": mt.zeros(3), "frozen": None}
    clipped, norm = mt.optim.clip_by_global_norm(zero, 1.0)
    assert float(norm) == 0.0
    assert clipped["w"].tolist() == [0, 0, 0]
    assert clipped["frozen"] is None
    # float16 squares overflow at 256; the norm is taken in float32.
    clipped, norm = mt.optim.clip_by_global_norm([mt.full(4, 3e4, dtype=mt.float16)], 1.0)
    assert float(norm) == pytest.approx(6e4, rel=1e-3)
    assert clipped[0].dtype == mt.float16
    np.testing.assert_allclose(np.asarray(clipped[0], np.float64), 0.5, rtol=1e-3)
    clipped, norm = mt.optim.clip_by_global_norm([mt.asarray([3 + 4j])], 1.0)
    assert float(norm) == 5.0
    assert complex(clipped[0][0]) == pytest.approx(0.6 + 0.8j, rel=1e-6)
    with np.errstate(invalid="ignore"):
        assert math.isnan(float(mt.optim.clip_by_global_norm([mt.asarray([math.inf])], 1.0)[0][0][0]))
    assert float(mt.optim.clip_by_global_norm([], 1.0)[1]) == 0.0


@pytest.mark.parametrize("opt", [mt.optim.momentum(1e-3), mt.optim.adamw(1e-3)], ids=["momentum", "adamw"])
@pytest.mark.parametrize("dtype", [mt.bfloat16, mt.float16], ids=str)
def test_low_precision_parameters_follow_float32_masters(opt, dtype):
    """The masters take the path of float32 parameters, to the bit; the parameters are their rounding."""
    small = {"w": mt.asarray([1.0, -3.0], dtype=dtype), "scale": mt.asarray([2.0], dtype=mt.float32)}
    wide = mt.tree_map(lambda p: p.astype(mt.float32), small)
    state, wide_state = opt.init(small), opt.init(wide)
    assert "master" not in wide_state
    assert state["master"]["scale"] is None  # it is its own master
    step = mt.compile(opt.update)
    for i in range(20):
        g = {"w": mt.asarray([0.5, -0.25], dtype=dtype), "scale": mt.asarray([0.1 * i], dtype=mt.float32)}
        small, state = step(small, g, state)
        wide, wide_state = opt.update(wide, mt.tree_map(lambda x: x.astype(mt.float32), g), wide_state)
        assert small["w"].dtype == dtype
        assert state["master"]["w"].dtype == mt.float32
        assert all(x.dtype == mt.float32 for k, t in state.items() if k not in ("step", "master") for x in t.values())
        np.testing.assert_allclose(np.asarray(state["master"]["w"]), np.asarray(wide["w"]), rtol=1e-6)
        assert small["w"].tolist() == state["master"]["w"].astype(dtype).tolist()
        np.testing.assert_allclose(np.asarray(small["scale"]), np.asarray(wide["scale"]), rtol=1e-6)
    assert step.signatures == 1
    masters = mt.optim.masters(small, state)
    assert (masters["w"].dtype, masters["scale"].dtype) == (mt.float32, mt.float32)


def test_steps_below_the_resolution_are_not_lost():
    # In bfloat16 1 - 2**-10 rounds back to 1: without masters nothing would ever move.
    opt = mt.optim.sgd(2.0**-10)
    p = mt.ones(1, dtype=mt.bfloat16)
    state = opt.init(p)
    for _ in range(64):
        p, state = opt.update(p, mt.ones(1, dtype=mt.bfloat16), state)
    assert p.tolist() == [1 - 2.0**-4]


def test_what_has_no_gradient_stays():
    opt = mt.optim.adamw(0.1)
    params = {"w": mt.ones(2), "ids": mt.asarray([1, 2]), "frozen": mt.ones(1), "none": None, "np": np.ones(2)}
    state = opt.init(params)
    assert state["mean"]["ids"] is None
    grads = {"w": mt.ones(2), "ids": None, "frozen": None, "none": None, "np": np.ones(2)}
    new, state = opt.update(params, grads, state)
    assert new["ids"].tolist() == [1, 2]
    assert new["frozen"].tolist() == [1]
    assert new["none"] is None
    assert new["np"].tolist() == new["w"].tolist() != [1, 1]
    assert params["w"].tolist() == [1, 1]  # pure
    assert state["mean"]["frozen"].tolist() == [0]


def test_gradients_of_vjp_fit_whatever_the_tree():
    params = {"layers": [(mt.ones((2, 2)), mt.zeros(2))], "table": mt.asarray([0, 1])}

    def loss(p, x):
        (w, b) = p["layers"][0]
        return mt.sum((x @ w + b) ** 2)

    opt = mt.optim.adam(0.1)
    _, pull = mt.vjp(lambda p: loss(p, mt.ones((3, 2))), params)  # gives integers None, where `grad` refuses them
    (grads,) = pull(mt.asarray(1.0))
    new, _ = opt.update(params, grads, opt.init(params))
    assert new["table"] is params["table"]
    assert float(loss(new, mt.ones((3, 2)))) < float(loss(params, mt.ones((3, 2))))


def test_a_whole_step_is_traced_once():
    opt = mt.optim.chain(
        lambda g: mt.optim.clip_by_global_norm(g, 1.0)[0], mt.optim.adamw(mt.optim.warmup_cosine(0.1, 3, 30))
    )

    @mt.compile
    def step(params, state, x):
        loss, grads = mt.value_and_grad(lambda p: mt.mean((x @ p["w"] - 1.0) ** 2))(params)
        return loss, *opt.update(params, grads, state)

    params = {"w": mt.asarray([0.5, -0.5])}
    state = opt.init(params)
    losses = []
    for _ in range(30):
        loss, params, state = step(params, state, mt.asarray([[1.0, 2.0], [3.0, -1.0]]))
        losses.append(float(loss))
    assert step.signatures == 1
    assert losses[-1] < 0.2 * losses[0]


def test_errors_say_what_does_not_fit():
    opt = mt.optim.sgd(0.1, momentum=0.9)
    p = {"w": mt.ones(2)}
    state = opt.init(p)
    with pytest.raises(mt.errors.ShapeError, match=r"\[sgd\] grads of shape \(1,\) for a parameter of shape \(2,\)"):
        opt.update(p, {"w": mt.ones(1)}, state)
    with pytest.raises(ValueError, match=r"\[sgd\] grads has the structure"):
        opt.update(p, {"v": mt.ones(2)}, state)
    with pytest.raises(ValueError, match=r"\[sgd\] nesterov needs momentum"):
        mt.optim.sgd(0.1, nesterov=True)
    with pytest.raises(ValueError, match=r"\[adamw\] b2 must be"):
        mt.optim.adamw(0.1, b2=1.0)
    with pytest.raises(ValueError, match=r"\[ema\] decay must be a number from 0 to 1"):
        mt.optim.ema(1.5)
    z, adam = mt.asarray([1j]), mt.optim.adam(0.1)
    state = adam.init(z)
    with pytest.raises(mt.errors.DTypeError, match=r"\[adam\] takes real parameters, got complex128"):
        adam.update(z, z, state)
    with pytest.raises(TypeError, match=r"\[chain\]"):
        mt.optim.chain(mt.optim.sgd(0.1), lambda g: g)


def test_sgd_on_complex_parameters_descends():
    opt = mt.optim.sgd(0.1)
    z = mt.asarray([1 + 1j])
    state = opt.init(z)
    for _ in range(50):
        z, state = opt.update(z, mt.grad(lambda z: mt.sum(mt.abs(z - 3j) ** 2))(z), state)
    assert abs(complex(z[0]) - 3j) < 1e-3


# ----- averages -------------------------------------------------------------------------------------------------------


def test_ema_does_not_follow_what_is_written_to_the_parameters():
    params = {"w": mt.ones(3), "b": mt.ones(2, dtype=mt.float32)}
    state = mt.optim.ema(0.9).init(params)
    params["w"][0] = 7.0
    params["b"][:] = 7.0
    assert [x.tolist() for x in (state["mean"]["w"], state["mean"]["b"])] == [[1, 1, 1], [1, 1]]


def test_ema_starts_as_a_copy():
    avg = mt.optim.ema(0.9)
    x = mt.asarray(1.0)
    state = avg.init(x)
    assert float(state["mean"]) == 1.0
    seen = []
    for v in (2.0, 3.0, -1.0):
        state = avg.update(mt.asarray(v), state)
        seen.append(float(state["mean"]))
    assert seen == pytest.approx(TORCH["ema"])
    assert seen[:2] == pytest.approx([1.1, 1.29])
    x[...] = 7.0
    assert float(avg.init(mt.asarray(1.0))["mean"]) == 1.0


@pytest.mark.parametrize("bad", [0.5, 0.7, math.nan, math.inf])
def test_ema_skips_bad_losses(bad):
    avg = mt.optim.ema(0.9, threshold=0.5)
    update = mt.compile(avg.update)
    state = avg.init({"w": mt.ones(2)})
    poison = {"w": mt.asarray([math.nan, 5.0])}
    after = update(poison, state, mt.asarray(bad))
    assert after["mean"]["w"].tolist() == [1, 1]
    assert int(after["skipped"]) == 1
    after = update({"w": mt.asarray([2.0, 3.0])}, after, mt.asarray(0.49))
    assert after["mean"]["w"].tolist() == pytest.approx([1.1, 1.2])
    assert int(after["skipped"]) == 1
    assert update.signatures == 1
    with pytest.raises(ValueError, match="needs the loss"):
        avg.update(poison, state)


def test_ema_without_threshold_still_refuses_a_loss_that_is_nan():
    avg = mt.optim.ema(0.5)
    state = avg.update(mt.asarray(3.0), avg.init(mt.asarray(1.0)), float("nan"))
    assert (float(state["mean"]), int(state["skipped"])) == (1.0, 1)
    assert float(avg.update(mt.asarray(3.0), state, 1e30)["mean"]) == 2.0


def test_ema_interval():
    avg = mt.optim.ema(0.5, interval=2)
    state = avg.init(mt.asarray(0.0))
    seen = []
    for v in (8.0, 4.0, 8.0, 4.0):
        state = avg.update(mt.asarray(v), state)
        seen.append(float(state["mean"]))
    assert seen == [0.0, 2.0, 2.0, 3.0]
    assert int(state["skipped"]) == 0


def test_ema_of_low_precision_is_kept_in_float32():
    avg = mt.optim.ema(0.999)
    params = {"w": mt.ones(1, dtype=mt.bfloat16), "ids": mt.asarray([3])}
    state = avg.init(params)
    for i in range(8):
        state = avg.update({"w": mt.zeros(1, dtype=mt.bfloat16), "ids": mt.asarray([i])}, state)
    assert state["mean"]["w"].dtype == mt.float32
    assert state["mean"]["w"].tolist() == pytest.approx([0.999**8], rel=1e-6)
    assert state["mean"]["ids"].tolist() == [7]  # integers are followed, not averaged
    assert avg.value(state, params)["w"].dtype == mt.bfloat16


NONSENSE = ["0.1", None, [0.1], float("nan"), -1.0, 1j, True, object(), np.ones(2), mt.ones(2)]


@pytest.mark.parametrize("value", NONSENSE, ids=[type(x).__name__ for x in NONSENSE])
@pytest.mark.parametrize(
    ("name", "what"),
    [(name, "lr") for name in ("sgd", "momentum", "adam", "adamw", "lazy_adam")]
    + [("sgd", "momentum"), ("sgd", "weight_decay"), ("adam", "b1"), ("adam", "b2"), ("adam", "eps"), ("ema", "decay")],
)
def test_numbers_that_are_none_are_refused_where_the_optimizer_is_made(name, what, value):
    given = {} if what in ("lr", "decay") else {"lr": 0.1}
    with pytest.raises(mt.errors.ArgumentError, match=rf"{what} must be a number from 0 to "):
        getattr(mt.optim, name)(**given, **{what: value})


@pytest.mark.parametrize("lr", [0.5, np.float32(0.5), np.asarray(0.5), mt.asarray(0.5), lambda step: 0.5])
def test_rates_of_every_kind_of_number(lr):
    opt = mt.optim.sgd(lr)
    p, _ = opt.update(mt.ones(1), mt.ones(1), opt.init(mt.ones(1)))
    assert p.tolist() == [0.5]
    compiled = mt.compile(lambda p, lr: mt.optim.sgd(lr).update(p, p, mt.optim.sgd(lr).init(p))[0])
    assert compiled(mt.ones(1), lr).tolist() == [0.5]


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 3)])
def test_a_state_of_another_shape_changes_no_parameter(shape: tuple[int, ...]) -> None:
    p, other = {"b": mt.ones((3, 1))}, {"b": mt.ones(shape)}
    for make in (mt.optim.adamw(0.1), mt.optim.sgd(0.1, momentum=0.9), mt.optim.lazy_adam(0.1)):
        with pytest.raises(mt.errors.ShapeError, match=r"of shape .* for a parameter of shape \(3, 1\)"):
            make.update(p, p, make.init(other))
    mean = mt.optim.ema(0.9)
    for call in (lambda: mean.update(p, mean.init(other)), lambda: mean.value(mean.init(other), p)):
        with pytest.raises(mt.errors.ShapeError, match=r"\[ema\] a mean of shape"):
            call()


def test_clipping_hides_no_norm_that_is_not_finite_and_takes_floats_alone() -> None:
    for value in (1e30, np.inf, np.nan):
        clipped, _ = mt.optim.clip_by_global_norm([mt.full((3,), value, dtype="float32"), mt.ones(2)], 1.0)
        assert all(np.isnan(np.asarray(g)).all() for g in clipped)
    with pytest.raises(mt.errors.DTypeError, match="int64"):
        mt.optim.clip_by_global_norm([mt.asarray([30, 40])], 10.0)
    for limit in (-1.0, np.nan, "a"):
        with pytest.raises(mt.errors.ArgumentError, match="limit"):
            mt.optim.clip_by_global_norm([mt.ones(1)], limit)
        with pytest.raises(mt.errors.ArgumentError, match="limit"):
            mt.optim.clip_by_value([mt.ones(1)], limit)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: mt.optim.sgd(0.1, momentum=0.9, nesterov=True),
    "momentum": lambda: mt.optim.momentum(mt.optim.constant(0.1)),
    "adam": lambda: mt.optim.adam(mt.optim.linear(0.1, 0.0, 5), weight_decay=0.1),
    "adamw": lambda: mt.optim.adamw(mt.optim.warmup_cosine(0.1, 2, 6, end=0.01), b1=0.8),
    "lazy_adam": lambda: mt.optim.lazy_adam(mt.optim.warmup_linear(0.1, 2, 6)),
    "chain": lambda: mt.optim.chain(
        functools.partial(mt.optim.clip_by_value, limit=0.5), mt.optim.adamw(mt.optim.exponential(0.1, 0.5))
    ),
    "cosine": lambda: mt.optim.sgd(mt.optim.cosine(0.1, 4)),
}


def three_steps(opt: Any) -> list[float]:
    p = mt.asarray([1.0, -2.0])
    state = opt.init(p)
    for _ in range(3):
        p, state = opt.update(p, p * p, state)
    return p.tolist()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedules_are_pickled(name: str) -> None:
    opt = OPTIMIZERS[name]()
    for back in (pickle.loads(pickle.dumps(opt)), copy.deepcopy(opt), pickle.loads(pickle.dumps(copy.copy(opt)))):
        assert three_steps(back) == three_steps(opt)
    changed = dataclasses.replace(opt, update=max)  # no longer what the function gave
    assert pickle.loads(pickle.dumps(dataclasses.replace(changed, init=min))).update is max


def test_averages_are_pickled() -> None:
    avg = mt.optim.ema(0.5, interval=2)
    state = avg.init(mt.asarray(1.0))
    again = pickle.loads(pickle.dumps(avg))
    for x in (2.0, 3.0):
        state = again.update(mt.asarray(x), state)
    assert float(state["mean"]) == 2.0
