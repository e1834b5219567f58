"""Random numbers follow the samples: micro-batches, chunks, stages and meshes change none of them."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt

en = mt.models.encoder
CONFIG = en.Config(vocab=30, width=16, layers=1, heads=2, ffn=32, max_length=8, dropout=0.3)


@pytest.fixture(scope="module")
def run(small_run):
    return small_run(layers=2, steps=2, batch=8, clip=None, ema=None)


@pytest.fixture(scope="module")
def reference(run):
    return [h["loss"] for h in run(accumulation=1).fit().history]


@pytest.mark.parametrize(
    ("axes", "plan", "options"),
    [
        (None, "dp", {"accumulation": 2}),
        (None, "dp", {"accumulation": None, "micro": 1}),
        ({"data": 2}, "dp", {"accumulation": 1}),
        ({"data": 4}, "dp", {"accumulation": 2}),
        ({"data": 2, "model": 2}, "fsdp+tp", {"accumulation": 1}),
        ({"pipe": 2}, "dp+pp", {"accumulation": 4}),
        ({"pipe": 2, "data": 2}, "dp+pp", {"accumulation": 2, "schedule": "zerobubble"}),
    ],
)
def test_dropout_does_not_depend_on_how_a_batch_is_cut(run, reference, axes, plan, options):
    history = run(axes, plan, **options).fit().history
    np.testing.assert_allclose([h["loss"] for h in history], reference, rtol=0, atol=1e-6)


def pairs(rows=20):
    rng = np.random.default_rng(0)
    return {name: {"ids": rng.integers(1, 30, (rows, 6))} for name in ("query", "answer")}


def embed(params, part, key):
    half = mt.random.fold_in(key, 1)
    return tuple(en.embed(params, part[n]["ids"], CONFIG, key=k) for n, k in (("query", key), ("answer", half)))


def cached(chunk):
    return mt.training.grad_cache(
        embed, lambda found: mt.training.contrastive_loss(*found, temperature=0.1), chunk=chunk
    )


@pytest.fixture(scope="module")
def params():
    return en.init(mt.random.key(0), CONFIG)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 4, 5, 20])
def test_cached_gradients_have_one_dropout_whatever_the_chunk_and_the_mesh(params, ranks, chunk):
    key = mt.random.key(5)
    fn = mt.compile(mt.value_and_grad(lambda p, b: cached(chunk)(p, b, key)))
    batch = mt.tree.tree_map(mt.asarray, pairs())
    wanted, slopes = mt.value_and_grad(lambda p: cached(20)(p, batch, key))(params)
    if ranks > 1:
        mesh = mt.Mesh({"data": ranks})
        batch = mt.tree.tree_map(lambda x: mt.distribute(x, mesh, data=mt.Shard(0)), batch)
        key = mesh.replicate(key)
        params = mt.tree.tree_map(mesh.replicate, params)
    value, grads = fn(params, batch)
    assert abs(float(value) - float(wanted)) < 1e-6
    for a, b in zip(mt.tree.flatten(grads)[0], mt.tree.flatten(slopes)[0], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def test_a_cached_loss_in_a_run_has_the_dropout_of_the_plain_one(params):
    """Micro-batches are other batches to a contrastive loss, but their vectors are the same."""

    def norms(wrap):
        def loss(p, batch, key):
            return wrap(p, batch, key)

        return (
            mt.Trainer(loss, params, mt.optim.sgd(0.0), pairs(8), batch=8, accumulation=2, steps=1, log_every=1)
            .fit()
            .loss
        )

    def total(found):
        return mt.mean(found[0] * found[1])

    plain = norms(lambda p, b, key: total(embed(p, b, key)))
    for chunk in (1, 3, 4):
        assert abs(norms(mt.training.grad_cache(embed, total, chunk=chunk)) - plain) < 1e-6


# ----- the keys themselves --------------------------------------------------------------------------------------------


DRAWS = {
    "uniform": lambda key, shape: mt.random.uniform(key, shape),
    "normal": lambda key, shape: mt.random.normal(key, shape, dtype=np.float32),
    "truncated_normal": lambda key, shape: mt.random.truncated_normal(key, -1.0, 1.0, shape),
    "exponential": lambda key, shape: mt.random.exponential(key, shape),
    "gumbel": lambda key, shape: mt.random.gumbel(key, shape),
    "bits": lambda key, shape: mt.random.bits(key, shape),
    "integers": lambda key, shape: mt.random.integers(key, shape, 0, 1000),
    "bernoulli": lambda key, shape: mt.random.bernoulli(key, 0.5, shape),
    "categorical": lambda key, shape: mt.random.categorical(key, mt.zeros((*shape, 7))),
    "laplace": lambda key, shape: mt.random.laplace(key, shape),
    "dropout": lambda key, shape: mt.nn.dropout(mt.ones(shape), 0.5, key=key),
    "dropout_add": lambda key, shape: mt.nn.dropout_add(mt.ones(shape), mt.ones(shape), 0.5, key=key),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (12, 5), (6, 2, 130)])
def test_a_draw_with_keys_of_samples_is_that_of_each_sample(name, shape):
    draw, keys = DRAWS[name], mt.random.fold_in(mt.random.key(1), mt.arange(6))
    whole = np.asarray(draw(keys, shape))
    each = shape[0] // 6
    for i in range(6):
        part = np.asarray(draw(keys[i : i + 1], (each, *shape[1:])))
        np.testing.assert_array_equal(whole[i * each : (i + 1) * each], part)
    mesh = mt.Mesh({"data": 3})
    split = mt.compile(lambda k: draw(k, shape) * mt.distribute(mt.ones(shape), mesh, data=mt.Shard(0)))
    if whole.dtype.kind == "f":
        np.testing.assert_array_equal(np.asarray(split(mesh.replicate(keys))), whole)


def test_what_belongs_to_no_sample_takes_one_key():
    keys = mt.random.fold_in(mt.random.key(1), mt.arange(6))
    first = mt.random.fold_in(mt.random.key(1), 0)
    for draw in (
        lambda k: mt.random.uniform(k, ()),
        lambda k: mt.random.normal(k, (4, 2)),
        lambda k: mt.random.permutation(k, 12),
        lambda k: mt.random.choice(k, 9, (6,), replace=False),
    ):
        np.testing.assert_array_equal(np.asarray(draw(keys)), np.asarray(draw(first)))


def test_keys_of_samples_are_folded_and_split_row_by_row():
    key = mt.random.key(9)
    keys = mt.random.fold_in(key, mt.asarray([0, 3, 7]))
    assert keys.shape == (3, 1, 2)
    for i, n in enumerate((0, 3, 7)):
        one = mt.random.fold_in(key, n)
        for found, wanted in (
            (keys, one),
            (mt.random.fold_in(keys, 5), mt.random.fold_in(one, 5)),
            (mt.random.fold_in(keys, "dropout"), mt.random.fold_in(one, "dropout")),
            (mt.random.split(keys, 3)[1], mt.random.split(one, 3)[1]),
        ):
            np.testing.assert_array_equal(np.asarray(found[i, 0]), np.asarray(wanted))
    with pytest.raises(mt.errors.ShapeError, match="4 numbers do not fit 3 keys"):
        mt.random.fold_in(keys, mt.arange(4))
    with pytest.raises(mt.errors.DTypeError, match=r"of shape \(2,\)"):
        mt.random.uniform(mt.random.split(key), (2,))  # the rows of split are keys, not keys of samples
