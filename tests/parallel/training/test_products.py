"""Products of parallel forms on one mesh: each run is that of one rank, whatever the forms and however they are
combined."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt

de, en, tr = mt.models.decoder, mt.models.encoder, mt.training
moe = mt.models.moe
TOKENS = np.random.default_rng(0).integers(0, 32, 300)
CONFIG = de.Config(
    vocab=32, width=16, layers=2, heads=2, max_length=16, experts=moe.Config(4, 2, capacity_factor=None, aux_weight=0.1)
)
AXES = {"dp": "data", "fsdp": "data", "tp": "model", "cp": "context", "ep": "expert", "pp": "pipe"}


def mesh_of(plan, **options):
    """Two ranks along the axis of each part."""
    return mt.Mesh({AXES[p]: 2 for p in plan.split("+") if p in AXES}, **options)


def numbers(result):
    return [(h["loss"], h["grad_norm"]) for h in result.history if "loss" in h]


def decoder(plan, mesh, steps=2, **options):
    named = de.plan(plan)
    return mt.Trainer(
        lambda p, b, key: de.loss(p, b, CONFIG, key=key, plan=named), lambda key: de.init(key, CONFIG), mt.optim.adamw(1e-2),
        tr.TokenSource(TOKENS, 8), batch=8, accumulation=2, steps=steps, log_every=1, clip=0.5, mesh=mesh, plan=named,
        ema=mt.optim.ema(0.9), stages=de.staged(CONFIG, plan=named), **options,
    ).fit()  # fmt: skip


@pytest.fixture(scope="module")
def single():
    return numbers(decoder("dp", None))


slow = pytest.mark.slow
PRODUCTS = [
    "dp+tp+ep+pp",
    "fsdp+cp+ep",
    *(
        pytest.param(p, marks=slow)
        for p in (
            "dp+pp", "tp+pp", "ep+pp", "cp+pp", "dp+tp", "dp+cp", "dp+ep", "tp+cp", "tp+ep", "cp+ep", "fsdp+tp+sp+vocab+pp", "dp+tp+cp",
            "tp+sp+vocab+cp+pp", "fsdp+tp+ep+pp", "dp+cp+ep+pp", "dp+tp+cp+ep+pp", "fsdp+tp+vocab+cp+ep+pp",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("plan", PRODUCTS)
def test_a_product_of_forms_equals_one_rank(single, plan):
    np.testing.assert_allclose(numbers(decoder(plan, mesh_of(plan))), single, rtol=5e-5)


def test_a_run_goes_on_under_other_forms_at_every_step(tmp_path):
    """Each step on another mesh: parameters, slots and averages pass through the checkpoint."""
    whole = numbers(decoder("dp", None, steps=5))
    found = []
    for step, plan in enumerate(("fsdp+tp", "cp+pp", "dp", "ep+tp", "pp"), 1):
        mesh = mesh_of(plan) if step != 3 else None
        found += numbers(decoder(plan, mesh, steps=step, directory=tmp_path))
    np.testing.assert_allclose(found, whole, rtol=5e-5)


@pytest.mark.parametrize(
    "plan", ["tp", *(pytest.param(p, marks=slow) for p in ("dp", "cp", "ep", "pp", "dp+tp", "cp+pp", "tp+ep"))]
)
def test_a_form_on_two_worker_processes_equals_one_rank(processes, single, plan):
    with mesh_of(plan, client=processes) as mesh:
        np.testing.assert_allclose(numbers(decoder(plan, mesh)), single, rtol=5e-5)


# ----- an encoder in stages -------------------------------------------------------------------------------------------

SMALL = en.Config(vocab=32, width=16, layers=3, heads=2, ffn=24, max_length=8, dropout=0.1)
LENGTHS = np.random.default_rng(1).integers(1, 9, 30)
SENTENCES = {
    "ids": np.random.default_rng(2).integers(0, 32, (30, 8)),
    "mask": (np.arange(8) < LENGTHS[:, None]).astype(np.int64),
    "kind": LENGTHS % 3,
}


def encoder(plan, mesh, tied=False, masked=True):
    """A classifier of sentences, with a head of its own or, ``tied``, one that asks rows of the embedding."""
    named = en.plan(plan)
    data = {n: x for n, x in SENTENCES.items() if masked or n != "mask"}

    def judge(p, x, b, key):
        head = p["embed"]["word"][:3].T if tied else p["head"]
        losses = mt.nn.cross_entropy(en.pool(x, b.get("mask")) @ head, b["kind"], reduction="sum")
        return losses, mt.asarray(float(len(b["kind"])))

    def loss(p, b, key):
        x = en.apply(p, b["ids"], SMALL, mask=b.get("mask"), key=key, plan=named)
        return judge(p, x, b, key)

    def init(key):
        params = en.init(key, SMALL)
        return (
            params
            if tied
            else params | {"head": mt.random.normal(mt.random.fold_in(key, 99), (16, 3), dtype=mt.float32)}
        )

    return mt.Trainer(
        loss, init, mt.optim.adamw(1e-2), data, batch=8, accumulation=2, steps=4, log_every=1, clip=0.5, mesh=mesh, plan=named,
        evaluate={n: x[:11] for n, x in data.items()}, stages=en.staged(SMALL, judge, plan=named, tied=tied),
    ).fit()  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "axes", "options"),
    [
        ("pp", {"pipe": 3}, {}),
        pytest.param("dp+tp+pp", {"data": 2, "model": 2, "pipe": 2}, {"tied": True}, marks=slow),
        pytest.param("tp+sp+vocab+pp", {"model": 2, "pipe": 2}, {"masked": False}, marks=slow),
        pytest.param("fsdp+pp", {"data": 2, "pipe": 3}, {"tied": True, "masked": False}, marks=slow),
    ],
)
def test_an_encoder_in_stages_equals_one_rank(plan, axes, options):
    """Dropout, padding, a ragged last batch and an evaluation are in it."""
    one, many = encoder("dp", None, **options), encoder(plan, mt.Mesh(axes), **options)
    np.testing.assert_allclose(numbers(many), numbers(one), rtol=5e-5)
    np.testing.assert_allclose(many.history[-1]["eval_loss"], one.history[-1]["eval_loss"], rtol=5e-5)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(mt.errors.ShapeError, match=r"\[encoder\] 3 blocks cannot be cut into 4 stages"):
        en.staged(SMALL, lambda p, x, b, key: x).functions(4)
