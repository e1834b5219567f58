"""What ``--json`` prints is what docs/reference/json.md says: every field of its tables, of their types, and no
other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

import meshtape as mt
from meshtape.cli.main import main

PAGE = Path(mt.__file__).resolve().parents[1] / "docs" / "reference" / "json.md"


@dataclass(frozen=True)
class Field:
    """A row of a table."""

    type: str
    optional: bool
    """Whether it may be absent."""


def tables() -> dict[str, dict[str, Field]]:
    """The fields by path, for each command of the page."""
    out = {}
    for section in PAGE.read_text().split("\n## meshtape ")[1:]:
        commands, _, text = section.partition("\n")
        rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (.+) \|$", text, re.MULTILINE)
        assert len(rows) == len({path for path, *_ in rows}) == text.count("\n| `")
        for command in commands.split(", "):
            out[command] = {p: Field(t, "Absent" in what) for p, t, what in rows}
    return out


TABLES = tables()


def fits(value: Any, kind: str) -> bool:
    """Whether a value is of a type of the page."""
    if kind.endswith(" or null"):
        return value is None or fits(value, kind.removesuffix(" or null"))
    if kind.startswith("list of "):
        inner = (
            kind.removeprefix("list of ")
            .replace("lists", "list")
            .replace("integers", "integer")
            .replace("texts", "text")
        )
        return isinstance(value, list) and all(fits(v, inner) for v in value)
    return {
        "any": lambda v: True,
        "anything": lambda v: True,
        "text": lambda v: isinstance(v, str),
        "integer": lambda v: type(v) is int,
        "number": lambda v: type(v) in (int, float) or v in ("NaN", "Infinity", "-Infinity"),
        "true/false": lambda v: isinstance(v, bool),
        "list": lambda v: isinstance(v, list),
        "object": lambda v: isinstance(v, dict),
        "texts by name": lambda v: isinstance(v, dict) and all(fits(t, "text or null") for t in v.values()),
    }[kind](value)


def children(fields: dict[str, Field], path: str) -> list[str]:
    """The paths of the rows right below a path."""
    return [p for p in fields if re.fullmatch(re.escape(path) + (r"\.[^.\[]+" if path else r"[^.\[]+"), p)]


def compare(value: Any, fields: dict[str, Field], path: str = "") -> Iterator[str]:
    """The paths of a value, each checked."""
    path = re.sub(r"(children\.NAME\.)+", "children.NAME.", path)  # levels of one form
    if path in fields:
        yield path
        assert fits(value, fields[path].type), f"{path} is {value!r}, and not {fields[path].type}"
    if isinstance(value, list) and any(p.startswith(f"{path}[]") for p in fields):
        for v in value:
            assert isinstance(v, dict)
            yield from compare(v, fields, f"{path}[]")
    if isinstance(value, dict) and fields.get(path, Field("", False)).type not in ("any", "anything"):
        below = children(fields, path)
        anyone = [p for p in below if p.rpartition(".")[2].isupper()]
        if path.endswith("children.NAME.children"):
            anyone = ["children.NAME"]
        for key, v in value.items():
            found = f"{path}.{key}" if path else key
            found = found if found in below else anyone[0] if anyone else pytest.fail(f"{found} is not on the page")
            yield from compare(v, fields, found)
        for p in below:
            assert p in anyone or fields[p].optional or p.rpartition(".")[2] in value, f"{p} is not there"


def check(command: str, *outputs: str) -> None:
    """What a command printed has the fields of its table, and all of them taken together has every one."""
    fields = TABLES[command]
    seen = set()
    for text in outputs:
        value = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
        assert text.endswith("\n")
        seen.update(compare(value, fields))
    assert seen == set(fields), f"never printed: {sorted(set(fields) - seen)}"


def call(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, [*args, "--json"])
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_page_has_every_command_that_takes_json() -> None:
    taking = {name for name, c in main.commands.items() if any("--json" in p.opts for p in c.params)}
    assert set(TABLES) == taking


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints that differ in every way, NaN and infinities among them, and remains of a third."""
    home = tmp_path_factory.mktemp("json")
    mesh = mt.Mesh({"data": 2, "model": 2})
    state: dict[str, Any] = {
        "params": {
            "w": mt.distribute(np.arange(24, dtype=np.float32).reshape(4, 6), mesh, data=mt.Shard(0)),
            "n": np.array([1.0, np.nan, np.inf, -np.inf]),
            "none": np.full(3, np.nan),
            "empty": np.zeros((0, 3), np.float32),
            "shape": np.zeros(3, np.float16),
            "gone": np.ones(2, np.float16),
        },
        "bias\x1b[2J": np.array([True, False]),
        "rate": float("nan"),
        "name": "a",
    }
    with mt.CheckpointManager(home / "run", keep=5) as manager:
        options = {"metadata": {"note": float("inf"), "more": [float("nan")]}, "documents": {"config": {"a": 1}}}
        manager.save(1, state, metrics={"loss": float("nan")}, **options)
        state["params"] |= {"n": np.array([1.0, 2.0, np.inf, 0.0]), "shape": np.zeros(4)}
        state |= {"rate": float("-inf"), "new": np.ones(1)}
        del state["params"]["gone"], state["name"]
        manager.save(2, state, metrics={"loss": 0.5})
    (home / "run" / "step-00000003").mkdir()
    mt.save(home / "packed", {"w": np.zeros(9000)}, compression="zstd")
    mt.merge(home / "run" / "step-00000001", home / "hf")
    return home


def test_looking(home: Path) -> None:
    first = str(home / "run" / "step-00000001")
    listed = call("ls", first, "--match", "params.*")
    assert json.loads(listed)["arrays"] == len(json.loads(listed)["rows"]) == 6
    left = home / "run" / "step-00000004.tmp-01234567-01234567-7-01234567"
    left.mkdir()
    check("ls", listed, call("ls", str(home / "packed")), call("ls", str(home / "hf")), call("ls", str(home / "run")))
    check("du", call("du", str(home / "run")))  # step 3 is incomplete
    check("gc", call("gc", str(home / "run"), "--older-than", "0", "--dry-run"))
    left.rmdir()
    shown = [call("show", first, n) for n in ("params.w", "params.n", "params.none", "params.empty", "name")]
    made = str(home / "mean.json")
    check("derive", call("derive", "mean", first, "--out", made))
    check("show", *shown, call("show", made, "params.w"))
    check("tree", call("tree", first), call("tree", str(home / "hf")))
    check("browse", call("browse", first, str(home / "run"), str(home)))


def test_checking(home: Path, tmp_path: Path) -> None:
    first, second = str(home / "run" / "step-00000001"), str(home / "run" / "step-00000002")
    check("verify", call("verify", first))
    told = call("diff", first, second, code=1)
    assert '"Infinity"' in told
    assert json.loads(told)["values"]["rate"] == ["NaN", "-Infinity"]
    others = []
    for units in ("K", "degC"):
        group = zarr.create_group(tmp_path / units)
        group.create_array("t", data=np.ones(2)).attrs["units"] = units
        others.append(str(tmp_path / units))
    same = call("diff", first, first)
    check("diff", told, call("diff", first, second, "--no-values", code=1), same, call("diff", *others, code=1))
    mesh = ("--mesh", "m=2", "--shard", "params.w:m=1")
    check("estimate", call("estimate", first, *mesh, "--optimizer", "adam"), call("estimate", second, "--compression", "zstd"))  # fmt: skip


def test_writing(home: Path, tmp_path: Path) -> None:
    source, out = str(home / "run" / "step-00000001"), str(tmp_path / "out")
    check("merge", call("merge", source, out, "--keys", "params.*"), call("merge", source, out, "--overwrite"))
    for args in (("convert", "--format", "zarr"), ("convert", "--format", "safetensors"), ("reshard", "--mesh", "m=2")):
        command, *options = args
        check(command, call(command, source, out, *options, "--overwrite"))
    for name, x in (("base", 0.0), ("tuned", 1.0)):
        mt.storage.save_safetensors(tmp_path / f"{name}.safetensors", {"m.weight": np.full((2, 3), x, np.float32)})
    base, tuned, adapter = (str(tmp_path / n) for n in ("base.safetensors", "tuned.safetensors", "adapter"))
    check("lora-extract", call("lora-extract", tuned, base, adapter, "--rank", "1"))
    check("lora-merge", call("lora-merge", base, adapter, out, "--overwrite"))
    (tmp_path / "c.yml").write_text(f"merge_method: passthrough\nmodels: [{{model: {tuned}}}]")
    check("blend", call("blend", str(tmp_path / "c.yml"), "--out", out, "--overwrite"))


JOB = """
import sys
import numpy as np
import meshtape as mt

trainer = mt.Trainer(
    lambda p, b, key: mt.mean(b["x"] @ p) * float(sys.argv[1]), mt.ones(2, dtype=mt.float32), mt.optim.sgd(0.0),
    {"x": np.full((4, 2), 0.5, np.float32)}, batch=2, steps=2, save_every=2,
    mesh=mt.cluster_mesh({"data": 2}) if sys.argv[1] == "1" else None,
)
trainer.fit()
"""


def test_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)

    def run(how: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, ["run", "job.py", "-d", f"runs/{how}", "--json", "--", how])
        assert done.exit_code == code, done.output
        return done.stdout

    told = [run("1"), run("1"), run("nan", 1)]
    assert [json.loads(t).get("loss") for t in told] == [1.0, 1.0, None]
    check("run", *told)
    assert json.loads(told[1]) == json.loads((tmp_path / "runs" / "1" / "summary.json").read_text())
    check("status", call("status"))


def test_the_demo_and_info(demo_run: Any) -> None:
    check("info", call("info"))
    (kept,) = demo_run.folder.glob("first-run/run-*/report.json")
    check("demo", kept.read_text())
    facts = json.loads(kept.read_text())
    assert f"{facts['accuracy']:.4f}" in demo_run.printed
