"""The report on the decoder of the standard library's bytes: ``python benchmarks/bytes_report.py forms|run|draw``.

``forms`` takes the same first steps on one rank and on two in each form (data, tensor, pipeline), and writes the loss
curves:

    python benchmarks/bytes_report.py forms --size small --steps 300 --out docs/_static/bytes-small.json
    python benchmarks/bytes_report.py forms --size large --steps 60 --workers --out docs/_static/bytes-large.json

``run`` judges the newest checkpoint of a run of ``bytes_job.py`` on the whole held-out text, beside the compressors,
and writes that with the run's curve; ``draw`` makes the picture of all of them:

    python benchmarks/bytes_report.py run runs/bytes_job --size large --length 256 --out docs/_static/bytes-run.json
    python benchmarks/bytes_report.py draw docs/_static
"""

from __future__ import annotations

import timing  # first: it sets the number of threads  # noqa: F401

# isort: split
import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bytes_job
import numpy as np

import meshtape as mt
from meshtape.parallel.training.logging.metrics import read_lines

FORMS = {"dp": {"data": 2}, "tp": {"model": 2}, "pp": {"pipe": 2}}
PICTURE = "bytes.png"


# ----- the four forms -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mesh_of(axes: dict[str, int], workers: bool) -> Iterator[mt.Mesh]:
    """Two virtual ranks, or two worker processes."""
    if not workers:
        yield mt.Mesh(axes)
        return
    from meshtape.parallel.dask.cluster import local_cluster

    with local_cluster(2) as client, mt.Mesh(axes, client=client) as mesh:
        yield mesh


def forms(size: str, steps: int, length: int, batch: int, workers: bool) -> dict[str, Any]:
    """The loss of every step, in bits per byte, of one rank and of each form."""
    options: dict[str, Any] = {
        "steps": steps, "length": length, "batch": batch, "accumulation": 2, "peak": 1e-3, "log_every": 1, "limit": 2_000_000,
        "sample": 64,
    }  # fmt: skip

    def curve(**where: Any) -> list[float]:
        result = bytes_job.trainer(size, **where, **options).fit()
        print(size, where.get("plan", "one rank"), result.loss, flush=True)
        return [h["loss"] / math.log(2) for h in result.history if "loss" in h]

    curves = {"one rank": curve()}
    for plan, axes in FORMS.items():
        with mesh_of(axes, workers) as mesh:
            curves[plan + "2"] = curve(plan=plan, mesh=mesh)
    one = np.array(curves["one rank"])
    largest = {name: float(np.max(np.abs(np.array(c) / one - 1))) for name, c in curves.items() if name != "one rank"}
    return {
        "size": size,
        "parameters": parameters(size),
        "tokens a step": length * batch,
        "ranks": "worker processes" if workers else "virtual ranks",
        "largest relative difference from one rank": largest,
        "bits per byte": {name: [round(x, 5) for x in c] for name, c in curves.items()},
    }


def parameters(size: str) -> int:
    config = bytes_job.SIZES[size]
    return sum(x.size for x in mt.tree.flatten(bytes_job.de.init(mt.random.key(0), config))[0])


# ----- the long run ---------------------------------------------------------------------------------------------------


def run(directory: Path, size: str, length: int, sample: int) -> dict[str, Any]:
    """What a run came to."""
    config = bytes_job.SIZES[size]
    checkpoints = mt.CheckpointManager(directory / "checkpoints")
    path = checkpoints.latest()
    if path is None:
        sys.exit(f"there is no checkpoint in {directory}")
    params = mt.load(path, prefix="params")
    learn, held = bytes_job.sources()
    source = mt.training.TokenSource(held, length, stride=length * sample)
    judge = mt.compile(lambda p, b: bytes_job.de.loss(p, b, config))
    total = weight = 0.0
    for i in range(0, len(source), 8):
        found = judge(params, mt.tree.tree_map(mt.asarray, source.read(np.arange(i, min(i + 8, len(source))))))
        total, weight = total + float(found[0]), weight + float(found[1])
    lines = list(read_lines(directory / "metrics.jsonl"))
    bits = {
        name: [(h["step"], round(h[name] / math.log(2), 4)) for h in lines if name in h]
        for name in ("loss", "eval_loss")
    }
    return {
        "size": size,
        "parameters": parameters(size),
        "window": length,
        "steps": lines[-1]["step"],
        "bytes of text": {"to learn from": len(learn), "held out": len(held), "judged": int(weight)},
        "held-out bits per byte": round(total / weight / math.log(2), 4),
        "compressors": {n: round(v, 4) for n, v in bytes_job.baselines(learn, held, length).items()},
        "curve": bits["loss"],
        "held out": bits["eval_loss"],
    }


# ----- the picture ----------------------------------------------------------------------------------------------------


def draw(folder: Path) -> None:
    """One picture: the long run beside the compressors, and the four forms."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    found = {n: json.loads((folder / f"bytes-{n}.json").read_text()) for n in ("run", "small", "large")}
    ink = "#1c2529"
    plt.rcParams.update({"font.size": 9, "text.color": ink, "axes.edgecolor": "#8a979c", "axes.labelcolor": ink})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.4), gridspec_kw={"width_ratios": [1.25, 1]})
    long = found["run"]
    steps, bits = np.array(long["curve"]).T
    left.plot(steps, bits, color="#9fc3d1", lw=0.8, label="training windows")
    left.plot(*np.array(long["held out"]).T, "o-", color="#0b6e8a", ms=3, lw=1.2, label="held-out windows")
    for name, value in long["compressors"].items():
        if value < 5.5:
            left.axhline(value, color="#b4532a", lw=0.8, ls="--" if "whole" in name else "-")
            at, side = (0, "left") if "whole" in name else (steps[-1], "right")
            left.text(at, value, name, color="#b4532a", ha=side, va="bottom", fontsize=7)
    left.set(
        ylim=(1.4, 5.0),
        xlabel="step",
        ylabel="bits per byte",
        title=f"{long['parameters'] / 1e6:.1f} million parameters, one rank",
    )
    left.legend(frameon=False, loc="upper center", fontsize=8)
    styles = {"one rank": (3.2, "#d5dde0"), "dp2": (1.6, "#0b6e8a"), "tp2": (1.0, "#b4532a"), "pp2": (0.6, ink)}
    small = found["small"]
    for name, (width, color) in styles.items():
        right.plot(small["bits per byte"][name], lw=width, color=color, label=name)
    right.set(xlabel="step", title=f"{small['parameters'] / 1e6:.1f} million, four forms: one curve")
    right.legend(frameon=False)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(folder / PICTURE, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("forms", "run", "draw"))
    parser.add_argument("folder", nargs="?", type=Path, help="of the run, or of the JSON files")
    parser.add_argument("--size", choices=bytes_job.SIZES, default="small")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sample", type=int, default=1)
    parser.add_argument("--workers", action="store_true", help="two worker processes instead of virtual ranks")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    if a.what != "forms" and a.folder is None:
        parser.error(f"{a.what} needs a folder")
    if a.what == "draw":
        draw(a.folder)
        return
    made = (
        forms(a.size, a.steps, a.length, a.batch, a.workers)
        if a.what == "forms"
        else run(a.folder, a.size, a.length, a.sample)
    )
    text = json.dumps(made, indent=1)
    if a.out is None:
        print(text)
    else:
        a.out.write_text(text + "\n")
        print({n: v for n, v in made.items() if n not in ("curve", "bits per byte", "held out")})


if __name__ == "__main__":
    main()
