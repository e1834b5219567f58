"""One step: global weighting, accumulation, ZeRO, mixed precision, clipping, frozen parameters, averages."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.training.precision import Precision
from meshtape.parallel.training.step import TrainingConfig

de = mt.models.decoder
CONFIG = de.Config(vocab=40, width=32, layers=2, heads=4, kv_heads=2, max_length=16)


def tokens(rows, seed, ignored=0):
    ids = np.random.default_rng(seed).integers(0, 40, (rows, 9))
    labels = ids[:, 1:].copy()
    labels[0, :ignored] = -100
    return {"ids": ids[:, :-1], "labels": labels}


MICRO = [tokens(4, 0, ignored=6), tokens(3, 1)]
WHOLE = {n: np.concatenate([m[n] for m in MICRO]) for n in MICRO[0]}


def run(axes=None, plan="dp", micro=MICRO, steps=3, lr=1e-2, **options):
    plan = de.plan(plan)
    recipe = TrainingConfig(
        lambda p, b, key: de.loss(p, b, CONFIG, key=key, plan=plan),
        options.pop("optimizer", None) or mt.optim.adamw(lr),
        plan=plan,
        **options,
    )
    mesh = mt.Mesh(axes) if axes else None
    state = recipe.init(de.init(mt.random.key(0), CONFIG), mesh)
    step, key = mt.compile(recipe.step), mt.random.key(7)
    seen = []
    for _ in range(steps):
        placed = [
            mt.tree.tree_map(mt.asarray, m) if mesh is None else mt.distribute(m, plan.batch(mesh)) for m in micro
        ]
        state, found = step(state, placed, key)
        seen.append({n: float(v) for n, v in found.items()})
    return state, seen


def largest_difference(a, b):
    pairs = zip(mt.tree.flatten(a)[0], mt.tree.flatten(b)[0], strict=True)
    return max(float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max()) for x, y in pairs)


@pytest.fixture(scope="module")
def single():
    return run(clip=1.0, ema=mt.optim.ema(0.9))


def test_uneven_micro_batches_count_by_their_tokens():
    """Four and three rows, six tokens of them ignored: the step is that of all seven rows at once."""
    sgd = mt.optim.sgd(0.5)
    cut, cut_seen = run(optimizer=sgd)
    whole, whole_seen = run(micro=[WHOLE], optimizer=sgd)
    assert cut_seen[0]["weight"] == whole_seen[0]["weight"] == 7 * 8 - 6
    assert abs(cut_seen[0]["loss"] - whole_seen[0]["loss"]) < 1e-6
    assert largest_difference(cut["params"], whole["params"]) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_mean_counts_by_its_samples(scale):
    """Also where the loss is scaled, and so differentiated as a mean."""
    x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    precision = Precision("float32", scale=scale)
    recipe = TrainingConfig(lambda p, b, key: mt.mean((b["x"] @ p) ** 2), mt.optim.sgd(0.1), precision=precision)

    def stepped(*parts):
        state = recipe.init(mt.ones(3, dtype=mt.float32), None)
        return recipe.step(state, [{"x": mt.asarray(part)} for part in parts], mt.random.key(0))[0]["params"]

    by_hand = 1.0 - 0.1 * 2.0 / 7.0 * x.T @ (x @ np.ones(3, np.float32))
    np.testing.assert_allclose(np.asarray(stepped(x)), by_hand, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(stepped(x[:4], x[4:])), by_hand, rtol=1e-6)


@pytest.mark.parametrize(
    ("axes", "plan", "zero"),
    [
        ({"data": 2}, "dp", 0),
        ({"data": 2}, "dp", 1),
        ({"data": 3}, "dp", 2),
        ({"data": 2}, "dp", 3),
        ({"data": 2, "model": 2}, "dp+tp+sp", 2),
        ({"data": 2, "model": 2}, "fsdp+tp+vocab", 0),
    ],
)
def test_every_stage_of_zero_gives_the_steps_of_one_rank(single, axes, plan, zero):
    state, seen = run(axes, plan, zero=zero, clip=1.0, ema=mt.optim.ema(0.9))
    wanted, wanted_seen = single
    for a, b in zip(seen, wanted_seen, strict=True):
        assert abs(a["loss"] - b["loss"]) < 2e-6
        assert abs(a["grad_norm"] - b["grad_norm"]) < 2e-5
    assert largest_difference(state["params"], wanted["params"]) < 4e-5  # Adam divides by small roots
    assert largest_difference(state["ema"]["mean"], wanted["ema"]["mean"]) < 1e-5


@pytest.mark.parametrize(
    ("zero", "params", "slots"), [(0, False, False), (1, False, True), (2, False, True), (3, True, True)]
)
def test_stages_of_zero_split_what_they_say(zero, params, slots):
    state, _ = run({"data": 2}, zero=zero, steps=1)
    for part, split in (("params", params), ("optimizer", slots)):
        leaf = state[part]["mean"]["embed"] if part == "optimizer" else state[part]["embed"]
        assert isinstance(leaf.sharding.placements["data"], mt.Shard) is split


def held_bytes(tree, mesh):
    """Bytes of one rank."""
    return sum(np.prod(x.sharding.block_shape(x.shape)) * x.dtype.itemsize for x in mt.tree.flatten(tree)[0])


@pytest.mark.parametrize(("zero", "share"), [(0, 12.0), (1, 4 + 8 / 4), (2, 4 + 8 / 4), (3, 12 / 4)])
def test_memory_of_the_state_follows_the_formula(zero, share):
    """float32 parameters and two slots: 4P + 8P, of which stages 1 and 2 split the slots and stage 3 everything."""
    state, _ = run({"data": 4}, zero=zero, steps=0)
    count = sum(x.size for x in mt.tree.flatten(state["params"])[0])
    mesh = state["params"]["embed"].sharding.mesh
    got = held_bytes({"p": state["params"], "m": state["optimizer"]["mean"], "v": state["optimizer"]["square"]}, mesh)
    assert abs(got - share * count) < 0.02 * share * count


def test_stage_two_scatters_gradients_where_stage_one_reduces_them_whole():
    texts = {}
    for zero in (1, 2):
        plan, mesh = de.plan("dp"), mt.Mesh({"data": 2})
        recipe = TrainingConfig(lambda p, b, key: de.loss(p, b, CONFIG), mt.optim.adamw(1e-2), plan=plan, zero=zero)
        state = recipe.init(de.init(mt.random.key(0), CONFIG), mesh)
        texts[zero] = mt.explain(recipe.step, state, [mt.distribute(MICRO[0], plan.batch(mesh))], mt.random.key(0))
    assert texts[2].count("reduce_scatter") > 10
    assert texts[1].count("reduce_scatter") == 0


def test_stage_three_gathers_each_parameter_once_and_moves_no_activation():
    plan, mesh = de.plan("dp"), mt.Mesh({"data": 2})
    recipe = TrainingConfig(lambda p, b, key: de.loss(p, b, CONFIG), mt.optim.adamw(1e-2), plan=plan, zero=3)
    state = recipe.init(de.init(mt.random.key(0), CONFIG), mesh)
    text = mt.explain(recipe.step, state, [mt.distribute(MICRO[0], plan.batch(mesh))], mt.random.key(0))
    parameters = len(mt.tree.flatten(state["params"])[0])
    assert text.count("all_gather(") == text.count("reduce_scatter(") == parameters
    assert "all_to_all(" not in text
    reduced = [line for line in text.splitlines() if "all_reduce(" in line]
    assert all(": float32[]  #" in line for line in reduced), reduced  # the loss and its weight


def test_accumulation_costs_one_reduction_a_parameter():
    """Gradients stay unreduced from micro-batch to micro-batch."""
    plan, mesh = de.plan("dp"), mt.Mesh({"data": 2})
    recipe = TrainingConfig(lambda p, b, key: de.loss(p, b, CONFIG), mt.optim.sgd(1e-2), plan=plan)
    state = recipe.init(de.init(mt.random.key(0), CONFIG), mesh)
    counts = []
    for k in (1, 3):
        micro = [mt.distribute(MICRO[0], plan.batch(mesh))] * k
        text = mt.explain(recipe.step, state, micro, mt.random.key(0))
        counts.append(sum(line.count("all_reduce") for line in text.splitlines() if "float32[32,96]" in line))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("axes", [None, {"data": 2}])
def test_sixteen_bit_computation_follows_float32(single, compute, axes):
    state, seen = run(axes, precision=Precision(compute), clip=1.0)
    assert state["params"]["embed"].dtype == np.float32
    for a, b in zip(seen, single[1], strict=True):
        assert abs(a["loss"] - b["loss"]) < 2e-2
    assert seen[-1]["loss"] < seen[0]["loss"]


def test_float16_scales_its_loss_and_leaves_out_steps_that_overflow():
    with np.errstate(all="ignore"):
        state, seen = run(precision=Precision("float16", scale=2.0**24, every=2), steps=12, clip=1.0)
    first, last = seen[0], seen[-1]
    assert first["scale"] == 2.0**24
    assert not np.isfinite(first["grad_norm"])
    assert int(state["scaler"]["skipped"]) > 0
    assert last["scale"] < 2.0**24
    assert last["loss"] < first["loss"]
    assert all(np.isfinite(np.asarray(x)).all() for x in mt.tree.flatten(state["params"])[0])
    assert int(state["optimizer"]["step"]) == 12 - int(state["scaler"]["skipped"])


def test_the_scale_does_not_reach_what_is_clipped():
    """The norm is that of the gradients themselves, and so is the step: of length ``rate * clip`` whatever the
    scale."""
    before = de.init(mt.random.key(0), CONFIG)
    norms = []
    for scale in (2.0, 1024.0):
        state, (seen,) = run(
            optimizer=mt.optim.sgd(0.25), precision=Precision("float16", scale=scale), clip=0.5, steps=1
        )
        change = mt.tree.tree_map(lambda a, b: a - b, state["params"], before)
        assert seen["grad_norm"] > 0.5
        np.testing.assert_allclose(float(mt.optim.global_norm(change)), 0.125, rtol=1e-3)
        norms.append(seen["grad_norm"])
    np.testing.assert_allclose(*norms, rtol=2e-2)


def test_the_scale_grows_after_good_steps():
    p = Precision("float16", scale=4.0, every=2)
    s = p.init()
    for good in (True, True, True, False):
        s = p.update(s, mt.asarray(good))
    assert float(s["scale"]) == 4.0  # doubled after two, halved by the last
    assert int(s["good"]) == 0
    assert int(s["skipped"]) == 1


def test_frozen_parameters_stay_and_have_no_slots():
    frozen = run(trainable=lambda path: path[0] == "layers", steps=2)[0]
    before = de.init(mt.random.key(0), CONFIG)
    np.testing.assert_array_equal(np.asarray(frozen["params"]["embed"]), np.asarray(before["embed"]))
    assert frozen["optimizer"]["mean"]["embed"] is None
    q = frozen["params"]["layers"][0]["attn"]["q"]
    assert np.abs(np.asarray(q) - np.asarray(before["layers"][0]["attn"]["q"])).max() > 0


def test_average_follows_its_recursion():
    recipe = TrainingConfig(lambda p, b, key: mt.sum(p * b["x"]), mt.optim.sgd(1.0), ema=mt.optim.ema(0.9))
    state = recipe.init(mt.asarray([1.0], dtype=mt.float32), None)
    means, params = [], []
    for _ in range(3):
        state, _ = recipe.step(state, [{"x": mt.asarray([-1.0], dtype=mt.float32)}], mt.random.key(0))
        means.append(float(state["ema"]["mean"][0]))
        params.append(float(state["params"][0]))
    assert params == [2.0, 3.0, 4.0]
    np.testing.assert_allclose(means, [1.1, 1.29, 1.561], rtol=1e-6)


def test_an_average_of_small_floats_follows_their_masters():
    """A step of 0.001 from 1 is less than bfloat16 can tell; the average keeps it."""
    recipe = TrainingConfig(lambda p, b, key: mt.sum(p * b["x"]), mt.optim.sgd(1e-3), ema=mt.optim.ema(0.5))
    state = recipe.init(mt.ones(1, dtype=mt.bfloat16), None)
    state, _ = recipe.step(state, [{"x": mt.asarray([-1.0], dtype=mt.float32)}], mt.random.key(0))
    assert (state["params"].dtype.name, float(state["params"][0])) == ("bfloat16", 1.0)
    np.testing.assert_allclose(float(state["ema"]["mean"][0]), 1.0005, rtol=1e-6)


def test_a_step_that_is_left_out_leaves_the_average_too():
    """The loss is finite; its gradients, 64 times 3e4, are not in float16, which a product of matrices gives."""
    recipe = TrainingConfig(
        lambda p, b, key: mt.mean(b @ p[:, None]), mt.optim.momentum(1e-3), precision=Precision("float16", scale=64.0),
        ema=mt.optim.ema(0.5),
    )  # fmt: skip
    before = recipe.init(mt.full(1, 1e-4, dtype=mt.float32), None)
    with np.errstate(all="ignore"):
        after, seen = recipe.step(before, [mt.full((4, 1), 3e4, dtype=mt.float16)], mt.random.key(0))
    assert np.isfinite(float(seen["loss"]))
    assert int(after["scaler"]["skipped"]) == 1
    for part in ("params", "optimizer", "ema"):
        assert largest_difference(after[part], before[part]) == 0.0


def test_a_batch_that_counts_nothing_changes_nothing_and_gives_no_nan():
    empty = {"ids": np.zeros((2, 8), int), "labels": np.full((2, 8), -100)}
    state, seen = run(micro=[empty], optimizer=mt.optim.sgd(1.0), steps=1)
    assert seen[0]["loss"] == 0.0
    assert largest_difference(state["params"], de.init(mt.random.key(0), CONFIG)) == 0.0


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("weight", [0, -1, float("nan"), 0.0])
@pytest.mark.parametrize("static", [True, False])
def test_a_total_without_a_positive_weight_is_no_step(static, weight, precision):
    given = weight if static else mt.asarray(float(weight))
    recipe = TrainingConfig(
        lambda p, b, key: (mt.sum(p * b), given),
        mt.optim.sgd(0.1),
        precision=Precision.of(precision),
        on_nonfinite="skip",
    )
    state = recipe.init(mt.ones(2, dtype=mt.float32), None)
    new, found = recipe.step(state, [mt.ones(2)], mt.random.key(0))
    assert not found["finite"]
    assert new["params"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("weight", [0, -1])
def test_a_run_says_that_the_weight_is_to_blame(weight):
    trainer = mt.Trainer(
        lambda p, b, key: (mt.sum(p * b["x"]), weight),
        mt.ones(2, dtype=mt.float32),
        mt.optim.sgd(0.1),
        {"x": np.ones((4, 2), np.float32)},
        batch=2,
        steps=2,
    )
    with pytest.raises(mt.errors.NonFiniteError, match=rf"at step 1 .* the weight {weight}.0: .* positive weight"):
        trainer.fit()
    assert trainer.params.tolist() == [1.0, 1.0]


CONSTANT = {
    "of the batch": lambda p, b, key: mt.mean(b["x"] ** 2),
    "a number": lambda p, b, key: 1.0,
    "an array": lambda p, b, key: mt.asarray(1.0),
    "stopped": lambda p, b, key: mt.stop_gradient(mt.mean(p * b["x"])),
    "an index": lambda p, b, key: mt.mean(mt.argmax(p * b["x"], axis=1)),
    "a comparison": lambda p, b, key: mt.mean(mt.astype(p * b["x"] > 0, mt.float32)),
    "a weight alone": lambda p, b, key: (mt.sum(b["x"]), mt.sum(p)),
}


@pytest.mark.parametrize("trainable", [None, lambda path: path != ("frozen",)])
@pytest.mark.parametrize("kind", CONSTANT)
def test_a_loss_without_derivative_is_refused(kind, trainable):
    loss = CONSTANT[kind]
    params = mt.ones(2, dtype=mt.float32)
    if trainable is not None:
        params = {"p": params, "frozen": params}
        loss = lambda p, b, key: CONSTANT[kind](p["p"], b, key)  # noqa: E731
    data = {"x": np.ones((4, 2), np.float32)}
    trainer = mt.Trainer(loss, params, mt.optim.sgd(0.1), data, batch=2, steps=2, trainable=trainable)
    with pytest.raises(mt.errors.TrainingError, match="the loss does not depend on the parameters"):
        trainer.fit()


@pytest.mark.parametrize("optimizer", ["adam", mt.optim.adam, None, {}])
def test_an_optimizer_that_is_none_is_refused(optimizer):
    with pytest.raises(mt.errors.TrainingError, match=r"the optimizer must be one of mt\.optim"):
        TrainingConfig(lambda p, b, key: p.sum(), optimizer)


@pytest.mark.parametrize("value", ["a", 0, -1, 2.5])
@pytest.mark.parametrize("name", ["steps", "epochs", "log_every", "snapshot_every", "batch", "micro", "accumulation"])
def test_sizes_that_are_none_are_refused_before_the_run(name, value):
    with pytest.raises(mt.errors.MeshtapeError, match=rf"{name} must be a .*, got {value!r}"):
        mt.Trainer(
            lambda p, b, key: p.sum(),
            mt.ones(2),
            mt.optim.sgd(0.1),
            {"x": np.ones(4)},
            **{"batch": 2, "steps": 1, name: value},
        )


@pytest.mark.parametrize("precision", [None, "float64", "float32", Precision()])
def test_float64_parameters_warn_where_no_precision_was_chosen(precision):
    seen = []

    def loss(p, b, key):
        seen.append(p["w"].dtype)
        return mt.mean(p["w"] * b["x"])

    trainer = mt.Trainer(
        loss, {"w": mt.ones(2)}, mt.optim.sgd(0.1), {"x": np.ones((4, 2))}, batch=2, steps=1, precision=precision
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit()
    told = [str(w.message) for w in found if "precision='float64'" in str(w.message)]
    assert len(told) == (precision is None)
    assert not told or told[0].startswith("parameter w is float64")
    assert seen[0] == (mt.float64 if precision == "float64" else mt.float32)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b, key: p, r"the mean .* no single real number but float32 of shape \(2,\)"),
        (lambda p, b, key: None, "the mean .* but NoneType: a loss returns a mean over the batch"),
        (lambda p, b, key: {"loss": p.sum()}, "the mean .* but dict"),
        (lambda p, b, key: p.sum() * 1j, r"the mean .* complex64 of shape \(\)"),
        (lambda p, b, key: (p, 1.0), r"the total .* float32 of shape \(2,\)"),
        (lambda p, b, key: (p.sum(), None), "the weight .* NoneType"),
        (lambda p, b, key: (p.sum(), 1.0, {"a": p}), r"the metric a .* shape \(2,\)"),
        (lambda p, b, key: (p.sum(), 1.0, p), "metrics of a loss are a dict"),
        (lambda p, b, key: (p.sum(), 1.0, {}, 2), "4 things"),
        (lambda p, b, key: (p.sum(), 1.0, {"loss": 1.0}), "cannot be called loss"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss, message):
    recipe = TrainingConfig(loss, mt.optim.sgd(0.1))
    with pytest.raises(mt.errors.TrainingError, match=message):
        recipe.step(recipe.init(mt.ones(2), None), [{"x": mt.ones(2)}], mt.random.key(0))


def test_options_that_mean_nothing_are_refused():
    for options, message in (
        ({"zero": 4}, "stage"),
        ({"clip": 0.0}, "clip"),
        ({"trainable": lambda p: False}, "no parameter"),
    ):
        with pytest.raises(mt.errors.TrainingError, match=message):
            TrainingConfig(lambda p, b, k: p.sum(), mt.optim.sgd(0.1), **options).init(mt.ones(2), None)
    with pytest.raises(mt.errors.TrainingError, match="float8"):
        Precision("float8")
    for options in ({"scale": 0.0}, {"scale": float("inf")}, {"growth": 0.5}, {"every": 0}):
        with pytest.raises(mt.errors.TrainingError, match="a finite scale above"):
            Precision("float16", **{"scale": 2.0} | options)


def test_more_tokens_than_float16_counts_do_not_erase_the_gradients_of_float16_parameters():
    """The mean is taken in float32: their number is infinite in float16."""

    def loss(p, batch, key):
        return mt.sum(mt.astype(p["w"], mt.float32) * batch) * 2**17, mt.asarray(np.float32(2**17))

    recipe = TrainingConfig(loss, mt.optim.sgd(1.0))
    state = recipe.init({"w": mt.zeros(3, dtype=mt.float16)}, None)
    state, found = recipe.step(state, [mt.asarray(np.float32([0.25, -0.125, 0.0625]))], mt.random.key(0))
    np.testing.assert_array_equal(np.asarray(state["params"]["w"]), np.float16([-0.25, 0.125, -0.0625]))
    assert float(found["weight"]) == 2**17


@pytest.mark.parametrize("loss", [lambda p, b: p.sum(), lambda: 0.0, lambda p, b, key, more: p.sum()])
def test_a_loss_that_does_not_take_what_it_is_given_is_refused_before_the_run(loss):
    with pytest.raises(mt.errors.TrainingError, match=r"called as loss\(params, batch, key\)"):
        TrainingConfig(loss, mt.optim.sgd(0.1))
    TrainingConfig(lambda p, b, key=None, more=1: p.sum(), mt.optim.sgd(0.1))


@pytest.mark.parametrize("count", [np.arange(2), mt.asarray([1, 2]), mt.asarray([True]), 3], ids=repr)
def test_integers_among_the_parameters_are_refused_until_they_are_said_not_to_be_trained(count):
    params = {"w": mt.ones(2), "norm": {"count": count}}
    loss = lambda p, b, key: mt.mean(p["w"] * mt.sum(p["norm"]["count"]) * b["x"])  # noqa: E731
    with pytest.raises(
        mt.errors.TrainingError, match=r"norm\.count is .* which has no gradient.*trainable=lambda path"
    ):
        TrainingConfig(loss, mt.optim.sgd(0.1)).init(params, None)
    recipe = TrainingConfig(loss, mt.optim.sgd(0.1), trainable=lambda path: path != ("norm", "count"))
    state, _ = recipe.step(recipe.init(params, None), [{"x": mt.ones(2)}], mt.random.key(0))
    assert np.asarray(state["params"]["norm"]["count"]).tolist() == np.asarray(count).tolist()
    assert (np.asarray(state["params"]["w"]) < 1).all()
