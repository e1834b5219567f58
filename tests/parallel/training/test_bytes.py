"""The job on real text in small: one loss curve on every mesh, below what guessing would give."""

from __future__ import annotations

import math

import numpy as np
import pytest

import meshtape as mt

from .conftest import losses

STEPS = 12
OPTIONS = {"steps": STEPS, "length": 48, "batch": 8, "limit": 40_000, "log_every": 1}


@pytest.fixture(scope="module")
def job(benchmark_module):
    return benchmark_module("bytes_job")


@pytest.fixture(scope="module")
def single(job):
    return job.trainer("tiny", **OPTIONS).fit()


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        ("tp+sp+vocab", {"model": 2}),
        pytest.param("dp", {"data": 2}, marks=pytest.mark.slow),
        pytest.param("pp", {"pipe": 2}, marks=pytest.mark.slow),
    ],
)
def test_two_virtual_ranks_have_the_curve_of_one(job, single, plan, axes):
    result = job.trainer("tiny", plan=plan, mesh=mt.Mesh(axes), **OPTIONS).fit()
    np.testing.assert_allclose(losses(result), losses(single), rtol=2e-4)


@pytest.mark.slow
def test_two_workers_have_the_curve_of_one(job, single, processes):
    with mt.Mesh({"data": 2}, client=processes) as mesh:
        result = job.trainer("tiny", mesh=mesh, **OPTIONS).fit()
    np.testing.assert_allclose(losses(result), losses(single), rtol=2e-4)


def test_it_learns_and_is_judged_on_other_files(job, single):
    judged = single.history[-1]["eval_loss"] / math.log(2)
    assert losses(single)[-1] / math.log(2) < 7.0  # eight bits to begin with
    assert judged < 7.5
    learn, held = job.sources()
    assert len(learn) > 5 * len(held) > 500_000
    found = job.baselines(learn, held[:16384], 512)
    assert 1.0 < found["xz -9, whole"] < found["gzip -9, whole"] < 3.0
    assert (
        found["gzip -9, whole"]
        < found["gzip -9, windows after 32 kB of the training text"]
        < found["gzip -9, windows"]
        < 5.0
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_ranks_of_every_form_have_the_curve_of_one(benchmark_module):
    """A hundred steps, over the warm-up and the fall of the rate: rounding grows with each."""
    found = benchmark_module("bytes_report").forms("tiny", 100, 64, 8, workers=False)
    assert set(found["largest relative difference from one rank"]) == {"dp2", "tp2", "pp2"}
    assert max(found["largest relative difference from one rank"].values()) < 1e-3, found
    assert found["bits per byte"]["one rank"][-1] < 4.5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_small_decoder_predicts_held_out_bytes_better_than_gzip_packs_them(job):
    """Some 120,000 parameters and 3 MB of text, in minutes. A window is predicted from nothing but its own bytes; gzip
    -9 has the windows too, and in the second row 32 kB of the training text as well. What 10 million parameters reach
    is in the report."""
    t = job.trainer("tiny", steps=1500, length=128, batch=16, peak=5e-3, sample=16, log_every=100, progress=True)
    judged = t.fit().history[-1]["eval_loss"] / math.log(2)
    found = job.baselines(*job.sources(), 128)
    print(f"{judged:.3f} bits per byte, {found}")
    assert judged < 0.75 * found["gzip -9, windows after 32 kB of the training text"] < found["gzip -9, windows"]
