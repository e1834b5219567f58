"""Rules met with keys: patterns, one rule, and the program that applies rules to the keys of a checkpoint."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import chain, islice
from typing import Any

from ...arrays.core.errors import CheckpointError, MeshtapeError, RuleConflict, RuleMatchError, RuleSyntaxError
from ...arrays.core.formatting import count, ranges
from ..base.names import patterns_of
from . import text
from .dequantized import is_quantized, not_followed
from .key_patterns import Pattern, natural, number_of, pattern_of
from .lazy_tensors import Agreed, DerivedTensor, renamed
from .step import NotInvertible, Step
from .steps import Concat, Deinterleave, FuseFFN, FuseQKV, Interleave, Split, SplitFFN, SplitQKV
from .value_steps import Cast, Dequantize, Pad

# ----- rules ----------------------------------------------------------------------------------------------------------


_JOINS, _SPLITS = (Concat, Interleave, FuseQKV, FuseFFN), (Split, Deinterleave, SplitQKV, SplitFFN)


def _counted(rule: Rule) -> str | None:
    """The capture that only targets have, which numbers the parts of a split; any other such capture is a mistake."""
    known = dict.fromkeys(c for s in rule.sources for c in pattern_of(s).captures)
    used = dict.fromkeys(c for t in rule.targets for c in pattern_of(t).captures)
    new = [c for c in used if c not in known]
    if not new:
        return None
    if len(new) > 1:
        raise RuleConflict(f"captures {sorted(new)} stand in no source, in the rule\n  {rule.shown}")
    splits, joins = (any(isinstance(s, kinds) for s in rule.steps) for kinds in (_SPLITS, _JOINS))
    left = [c for c in known if c not in used]
    if splits and (joins or not left):
        return new[0]
    near = get_close_matches(new[0], left or known, 1, 0.0)
    hint = f"; the nearest that it has is {{{near[0]}}}" if near else ""
    raise RuleConflict(
        f"the capture {{{new[0]}}} stands in no source{hint}. A capture that only targets have numbers the parts of a "
        f"split, in the rule\n  {rule.shown}"
    )


def _check_gaps(
    rule: Rule, names: Sequence[str], groups: Sequence[tuple[Mapping[str, str], Iterable[tuple[str, ...]]]]
) -> None:
    """Refuse gaps in a collected capture: a missing expert would shift all others, or shorten the array."""
    for i, name in enumerate(names):
        runs: dict[tuple[int, tuple[str, ...]], set[str]] = {}
        for number, (_, rows) in enumerate(groups):
            for row in rows:
                runs.setdefault((number, row[:i]), set()).add(row[i])
        values = set().union(*runs.values())
        numbers = {n for n in map(number_of, values) if n is not None}
        # Where each key is alone, a name that stands there is passed over, not collected.
        texts = {v for v in values if number_of(v) is None} if any(len(held) > 1 for held in runs.values()) else set()
        first, last = min(numbers, default=0), max(numbers, default=-1)
        for (number, before), held in runs.items():
            at = {**groups[number][0], **dict(zip(names, before, strict=False))}
            where = "".join(f" for {k}={v}" for k, v in at.items())
            known: dict[int, str] = {}
            for v in held:
                if (n := number_of(v)) is not None and known.setdefault(n, v) != v:
                    both = " and ".join(sorted((v, known[n])))
                    raise RuleConflict(
                        f"{name}={both} are one number{where}: name each source, in the rule\n  {rule.shown}"
                    )
            if len(known) == last - first + 1 and texts <= held:
                continue
            gaps = set(islice((n for n in range(first, last + 1) if n not in known), 1000))
            lost = ", ".join([*([ranges(gaps)] if gaps else []), *sorted(texts - held)[:8]])
            there = ", ".join([*([ranges(known)] if known else []), *sorted(held - set(known.values()))[:8]])
            raise RuleMatchError(
                f"{name}={lost} is missing{where}: the keys that the rule collects have {name}={there}. Restore it; "
                "where it is left out on purpose, name each source, or write a rule for each array that has fewer; in "
                f"the rule\n  {rule.shown}"
            )


MOST_LEVELS = 128
"""Of tensors within tensors: some calls each, when an element is read."""


def deepest(tensors: Iterable[Any]) -> int:
    """The levels of tensors within tensors, as far as a level beyond :data:`MOST_LEVELS`."""
    levels, held = -1, list(tensors)
    while held and levels <= MOST_LEVELS:
        held = list({id(s): s for t in held if isinstance(t, DerivedTensor) for s in t.sources()}.values())
        levels += 1
    return levels


@dataclass(frozen=True)
class Rule:
    """Sources, targets and the steps between them. No targets: the sources are dropped. No sources: `Init` makes it.

    >>> str(Rule("a", "b", Cast("bfloat16")))
    'a -> b, cast(dtype=bfloat16)'
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    steps: tuple[Step, ...]
    optional: bool = False
    line: int | None = field(default=None, compare=False, repr=False)  # of the text that it was read from

    def __init__(
        self,
        sources: str | Iterable[str],
        targets: str | Iterable[str],
        *steps: Step,
        optional: bool = False,
        line: int | None = None,
    ) -> None:
        names = [tuple(patterns_of(given, "a rule has names, in a text each")) for given in (sources, targets)]
        values = (*names, steps, optional, line)
        for f, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, f.name, value)
        for name in (*self.sources, *self.targets):
            problem = text.check_pattern(name)
            if problem:
                raise RuleSyntaxError(problem)
        if wrong := [s for s in steps if not isinstance(s, Step)]:
            raise RuleSyntaxError(f"behind the names of a rule stand steps, such as Concat(0); got {wrong[0]!r:.80}")
        if not isinstance(optional, bool):
            raise RuleSyntaxError(f"optional of a rule is true or false, got {optional!r:.80}")
        if not self.sources and not self.targets:
            raise RuleSyntaxError("a rule names something on at least one side")

    def __str__(self) -> str:
        return text.format_line(self.sources, self.targets, self.steps, self.optional)

    def reads(self, name: str) -> bool:
        """Whether a key of that name would be one of its sources."""
        return any(p.matches(name) for p in map(pattern_of, self.sources))

    @property
    def shown(self) -> str:
        """The rule in a message, with its line where it has one."""
        return str(self) if self.line is None else f"{self}   (line {self.line})"


@dataclass(slots=True)
class Applied:
    """One application of a rule: concrete names, and the tensors before each step and after the last."""

    rule: Rule
    sources: list[str]
    targets: list[str]
    steps: tuple[Step, ...]
    stages: list[list[Any]]
    agreed: bool = False


def _by_values(
    pattern: Pattern, hits: Iterable[tuple[str, tuple[str, ...]]], names: Sequence[str]
) -> dict[tuple[str, ...], str]:
    """Keys by the texts of their captures, in the order of ``names``."""
    if list(pattern.captures) == list(names):
        return {values: key for key, values in hits}
    at = [pattern.captures.index(n) for n in names]
    return {tuple(values[i] for i in at): key for key, values in hits}


class BoundRules:
    """Rules bound to the keys of one checkpoint."""

    def __init__(
        self,
        rules: Sequence[Rule],
        follow: Sequence[str],
        tensors: Mapping[str, Any],
        scalars: Mapping[str, Any],
        unread: Iterable[str] = (),
    ) -> None:
        self.tensors, self.scalars, self.unread = tensors, scalars, unread
        self.keys = [*tensors, *scalars]
        self.temporary: dict[str, Any] = {}
        self.read_temporary: set[str] = set()
        self.given: dict[str, Any] = {}
        self.applied: list[Applied] = []
        self._parts: dict[tuple[int, tuple[str, ...]], int] = {}  # of rules that number them, by the texts of captures
        self._matches: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        for rule in rules:
            self._run(rule)
            for template in follow:
                state = _for_state(rule, template)
                if state is not None:
                    self._run(state, rule)
        unread = [t for t in self.temporary if t not in self.read_temporary]
        if unread:
            raise RuleConflict(f"{unread[0]!r}, given by\n  {self._giver(unread[0]).shown}\nis read by no later rule")
        if both := next((k for k in self.temporary if k in tensors), None):
            raise RuleConflict(
                f"{both!r} is a key of the checkpoint; choose another name with $ in\n  {self._giver(both).shown}"
            )
        dropped, read = (
            dict.fromkeys(chain.from_iterable(a.sources for a in self.applied if bool(a.targets) is reads))
            for reads in (False, True)
        )
        for name in self.temporary:
            dropped.pop(name, None)
            read.pop(name, None)
        if (both := next((k for k in dropped if k in read), None)) is not None:
            drops, reads = (
                next(a.rule for a in self.applied if bool(a.targets) is reads and both in a.sources)
                for reads in (False, True)
            )
            raise RuleConflict(f"{both!r} is dropped by\n  {drops.shown}\nand read by\n  {reads.shown}")
        self.consumed = dropped.keys() | read.keys()
        self.untouched = {k for k in tensors if k not in self.consumed}

    def _giver(self, name: str) -> Rule:
        """The first rule that gives a target."""
        return next(a.rule for a in self.applied if name in a.targets)

    def outputs(self) -> dict[str, Any]:
        """Tensors by target name: the unread ones and the results of rules, in the order of their first source."""
        for name in self.untouched:
            if name in self.given:
                raise RuleConflict(
                    f"{name!r} is given by\n  {self._giver(name).shown}\nbut the checkpoint holds a key of that name, "
                    "which no rule reads or drops"
                )
        out: dict[str, Any] = {}
        by_first: dict[str, list[str]] = {}
        rest: list[str] = []
        for a in self.applied:
            named = [t for t in a.targets if t[:1] != "$"] if self.temporary else a.targets
            first = a.sources[0] if a.sources else None
            if first not in self.tensors:
                first = next((s for s in a.sources if s in self.tensors), None)
            if first is None:
                rest += named
            else:
                by_first[first] = by_first[first] + named if first in by_first else named
        for name, tensor in self.tensors.items():
            if name in self.untouched:
                out[name] = tensor
            for target in by_first.get(name, ()):
                out[target] = self.given[target]
        for target in rest:
            out[target] = self.given[target]
        return out

    def _found(self, pattern: Pattern) -> list[tuple[str, tuple[str, ...]]]:
        """(key, captured texts) of all keys that match."""
        ours = pattern.text.startswith("$")
        if pattern.regex is None:
            held = self.temporary if ours else self.tensors
            return [(pattern.literal, ())] if pattern.literal in held or pattern.literal in self.scalars else []
        if (known := self._matches.get(pattern.text)) is not None:
            return known
        match = pattern.regex.fullmatch
        found = [(k, m.groups()) for k in (self.temporary if ours else self.keys) if (m := match(k))]
        if not ours:  # of those that rules give, later rules find more
            self._matches[pattern.text] = found
        return found

    def _no_match(self, rule: Rule, pattern: str) -> RuleMatchError:
        if pattern in self.tensors:  # it is there, and was left out as it is not quantised
            return RuleMatchError(
                f"{pattern!r} is {self.tensors[pattern].dtype}, and only int8, uint8 and float8 are quantised, in the "
                f"rule\n  {rule.shown}\nname the quantised weights and their scales, or mark the rule optional()"
            )
        near = get_close_matches(pattern, self.keys[:5000], 3, 0.0)
        return RuleMatchError(
            f"{pattern!r} matches no key, in the rule\n  {rule.shown}\n"
            f"nearest keys: {', '.join(map(repr, near)) or 'the checkpoint is empty'}; "
            "correct the pattern, or mark the rule optional()"
        )

    def _combinations(self, rule: Rule) -> tuple[Sequence[str], list[tuple[tuple[str, ...], list[str]]]]:
        """The captures that the targets use; and for each application their values, and the source keys in order."""
        patterns = [pattern_of(s) for s in rule.sources]
        found = [self._found(p) for p in patterns]
        if not rule.targets:  # what cannot be read can be dropped
            lost = [[(k, ()) for k in self.unread if p.matches(k)] for p in patterns]
            found = [[*hits, *more] for hits, more in zip(found, lost, strict=True)]
        if (how := next((s for s in rule.steps if isinstance(s, Dequantize)), None)) is not None:
            for k, _ in chain.from_iterable(found):
                if why := not_followed(k, self.tensors):
                    raise RuleConflict(f"{why}. In the rule\n  {rule.shown}")
            # Weights that are not quantised have no scale and stay as they are; one that is and has none is an error
            # below.
            found[0] = [
                (k, m)
                for k, m in found[0]
                if k not in self.tensors or is_quantized(self.tensors[k].dtype) or how.bits or k.endswith("_packed")
            ]
        for p, hits in zip(patterns, found, strict=True):
            if not hits:
                if rule.optional:
                    return (), []
                raise self._no_match(rule, p.text)
        wanted = {c for t in rule.targets for c in pattern_of(t).captures}
        shared = [c for c in dict.fromkeys(c for p in patterns for c in p.captures) if c in wanted]
        if not rule.targets:
            return (), [((), [k for hits in found for k, _ in hits])]
        if all(set(p.captures) == set(shared) for p in patterns):
            # The common case, one key of each pattern, without the tables that follow.
            by_values = [_by_values(p, hits, shared) for p, hits in zip(patterns, found, strict=True)]
            if all(table.keys() == by_values[0].keys() for table in by_values):
                return shared, [(v, [table[v] for table in by_values]) for v in sorted(by_values[0], key=natural)]
        # Per pattern: keys by the values of those captures that targets use.
        tables: list[dict[tuple[str, ...], list[tuple[tuple[str, ...], str]]]] = []
        outer = [[c for c in p.captures if c in shared] for p in patterns]
        extra = [[c for c in p.captures if c not in shared] for p in patterns]
        for p, hits, o, e in zip(patterns, found, outer, extra, strict=True):
            table: dict[tuple[str, ...], list[tuple[tuple[str, ...], str]]] = {}
            at = {c: i for i, c in enumerate(p.captures)}
            for key, values in hits:
                table.setdefault(tuple(values[at[c]] for c in o), []).append((tuple(values[at[c]] for c in e), key))
            tables.append(table)
        combos: list[dict[str, str]] = [{}]
        for o, table in zip(outer, tables, strict=True):
            if not o or set(o) <= set(combos[0]):
                continue
            known = [c for c in o if c in combos[0]]
            index: dict[tuple[str, ...], list[dict[str, str]]] = {}
            for values in table:
                row = dict(zip(o, values, strict=True))
                index.setdefault(tuple(row[c] for c in known), []).append(row)
            joined = [c | row for c in combos for row in index.get(tuple(c[k] for k in known), ())]
            combos = joined or combos
        # Tuples that a later pattern has and the first has not must not be lost without a word.
        for o, table in zip(outer, tables, strict=True):
            seen = {tuple(c.get(k, "") for k in o) for c in combos}
            combos += [dict(zip(o, values, strict=True)) for values in table if values not in seen]
        out, groups = [], []
        for values in sorted(combos, key=lambda c: natural(c.get(k, "") for k in shared)):
            keys: list[tuple[Any, str]] = []
            same = all(e == extra[0] for e in extra)
            rows: list[set[tuple[str, ...]]] = []
            for i, (o, table) in enumerate(zip(outer, tables, strict=True)):
                hits = table.get(tuple(values.get(c, "") for c in o))
                if not hits:
                    told = ", ".join(f"{k}={v}" for k, v in values.items())
                    raise RuleMatchError(f"for {told} there is no key {rule.sources[i]!r}, in the rule\n  {rule.shown}")
                rows.append({e for e, _ in hits})
                keys += [((natural(e), i) if same else (i, natural(e)), k) for e, k in hits]
            if same and any(r != rows[0] for r in rows):
                odd = sorted(set.union(*rows) - set.intersection(*rows), key=natural)[0]
                raise RuleMatchError(
                    f"for {dict(zip(extra[0], odd, strict=True))} some keys are missing, in the rule\n  {rule.shown}"
                )
            out.append((tuple(values[c] for c in shared), [k for _, k in sorted(keys, key=lambda x: x[0])]))
            groups.append((values, rows))
        for i, collected in enumerate(extra[:1] if all(e == extra[0] for e in extra) else extra):
            if collected:
                _check_gaps(rule, collected, [(values, rows[i]) for values, rows in groups])
        return shared, out

    def _run(self, rule: Rule, follows: Rule | None = None) -> None:
        counted = _counted(rule)
        shared, found = self._combinations(rule) if rule.sources else ((), [((), [])])
        names = (*shared, *([] if counted is None else [counted]))
        makers = [pattern_of(t).filled(names) for t in rule.targets] if found else []
        for values, keys in found:
            self._apply(rule, makers, counted is not None, values, keys, follows)

    def _apply(
        self,
        rule: Rule,
        makers: list[Callable[..., str]],
        counted: bool,
        values: tuple[str, ...],
        keys: list[str],
        follows: Rule | None,
    ) -> None:
        if not makers:
            self.applied.append(Applied(rule, keys, [], (), []))
            return
        scalar = next((k for k in keys if k in self.scalars), None) if self.scalars else None
        if scalar is not None:
            raise RuleConflict(
                f"{scalar!r} is a value, not an array; rules can only drop it. In the rule\n  {rule.shown}"
            )
        held = self.tensors
        if self.temporary:
            self.read_temporary.update(k for k in keys if k in self.temporary)
            held = ChainMap(self.temporary, self.tensors)
        tensors = [held[k] for k in keys]
        number = None if counted else len(makers)
        agreed = follows is not None and bool(tensors) and all(t.shape == () for t in tensors)
        stages, steps = [tensors], () if agreed else rule.steps
        if agreed and len(tensors) > 1:
            stages.append([Agreed(tensors[0].name, tuple(tensors))])
        if agreed and counted:
            number = self._parts.get((id(follows), values))
            if number is None:  # the parameter is not there: nobody knows into how many parts it would be split
                return
        if steps and (levels := deepest(tensors) + len(steps)) > MOST_LEVELS:
            raise RuleConflict(
                f"its arrays would be made in {levels} steps, one within another; at most {MOST_LEVELS} are allowed. "
                f"In the rule\n  {rule.shown:.400}"
            )
        for step in steps:
            try:
                stages.append(step.apply(stages[-1], number))
            except MeshtapeError as e:
                raise type(e)(f"{e}. In the step {text.format_step(step)} of the rule\n  {rule.shown}") from None
        result = stages[-1] * number if agreed and number else stages[-1]
        if counted:
            self._parts[id(rule), values] = len(result)
            targets = [make(*values, i) for i in range(len(result) // len(makers)) for make in makers]
        else:
            targets = [make(*values) for make in makers]
        if len(targets) != len(result):
            raise RuleConflict(
                f"{count(len(result), 'array')} given to {count(len(targets), 'target')} by the rule\n  {rule.shown}"
            )
        self.applied.append(Applied(rule, keys, targets, steps, stages, agreed))
        for name, tensor in zip(targets, result, strict=True):
            given = self.temporary if name[:1] == "$" else self.given
            if name in given:
                raise RuleConflict(f"{name!r} is given twice, by\n  {self._giver(name).shown}\nand by\n  {rule.shown}")
            given[name] = renamed(name, tensor)

    def inverted(self) -> list[Rule]:
        """The inverses of the applied rules, last first."""
        owner: dict[str, int] = {}
        for i, a in enumerate(self.applied):
            for s in a.sources:
                owner.setdefault(s, i)
        out = []
        for i, a in reversed(list(enumerate(self.applied))):
            mine = {owner[s] == i for s in a.sources}
            names = [_escaped(t) for t in a.targets]
            back = [_escaped(s) for s in a.sources]
            if not a.targets:
                raise CheckpointError(
                    f"the rule\n  {a.rule.shown}\nhas no inverse: it drops {', '.join(a.sources[:4])}"
                )
            if not a.sources or mine == {False}:
                # A new array, or one more copy of what another rule restores (tied weights).
                out.append(Rule(names, ()))
            elif mine == {True, False}:
                raise CheckpointError(
                    f"the rule\n  {a.rule.shown}\nhas no inverse: some of its sources are read by other rules too"
                )
            elif a.agreed:
                out += [Rule(names[0], s) for s in back]
                out += [Rule(n, ()) for n in names[1:]]
            else:
                steps = []
                for step, before in zip(reversed(a.steps), reversed(a.stages[:-1]), strict=True):
                    try:
                        steps.append(step.inverse(before))
                    except NotInvertible as e:
                        raise CheckpointError(f"the rule\n  {a.rule.shown}\nhas no inverse: {e}") from None
                out.append(Rule(names, back, *steps))
        return out


def _escaped(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")


def _for_state(rule: Rule, template: str) -> Rule | None:
    """The rule for the state of its parameters, or None where it has none."""
    if not rule.sources:
        return None

    def put(name: str) -> str:
        before, after = map(_escaped, template.split("{}"))
        return f"{'$' * name.startswith('$')}{before}{name.removeprefix('$')}{after}"

    steps = [
        replace(s, value=0, fill="value") if isinstance(s, Pad) else s
        for s in rule.steps
        if not isinstance(s, (Cast, Dequantize))
    ]
    # Scales have no state of their own.
    sources = rule.sources[:1] if any(isinstance(s, Dequantize) for s in rule.steps) else rule.sources
    return Rule(map(put, sources), map(put, rule.targets), *steps, optional=True, line=rule.line)
