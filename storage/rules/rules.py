"""Key rules: the transformation of the arrays of one checkpoint into those of another.

A rule names source keys, target keys and the steps between them (see ``steps``). Rules are simultaneous: all read the
checkpoint as it is, so ``a -> b`` with ``b -> a`` is a swap. A key that no rule reads keeps its name. A target that
begins with ``$`` is not stored; later rules read it. The result of the rules is checked in full before a byte is read.

``{layer}`` in a name stands for a part of a key, without dots; ``{rest*}`` for any part. A rule is applied once for
each combination of captures that its targets use and the checkpoint holds. A capture that only sources have is
collected: ``e.{layer}.{expert}.w -> m.{layer}.w, concat(0)`` joins the experts of each layer, in the order of numbers
(2 before 10). A capture that only targets have is counted: ``m.{layer}.w -> e.{layer}.{expert}.w, split(0, parts=8)``
names the parts 0 to 7.

>>> rules = Rules("h.{i}.q, h.{i}.k -> h.{i}.qk, concat(axis=0)")
>>> sorted(rules.on_arrays({"h.0.q": np.ones((2, 3)), "h.0.k": np.ones((1, 3)), "n": np.ones(1)}))
['h.0.qk', 'n']
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...arrays.backends.collector import no_collections
from ...arrays.core.errors import CheckpointError, RuleConflict, RuleMatchError, RuleSyntaxError
from ..base.malformed import malformed
from ..base.names import patterns_of
from ..checkpoint.checkpoint import Checkpoint, StoredArray
from ..format.manifest import Leaf
from ..readers.tensor import read_box
from . import text
from .dequantized import marks_of
from .lazy_tensors import Filled, InMemoryTensor
from .match import BoundRules
from .match import Rule as Rule
from .value_steps import Dequantize


class Rules:
    """A program of key rules.

    Parameters
    ----------
    rules
        Its text form (see ``text``), or `Rule` objects.
    follow
        Templates with one ``{}``: every rule also applies to its names put into the template. So the state of an
        optimizer follows its parameters: ``follow=["opt.m.{}", "opt.v.{}"]``. The state keeps its own dtype and is
        padded with zeros, and scalars of joined sources must agree.

    Examples
    --------
    >>> rules = Rules('''
    ...     h.{i}.q, h.{i}.k, h.{i}.v -> h.{i}.qkv, fuse_qkv(heads=4, groups=2)
    ...     embed -> embed, pad(axis=0, size=128)
    ...     old -> _, optional()
    ... ''')
    >>> print(rules)
    h.{i}.q, h.{i}.k, h.{i}.v -> h.{i}.qkv, fuse_qkv(heads=4, groups=2)
    embed -> embed, pad(axis=0, size=128)
    old -> _, optional()
    >>> Rules(str(rules)) == rules
    True
    """

    def __init__(self, rules: str | Rule | Iterable[Rule] | Rules, *, follow: Iterable[str] = ()) -> None:
        templates = patterns_of(follow, "follow templates are texts, such as opt.m.{}")
        if isinstance(rules, str):
            parsed = [text.parse_line(line, i) for i, line in enumerate(rules.split("\n"), 1)]
            templates = [p for p in parsed if isinstance(p, str)] + templates
            held = [
                Rule(p[0], p[1], *p[2], optional=p[3], line=i) for i, p in enumerate(parsed, 1) if isinstance(p, tuple)
            ]
        elif isinstance(rules, Rules):
            held, templates = list(rules.rules), [*rules.follow, *templates]
        else:
            held = list(rules) if isinstance(rules, Iterable) else [rules]
        if bad := [x for x in held if not isinstance(x, Rule)]:
            raise RuleSyntaxError(f"rules are a text, or Rule objects; got {bad[0]!r:.80}")
        for t in templates:
            if t.count("{}") != 1:
                raise RuleSyntaxError(f"follow template {t!r} must have one {{}}, where the name of the parameter goes")
        self.rules = tuple(held)
        self.follow = tuple(templates)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rules), *(f"@follow {text.quote(t)}" for t in self.follow)])

    def __repr__(self) -> str:
        return f"Rules({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and (self.rules, self.follow) == (other.rules, other.follow)

    def __hash__(self) -> int:
        return hash((self.rules, self.follow))

    @no_collections()
    def on(self, ckpt: Checkpoint) -> Checkpoint:
        """The checkpoint that the rules make of ``ckpt``: flat, lazy, with every shape and dtype known and checked.

        Raises
        ------
        RuleMatchError
            A rule that is not optional matches nothing; names the nearest keys.
        RuleConflict
            Two rules give one target, or one drops what another reads.
        CheckpointShapeError, CheckpointDTypeError
            A step does not fit; shows the rule.
        """
        if not isinstance(ckpt, Checkpoint):
            raise CheckpointError(f"rules are applied to an open checkpoint (open_checkpoint), got {ckpt!r:.80}")
        scalars = ckpt.leaves
        try:
            tensors = {n: a.tensor for n, a in ckpt.arrays.items()}
            program = BoundRules(self.rules, self.follow, tensors, scalars, ckpt.skipped)
            outputs = program.outputs()
        except RuleMatchError:
            ckpt.refuse_skipped(n for n in ckpt.skipped if any(r.targets and r.reads(n) for r in self.rules))
            raise
        kept = program.untouched
        arrays = {
            n: StoredArray((n,), t, ckpt.arrays[n].sharding_text if n in kept else None) for n, t in outputs.items()
        }
        structure: dict[str | int, Any] = {n: Leaf(i) for i, n in enumerate(arrays)}
        restored = [a for a in program.applied if any(isinstance(s, Dequantize) for s in a.rule.steps)]
        consumed = program.consumed | marks_of([s for a in restored for s in a.sources], scalars)
        for name, value in scalars.items():
            if name not in consumed:
                if name in structure:
                    raise RuleConflict(f"{name!r} is a value in the checkpoint, and a rule gives an array of that name")
                structure[name] = value
        distinct = {id(a.rule): a.rule for a in program.applied}
        told = {key: str(rule) for key, rule in distinct.items()}  # once for a rule, not for each key
        for a in program.applied:
            for target in a.targets:
                if target in arrays:
                    arrays[target].rule = told[id(a.rule)]
        counts = Counter(told[id(a.rule)] for a in program.applied)
        skipped = {n: why for n, why in ckpt.skipped.items() if n not in program.consumed}
        made = replace(ckpt, arrays=arrays, structure=structure, meshes=[], mapping=list(counts.items()))
        return replace(made, whole=False, skipped=skipped)

    def on_arrays(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The rules applied to arrays in memory.

        Raises `Lossy` where a cast loses values; ``cast(int8, allow_overflow=true)`` accepts that.

        >>> Rules("a -> b, cast(int8, allow_overflow=true)").on_arrays({"a": np.asarray([1.0, 300.0])})
        {'b': array([ 1, 44], dtype=int8)}
        """
        with malformed("no arrays by name, such as {'w': array}", error=CheckpointError):
            held = {n: InMemoryTensor(n, np.asarray(a)) for n, a in arrays.items()}
        return {n: read_box(t)[0] for n, t in BoundRules(self.rules, self.follow, held, {}).outputs().items()}

    def inverse(self, source: Mapping[str, Any]) -> Rules:
        """Rules from the result of these on ``source`` (a checkpoint, or anything with shapes and dtypes) back to it.

        They name every key, as sizes and dtypes are those of ``source``.

        Raises
        ------
        CheckpointError
            A rule loses something: it drops a key, cuts a part off, or casts to a dtype that holds less. Names the
            rule.

        Examples
        --------
        >>> arrays = {"a": np.zeros((4, 2)), "b": np.zeros((2, 2))}
        >>> print(Rules("a, b -> c, concat(axis=0), permute()").inverse(arrays))
        c -> a, b, permute(), split(sizes=[4, 2])
        """
        with malformed("no arrays by name, such as {'w': array}", error=CheckpointError):
            held = {n: Filled(n, tuple(a.shape), np.dtype(a.dtype)) for n, a in source.items()}
        program = BoundRules(self.rules, self.follow, held, {})
        program.outputs()
        return Rules(program.inverted())
