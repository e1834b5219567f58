"""Mixed precision: the computation in 16 bits, parameters, optimizer and sums in float32; and the scaling of float16
losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dtypes import as_dtype
from ...arrays.core.errors import TrainingError
from ...arrays.ops.creation import asarray
from ...arrays.ops.elementwise import maximum, minimum, where
from ...arrays.ops.manipulation import astype

DTYPES = {name: as_dtype(name) for name in ("float64", "float32", "bfloat16", "float16")}

LEAST = 2.0**-14
"""The smallest scale of a loss. The usual 2**15 reaches it after 29 bad steps in a row, so that then the loss itself is
not finite."""


def _name_of(dtype: Any) -> Any:
    return dtype if isinstance(dtype, str) else as_dtype(dtype, "precision").name


@dataclass(frozen=True)
class Precision:
    """The precision of a step.

    Parameters
    ----------
    compute
        ``"float32"``, ``"bfloat16"`` or ``"float16"`` (or ``"float64"``), or the dtype itself: the loss gets parameters
        cast to it. The parameters themselves keep their dtype, as masters.
    scale
        The first factor of the loss, so that small gradients survive in float16; 1 for other dtypes.
    growth, every
        The scale grows by this factor after so many good steps in a row, and halves at a step whose gradients are not
        finite; that step is left out (Micikevicius et al., 2018). At a scale of 2**-14 ``on_nonfinite`` of the Trainer
        applies.
    """

    compute: str = "float32"
    scale: float = 1.0
    growth: float = 2.0
    every: int = 2000

    __is_tree__ = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", _name_of(self.compute))
        if self.compute not in DTYPES:
            raise TrainingError(f"precision must be one of {', '.join(DTYPES)}, got {self.compute!r}")
        if not (LEAST < self.scale < math.inf and self.growth >= 1 and self.every >= 1):
            raise TrainingError(
                f"precision needs a finite scale above {LEAST:.2g}, and growth and every of at least 1, got {self}"
            )

    @classmethod
    def of(cls, given: Any) -> Precision:
        """From its name (or the dtype itself). float16 begins with a scale of 2 to the 15th."""
        if given is None:
            return UNSAID
        if isinstance(given, Precision):
            return given
        given = _name_of(given)
        return cls(given, scale=2.0**15) if given == "float16" else cls(given)

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled."""
        return self.scale != 1.0

    def cast(self, params: Any) -> Any:
        """Floating parameters in the dtype of the computation. Those of fewer bytes stay as they are."""
        dtype = DTYPES[self.compute]

        def one(x: Any) -> Any:
            if isinstance(x, Array) and x.dtype.kind == "f" and x.dtype.itemsize > dtype.itemsize:
                return astype(x, dtype)
            return x

        return trees.tree_map(one, params)

    # ----- the scaler: a small tree in the state ----------------------------------------------------------------------

    def init(self) -> dict[str, Any]:
        """The scaler's state."""
        return {"scale": asarray(np.float32(self.scale)), "good": asarray(np.int64(0)), "skipped": asarray(np.int64(0))}

    def update(self, state: Any, good: Array) -> dict[str, Any]:
        """The scaler's state after a step; ``good`` says whether its gradients were finite."""
        run = state["good"] + 1
        grown = where(
            run >= self.every, minimum(state["scale"] * np.float32(self.growth), np.float32(2.0**24)), state["scale"]
        )
        return {
            "scale": where(good, grown, maximum(state["scale"] * np.float32(0.5), np.float32(LEAST))),
            "good": where(good, where(run >= self.every, 0, run), 0),
            "skipped": state["skipped"] + astype(~good, np.int64),
        }


UNSAID = Precision()
"""The precision of a run for which none was chosen."""
