"""A tape changes no dtype, shape, value or aliasing: the namespace that the public array-API suite is run on under a
tape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import numpy as np
import traced_namespace as xp
from meshtape import arrays as plain
from meshtape.arrays.core.op import state

assert state.recorders == (xp.TAPE,)
for name in xp.CREATION:
    assert hasattr(plain, name), name
x, y = xp.asarray([1.0, 2.0, 4.0]), xp.linspace(0, 1, 3)
assert xp.TAPE.watches(x) and xp.TAPE.watches(y)
assert not xp.TAPE.watches(xp.arange(3))  # integers have no gradient
before = len(xp.TAPE)
z = xp.sum(xp.sqrt(x) * y)
assert len(xp.TAPE) == before + 3
assert xp.TAPE.gradient(z, y).tolist() == np.sqrt([1.0, 2.0, 4.0]).tolist()
for _ in range(1500):
    x = x + 0.0
assert len(xp.TAPE) <= 1001
assert set(plain.__all__) <= set(dir(xp)) and xp.__array_api_version__ == plain.__array_api_version__
w = x[:2]
w[0] = 9.0
assert x.tolist() == [1.0, 2.0, 4.0] and w.tolist() == [9.0, 2.0]
print("whole")
"""


def test_creation_functions_return_watched_arrays():
    # In a process of its own: its tape listens for as long as that lives.
    tests = Path(__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", CODE], cwd=tests, capture_output=True, text=True, timeout=300)
    assert found.stdout == "whole\n", found.stderr
