"""Measure what ``pip install`` gives, from a checkout: the wheel, whose core is compiled.

A wheel that is installed is measured. A checkout that is installed editable runs its Python sources: there :func:`options` builds the
wheel once (a minute), keeps it under ``build/``, and runs the program again on it. ``--editable`` on the command line measures the sources.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("arrays", "autodiff", "front", "parallel", "storage")
FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")


def core() -> str:
    """Which core runs, and whether the kernels in C do, for the title of a table."""
    from meshtape.arrays.core.value import COMPILED
    from meshtape.arrays.native import AVAILABLE

    return ("compiled core" if COMPILED else "core in Python") + (", native kernels" if AVAILABLE else "")


def options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a program, whose ``--help`` is answered before anything is built or imported; what follows runs on the wheel."""
    parser.add_argument("--editable", action="store_true", help="measure the sources of this checkout, not its wheel")
    found = parser.parse_args()
    if not found.editable and "MESHTAPE_WHEEL" not in os.environ:
        _run_on_wheel()
    try:
        version("meshtape")
    except PackageNotFoundError:
        sys.exit(
            f"meshtape is not installed in {sys.prefix}, and --editable measures what is: run `uv run python benchmarks/{Path(sys.argv[0]).name} "
            "--editable`, or `pip install -e .` in the checkout first; without --editable a wheel of it is built and measured"
        )
    return found


def _run_on_wheel() -> None:
    """Start the program again on the wheel of this checkout; return where one is installed, or none can be built."""
    found = find_spec("meshtape")  # the root is not on the path of a program in this folder
    if found is not None and not Path(found.origin or ROOT).resolve().is_relative_to(ROOT / "front"):
        return
    if not (find_spec("Cython") and find_spec("setuptools")):
        print(
            "the wheel cannot be built here (pip install cython setuptools): the sources are measured", file=sys.stderr
        )
        return
    site = _wheel()
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "MESHTAPE_WHEEL": str(site)}
    sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)


def _wheel() -> Path:
    digest = hashlib.sha256(sys.version.encode())
    files = [*(ROOT / f for f in FILES), *(p for d in FOLDERS for p in sorted((ROOT / d).rglob("*.*")))]
    for file in files:
        if file.suffix in (".py", ".pxd", ".c", ".h", ".toml"):
            digest.update(file.read_bytes())
    site = ROOT / "build" / "benchmarks" / digest.hexdigest()[:16]
    if not site.exists():
        print("building the wheel …", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder, "source"), Path(folder, "out")
            for name in FOLDERS:
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            for name in FILES:
                shutil.copy(ROOT / name, source)
            code = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
            subprocess.run([sys.executable, "-c", code], cwd=source, stdout=subprocess.DEVNULL, check=True)
            (wheel,) = out.glob("*.whl")
            unpacked = site.with_name(f"{site.name}.new")
            shutil.rmtree(unpacked, ignore_errors=True)
            with zipfile.ZipFile(wheel) as z:
                z.extractall(unpacked)
            unpacked.rename(site)
    return site
