"""The page of errors is true: every row is run, and gives the value or the error that stands beside it."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "why-it-raises.md"
ROWS = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", PAGE.read_text(), re.MULTILINE)


def names() -> dict[str, Any]:
    """What the page's first block defines."""
    found: dict[str, Any] = {}
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(block, found)
    return found


@pytest.mark.parametrize(("code", "result"), ROWS, ids=[code for code, _ in ROWS])
def test_row(code: str, result: str) -> None:
    if result.isidentifier() and result.endswith("Error"):
        error = getattr(mt.errors, result, None) or getattr(builtins, result)
        with pytest.raises(error):
            eval(code, names())
        return
    np.testing.assert_allclose(eval(code, names()), ast.literal_eval(result), atol=5e-4)


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 15
