"""Type checkers see the public surface: mypy on a user's code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshtape as mt

ROOT = Path(mt.__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the sources are not at hand")

# Nothing of other libraries is of interest, and reading them takes most of the time.
SETTINGS = """
[mypy]
strict = True
follow_imports = silent
[mypy-bokeh.*,click.*,cupy.*,dask.*,distributed.*,jinja2.*,markupsafe.*,obstore.*,PIL.*,psutil.*,rich.*,scipy.*,tornado.*,zarr.*]
follow_imports = skip
"""
CODE = """
import numpy as np
import meshtape as mt
from meshtape.errors import ShapeError
from meshtape.nn import softmax

x = mt.asarray([1.0, 2.0])
y = 2 * mt.sin(x) + x.sum()
y[0] = 3.0
t, errors = x.reshape(2, 1).mT, (ShapeError,)
mesh = mt.Mesh({"data": 2})
z = mt.distribute(x, mesh, data=mt.Shard(0))
report = mt.save("run", {"x": x})
with mt.Tape() as tape:
    tape.watch(x)
reveal_type(y)  # Array
reveal_type(x == y)  # Array
reveal_type(t.shape)  # tuple[int, ...]
reveal_type(softmax(x))  # Array
reveal_type(mt.linalg.norm(x))  # Array
reveal_type(mesh)  # Mesh
reveal_type(report)  # SaveReport
reveal_type(x.numpy())  # ndarray[tuple[Any, ...], dtype[Any]]
x.smu()  # error: "Array" has no attribute "smu"
mt.ones("a")  # error: Argument 1 to "ones" has incompatible type "str"
mt.ones(2, dtpye="float32")  # error: Unexpected keyword argument "dtpye" for "ones"
mt.no_such  # error: Module has no attribute "no_such"
"""


def test_a_checker_knows_what_users_write(tmp_path: Path) -> None:
    package = tmp_path / "site" / "meshtape"  # as it is installed
    package.mkdir(parents=True)
    for source in [*(ROOT / "front").iterdir(), *(ROOT / p for p in ("arrays", "autodiff", "parallel", "storage"))]:
        (package / source.name).symlink_to(source)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    (tmp_path / "code.py").write_text(CODE)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "code.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"MYPYPATH": "site"}, timeout=250, check=False
    )
    said = {
        int(n): text
        for n, text in re.findall(r"^code\.py:(\d+): (.*)$", done.stdout, re.MULTILINE)
        if "defined in" not in text
    }
    wanted = {n: line.partition("  # ")[2] for n, line in enumerate(CODE.splitlines(), 1) if "  # " in line}
    assert said.keys() == wanted.keys(), done.stdout
    for n, text in wanted.items():
        shown = re.sub(r"\b(?:meshtape|numpy)\.(?:\w+\.)*", "", said[n])
        assert (text in shown) if text.startswith("error") else (shown == f'note: Revealed type is "{text}"'), said[n]
    assert done.stdout.count("\n") <= len(said) + 5, done.stdout  # no errors in the package's own stubs
