"""Importing the arrays loads nothing heavy and nothing optional."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ["scipy", "dask", "distributed", "zarr", "cupy", "safetensors", "pandas", "matplotlib", "tornado"]


def loaded(code: str) -> set[str]:
    script = f"import sys; {code}; print(' '.join(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return set(out.split())


def test_importing_arrays_loads_no_optional_package():
    assert not loaded("import meshtape.arrays") & set(HEAVY)


def test_ordinary_use_loads_none_either():
    uses = [
        "mt.ones(3) @ mt.ones(3)",
        "mt.random.normal(mt.random.key(0), (3,))",
        "mt.nn.softmax(mt.ones(3))",
        "mt.layer_norm(mt.ones((2, 3)), 3)",
        "mt.ones(3)[[0, 1]]",
        "repr(mt.ones(3))",
    ]
    assert not loaded(f"import meshtape.arrays as mt; {'; '.join(uses)}") & set(HEAVY)


def test_arrays_import_nothing_of_ours_but_arrays():
    script = "import sys, meshtape.arrays; print(' '.join(m for m in sys.modules if m.startswith('meshtape.')))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    sources = {m.split(".")[1] for m in out.split()}
    if sources != {"arrays"}:
        # The front door loads the other packages; the rule is about what the modules of arrays say themselves.
        import ast
        from pathlib import Path

        import meshtape.arrays as package

        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            depth = len(path.relative_to(root).parts)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert node.level <= depth, f"{path} imports from above: {ast.unparse(node)}"
                    name = node.module or ""
                    assert node.level or not name.startswith("meshtape."), f"{path}: {ast.unparse(node)}"


def test_the_namespace_shows_no_modules_but_those_for_users():
    import types

    import meshtape.arrays as namespace

    shown = {n for n in namespace.__all__ if isinstance(getattr(namespace, n), types.ModuleType)}
    assert shown == {"errors", "fft", "linalg", "nn", "random", "tree"}
