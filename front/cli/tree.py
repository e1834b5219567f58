"""The tree of a checkpoint, as text and as data: arrays are leaves, and numbered folders that are alike are one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..arrays.core.formatting import human_bytes
from ..storage.browse.model.text import count, visible

_DEEPEST = 150  # levels; below, what is left of a name is one


@dataclass
class _TreeRow:
    """A folder, or an array where ``array`` is set."""

    children: dict[str, _TreeRow] = field(default_factory=dict)
    array: Any = None
    count: int = 0
    nbytes: int = 0

    def shape(self) -> Any:
        """The key of a folder's structure: equal for folders that are alike."""
        own = None if self.array is None else (self.array.dtype.name, self.array.shape, self.array.sharding_text)
        return own, tuple((name, child.shape()) for name, child in self.children.items())


def build(ckpt: Any) -> _TreeRow:
    """The nodes of a checkpoint. Names of flat formats are parted at their dots."""
    root = _TreeRow()
    for array in ckpt.values():
        parts = [p for key in array.path for p in str(key).split(".")] or [array.name]
        if len(parts) > _DEEPEST:
            parts = [*parts[:_DEEPEST], ".".join(parts[_DEEPEST:])]
        node = root
        for part in parts:
            node.count += 1
            node.nbytes += array.nbytes
            node = node.children.setdefault(part, _TreeRow())
        node.array, node.count, node.nbytes = array, node.count + 1, node.nbytes + array.nbytes
    return root


def _runs(node: _TreeRow) -> list[tuple[str, _TreeRow, int]]:
    """(text, first of them, how many) of the children, numbered neighbours that are alike together."""
    out: list[tuple[str, _TreeRow, int]] = []
    first = last = 0
    shape: Any = None
    for name, child in node.children.items():
        number = int(name) if name.isascii() and name.isdigit() else None
        if number is not None and shape is not None and number == last + 1 and child.shape() == shape:
            _, start, n = out.pop()
            out.append((f"{first}…{number}", start, n + 1))
            last = number
            continue
        out.append((visible(name), child, 1))
        first = last = number if number is not None else 0
        shape = child.shape() if number is not None else None
    return out


def as_text(ckpt: Any, depth: int | None = None) -> list[str]:
    """Lines for a terminal."""
    step = "" if ckpt.step is None else f", step {ckpt.step}"
    lines = [f"{ckpt.path} ({ckpt.kind}{step}): {count(len(ckpt), 'array')}, {human_bytes(ckpt.nbytes)}"]

    def walk(node: _TreeRow, indent: str, level: int) -> None:
        if depth is not None and level > depth:
            return
        rows = _runs(node)
        for i, (text, child, n) in enumerate(rows):
            end = i == len(rows) - 1
            many, each = (f" × {n}", " each") if n > 1 else ("", "")
            if (a := child.array) is not None:
                facts = f"  {a.dtype.name}{list(a.shape)}  {human_bytes(a.nbytes)}"
                facts += f"  {a.sharding_text}" if a.sharding_text else ""
            else:
                facts = f"  ({count(child.count, 'array')}, {human_bytes(child.nbytes)}{each})"
            lines.append(f"{indent}{'└── ' if end else '├── '}{text}{many}{facts}")
            walk(child, indent + ("    " if end else "│   "), level + 1)

    walk(build(ckpt), "", 1)
    return lines


def as_data(ckpt: Any) -> dict[str, Any]:
    """Plain data."""

    def of(node: _TreeRow) -> dict[str, Any]:
        out: dict[str, Any] = {"arrays": node.count, "nbytes": node.nbytes}
        if (a := node.array) is not None:
            out |= {"name": a.name, "dtype": a.dtype.name, "shape": list(a.shape), "sharding": a.sharding_text}
        if node.children:
            out["children"] = {name: of(child) for name, child in node.children.items()}
        return out

    return {"path": ckpt.path, "kind": ckpt.kind, "step": ckpt.step, **of(build(ckpt))}
