"""The tape, and the backward pass that reads it.

A tape is the linear record of the op calls that its watched arrays went into. It keeps no Array: values are named by number,
and of the buffers only those are kept that a rule said it needs. The backward pass walks the record in reverse. First-order
gradients run the rules on raw NumPy or CuPy buffers; where another tape is listening, or the values are traced or sharded, the
same rules run on Arrays and are themselves recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..arrays import tree as trees
from ..arrays._array import Array, new_id
from ..arrays._backends import backend_of
from ..arrays._dispatch import Deferred, apply, wrap
from ..arrays._op import Op, not_recording, state
from ..arrays.creation import asarray, ones
from ..arrays.devices import Device
from ..arrays.elementwise import ALIAS
from ..arrays.errors import GradientError, NonDifferentiableError, ShapeError
from ..arrays.program import Const, Entry, ShapeDtype, Site, site_text
from .rules import RULES


class Wanted(NamedTuple):
    """An operand that gets a cotangent: its position, name on the tape, shape and dtype."""

    position: int
    var: int
    shape: tuple[int, ...]
    dtype: np.dtype


class Recorded(NamedTuple):
    """An entry of the tape, with what its rule needs: buffers by operand (None where not needed) and of the result."""

    entry: Entry
    wanted: tuple[Wanted, ...]
    saved: tuple[Any, ...]
    ans: Any
    avals: tuple[Any, ...]
    out_avals: tuple[ShapeDtype, ...]


def is_differentiable(dtype: np.dtype) -> bool:
    """Whether values of this dtype have derivatives: floats and complex numbers, ml_dtypes' included."""
    return dtype.kind in "fc" or (dtype.kind == "V" and dtype.names is None)


class Tape:
    """Records what happens to watched arrays, and gives gradients.

    Parameters
    ----------
    persistent
        Keep the record after :meth:`gradient`, so that it can be asked again.

    Examples
    --------
    >>> import meshtape as mt
    >>> x = mt.asarray([1.0, 2.0, 3.0])
    >>> with mt.Tape() as tape:
    ...     tape.watch(x)
    ...     y = (x * x).sum()
    >>> tape.gradient(y, x)
    Array([2., 4., 6.], dtype=float64)
    """

    def __init__(self, *, persistent: bool = False) -> None:
        self.persistent = persistent
        self._records: list[Recorded] = []
        self._live: set[int] = set()
        # What a watched array was called when it was watched: `x[i] = v` turns the object into another value, and the
        # gradient that is asked for is that of the value that was watched.
        self._watched: dict[int, tuple[weakref.ref[Array], int]] = {}
        self._used = False

    # ----- recording --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Tape:
        if self in state.recorders:
            raise GradientError("this tape is recording already: use another one for a gradient inside a gradient")
        state.recorders = (*state.recorders, self)
        return self

    def __exit__(self, *exc: object) -> None:
        state.recorders = tuple(r for r in state.recorders if r is not self)

    def watch(self, *arrays: Any) -> None:
        """Record what is computed from these arrays (or the arrays in these trees). Integers are passed over."""
        for x in trees.flatten(arrays)[0]:
            if not isinstance(x, Array):
                raise GradientError(f"[watch] takes Arrays, got {type(x).__name__}: make one with mt.asarray(...)")
            if is_differentiable(x.dtype):
                self._live.add(new_id(x))
                self._watched[id(x)] = weakref.ref(x), x._id

    def watches(self, x: Array) -> bool:
        """Whether a call on this array would be recorded."""
        return x._id in self._live

    def _name(self, x: Array) -> int:
        """The name of a source: that of the value watched, also where the array was written since."""
        ref, name = self._watched.get(id(x), (None, 0))
        return name if ref is not None and ref() is x else x._id

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """What is computed inside is a constant to this tape."""
        with not_recording(self):
            yield

    def __len__(self) -> int:
        """Number of recorded calls."""
        return len(self._records)

    def record(
        self,
        op: Op,
        args: tuple[Any, ...],
        outs: tuple[Array, ...],
        params: Mapping[str, Any],
        origin: str | None,
        site: Site | None,
    ) -> None:
        """Called by the dispatcher after each op call of this thread; must not call ops itself."""
        live = self._live
        if op.nondifferentiable:
            return
        wanted = []
        for i, a in enumerate(args):
            if type(a) is Array and a._id in live:
                buf = a._buf
                wanted.append(Wanted(i, a._id, buf.shape, buf.dtype))
        if not wanted:
            return
        rule = RULES.get(op)
        out_ids = tuple(new_id(o) for o in outs)
        if rule is None:
            # Differentiated through its decomposition (or refused, in the backward pass): that needs all operands.
            positions, needs_ans = frozenset(range(len(args))), False
        else:
            positions, needs_ans = rule.saves([w.position for w in wanted], len(args))
        saved = tuple((a._buf if type(a) is Array else a) if i in positions else None for i, a in enumerate(args))
        inputs = tuple(new_id(a) if type(a) is Array else Const(a) for a in args)
        avals = tuple(ShapeDtype(a._buf.shape, a._buf.dtype) if type(a) is Array else a for a in args)
        out_avals = tuple(ShapeDtype(o._buf.shape, o._buf.dtype) for o in outs)
        self._records.append(
            Recorded(
                Entry(op, inputs, out_ids, params, origin, site),
                tuple(wanted),
                saved,
                tuple(o._buf for o in outs) if needs_ans else None,
                avals,
                out_avals,
            )
        )
        for o, v in zip(outs, out_ids, strict=True):
            if is_differentiable(o._buf.dtype):
                live.add(v)

    # ----- gradients --------------------------------------------------------------------------------------------------

    def gradient(self, target: Any, sources: Any, seed: Any = None, *, unconnected: str = "none") -> Any:
        """Gradient of ``target`` with respect to each array of ``sources``.

        Parameters
        ----------
        target
            An array; without a ``seed`` it must have one element.
        sources
            A tree of watched arrays (or of results computed from them).
        seed
            Cotangent of the target, of its shape; ones by default. It is never changed.
        unconnected
            What stands for the gradient where the target does not depend on a source: ``"none"`` or ``"zeros"``.

        Returns
        -------
        tree
            Of the structure of ``sources``. Integers have the gradient None.

        Raises
        ------
        GradientError
            For a target of several elements without a seed, an integer target, a source that was not watched, a seed of
            another shape, or a tape that was used up.
        """
        if self._used:
            raise GradientError("this tape was used up by gradient(): make it with Tape(persistent=True) to ask again")
        if unconnected not in ("none", "zeros"):
            raise ValueError(f"[gradient] unconnected must be 'none' or 'zeros', got {unconnected!r}")
        leaves, treedef = trees.flatten(sources)
        for path, x in trees.flatten_with_path(sources):
            name = trees.path_name(path) or "the source"
            if not isinstance(x, Array):
                raise GradientError(f"[gradient] {name} is no Array but {type(x).__name__}")
            if is_differentiable(x.dtype) and self._name(x) not in self._live:
                raise GradientError(
                    f"[gradient] {name} (shape {x.shape}) was not watched: call tape.watch(x) before use"
                )
        names = [self._name(x) for x in leaves]
        cots = self.backward([target], [seed], names)
        out = []
        for x, name in zip(leaves, names, strict=True):
            g = cots.get(name) if is_differentiable(x.dtype) else None
            if g is None and unconnected == "zeros" and is_differentiable(x.dtype):
                from ..arrays.creation import zeros_like

                g = zeros_like(x)
            out.append(g)
        return trees.unflatten(treedef, out)

    def backward(self, targets: Sequence[Any], seeds: Sequence[Any], keep: Sequence[int]) -> dict[int, Array]:
        """Cotangents, by name on the tape, of the values ``keep``; the engine behind :meth:`gradient` and ``vjp``."""
        cots: dict[int, Any] = {}
        checked = [_seed_of(t, s) for t, s in zip(targets, seeds, strict=True)]
        with not_recording(self):
            wrapped = bool(state.recorders) or any(
                isinstance(b, Deferred) for t, s in checked for b in (t._buf, s._buf)
            )
            if wrapped:
                import meshtape.arrays as xp
            else:
                xp = backend_of(checked[0][0]._buf).xp if checked else np
            for t, s in checked:
                if t._id in self._live:
                    g = s if wrapped else s._buf
                    cots[t._id] = g if t._id not in cots else cots[t._id] + g
            records = self._records
            if not self.persistent:
                self._records, self._used = [], True
            _walk(records, cots, frozenset(keep), xp, wrapped, free=not self.persistent)
        kept = {v: cots[v] for v in keep if v in cots}
        return {v: g if wrapped else wrap(np.asarray(g) if xp is np else g) for v, g in kept.items()}


def _seed_of(target: Any, seed: Any) -> tuple[Array, Array]:
    if not isinstance(target, Array):
        raise GradientError(f"[gradient] the target is no Array but {type(target).__name__}")
    if not is_differentiable(target.dtype):
        raise GradientError(f"[gradient] the target has dtype {target.dtype.name}, which has no derivatives")
    if seed is None:
        if target.size != 1:
            raise GradientError(
                f"[gradient] the target has shape {target.shape}: reduce it to one element (y.sum()), or pass a seed"
            )
        # Made from the shape alone, not "like" the target: a target that is still to be reduced need not be for this.
        where = target.device if isinstance(target.device, Device) else None
        return target, ones(target.shape, dtype=target.dtype, device=where)
    seed = asarray(seed)
    if seed.shape != target.shape:
        raise GradientError(f"[gradient] the seed has shape {seed.shape}, the target {target.shape}")
    if seed.dtype != target.dtype:
        if np.result_type(seed.dtype, target.dtype) != target.dtype:
            raise GradientError(f"[gradient] the seed has dtype {seed.dtype.name}, the target {target.dtype.name}")
        seed = seed.astype(target.dtype)
    return target, seed


# ----- the walk -------------------------------------------------------------------------------------------------------


def _walk(
    records: list[Recorded], cots: dict[int, Any], keep: frozenset[int], xp: Any, wrapped: bool, *, free: bool
) -> None:
    """Pull the cotangents in ``cots`` back through the records. Each is dropped as soon as its producer is done, unless it
    is one of ``keep``; records are dropped with their saved values when ``free``."""
    owned: set[int] = set()  # cotangents whose buffer nobody else can hold: they may be added to in place
    position = len(records)
    while position:
        position -= 1
        r = records.pop() if free else records[position]
        outputs = r.entry.outputs
        gs = [cots.get(v) for v in outputs]
        if all(g is None for g in gs):
            continue
        for v in outputs:
            if v not in keep:
                cots.pop(v, None)
                owned.discard(v)
        if len(outputs) == 1:
            g: Any = gs[0]
        else:
            g = tuple(
                c if c is not None else xp.zeros(a.shape, dtype=a.dtype) for c, a in zip(gs, r.out_avals, strict=True)
            )
        before_origin = state.origin
        state.origin = f"{r.entry.origin or r.entry.op.name} vjp"
        try:
            found = _pull(r, g, xp, wrapped)
        except NonDifferentiableError:
            raise
        except Exception as e:
            e.add_note(f"in the derivative of {r.entry.origin or r.entry.op.name}, called at {site_text(r.entry.site)}")
            raise
        finally:
            state.origin = before_origin
        for w, gx in zip(r.wanted, found, strict=True):
            if gx is None:
                continue
            gx = fit(xp, gx, w.shape, w.dtype)
            before = cots.get(w.var)
            if before is None:
                cots[w.var] = gx
            elif w.var in owned:
                before += gx
            else:
                cots[w.var] = before + gx
                if not wrapped and type(cots[w.var]) is np.ndarray:
                    owned.add(w.var)


def _pull(r: Recorded, g: Any, xp: Any, wrapped: bool) -> list[Any]:
    """Cotangents of ``r.wanted``, as the rule gives them."""
    op = r.entry.op
    rule = RULES.get(op)
    if rule is None:
        if op.decompose is None:
            raise NonDifferentiableError(f"[{op.name}] has no derivative; it was called at {site_text(r.entry.site)}")
        return _pull_decomposed(r, g, wrapped)

    def value(position: int) -> Any:
        b = r.saved[position]
        if not wrapped or type(r.entry.inputs[position]) is Const:
            return b
        return _named(b, r.entry.inputs[position])

    def argument(n: Any) -> Any:
        if n.kind == "operand":
            return value(n.where)
        if n.kind == "ans":
            found = tuple(map(_named, r.ans, r.entry.outputs)) if wrapped else r.ans
            return found[0] if len(found) == 1 else found
        if n.kind == "param":
            return r.entry.params[n.where]
        if n.kind == "rest":
            return tuple(value(i) for i in range(n.where, len(r.saved)))
        if n.kind == "rest_like":
            return r.avals[n.where :]
        return r.avals[n.where]

    if rule.together is not None:
        found = rule.together(xp, g, *map(argument, rule.needs[-1]))
        return [found[w.position] for w in r.wanted]
    out = []
    for w in r.wanted:
        fn = rule.each.get(w.position)
        out.append(None if fn is None else fn(xp, g, *map(argument, rule.needs[w.position])))
    return out


def _named(buf: Any, var: int) -> Array:
    """A saved buffer as the Array it was, under the same name: outer tapes know it."""
    x = wrap(buf)
    x._id = var
    return x


def same_value(x: Array) -> Array:
    """A second Array of the value and name that ``x`` has now; a write to ``x`` does not reach it."""
    return _named(x._buf, x._id)


def _pull_decomposed(r: Recorded, g: Any, wrapped: bool) -> list[Any]:
    """Derivative of an op through its decomposition: record that on a tape of its own and walk it."""
    # Where outer tapes listen, each operand is an alias with a name of its own that they know: an array that is passed twice
    # would otherwise get the sum of both cotangents twice.
    args = [
        b if type(v) is Const else (apply(ALIAS, (_named(b, v),)) if wrapped else wrap(b))
        for b, v in zip(r.saved, r.entry.inputs, strict=True)
    ]
    tape = Tape()
    with tape:
        tape.watch([args[w.position] for w in r.wanted])
        outs = r.entry.op.decompose(*args, **r.entry.params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    seeds = g if isinstance(g, tuple) else (g,)
    if not wrapped:
        seeds = tuple(wrap(np.asarray(s)) if isinstance(s, np.generic) else wrap(s) for s in seeds)
    pairs = [(o, s) for o, s in zip(outs, seeds, strict=True) if o._id in tape._live]
    names = [args[w.position]._id for w in r.wanted]
    found = tape.backward([o for o, _ in pairs], [s for _, s in pairs], names)
    return [found.get(v) if wrapped or found.get(v) is None else found[v]._buf for v in names]


def fit(xp: Any, g: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A cotangent made to fit the value it belongs to: broadcasting undone by sums, dtype cast.

    Rules leave both to this one place. The cotangent of a real value is real.
    """
    if g.shape != shape:
        lead = len(g.shape) - len(shape)
        if lead < 0:
            g, lead = xp.reshape(g, (1,) * -lead + tuple(g.shape)), 0
        axes = tuple(range(lead)) + tuple(
            i + lead for i, n in enumerate(shape) if n == 1 and lead + i < len(g.shape) and g.shape[i + lead] != 1
        )
        if axes:
            g = xp.sum(g, axis=axes)
        if g.shape != shape:
            if any(m != n and m != 1 for m, n in zip(g.shape, shape, strict=False)) and _size(g.shape) != _size(shape):
                raise ShapeError(f"[gradient] a cotangent of shape {g.shape} does not fit a value of shape {shape}")
            # A rule may answer with a broadcastable piece; lengths of one that the sums removed come back here.
            g = xp.reshape(g, shape) if _size(g.shape) == _size(shape) else xp.broadcast_to(g, shape)
    if g.dtype != dtype:
        if g.dtype.kind == "c" and dtype.kind != "c":
            g = xp.real(g)
        if g.dtype != dtype:
            g = xp.astype(g, dtype)
    return g


def _size(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
