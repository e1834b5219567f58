"""The page on how each op is sharded, from the factor mappings that the partitioner reads and the samples that the
tests run.

``python docs/generate/shardings.py`` writes ``docs/reference/shardings.md``; with ``--check`` it only compares, and
says by its exit status whether the page is up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "shardings.md"

import meshtape as mt  # noqa: E402
from meshtape.arrays import OPS  # noqa: E402
from meshtape.arrays.core.op import Op, ShapeDtype  # noqa: E402
from meshtape.parallel.sharding.factors import FactorRule, rule_for  # noqa: E402

samples = tables.op_samples().samples

HEAD = """\
# How the ops are sharded

Made by `docs/generate/shardings.py` from the factor mappings that the partitioner reads, for the calls that the tests make. Every op of the
table is in it. Of each op, by the kinds of dimensions that its operands have ({doc}`/explanation/sharding` says what the kinds are):

* **stays split**: may be split freely; *blocked* where only between blocks of elements that stay together (heads, groups of channels,
  rows that become columns). A split that cuts blocks is undone first: `mt.explain` says so, `mt.explicit_sharding` refuses it.
* **leaves a reduction**: splitting it leaves a result `Partial` with this operator, reduced where somebody needs the value.
* **fetches**: ranks fetch just the elements that their block of the result needs: a halo, a slice, a shift.
* **made whole**: operands that are split there are gathered first, for the reason given; or the op is *decomposed* into plain functions,
  whose reductions along that dimension become collectives of the reduced size, so that no element moves.
* **pending**: operands (together, in brackets) that may be sums still to be made: the result then is one too.
"""

# Why a dimension must be whole, of the ops that then gather.
WHY = {
    "prod": "of complex numbers alone, which are multiplied in order",
    "sort": "each place depends on all elements",
    "argsort": "each place depends on all elements",
    "topk": "each place depends on all elements",
    "searchsorted": "each value is looked for in the whole table",
    "cumulative_prod": "each element depends on all before it",
    "cumulative_sum": "each element depends on all before it",
    "fft": "each frequency depends on all elements",
    "rfft": "each frequency depends on all elements",
    "irfft": "each element depends on all frequencies",
    "last_writes": "which write came last is known where all are seen",
    "index_set": "the index arrays: writes of several ranks to one place have no order",
    "index_add": "the index arrays: each rank applies all writes to its own places, in their order",
    "index_min": "the index arrays: each rank applies all writes to its own places, in their order",
    "index_max": "the index arrays: each rank applies all writes to its own places, in their order",
    "getitem": "index arrays beside a boolean in the key",
    "scatter": "index arrays beside a boolean in the key",
    "conv": "the places of the kernel, and the channels of a group",
    "conv_image": "the places of the kernel, and the channels of a group",
    "conv_kernel": "the places of the kernel, and the channels of a group",
    "random_fold_in": "keys are small",
    "eigvals": "a matrix is factorized as a whole",
    "random_choice": "the probabilities are summed up in order",
    "random_permutation": "keys are small",
    **dict.fromkeys(("dropout", "dropout_add"), "the key"),
    **dict.fromkeys(
        (
            "cholesky",
            "inv",
            "det",
            "adjugate",
            "slogdet",
            "eigh",
            "eigvalsh",
            "eig",
            "eigvals",
            "svd",
            "svdvals",
            "qr",
            "pinv",
        ),
        "a matrix is factorized as a whole",
    ),
    "solve": "a matrix is factorized as a whole; right-hand sides may be split",
}


def rules(op: Op) -> Iterator[FactorRule]:
    """Rule of each call of the op that the samples make."""
    rng = np.random.default_rng(0)
    for sample in samples("split", op.name):
        args = list(map(mt.asarray, sample.make(rng)))
        program = mt.compile(sample.fn).program(*args)
        found = [e for e in program.entries if e.op is op]
        for e in found:
            avals = [program.avals[v] if isinstance(v, int) else v.value for v in e.inputs]
            yield rule_for(op, avals, [program.avals[v] for v in e.outputs], e.params)
        if not found:  # a program leaves it out, as it does nothing
            avals = [ShapeDtype(x.shape, x.dtype) for x in args]
            yield rule_for(op, avals, op.avals(tuple(avals), {}), {})


def row(op: Op) -> tuple[str, ...]:
    """Op, stays split, leaves a reduction, fetches, made whole, pending."""
    free: set[str] = set()
    reduced: set[str] = set()
    fetched: set[str] = set()
    whole = False
    pending: set[str] = set()
    for rule in rules(op):
        for dims in rule.operands:
            for d in dims:
                if d is None or rule.factors[d.factor].size < 2:
                    continue
                f = rule.factors[d.factor]
                whole |= f.whole
                if f.whole:
                    continue
                if d.window is not None:
                    fetched.add({"conv": "a halo", "unconv": "a halo"}.get(d.window.kind, "slices"))
                    continue
                kept = [d.factor in {y.factor for y in x if y is not None} for x in rule.results]
                if any(kept):
                    free.add("blocked" if d.inner > 1 else "freely")
                if not all(kept):
                    own = f.reduce == "sum" and op.name == "getitem"
                    reduced.add(f"{f.reduce} (each rank answers for its part)" if own else f.reduce or "")
        if rule.made:
            free.add("made in parts")
        if rule.valueless:
            pending.add("all: values are not read")
        for group in rule.linear:
            names = [_operand(op, i) for i in sorted(group)]
            pending.add(names[0] if len(names) == 1 else f"({', '.join(dict.fromkeys(names))})")
    why = ""
    if whole:
        why = WHY.get(op.name) or ("decomposed" if op.decompose is not None else "")
        why = why or ("the key" if op.name.startswith("random_") else "")
        if not why:
            raise LookupError(f"{op.name} makes a dimension whole, and docs/generate/shardings.py does not say why")
    return (f"`{op.name}`", *(", ".join(sorted(x)) for x in (free, reduced, fetched)), why, ", ".join(sorted(pending)))


def _operand(op: Op, i: int) -> str:
    names = op.operands
    return names[i].lstrip("*") if i < len(names) else names[-1].lstrip("*")


def page() -> str:
    """The page as Markdown."""
    columns = ("op", "stays split", "leaves a reduction", "fetches", "made whole", "pending")
    with np.errstate(all="ignore"):
        rows = [row(op) for _, op in sorted(OPS.items()) if op.name != "reshard"]
    return HEAD + "\n" + tables.markdown(columns, rows)


if __name__ == "__main__":
    raise SystemExit(tables.write(PAGE, page()))
