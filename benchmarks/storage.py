"""Checkpoints against raw reads and writes and against other libraries: ``python benchmarks/storage.py [--megabytes
1000]``.

All candidates of a row run in turns, in one process, on the same arrays, and each round begins with another; the ratio
is that of the shortest times. The shortest processor time of all threads and the fewest page faults stand beside it.
Every writer ends with the same promise: its files and directories are synced (a library that does not sync gets that
done for it, inside its time). *Warm* reads find the files in the page cache; for *cold* ones the kernel is asked to
drop the pages of each file first. A library that is not installed is named as missing, one that fails with its error.
"""

from __future__ import annotations

import argparse

import installed

PARTS = (
    "save",
    "async",
    "load",
    "slices",
    "small",
    "models",
    "workers",
    "convert",
    "contents",
    "objects",
    "deltas",
    "forms",
    "blend",
    "serving",
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=1_000_000, help="in the table of contents that is listed")
    parser.add_argument("--count", type=int, default=100_000, help="small arrays")
    parser.add_argument("--blend-megabytes", type=int, default=200, help="of each of the three models that are blended")
    parser.add_argument("--large", action="store_true", help="fine-tune 10.7 million parameters for the deltas")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--against", action="append", help="only peers whose name has this in it")
    parser.add_argument("--directory", help="where to write; a temporary directory by default")
    OPTIONS = installed.options(parser)

import timing  # noqa: F401  # before NumPy: it sets the number of threads

# isort: split
import os
import shutil
import tempfile
from pathlib import Path

import storage_deltas
import storage_forms
import storage_models
import storage_serving
import storage_transforms
import storage_whole
from storage_table import Bench, arrays

from meshtape import storage

ROWS = {
    "save": storage_whole.saving,
    "async": storage_whole.background,
    "load": storage_whole.loading,
    "slices": storage_whole.slices,
    "small": storage_models.small,
    "models": storage_models.models,
    "workers": storage_models.workers,
    "convert": storage_transforms.converting,
    "contents": storage_transforms.contents,
    "objects": storage_transforms.objects,
    "deltas": storage_deltas.deltas,
    "forms": storage_forms.forms,
    "blend": storage_forms.blending,
    "serving": storage_serving.serving,
}


def main(options: argparse.Namespace) -> None:
    home = Path(tempfile.mkdtemp(prefix="meshtape-bench-", dir=options.directory))
    only = options.only or list(PARTS)
    try:
        tree = arrays(options.megabytes)
        size = sum(a.nbytes for a in tree.values())
        bench = Bench(options.rounds, options.against, options.chunks, options.count, options.blend_megabytes)
        bench.large = options.large
        bench.table.title = (
            f"Storage: {len(tree)} float32 arrays, {size / 1e6:.0f} MB, {os.cpu_count()} CPUs, {options.rounds} "
            f"rounds, {installed.kernels()}"
        )
        if {"save", "async", "load", "convert"} & set(only):
            storage.save(home / "template", tree)
        for name in PARTS:
            if name in only:
                ROWS[name](bench, home, tree)
        bench.show()
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(OPTIONS)
