"""Saves whose snapshot is taken in slices, between the steps of training.

`save_async` takes its snapshot before it returns. For arrays that is free, as they are values that are copied when one
side writes; NumPy arrays must be copied, and so must what a device holds. `Snapshots` spreads that copying: `begin`
says which state is wanted, `advance` copies a slice wherever the training loop has time, `must_finish` copies the rest
before the state is changed. Then the save goes on in the background, under the same protocol as every other.

An attempt is *copying*, then *writing*, then gone. Nothing here waits for a later step: whatever is still to be copied
when the loop comes to `must_finish` is copied there and then, so no order of calls can block for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...arrays import asarray
from ...arrays.core.errors import CheckpointError
from ...arrays.core.tree import Path, flatten_with_path, map_with_path
from .background import SaveHandle
from .save import SaveReport, save_async

SLICE = 64 << 20  # bytes


@dataclass
class _Attempt:
    """One snapshot: leaves that are still to be copied, and copies."""

    step: int
    where: str
    tree: Any
    options: dict[str, Any]
    waiting: list[tuple[Path, np.ndarray]]
    copies: dict[Path, np.ndarray] = field(default_factory=dict)
    at: int = 0  # bytes of the first waiting leaf that are copied

    @property
    def left(self) -> int:
        return sum(a.nbytes for _, a in self.waiting) - self.at


class Snapshots:
    """Takes snapshots in slices and saves them in the background, at most one at a time.

    Parameters
    ----------
    target
        A function of the step: where its checkpoint goes (a path or a URL); or a text with ``{step}``.
    slice_nbytes
        Bytes that one `advance` copies.
    when_busy
        The policy of `begin` while an earlier checkpoint is still being written: ``"block"`` until it is, or ``"skip"``
        this one, which is counted in ``skipped``.
    options
        Of `save_async`: ``overwrite``, ``metadata``, ``documents``.

    Notes
    -----
    An error of the writer is raised by the next call of any method, once. Arrays of a mesh are held as they are,
    without a copy, because their blocks are never written to.

    Examples
    --------
    >>> import tempfile
    >>> home = tempfile.mkdtemp()
    >>> w = np.zeros(4)
    >>> snapshots = Snapshots(home + "/step-{step}", slice_nbytes=16)
    >>> snapshots.begin(1, {"w": w})
    True
    >>> snapshots.advance()  # sixteen of thirty-two bytes; the loop may compute, but not write to ``w`` yet
    16
    >>> snapshots.must_finish()
    >>> w += 1
    >>> snapshots.finalize().path == home + "/step-1"
    True
    """

    def __init__(
        self,
        target: str | Callable[[int], str],
        *,
        slice_nbytes: int = SLICE,
        when_busy: Literal["block", "skip"] = "block",
        **options: Any,
    ) -> None:
        if when_busy not in ("block", "skip"):
            raise CheckpointError(f"when_busy must be 'block' or 'skip', got {when_busy!r}")
        if slice_nbytes < 1:
            raise CheckpointError(f"slice_nbytes must be positive, got {slice_nbytes}")
        self._target = target
        self.slice_nbytes, self.when_busy, self.options = slice_nbytes, when_busy, options
        self.skipped = 0
        self._attempt: _Attempt | None = None
        self._writing: SaveHandle | None = None
        # Of the snapshot before, when it is written: first touch of memory is slow.
        self._buffers: dict[Path, np.ndarray] = {}

    @property
    def pending(self) -> int:
        """Bytes that are still to be copied before the state may change."""
        return 0 if self._attempt is None else self._attempt.left

    def begin(self, step: int, tree: Any, metadata: Mapping[str, Any] | None = None) -> bool:
        """Want the state as it is now; False when this one is skipped. Nothing is copied yet.

        Until `must_finish` has returned, NumPy arrays and arrays of a device in ``tree`` must not be changed in place.
        An attempt that is still copying is finished first.
        """
        self._raise_error()
        self.must_finish()
        if self.when_busy == "skip" and self._writing is not None and not self._writing.done():
            self.skipped += 1
            return False
        self._wait()
        where = self._target(step) if callable(self._target) else self._target.format(step=step)
        options = {**self.options, **({} if metadata is None else {"metadata": metadata})}
        waiting = [
            (path, leaf) for path, leaf in flatten_with_path(tree) if isinstance(leaf, np.ndarray) and leaf.nbytes
        ]
        held = map_with_path(lambda _, leaf: _held(leaf), tree)
        self._attempt = _Attempt(int(step), where, held, options, waiting)
        if not waiting:
            self.must_finish()
        return True

    def advance(self, nbytes: int | None = None) -> int:
        """Copy a slice; returns the bytes that were copied. After the last one the save begins."""
        self._raise_error()
        attempt = self._attempt
        if attempt is None:
            return 0
        budget = copied = self.slice_nbytes if nbytes is None else nbytes
        while attempt.waiting and budget > 0:
            path, source = attempt.waiting[0]
            target = attempt.copies.get(path)
            if target is None:
                old = self._buffers.pop(path, None)
                dtype = source.dtype.newbyteorder("=")  # an array of ours has no other
                fits = old is not None and old.shape == source.shape and old.dtype == dtype
                target = attempt.copies[path] = old if fits and old is not None else np.empty(source.shape, dtype)
            n = min(budget, source.nbytes - attempt.at)
            done = _copy(source, target, attempt.at, n)
            budget -= done
            attempt.at += done
            if attempt.at >= source.nbytes:
                attempt.waiting.pop(0)
                attempt.at = 0
        copied -= budget
        if not attempt.waiting:
            self._start(attempt)
        return copied

    def must_finish(self) -> None:
        """Copy all that is left: from here on the state may change."""
        while self._attempt is not None:
            self.advance(self._attempt.left or 1)

    def finalize(self) -> SaveReport | None:
        """Finish the snapshot and wait until it is written; returns the last report."""
        self.must_finish()
        return self._wait()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, *error: object) -> None:
        self.finalize()

    def _start(self, attempt: _Attempt) -> None:
        self._attempt = None
        self._wait()
        copies = attempt.copies
        # As arrays of ours, so that the save does not copy them again.
        owned = {path: asarray(copy, device="cpu", copy=False) for path, copy in copies.items()}
        tree = map_with_path(lambda path, leaf: owned.get(path, leaf), attempt.tree)

        def written() -> None:
            self._buffers = copies

        self._writing = save_async(attempt.where, tree, step=attempt.step, then=written, **attempt.options)

    def _raise_error(self) -> None:
        if self._writing is not None and self._writing.done():
            self._wait()

    def _wait(self) -> SaveReport | None:
        handle = self._writing
        try:
            return None if handle is None else handle.wait()
        finally:
            if handle is not None and handle.done():
                self._writing = None


def _held(leaf: Any) -> Any:
    """An array of ours held by value; one of NumPy's stays, to be copied."""
    if isinstance(leaf, np.ndarray) or not hasattr(leaf, "shape") or getattr(leaf, "sharding", None) is not None:
        return leaf
    return asarray(leaf, copy=True) if hasattr(leaf, "device") else leaf  # shares the buffer until one side writes


def _copy(source: np.ndarray, target: np.ndarray, at: int, nbytes: int) -> int:
    """Copy about ``nbytes`` from byte ``at`` on: whole rows of the first dimension; returns the bytes."""
    if source.ndim == 0:
        target[...] = source
        return source.nbytes
    row = source.nbytes // source.shape[0]
    first = at // row
    last = min(source.shape[0], first + max(1, nbytes // row))
    target[first:last] = source[first:last]
    return (last - first) * row
