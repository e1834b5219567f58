"""Virtual checkpoints (``mt.storage.virtual``): computed from others, box by box, when they are read.

`mean`, `weighted_sum`, `ema`, `difference`, `add`, `lora`, `cast`, `quantize`, `with_rules`, `rows` and `repin` give
open checkpoints; `write` keeps one as a small JSON document, which `open_checkpoint` opens. All that reads checkpoints
reads them. Imports transform, saving, loading and rules. Begin with expressions.py; document.py has the file,
computed.py the lazy tensors, identity.py how parents are pinned.
"""

from .derive import add, cast, difference, ema, lora, mean, quantize, repin, rows, weighted_sum, with_rules
from .document import write

__all__ = [
    "add",
    "cast",
    "difference",
    "ema",
    "lora",
    "mean",
    "quantize",
    "repin",
    "rows",
    "weighted_sum",
    "with_rules",
    "write",
]
