"""Files that mean harm, or are broken: in pages, in notebooks and on terminals they are shown, or refused in plain
words."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import meshtape as mt
from meshtape.cli.main import main
from meshtape.errors import CorruptCheckpoint, MeshtapeError
from meshtape.storage import save
from meshtape.storage.browse.model.text import key

VIEWS = ("checkpoint", "map", "details", "health", "compare")
NAMES = {
    "deep": ".".join(["a"] * 1000),
    "long": "n" * (64 << 10),
    "long and deep": ".".join(["part" * 16] * 1000),
    "dots": "." * 1000,
    "bidi": "w\u202e\u2066gnp.exe\u2069",
    "control": "w\x00\x07\x1b]0;owned\x07\x1b[2J\r\n\t\x7f\x9b31m",
    "html": "</td></table><svg onload=alert(1)><!--",
    "attribute": "\"' onmouseover='alert(1)' x=\"",
    "blank": " \u00a0\u3000\u200b",
    "combining": "w" + "\u0301" * 500,
}
COMMANDS = (("ls",), ("ls", "--json"), ("tree",), ("tree", "--json"))


def safetensors(path: Path, arrays: dict[str, tuple[str, list[int], int]]) -> Path:
    """A file with zeros for the given (dtype, shape, bytes), written here, as libraries would refuse some of it."""
    header, at = {}, 0
    for name, (dtype, shape, nbytes) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as f:
        f.truncate(8 + len(text) + at)  # sparse: a terabyte takes no room
    return path


@pytest.fixture
def names(tmp_path: Path) -> Path:
    return safetensors(tmp_path / "names.safetensors", dict.fromkeys(NAMES.values(), ("F32", [2, 3], 24)))


def harmless(text: str) -> None:
    """Nothing that acts on a terminal or turns the direction of writing."""
    for c in text:
        assert c.isprintable() or c == "\n", repr(c)


def test_pages_show_names_that_mean_harm(visit: Any, names: Path, kit: Any) -> None:
    v = visit(names)
    for view in VIEWS:
        r = v.get(view, at=0)
        assert r.status == 200, (view, r.text[:500])
        assert len(r.body) < 200_000, view
        kit.Markup(r.text).check()
    for what, name in NAMES.items():
        for view in ("array", "statistics"):
            r = v.get(view, at=0, name=key(name))
            assert r.status == 200, (view, what, r.text[:500])
            assert len(r.body) < 100_000, (view, what)
            kit.Markup(r.text).check()
    v.post("health", at="0")
    assert v.finished("health", at=0)["arrays"] == len(NAMES)
    kit.Markup(v.get("health", at=0).text).check()
    # Every level of a deep name can be unfolded, and what is asked for beyond the last one is not there.
    for depth in (1, 50, 999):
        r = v.get("rows", at=0, in_=["a"] * depth)
        assert (r.status, r.text.count("<tr")) == (200, 1)
    assert v.get("rows", at=0, in_=["a"] * 1001).status in (400, 404)


def test_notebooks_show_names_that_mean_harm(names: Path, kit: Any) -> None:
    ckpt = mt.open_checkpoint(names)
    shown = ckpt._repr_html_()
    assert len(shown) < 200_000
    kit.Markup(shown).check()
    for name in NAMES.values():
        html = ckpt[name]._repr_html_()
        assert len(html) < 100_000
        kit.Markup(html).check()
        repr(ckpt[name])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_terminals_show_names_that_mean_harm(command: tuple[str, ...], names: Path) -> None:
    done = CliRunner().invoke(main, [*command, str(names)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output[-2000:]
    if "--json" in command:
        json.loads(done.stdout)
    else:
        harmless(done.output)


def test_a_terminal_shows_one_array_of_such_a_name(names: Path) -> None:
    for what, name in NAMES.items():
        if "\x00" not in name:  # no shell can pass it on
            done = CliRunner().invoke(main, ["show", str(names), name])
            assert done.exit_code == 0, (what, done.output[-500:])
            harmless(done.output)
        other = CliRunner().invoke(main, ["show", str(names), name + "?"])
        assert other.exit_code == 1, what
        assert not isinstance(other.exception, RecursionError)
        harmless(other.output)


def test_huge_shapes_cost_nothing(visit: Any, tmp_path: Path, kit: Any) -> None:
    path = safetensors(
        tmp_path / "huge.safetensors",
        {
            "terabytes": ("F32", [1 << 20, 1 << 18], 1 << 40),
            "empty": ("F32", [0, 1 << 40], 0),
            "thin": ("U8", [1] * 63 + [7], 7),
        },
    )
    v = visit(path)
    for view in VIEWS:
        r = v.get(view, at=0)
        assert r.status == 200, (view, r.text[-500:])
        kit.Markup(r.text).check()
    for name in ("terabytes", "empty", "thin"):
        r = v.get("array", at=0, name=name)
        assert r.status == 200, (name, r.text[-500:])
        kit.Markup(r.text).check()
    assert v.get("statistics", at=0, name="terabytes", format="json").json["exact"] is False
    kit.Markup(mt.open_checkpoint(path)._repr_html_()).check()
    for command in (("ls",), ("tree",), ("show", "terabytes"), ("show", "thin")):
        done = CliRunner().invoke(main, [command[0], str(path), *command[1:]])
        assert done.exit_code == 0, done.output[-500:]


@pytest.mark.parametrize("shape", [[1] * 200 + [7], [-1, 7], [1e9]], ids=str)
def test_shapes_that_no_array_has_are_refused(shape: list[Any], visit: Any, tmp_path: Path, kit: Any) -> None:
    path = safetensors(tmp_path / "odd.safetensors", {"w": ("U8", shape, 7 if shape[-1] == 7 else 0)})
    v = visit(path)
    for view in (*VIEWS, "array"):
        r = v.get(view, at=0, name="w")
        assert r.status == 422, view
        assert len(r.body) < 20_000
        assert "CorruptCheckpoint" in kit.Markup(r.text).check().text
    with pytest.raises(CorruptCheckpoint):
        mt.open_checkpoint(path)


def test_only_nan(visit: Any, tmp_path: Path, kit: Any) -> None:
    save(tmp_path / "c", {"nan": np.full((40, 30), np.nan, np.float16), "none": np.zeros((3, 0))})
    v = visit(tmp_path / "c")
    assert v.get("statistics", at=0, name="nan", format="json").json["nan"] == 1200
    for view in ("array", "statistics"):
        for name in ("nan", "none"):
            kit.Markup(v.get(view, at=0, name=name).text).check()
    v.post("health", at="0")
    assert v.finished("health", at=0)["counts"]["nan"] == 1
    kit.Markup(mt.open_checkpoint(tmp_path / "c")["nan"]._repr_html_()).check()


# ----- broken files ---------------------------------------------------------------------------------------------------


def zarr_checkpoint(path: Path) -> None:
    mesh = mt.Mesh({"data": 2})
    save(path, {"w": mt.distribute(np.arange(64.0).reshape(8, 8), mesh, data=mt.Shard(0)), "v": np.ones(4)}, step=3)


def hf_directory(path: Path) -> None:
    zarr_checkpoint(path.with_name("source"))
    mt.merge(path.with_name("source"), path, max_shard_bytes=300)


def foreign_group(path: Path) -> None:
    import zarr

    group = zarr.create_group(path)
    group.create_array("w", data=np.arange(64.0).reshape(8, 8), chunks=(4, 4))


MAKERS: dict[str, Callable[[Path], None]] = {"zarr": zarr_checkpoint, "hf": hf_directory, "foreign": foreign_group}
JSONS = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"format": 7}',
    b"[" * 100_000,
    b"\xff\xfe{}",
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
)


def cut(data: bytes, way: str) -> bytes:
    return {
        "empty": b"",
        "half": data[: len(data) // 2],
        "one short": data[:-1],
        "longer": data + b"\0" * 9,
        "noise": bytes((b * 7 + 13) % 256 for b in data),
    }[way]


@pytest.mark.parametrize("kind", MAKERS)
def test_broken_files_are_plain_pages(kind: str, visit: Any, tmp_path: Path, kit: Any) -> None:
    good = tmp_path / "good"
    MAKERS[kind](good)
    files = sorted(p.relative_to(good) for p in good.rglob("*") if p.is_file())
    home = tmp_path / "all"
    broken = []
    for i, file in enumerate(files):
        ways: list[Any] = ["empty", "half", "one short", "longer", "noise"]
        for j, way in enumerate([*ways, *(JSONS if file.suffix == ".json" and file.parent == Path() else ())]):
            at = home / f"{i}-{j}"
            shutil.copytree(good, at)
            data = (good / file).read_bytes()
            (at / file).write_bytes(cut(data, way) if isinstance(way, str) else way)
            broken.append((at, f"{file} {way!r:.20}"))
    v = visit(home)
    for at, what in broken:
        place = f"0/{at.name}"
        for view in ("checkpoint", "details"):
            r = v.get(view, at=place)
            assert r.status in (200, 404, 422), (what, view, r.status)
            kit.Markup(r.text).check()
        r = v.get("array", at=place, name="w", check=1)
        assert r.status in (200, 404, 422), (what, r.status)
        kit.Markup(r.text).check()
        assert v.get("statistics", at=place, name="w").status in (200, 404, 422), what
        try:
            ckpt = mt.open_checkpoint(at)
            kit.Markup(ckpt._repr_html_()).check()
            for array in ckpt.values():
                kit.Markup(array._repr_html_()).check()
        except MeshtapeError:
            pass
    assert v.get("open", at="0").status in (200, 302)


@pytest.mark.parametrize("kind", MAKERS)
def test_broken_files_are_one_line_on_a_terminal(kind: str, tmp_path: Path) -> None:
    good = tmp_path / "good"
    MAKERS[kind](good)
    for file in sorted(p.relative_to(good) for p in good.rglob("*") if p.is_file()):
        at = tmp_path / "broken"
        for way in ("half", "noise"):
            shutil.rmtree(at, ignore_errors=True)
            shutil.copytree(good, at)
            (at / file).write_bytes(cut((good / file).read_bytes(), way))
            for command in ("ls", "tree", "verify"):
                done = CliRunner().invoke(main, [command, str(at)])
                assert done.exit_code in (0, 1), (file, way, done.output)
                assert done.exception is None or isinstance(done.exception, SystemExit), (file, way, done.exception)
                harmless(done.output)
