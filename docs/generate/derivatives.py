"""The page on the derivative of each op, from the op table, the rule tables and the samples that the tests run.

``python docs/generate/derivatives.py`` writes ``docs/reference/derivatives.md``; with ``--check`` it only compares, and
says by its exit status whether the page is up to date.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "derivatives.md"
sys.path.insert(0, str(ROOT / "tests" / "autodiff"))

import meshtape as mt  # noqa: E402
import meshtape.parallel  # noqa: E402  it adds its ops to the table
from meshtape.arrays import OPS  # noqa: E402
from meshtape.arrays.core.op import Op, recording  # noqa: E402
from meshtape.autodiff.rules import RULES, VJPRule  # noqa: E402

HEAD = """\
# Derivatives of the ops

Made by `docs/generate/derivatives.py` from the tables that the engine reads. Of each op:

* **derivative**: a *rule* of its own, or its *decomposition* into plain functions, whose rules are then applied; or why there is none. An op
  without a derivative passes no gradient to its operands, and never raises.
* **of**: the operands that get a cotangent. Integers, booleans and running statistics never do.
* **keeps**: what the tape keeps of a call for the backward pass (`ans` is the result, `ans_1` one of several, `shapes` no values at all).
* **complex**: whether the tests differentiate it at complex numbers. The gradient of a real `L` is `dL/d(re z) + i dL/d(im z)`.
* **order**: to which order derivatives are tested: to the second against differences, forward and reverse, at awkward shapes
  (0-d, empty, broadcast, not contiguous, repeated indices); to the fourth along lines against the plain formula, for the fused ops.

Derivatives of any order exist wherever the first does. The cotangent of a read (`getitem`) of a large array, by whatever mixture of slices,
masks and index arrays, is kept as places and values as long as that takes less memory than the dense array, through sums, casts and products with
numbers, and as a gradient until something needs the whole of it: see {py:func}`meshtape.sparse_gradient`. Where it is itself recorded, traced
or sharded it is the result of `scatter`, which is dense.
"""


def _operands(op: Op, rule: VJPRule | None) -> str:
    if rule is None or rule.together is not None:
        return ", ".join(o.lstrip("*") for o in op.operands)
    return ", ".join(op.operands[i].lstrip("*") for i in sorted(rule.each))


def _keeps(op: Op, rule: VJPRule | None) -> str:
    if rule is None:
        return ", ".join(o.lstrip("*") for o in op.operands)
    needs = {n for found in rule.needs.values() for n in found}
    places = sorted({n.where for n in needs if n.kind in ("operand", "rest")})
    results = ["ans"] * any(n.kind == "ans" for n in needs) + sorted(
        f"ans_{n.where}" for n in needs if n.kind == "result"
    )
    named = [op.operands[i].lstrip("*") for i in places] + results
    return ", ".join(named) or ("shapes" if any(n.kind.endswith("like") for n in needs) else "nothing")


class _Names:
    """A recorder that keeps the names of the ops it sees."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def watches(self, x: Any) -> bool:
        return True

    def record(self, op: Op, *rest: Any) -> None:
        self.seen.add(op.name)


def fourth_order() -> set[str]:
    """The fused ops that the functions which are tested to fourth order call, forward and backward."""
    from test_layer_norm import test_to_fourth_order_along_a_line as of_layer_norm
    from test_norms import CASES
    from test_softmax import PAIRS

    assert of_layer_norm
    calls = [(f, (3, 4)) for f, _ in PAIRS.values()] + [(f, (2, 4, 3)) for f, _ in CASES.values()]
    calls.append((lambda x: mt.layer_norm(x, 4), (3, 4)))
    names = _Names()
    with recording(names):
        for fn, shape in calls:
            mt.grad(lambda x, fn=fn: mt.sum(fn(x)))(mt.reshape(mt.arange(float(math.prod(shape))), shape) / 7)
    return {n for n in names.seen if OPS[n].decompose is not None or n.startswith("gelu")}


def rows() -> list[tuple[str, ...]]:
    """One row an op, by name: op, derivative, operands, what is kept, complex, order."""
    samples = tables.op_samples().SAMPLES
    fourth = fourth_order()
    out = []
    for name, op in sorted(OPS.items()):
        if op.nondifferentiable is not None:
            out.append((f"`{name}`", f"none: {op.nondifferentiable}", "", "", "", ""))
            continue
        rule = RULES.get(op)
        kind = "rule" if rule is not None else "decomposition"
        cplx = any(o.kind == "c16" for s in samples[name] for o in s.operands)
        order = "4" if name in fourth else "2"
        out.append((f"`{name}`", kind, _operands(op, rule), _keeps(op, rule), "yes" if cplx else "", order))
    return out


def page() -> str:
    """The page as Markdown."""
    return HEAD + "\n" + tables.markdown(("op", "derivative", "of", "keeps", "complex", "order"), rows())


if __name__ == "__main__":
    raise SystemExit(tables.write(PAGE, page()))
