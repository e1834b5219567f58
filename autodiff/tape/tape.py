"""The tape, and the backward pass that reads it.

A tape is the linear record of the op calls that its watched arrays went into. It keeps no Array: values are named by
number, and of the buffers only those are kept that a rule said it needs. The backward pass walks the record in reverse.
First-order gradients run the rules on raw NumPy or CuPy buffers; where another tape is listening, or the values are
traced or sharded, the same rules run on Arrays and are themselves recorded.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from ...arrays.backends.backend import backend_of, on_device_of
from ...arrays.core import tree as trees
from ...arrays.core.array import Array, new_id
from ...arrays.core.devices import Device
from ...arrays.core.dispatch import Deferred, argument_avals, aval, compiled, wrap
from ...arrays.core.dtypes import float32
from ...arrays.core.errors import GradientError, check_function
from ...arrays.core.op import NO_PARAMS, not_recording, state
from ...arrays.core.program import Entry, Site
from ...arrays.indexing.sparse_cotangent import SparseCotangent, densify
from ...arrays.interface.askers import say_ours
from ...arrays.interface.writing import WATCHERS, settled
from ...arrays.ops.creation import ones, zeros_like
from ..rules.registry import same
from .anomaly import is_checker
from .backward import Hook, cast, give, is_kept_short, same_value, walk
from .custom_calls import CallPlan, run_hook
from .record import Recorded, Recording, VJPPlan, const, is_differentiable
from .seeds import beside_value


def noted(sources: Sequence[Any], grads: list[Any]) -> list[Any]:
    """These gradients, after noting on a trace of which of its values they are the gradients."""
    for r in state.recorders:
        if getattr(r, "lifts", False):
            r.note_gradients(sources, grads)
    return grads


class Tape(Recording):
    """Records the calls on watched arrays, and computes gradients.

    Parameters
    ----------
    persistent
        Keep the record after :meth:`gradient`, so that it can be asked again.

    Examples
    --------
    >>> x = mt.asarray([1.0, 2.0, 3.0])
    >>> with mt.Tape() as tape:
    ...     tape.watch(x)
    ...     y = (x * x).sum()
    >>> tape.gradient(y, x)
    Array([2., 4., 6.], dtype=float64)
    """

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.persistent = persistent
        # The name of each array when it was watched: `x[i] = v` gives the object another value, but the gradient is
        # that of the watched value.
        self._watched: dict[int, tuple[weakref.ref[Array], int]] = {}
        self._hooks: dict[int, list[Hook]] = {}
        self._used = False

    # ----- recording --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Tape:
        if self in state.recorders:
            raise GradientError("this tape is recording already: use another one for a gradient inside a gradient")
        state.recorders = (*state.recorders, self)
        if self._watched:
            WATCHERS[id(self)] = threading.get_ident(), self
        return self

    def __exit__(self, *exc: object) -> None:
        state.recorders = tuple([r for r in state.recorders if r is not self])
        for r in state.recorders:
            if hasattr(r, "forget"):  # a suspended block of `no_grad`
                r.forget(self)
        WATCHERS.pop(id(self), None)
        if exc[1] is not None:
            say_ours(exc[1])

    def watch(self, *arrays: Any) -> None:
        """Record calls on these arrays (or the arrays in these trees), and on their results. Integers are ignored."""
        for x in arrays if all(type(x) is Array for x in arrays) else trees.flatten(arrays)[0]:
            if not isinstance(x, Array):
                raise GradientError(f"[watch] takes Arrays, got {type(x).__name__}: make one with mt.asarray(...)")
            if is_differentiable(x.dtype):
                if self in state.recorders:
                    WATCHERS[id(self)] = threading.get_ident(), self
                name = 0
                while not name or x._id != name:  # again where another thread wrote to it meanwhile
                    name = new_id(x)
                    self.follow(name, x._buf)
                    settled(x)
                self._watched[id(x)] = weakref.ref(x), name

    def hook(self, x: Array, fn: Callable[[Array], Any]) -> None:
        """Call ``fn`` with the gradient of ``x`` once it is complete; its result, unless None, replaces the gradient.

        ``x`` is watched, or computed from watched arrays. See :func:`meshtape.gradient_hook` for functions.

        >>> x = mt.asarray([1.0, 2.0])
        >>> with mt.Tape() as tape:
        ...     tape.watch(x)
        ...     y = x * x
        ...     tape.hook(y, lambda g: 10.0 * g)
        ...     z = y.sum()
        >>> tape.gradient(z, x)
        Array([20., 40.], dtype=float64)
        """
        check_function("hook", fn)
        name = self._name(x) if isinstance(x, Array) else 0
        if name not in self.live:
            raise GradientError(
                "[hook] the array has no gradient on this tape: watch it, or compute it from watched ones"
            )
        self._hooks.setdefault(name, []).append(functools.partial(run_hook, fn))

    def _name(self, x: Array) -> int:
        """The name of a source: that of the value watched, also where the array was written since."""
        ref, name = self._watched.get(id(x), (None, 0))
        return name if ref is not None and ref() is x else x._id

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """A block whose results are constants to this tape."""
        # Inside a checkpoint its recorder stands for this tape.
        with not_recording(self, *(r for r in state.recorders if self in getattr(r, "tapes", ()))):
            yield

    def __len__(self) -> int:
        """Number of recorded calls."""
        return len(self._records)

    @property
    def entries(self) -> list[Entry]:
        """The recorded calls, in order; printing one shows it."""
        return [Recorded._make(r).entry for r in self._records]

    def record_call(
        self,
        call: Any,
        args: Sequence[Array],
        outs: Sequence[Array],
        saved: Sequence[Any],
        origin: str | None,
        site: Site | None,
    ) -> None:
        """Called by :mod:`.custom_calls` after a call that brings its own derivative; ``saved`` is for that alone."""
        wanted = tuple(i for i, a in enumerate(args) if a._id in self.live)
        if not wanted:
            return
        for o in outs:
            self.follow(o._id, o._buf)
        plan = CallPlan(call, wanted, argument_avals(tuple([args[i] for i in wanted])))
        inputs, outputs = tuple([a._id for a in args]), tuple([o._id for o in outs])
        self._records.append((plan, inputs, outputs, saved, NO_PARAMS, argument_avals(tuple(outs)), origin, site))

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
            The gradient where the target does not depend on a source: ``"none"`` or ``"zeros"``.

        Returns
        -------
        tree
            Of the structure of ``sources``. Integers have the gradient None.

        Raises
        ------
        GradientError
            For a target of several elements, or a complex one, without a seed, an integer target, a source that was not
            watched, a seed of another shape, or a tape that was used up.
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
            if is_differentiable(x.dtype) and self._name(x) not in self.live:
                raise GradientError(
                    f"[gradient] {name} (shape {x.shape}) was not watched: call tape.watch(x) before use"
                )
        names = [self._name(x) for x in leaves]
        cots = self.backward([target], [seed], names)
        out = []
        for x, name in zip(leaves, names, strict=True):
            g = cots.get(name) if is_differentiable(x.dtype) else None
            if g is None and unconnected == "zeros" and is_differentiable(x.dtype):
                g = zeros_like(x)
            out.append(g)
        return trees.unflatten(treedef, noted(leaves, out))

    def backward(self, targets: Sequence[Any], seeds: Sequence[Any], keep: Sequence[int]) -> dict[int, Array]:
        """Cotangents, by name on the tape, of the values ``keep``; the engine behind :meth:`gradient` and ``vjp``."""
        cots: dict[int, Any] = {}
        checked = list(map(_seed_of, targets, seeds))
        bufs = []
        wrapped = False
        for pair in checked:
            for x in pair:
                bufs.append(x._buf)
                wrapped = wrapped or (isinstance(x._buf, Deferred) and type(x._buf) is not SparseCotangent)
        if bufs and type(bufs[1]) is not np.ndarray:  # rules on CuPy's own buffers meet no float8
            wrapped = wrapped or any(d.itemsize == 1 for d in self.short.values())
        with nullcontext() if not bufs or type(bufs[1]) is np.ndarray else on_device_of(bufs[1]):
            before = state.recorders
            others = state.recorders = tuple([r for r in before if r is not self and not is_checker(r)])
            try:
                wrapped = wrapped or bool(others)
                if wrapped:
                    import meshtape.arrays as xp
                else:
                    xp = np if not bufs or type(bufs[1]) is np.ndarray else backend_of(bufs[1]).xp
                for t, s in checked:
                    if t._id in self.live:
                        g = s if wrapped else s._buf
                        if t._id in self.short and (t._id in cots or not is_kept_short(g)):
                            g = cast(g, float32)
                        cots[t._id] = g if t._id not in cots else cast(cots[t._id], g.dtype) + g
                records = self._records
                if not self.persistent:
                    self._records, self._used = [], True
                free = not self.persistent
                walk(self, records, cots, frozenset(keep), xp, wrapped, free=free, hooks=self._hooks, make=Tape)
            finally:
                state.recorders = before
            kept: dict[int, Array] = {}
            for v in keep:
                g = cots.get(v)
                if g is None:
                    continue
                if v in self.short:
                    g = cast(g, self.short[v])
                if type(g) is SparseCotangent:
                    g = g.compact()
                elif xp is np and type(g) is not np.ndarray:
                    g = np.asarray(g)
                # One Array may be the cotangent of several values; what is given is its owner's, to write to.
                kept[v] = same_value(g) if wrapped else wrap(g)
            return kept


def _seed_of(target: Any, seed: Any) -> tuple[Array, Array]:
    if not isinstance(target, Array):
        raise GradientError(f"[gradient] the target is no Array but {type(target).__name__}")
    buf = target._buf
    if not is_differentiable(buf.dtype):
        raise GradientError(f"[gradient] the target has dtype {buf.dtype.name}, which has no derivatives")
    if seed is None:
        if buf.size != 1:
            raise GradientError(
                f"[gradient] the target has shape {target.shape}: reduce it to one element (y.sum()), or pass a seed"
            )
        if buf.dtype.kind == "c":
            raise GradientError(
                f"[gradient] the target is {target.dtype.name}, and a gradient is that of a real number: take real(y) "
                "or abs(y), or pass a seed"
            )
        if type(buf) is np.ndarray:
            one = np.empty(buf.shape, buf.dtype)
            one.fill(1)  # `np.ones` takes three times as long
            return target, wrap(one)
        # Made from the shape alone, not "like" the target: a target that is still to be reduced need not be for this.
        where = target.device if isinstance(target.device, Device) else None
        seed = ones(target.shape, dtype=target.dtype, device=where)
        if isinstance(buf, Deferred) and buf.host is not None and not buf.traced:
            # Where the target is: here, what a cotangent is spread to would be as large as all blocks together.
            seed = buf.host.replicate(seed)
        return target, seed
    densify((seed,))  # of the target nobody reads the values
    seed = beside_value("gradient", seed, target)
    if seed.shape != target.shape:
        raise GradientError(f"[gradient] the seed has shape {seed.shape}, the target {target.shape}")
    if seed.dtype != target.dtype:
        if np.result_type(seed.dtype, target.dtype) != target.dtype:
            raise GradientError(f"[gradient] the seed has dtype {seed.dtype.name}, the target {target.dtype.name}")
        seed = seed.astype(target.dtype)
    return target, seed


if compiled is not None:
    compiled.bind_tape(Tape, VJPPlan, const, aval, same, give)
