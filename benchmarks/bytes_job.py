"""A decoder that learns to predict the bytes of the Python standard library's own sources: a job for ``meshtape run``.

    meshtape run benchmarks/bytes_job.py -- --size large --steps 3000                 # one process
    meshtape run benchmarks/bytes_job.py --local 2 --mesh data=2 -- --steps 2000      # two workers
    meshtape run benchmarks/bytes_job.py --scheduler tcp://host:8786 --mesh data=4,model=2 -- --size large --plan dp+tp --steps 20000

Every tenth module is held out. The model is judged in bits per byte on windows of its context's length, each on its
own, beside what compressors make of the same windows (which is the same knowledge of the past) and of the whole text at
once (which is more). ``--size large`` has 10.7 million parameters. The rate rises, stays, and falls to nothing over the
last ``--decay`` steps, so that a run that was stopped can be brought to its end at any length: the same command with
another ``--steps``.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import meshtape as mt

de = mt.models.decoder
SIZES = {
    "tiny": de.Config(vocab=256, width=64, layers=2, heads=2, max_length=512),
    "small": de.Config(vocab=256, width=192, layers=4, heads=4, max_length=512),
    "large": de.Config(vocab=256, width=384, layers=6, heads=6, max_length=512),
}


# ----- the text -------------------------------------------------------------------------------------------------------


def sources(limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library's modules: to learn from, and every tenth file to be judged by."""
    files: list[Path] = []
    for folder, below, names in os.walk(Path(os.__file__).parent):
        below[:] = set(below) - {"site-packages", "test", "tests"}
        files += (Path(folder, n) for n in names if n.endswith(".py"))
    files.sort()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, p in enumerate(files):
        parts[i % 10 == 9].append(p.read_bytes())
    learn, held = (np.frombuffer(b"".join(p), np.uint8) for p in parts)
    return learn[:limit], held[: None if limit is None else max(limit // 10, 4096)]


def baselines(learn: np.ndarray, held: np.ndarray, length: int) -> dict[str, float]:
    """Bits per byte of general compressors on the held-out text: windows of ``length`` bytes one by one, and the whole.

    For windows headers and checksums are left out (a raw deflate stream); in the last of those rows the compressor has
    read 32 kB of the text that the model learns from, as many as deflate can look back.
    """
    windows = [held[i : i + length].tobytes() for i in range(0, len(held) - length + 1, length)]
    known = learn[-32768:].tobytes()

    def deflated(data: bytes, dictionary: bytes = b"") -> int:
        packer = zlib.compressobj(
            9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, *([dictionary] if dictionary else [])
        )
        return len(packer.compress(data) + packer.flush())

    def xz(data: bytes) -> int:
        return len(lzma.compress(data, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9}]))

    def rate(pack: Callable[[bytes], int], texts: list[bytes]) -> float:
        return 8 * sum(map(pack, texts)) / sum(map(len, texts))

    whole = [held.tobytes()]
    return {
        "gzip -9, windows": rate(deflated, windows),
        "xz -9, windows": rate(xz, windows[:: max(1, len(windows) // 200)]),  # 64 MB of tables for every call
        "gzip -9, windows after 32 kB of the training text": rate(lambda x: deflated(x, known), windows),
        "gzip -9, whole": rate(lambda x: len(gzip.compress(x, 9)), whole),
        "xz -9, whole": rate(lambda x: len(lzma.compress(x, preset=9)), whole),
    }


# ----- the run --------------------------------------------------------------------------------------------------------


def rate(peak: float, warmup: int, steps: int, decay: int) -> Callable[[Any], Any]:
    """The learning rate: up from 0 in ``warmup`` steps, then level, then linearly down to 0 in the last ``decay`` of
    ``steps``."""

    def at(step: Any) -> Any:
        left = steps - step.astype(np.float64)
        return peak * mt.clip(mt.minimum((step + 1) / max(warmup, 1), left / max(decay, 1)), 0.0, 1.0)

    return at


def trainer(
    size: str = "small",
    *,
    steps: int,
    plan: str = "dp",
    mesh: mt.Mesh | None = None,
    length: int = 128,
    batch: int = 16,
    limit: int | None = None,
    peak: float = 2e-3,
    warmup: int | None = None,
    decay: int | None = None,
    sample: int = 1,
    **options: Any,
) -> mt.Trainer:
    """The run of a size; every ``sample``-th window of the held-out text is judged at its end."""
    config, chosen = SIZES[size], de.plan(plan)
    learn, held = sources(limit)
    schedule = rate(
        peak, max(1, steps // 20) if warmup is None else warmup, steps, steps // 2 if decay is None else decay
    )
    return mt.Trainer(
        lambda p, b, key: de.loss(p, b, config, key=key, plan=chosen),
        lambda key: de.init(key, config),
        mt.optim.adamw(schedule, b2=0.98, weight_decay=0.1),
        mt.training.TokenSource(learn, length),
        batch=batch,
        steps=steps,
        mesh=mesh,
        plan=chosen,
        stages=de.staged(config, plan=chosen),
        clip=1.0,
        evaluate=mt.training.TokenSource(held, length, stride=length * sample),
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--decay", type=int, help="steps over which the rate falls at the end; half of all by default")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--peak", type=float, default=1e-3, help="largest learning rate")
    parser.add_argument("--plan", default="dp")
    parser.add_argument("--length", type=int, default=256, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    parser.add_argument("--accumulation", type=int)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--eval-every", type=int)
    parser.add_argument("--sample", type=int, default=1, help="judge every so manieth window of the held-out text")
    a = vars(parser.parse_args())
    t = trainer(
        a.pop("size"),
        mesh=mt.cluster_mesh(),
        elastic=mt.training.Elastic(),
        progress=True,
        **a,
    )
    t.fit()
    judged = next(h["eval_loss"] for h in reversed(t.history) if "eval_loss" in h)
    print(f"held-out bits per byte: {judged / math.log(2):.3f}")
    for name, value in baselines(*sources(), a["length"]).items():
        print(f"{value:8.3f}  {name}")


if __name__ == "__main__":
    main()
