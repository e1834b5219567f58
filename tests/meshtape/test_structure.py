"""The architecture, asserted: who may import whom, what the import pulls in, and that no op lacks a facet."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meshtape as mt
from meshtape.autodiff.rules import RULES as VJP_RULES
from meshtape.parallel.sharding.factors import RULES as SHARDING_RULES

ROOT = Path(mt.__file__).resolve().parents[1]

MAY_IMPORT = {
    "arrays": set(),
    "autodiff": {"arrays"},
    "storage": {"arrays"},
    "parallel": {"arrays", "autodiff", "storage"},
}


def imports_of(file: Path, package: str) -> set[str]:
    """Which of our packages a file imports, by relative or absolute name."""
    depth = len(file.relative_to(ROOT / package).parts)  # dots that lead to the package above `package`
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level > depth:
                found.update([module.split(".")[0]] if module else [a.name for a in node.names])
            elif node.level == 0 and module.startswith("meshtape."):
                found.add(module.split(".")[1])
        elif isinstance(node, ast.Import):
            found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("meshtape."))
    return found & (set(MAY_IMPORT) | {"meshtape"})


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_in_one_direction(package: str) -> None:
    wrong = {
        str(f.relative_to(ROOT)): sorted(found - MAY_IMPORT[package] - {package})
        for f in sorted((ROOT / package).rglob("*.py"))
        if (found := imports_of(f, package)) - MAY_IMPORT[package] - {package}
    }
    assert not wrong, f"imports against the direction of the architecture: {wrong}"


def test_import_check_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "arrays" / "ops").mkdir(parents=True)
    file = tmp_path / "arrays" / "ops" / "x.py"
    for text in ("from ...parallel import Mesh", "from ... import parallel", "import meshtape.parallel.mesh.mesh"):
        file.write_text(text)
        assert imports_of(file, "arrays") == {"parallel"}, text


@pytest.mark.parametrize("package", [*MAY_IMPORT, "front"])
def test_files_have_one_subject_and_none_unpickles(package: str) -> None:
    for file in sorted((ROOT / package).rglob("*.py")):
        text = file.read_text()
        assert text.count("\n") < 520, f"{file} grew too long for one subject"
        names = {a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names}
        assert "pickle" not in names, f"{file} imports pickle: what was loaded would be able to run code"


def test_import_pulls_in_nothing_heavy() -> None:
    code = (
        "import sys, meshtape as mt; mt.zeros(3) + 1\n"
        "print([m for m in ('dask', 'distributed', 'zarr', 'cupy', 'rich', 'click', 'scipy', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_can_be_had() -> None:
    for name in mt.__all__:
        assert hasattr(mt, name), name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mt.no_such_name


@pytest.mark.parametrize("op", mt.OPS.values(), ids=lambda op: op.name)
def test_op_has_its_facets_or_says_why_not(op: mt.Op) -> None:
    assert mt.arrays.Op is mt.Op
    if op not in VJP_RULES and op.decompose is None:
        assert op.nondifferentiable, f"{op.name} has no derivative and does not say why"
    if op.nondifferentiable:
        assert op not in VJP_RULES, f"{op.name} has a rule and says that it has none"
    if op not in SHARDING_RULES:
        assert op.replicate_only, f"{op.name} has no sharding rule and does not say why"
    assert op.infer is not None
    assert mt.arrays.core.op.op_named(op.name) is op
