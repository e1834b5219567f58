"""The architecture, asserted: who may import whom, what the import pulls in, and that no op lacks a facet."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
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

ROOMS = {
    "arrays": "core backends kernels chains native ops reductions indexing linalg random statistics nn.norms nn numpy_compat "
    "interface prefetch",
    "autodiff": "rules tape transforms jacobians captures compiler optim",
    "storage": "base stores format commit readers checkpoint foreign rules loading saving transform.sinks transform "
    "virtual blending programs "
    "browse.model browse.views browse.server browse serving",
    "parallel": "base collectives transports sharding sharding.rules resharding spmd partition execution dask mesh "
    "forecasting "
    "transforms gangs models training.data training.job training.logging training.methods training dashboard",
}
"""The rooms of a package, from below: its sub-packages, and modules that stand beside them. Above all is the package's
own ``__init__``."""

MOST_FILES = 14
"""Python files of a room."""


@functools.cache
def imports_in(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """All imports of a file, wherever in it. (Each file is read by several tests.)"""
    return [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]


def imports_of(file: Path, package: str) -> set[str]:
    """Which of our packages a file imports, by relative or absolute name."""
    depth = len(file.relative_to(ROOT / package).parts)  # dots that lead to the package above `package`
    found = set()
    for node in imports_in(file):
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


def modules_of(package: str) -> dict[str, Path]:
    """The files of a package by the names of their modules, such as ``parallel.mesh.api``."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imported(module: str, file: Path) -> Iterator[tuple[str, str]]:
    """All that a file imports, wherever in it: the module or package, and the name that is taken from it."""
    for node in imports_in(file):
        if isinstance(node, ast.ImportFrom):
            path = module.split(".") if node.level else []
            up = node.level - (file.name == "__init__.py")
            source = ".".join([*path[: len(path) - up], *([node.module] if node.module else [])])
            yield from ((source.removeprefix("meshtape."), a.name) for a in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name.removeprefix("meshtape."), "") for a in node.names)


def graph_of(package: str) -> dict[str, set[str]]:
    """For each module of a package the modules of it that it imports: at load time, in a function, or for type checkers
    alone."""
    modules = modules_of(package)
    return {
        m: {
            t
            for source, name in imported(m, f)
            for t in [f"{source}.{name}" if f"{source}.{name}" in modules else source]
        }
        & (modules.keys() - {m})
        for m, f in modules.items()
    }


def in_circles(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """What is left of a graph when nodes that nothing leads to, or that lead nowhere, are taken away again and
    again."""
    left = dict(graph)
    while True:
        reached = {t for m in left for t in left[m]}
        ends = [m for m in left if m not in reached or not left[m] & left.keys()]
        if not ends:
            return {m: sorted(left[m] & left.keys()) for m in sorted(left)}
        for m in ends:
            del left[m]


def room_of(module: str) -> str:
    """The room of ``parallel.mesh.api`` is ``mesh``: the longest name of a room that its own begins with."""
    package, _, path = module.partition(".")
    return max((r for r in ROOMS[package].split() if f"{path}.".startswith(f"{r}.")), key=len, default=path)


@pytest.mark.parametrize("package", ROOMS)
def test_imports_of_a_package_make_no_circle(package: str) -> None:
    assert not in_circles(graph_of(package))


@pytest.mark.parametrize("package", ROOMS)
def test_imports_run_downwards_between_rooms(package: str) -> None:
    order = [*ROOMS[package].split(), ""]
    graph = graph_of(package)
    assert not {m for m in graph if room_of(m) not in order}, "modules that are in no room"
    up = {(m, t) for m in graph for t in graph[m] if order.index(room_of(t)) > order.index(room_of(m))}
    assert not up, f"imports of what stands above: {sorted(up)}"


@pytest.mark.parametrize("package", [*ROOMS, "front"])
def test_rooms_are_small_and_say_what_they_hold(package: str) -> None:
    for room in sorted({f.parent for f in modules_of(package).values()}):
        assert ast.get_docstring(ast.parse((room / "__init__.py").read_text())), f"{room} does not say what lives there"
        assert len(list(room.glob("*.py"))) <= MOST_FILES, f"{room} grew too large for one subject"


@pytest.mark.parametrize("package", ROOMS)
def test_no_underscore_module_of_another_package_is_imported(package: str) -> None:
    modules = {m for p in [*MAY_IMPORT, "front"] for m in modules_of(p)}
    wrong = []
    for m, f in modules_of(package).items():
        for source, name in imported(m, f):
            target = f"{source}.{name}" if f"{source}.{name}" in modules else source
            foreign = target in modules and target.split(".")[0] != package
            if foreign and any(part.startswith("_") for part in target.split(".")):
                wrong.append((m, target))
    assert not wrong


def test_room_checks_see_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setitem(ROOMS, "p", "low.deep low high")
    for room in ("low/deep", "high"):
        (tmp_path / "p" / room).mkdir(parents=True)
    for place in ("", "low", "low/deep", "high"):
        (tmp_path / "p" / place / "__init__.py").touch()
    (tmp_path / "p/low/deep/a.py").write_text("from ...high import b\n")
    (tmp_path / "p/low/c.py").write_text("def f():\n    from .deep.a import x\n")
    (tmp_path / "p/high/b.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    from ..low.c import f\n")
    (tmp_path / "p/high/d.py").write_text("from . import b\nfrom ..low.deep import a\n")
    circle = {"p.high.b": ["p.low.c"], "p.low.c": ["p.low.deep.a"], "p.low.deep.a": ["p.high.b"]}
    assert in_circles(graph_of("p")) == circle
    assert [room_of(m) for m in circle] == ["high", "low", "low.deep"]
    with pytest.raises(AssertionError, match=r"p\.high\.b"):
        test_imports_of_a_package_make_no_circle("p")
    with pytest.raises(AssertionError, match=r"above.*p\.low\.deep\.a"):
        test_imports_run_downwards_between_rooms("p")
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays/_hidden.py").touch()
    (tmp_path / "p/low/e.py").write_text("from ...arrays import _hidden\n")
    with pytest.raises(AssertionError, match="_hidden"):
        test_no_underscore_module_of_another_package_is_imported("p")


@pytest.mark.parametrize("package", [*MAY_IMPORT, "front"])
def test_files_have_one_subject_and_none_unpickles(package: str) -> None:
    for file in sorted((ROOT / package).rglob("*.py")):
        text = file.read_text()
        assert text.count("\n") < 540, f"{file} grew too long for one subject"
        names = {a.name for n in imports_in(file) if isinstance(n, ast.Import) for a in n.names}
        assert "pickle" not in names, f"{file} imports pickle: what was loaded would be able to run code"


def test_import_pulls_in_nothing_heavy() -> None:
    code = (
        "import sys, meshtape as mt; mt.zeros(3) + 1\n"
        "print([m for m in ('dask', 'distributed', 'zarr', 'cupy', 'rich', 'click', 'scipy', 'pandas', 'jinja2', "
        "'PIL') if m in sys.modules])"
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


def test_the_root_hides_no_installed_package(tmp_path: Path) -> None:
    """``python -c`` looks in the current folder first: nothing there has the name that an installed package has."""
    (tmp_path / "meshtape").mkdir()
    (tmp_path / "meshtape/__init__.py").write_text("")
    command = [sys.executable, "-c", "import meshtape; print(meshtape.__file__)"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tmp_path / "meshtape/__init__.py"
