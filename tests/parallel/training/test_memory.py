"""What training holds in memory follows its formulae: a sample of the table that ``benchmarks/memory.py`` makes.

Each figure is the least of three, as other threads of the process may hold something of their own meanwhile.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def memory(benchmark_module):
    return benchmark_module("memory")


@pytest.mark.parametrize(("kind", "more"), [("fthenb", 6), ("1f1b", 0)])
def test_inputs_of_stages_are_held_as_the_schedule_says(memory, kind, more):
    """Three ranks; from 3 to 6 micro-batches the two that have an input of their own hold three more each, or none."""
    (_, few), (held, many) = (memory.held_inputs(kind, 3, m, rows=1024, width=1024) for m in (3, 6))
    assert held == ([6, 6, 6] if kind == "fthenb" else [3, 2, 1])
    assert abs(many - few - more) < 0.5


def test_attention_leaves_its_square_matrices_out(memory):
    b, s, config = 8, 128, {"width": 16, "heads": 2, "ffn": 32}

    def kept(layers, r):  # measured anew, beside other threads than the first time
        return min(memory.kept(layers, r, b, s, config) for _ in range(2))

    grown = {r: kept(3, r) - kept(1, r) for r in ("none", "attention", "blocks")}
    inputs, hidden = 4.0 * b * s * 16, 4.0 * b * s * (7 * 16 + 4 * 32 + 2)
    assert grown["none"] == pytest.approx(grown["attention"], rel=0.01)
    assert grown["none"] == pytest.approx(2 * hidden, rel=0.1)
    assert 2 * inputs < grown["blocks"] < grown["none"]


@pytest.mark.parametrize(("zero", "share"), [(0, 3.0), (1, 2.0), (3, 1.5)])
def test_zero_splits_the_state(memory, zero, share):
    found, params = memory.resting(zero, 2)
    assert found == pytest.approx(share * params, rel=0.001)
