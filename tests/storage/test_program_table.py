"""Every op of the table in a program file: written, read and run to the bit; and what a file may say of a call is checked."""

from __future__ import annotations

import json

import numpy as np
import pytest

import meshtape as mt
import meshtape.parallel  # it has ops of its own
from meshtape.arrays import program_json as pj
from meshtape.arrays._dispatch import apply
from meshtape.arrays._op import OPS
from meshtape.arrays.program_checks import AGREEMENTS, PARAMETERS
from meshtape.storage import load_program


def bits(arrays):
    return [(a.dtype, a.shape, np.asarray(a).tobytes()) for a in arrays]


@pytest.mark.parametrize("name", sorted(OPS))
def test_each_op_is_written_read_and_run(name, op_programs):
    op = OPS[name]
    for program, document, args, params in op_programs(name):
        run = load_program(json.loads(json.dumps(document, allow_nan=False)))
        assert pj.same_program(run.program, program), params
        assert pj.to_json(run.program)[0].items() <= document.items(), params
        arrays = [mt.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
        wanted = apply(op, tuple(arrays), params)
        got = run(*(a for a in args if isinstance(a, np.ndarray)))
        assert bits(got) == bits(wanted if op.nout > 1 else [wanted]), params


def test_the_table_of_parameters_is_that_of_the_ops(op_programs):
    """No op has parameters that no check knows, and no check is for an op that is not there."""
    assert OPS.keys() >= PARAMETERS.keys() | AGREEMENTS.keys()
    for name in OPS:
        for _, _, _, params in op_programs(name):
            assert set(PARAMETERS.get(name, {})) == set(params), name
