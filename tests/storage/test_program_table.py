"""Every op of the table in a program file: written, read and run to the bit; and what a file may say of a call is
checked, as is the memory that it asks for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from same_programs import same_program

import meshtape as mt
import meshtape.parallel  # it has ops of its own
from meshtape.arrays.core.dispatch import apply
from meshtape.arrays.core.op import OPS
from meshtape.storage import load_program, program_document
from meshtape.storage.programs import encode as pj
from meshtape.storage.programs.memory import most_held
from meshtape.storage.programs.validate import AGREEMENTS


def bits(arrays):
    return [(a.dtype, a.shape, np.asarray(a).tobytes()) for a in arrays]


@pytest.mark.parametrize("name", sorted(OPS))
def test_each_op_is_written_read_and_run(name, op_programs):
    op = OPS[name]
    for program, document, args, params in op_programs(name):
        run = load_program(json.loads(json.dumps(document, allow_nan=False)))
        assert same_program(run.program, program), params
        assert pj.to_json(run.program)[0].items() <= document.items(), params
        arrays = [mt.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
        wanted = apply(op, tuple(arrays), params)
        got = run(*(a for a in args if isinstance(a, np.ndarray)))
        assert bits(got) == bits(wanted if op.nout > 1 else [wanted]), params


def test_the_table_of_parameters_is_that_of_the_ops(op_programs):
    """No op has parameters that no check knows, and no check is for an op that is not there."""
    assert OPS.keys() >= AGREEMENTS.keys()
    for name in OPS:
        for _, _, _, params in op_programs(name):
            assert set(OPS[name].params) == set(params), name


def test_what_is_no_view_is_counted(op_programs):
    """A result that lies in the memory of an operand, or repeats itself, is never taken for memory that the program
    needs."""
    for name in sorted(OPS):
        for program, _, args, params in op_programs(name):
            given = [mt.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
            got = apply(OPS[name], tuple(given), params)
            got = got if OPS[name].nout > 1 else [got]
            hosts = [a._buf for a in given if isinstance(a, mt.Array)]
            new = sum(
                g.nbytes
                for g in got
                if not any(np.shares_memory(g._buf, h) for h in hosts)
                and all(s or n < 2 for s, n in zip(g._buf.strides, g.shape, strict=True))
            )
            if name not in ("random_permutation", "positions"):  # which make more than they give
                assert most_held(program)[0] <= new, (name, params)


def _hostile(n):
    """Programs that somebody wrote who wants memory: (what, document)."""
    key = mt.random.key(0)
    order = program_document(lambda k: mt.random.permutation(k, 4), key)
    order["entries"][0]["params"]["global_shape"] = {"tuple": [n]}
    yield "an order of which it keeps little", order
    drawn = program_document(lambda k: mt.random.normal(k, (4,)), key)
    drawn["entries"][0]["params"].update(shape={"tuple": [n]}, global_shape={"tuple": [n]})
    drawn["types"]["1"][1] = [n]
    yield "numbers", drawn
    places = program_document(
        lambda x: apply(OPS["positions"], (mt.broadcast_to(x, (4,)),), {"axis": 0, "start": 0})[1], mt.ones(())
    )
    places["entries"][0]["params"]["shape"] = {"tuple": [n]}
    for v in ("1", "2"):
        places["types"][v][1] = [n]
    yield "places of which it keeps one", places
    side = 1 << n.bit_length() // 2
    spread = program_document(lambda x: mt.broadcast_to(x, (4, 4)) + 1.0, mt.ones(()))
    spread["entries"][0]["params"]["shape"] = {"tuple": [side, side]}
    for v in ("1", "2"):
        spread["types"][v][1] = [side, side]
    yield "a view that is added to", spread


@pytest.mark.parametrize("n", [1 << 48, 1 << 58])
def test_memory_that_no_machine_has_is_refused_before_anything_runs(n):
    for what, document in _hostile(n):
        run = load_program({k: v for k, v in document.items() if k != "crc32c"})
        array = mt.random.key(0) if run.program.avals[0].shape else mt.ones(())
        with pytest.raises(
            mt.errors.OutOfMemory, match=r"entry \d+ \(\w+\) of the program would hold .* TiB at once"
        ) as e:
            run(array)
        assert isinstance(e.value, MemoryError), what


def test_views_and_what_is_free_by_then_are_no_memory():
    """Terabytes by shape, a few bytes in fact; and what nothing reads any more does not add up."""
    document = program_document(lambda x: mt.broadcast_to(x, (4, 4))[1, 2], mt.ones(()))
    document["entries"][0]["params"]["shape"] = {"tuple": [1 << 24, 1 << 24]}
    document["types"]["1"][1] = [1 << 24, 1 << 24]
    del document["crc32c"]
    assert "getitem" in str(document)
    run = load_program(document)
    assert most_held(run.program)[0] == 0
    assert float(run(mt.asarray(3.0))) == 3.0
    chain = load_program(program_document(lambda x: mt.exp(mt.exp(mt.exp(mt.exp(x)))), mt.ones(8)))
    assert most_held(chain.program) == (128, 1)
