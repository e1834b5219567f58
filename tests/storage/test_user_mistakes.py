"""Arguments and files that users get wrong: a typed error that names them, and never a raw one or a wrong result."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import meshtape as mt
from meshtape import errors, storage
from meshtape.storage import CheckpointManager, Rule, Rules
from meshtape.storage.rules import steps, value_steps
from meshtape.storage.stores import store
from meshtape.storage.stores.filesystem import Files, using

W = np.ones((2, 3), "f4")


# ----- trees, indices, places -----------------------------------------------------------------------------------------


class Sparse:
    """As a matrix of SciPy is: a shape and a dtype, and no array."""

    shape, dtype = (2, 2), np.dtype("f8")

    def __len__(self) -> int:
        raise TypeError("sparse array length is ambiguous")


@pytest.mark.parametrize("leaf", [Sparse(), np.ma.array([1.0, 2.0], mask=[True, False])])
def test_what_is_no_array_is_refused_by_name(tmp_path: Path, leaf: Any) -> None:
    with pytest.raises(errors.CheckpointDTypeError, match=r"'a\.w'"):
        mt.save(tmp_path / "c", {"a": {"w": leaf}})
    assert not (tmp_path / "c").exists()


def test_a_mask_that_hides_nothing_is_no_loss(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"w": np.ma.array([1.0, 2.0])})
    assert np.asarray(mt.load(tmp_path / "c")["w"]).tolist() == [1, 2]


def test_masks_are_refused_in_safetensors(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointDTypeError, match="masked"):
        storage.save_safetensors(tmp_path / "x.safetensors", {"w": np.ma.array([1.0], mask=[True])})


@pytest.mark.parametrize("index", [np.array([0, 1]), [0, 1], np.array([True, False]), True, np.True_, 1.0, None])
def test_indices_of_another_kind(tmp_path: Path, index: Any) -> None:
    mt.save(tmp_path / "c", {"w": W})
    with pytest.raises(errors.ArrayIndexError, match="integers, slices"):
        mt.open_checkpoint(tmp_path / "c")["w"][index]


def test_an_index_of_numpy(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"w": W})
    assert mt.open_checkpoint(tmp_path / "c")["w"][np.int64(1), np.array(2)] == 1


@pytest.mark.parametrize("place", [b"dir", 3, None])
@pytest.mark.parametrize("call", [lambda p: mt.save(p, {"w": W}), mt.load, mt.open_checkpoint, CheckpointManager])
def test_places_that_are_no_texts(call: Any, place: Any) -> None:
    with pytest.raises(errors.CheckpointError, match="a text or a path"):
        call(place)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz])
def test_dtypes_without_an_array_name_their_key(tmp_path: Path, dtype: Any) -> None:
    storage.save_safetensors(tmp_path / "x.safetensors", {"odd": np.ones(2, dtype)})
    with pytest.raises(errors.CheckpointDTypeError, match="'odd'"):
        mt.load(tmp_path / "x.safetensors")
    storage.save_safetensors(tmp_path / "y.safetensors", {"odd": np.ones(2, dtype), "w": W})
    with pytest.warns(UserWarning, match=f"not readable here.*odd.*{np.dtype(dtype)}"):
        assert list(mt.load(tmp_path / "y.safetensors")) == ["w"]
    with pytest.raises(errors.CheckpointDTypeError, match="'odd'"):
        mt.load(tmp_path / "y.safetensors", keys=["odd", "w"])


class Tensor:
    """The face that load sees of a tensor of PyTorch."""

    device = "cpu"

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, type("dtype", (), {"__repr__": lambda self: f"torch.{dtype}"})()


def test_like_tensors_of_torch(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"w": W, "b": W.astype(ml_dtypes.bfloat16)})
    got = mt.load(tmp_path / "c", like={"w": Tensor((2, 3), "float32"), "b": Tensor((2, 3), "bfloat16")})
    assert np.asarray(got["w"]).tolist() == W.tolist()
    assert str(got["b"].dtype) == "bfloat16"
    with pytest.raises(errors.CheckpointDTypeError, match="wanted float16"):
        mt.load(tmp_path / "c", keys=["w"], like={"w": Tensor((2, 3), "float16")})


def test_arrays_in_another_order_of_bytes(tmp_path: Path) -> None:
    """Every way to save takes them, and what is read is in order."""
    w = np.arange(6, dtype=">f8")
    for name, options in {"plain": {}, "packed": {"pack": True}, "compressed": {"compression": "zstd"}}.items():
        mt.save(tmp_path / name, {"w": w}, **options)
    storage.save_safetensors(tmp_path / "file.safetensors", {"w": w})
    snapshots = storage.Snapshots(str(tmp_path / "snap-{step}"))
    snapshots.begin(1, {"w": w})
    snapshots.must_finish()
    snapshots.finalize()
    with open(tmp_path / "stream", "wb") as f:
        mt.save(f, {"w": w})
    for name in ("plain", "packed", "compressed", "file.safetensors", "snap-1", "stream"):
        got = np.asarray(mt.load(tmp_path / name)["w"])
        assert (got.tolist(), got.dtype.isnative) == ([0, 1, 2, 3, 4, 5], True), name
    like = mt.load(tmp_path / "plain", like={"w": w}, cast=True)["w"]
    assert like.tolist() == w.tolist()


# ----- documents ------------------------------------------------------------------------------------------------------

TEXT = "# a text, and no JSON\n"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("README.md", "README.md"),
        ("notes", "notes.txt"),
        ("README", "README"),
        ("run.yaml", "run.yaml"),
        ("m.py", "m.py"),
    ],
)
def test_texts_are_read_as_they_were_saved(tmp_path: Path, name: str, file: str) -> None:
    mt.save(tmp_path / "c", {"w": W}, documents={name: TEXT, "config": {"a": 1}, "more": '{"b": 2}'})
    for where in ("c", "hf"):
        if where == "hf":
            mt.merge(tmp_path / "c", tmp_path / "hf")
        held = mt.open_checkpoint(tmp_path / where).documents
        assert (held[name], held["config"], held["more"]) == (TEXT, {"a": 1}, {"b": 2})
        assert (tmp_path / where / file).read_text() == TEXT
    mt.verify(tmp_path / "c")


def test_documents_that_could_not_be_read_are_not_saved(tmp_path: Path) -> None:
    for documents in ({"config.json": TEXT}, {"a": "\ud800"}):
        with pytest.raises(errors.CheckpointError, match=r"no JSON|no text of Unicode"):
            mt.save(tmp_path / "c", {"w": W}, documents=documents)
        assert not (tmp_path / "c").exists()


def test_files_of_a_model_go_along(tmp_path: Path) -> None:
    here = tmp_path / "hf"
    here.mkdir()
    save_file({"w": W}, here / "model.safetensors")
    files = {"tokenizer.model": b"\xff\x00", "modeling_x.py": b"x = 1\n", "README.md": b"# x", "LICENSE": b"free"}
    for name, data in files.items():
        (here / name).write_bytes(data)
    assert mt.open_checkpoint(here).documents["tokenizer.model"] == b"\xff\x00"
    mt.merge(here, tmp_path / "out")
    mt.convert(here, tmp_path / "z", format="zarr")
    for made in ("out", "z"):
        assert {n: (tmp_path / made / n).read_bytes() for n in files} == files


def test_two_models_in_one_directory(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"w": W, "b": W})
    mt.merge(tmp_path / "c", tmp_path / "hf", max_shard_bytes=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(mt.load(tmp_path / "hf")) == {"w", "b"}
    save_file({"new": W}, tmp_path / "hf" / "model.safetensors")
    with pytest.warns(UserWarning, match="two models"):
        assert set(mt.load(tmp_path / "hf")) == {"new"}


# ----- the manager ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1.9, "3", True, None, np.float64(2)])
def test_steps_are_whole_numbers(tmp_path: Path, step: Any) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": W})
    calls = [
        manager.path,
        manager.rollback,
        manager.delete,
        manager.restore,
        lambda s: manager.save(s, {}, overwrite=True),
    ]
    for call in calls if step is not None else (calls[0], calls[4]):
        with pytest.raises(errors.CheckpointError, match="a step is a whole number"):
            call(step)
    assert np.asarray(manager.restore()["w"]).tolist() == W.tolist()
    manager.save(np.int64(2), {"w": W})
    assert manager.steps() == [1, 2]


@pytest.mark.parametrize("name", ["keep", "every_steps", "keep_every", "keep_best", "every_minutes"])
@pytest.mark.parametrize("value", [1.5, True, "2"])
def test_policies_are_numbers(tmp_path: Path, name: str, value: Any) -> None:
    if name == "every_minutes" and value != "2":
        CheckpointManager(tmp_path, every_minutes=value)
        return
    with pytest.raises(errors.CheckpointError, match=name):
        CheckpointManager(tmp_path, **{name: value})


def test_metrics_are_numbers(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, best="loss")
    for value in ("low", None, "1"):
        with pytest.raises(errors.CheckpointError, match="metric 'loss'"):
            manager.save(1, {"w": W}, metrics={"loss": value})
    assert manager.steps() == []


def test_a_copy_under_another_step_is_no_step(tmp_path: Path) -> None:
    import shutil

    manager = CheckpointManager(tmp_path, keep=2)
    manager.save(5, {"w": W})
    shutil.copytree(manager.path(5), manager.path(50))
    manager.save(6, {"w": W})
    assert manager.steps() == [5, 6]
    with pytest.warns(UserWarning, match="its manifest says step 5"):
        assert manager.latest() == manager.path(6)
    assert os.path.isdir(manager.path(50))


def test_a_save_below_the_latest_says_what_stays(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (10, 20, 30):
        manager.save(step, {"w": W})
    with pytest.warns(UserWarning, match=r"step 15 .* these two are kept, and of the others as many as keep=2 leaves"):
        manager.save(15, {"w": W})
    assert manager.steps() == [15, 30]


# ----- Zarr in stores -------------------------------------------------------------------------------------------------


def test_the_dtypes_of_tensorstore_in_a_bucket() -> None:
    golden = Path(__file__).parent / "golden" / "orbax-0.12" / "files-zarr2"
    where = "memory://orbax-in-a-bucket"
    for file in sorted(golden.rglob("*")):
        if file.is_file():
            store.at(where).put(str(file.relative_to(golden)), file.read_bytes())
    there, here = mt.open_checkpoint(where), mt.open_checkpoint(golden)
    assert {n: (a.dtype, a.read().tobytes()) for n, a in there.items()} == {
        n: (a.dtype, a.read().tobytes()) for n, a in here.items()
    }


def test_a_build_packs_nothing_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled modules of another version in ``build/`` would be imported in place of the sources."""
    from setuptools import Distribution

    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    held: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: held.update(options))
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    exec(compile((root / "setup.py").read_text(), "setup.py", "exec"), {"__name__": "setup"})
    stale = tmp_path / "lib" / "meshtape" / "autodiff" / "captures.so"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"old")
    command = held["cmdclass"]["build"](Distribution({"name": "x", "packages": []}))
    command.build_base, command.build_lib = str(tmp_path), str(tmp_path / "lib")
    command.ensure_finalized()
    command.run()
    assert not stale.exists()


@pytest.mark.parametrize("wrong", [5, None, [5]])
def test_numbers_in_the_place_of_rules_and_configurations(tmp_path: Path, wrong: Any) -> None:
    storage.save_safetensors(tmp_path / "a.safetensors", {"w": np.ones(2)})
    with pytest.raises(errors.RuleSyntaxError, match="a text, or Rule objects"):
        storage.virtual.with_rules(tmp_path / "a.safetensors", wrong)
    with pytest.raises(errors.RuleSyntaxError, match="a text, or Rule objects"):
        storage.Rules(wrong)
    with pytest.raises(errors.CheckpointError, match="a YAML file, its text, or a dict"):
        storage.blend(wrong, tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.safetensors"]


# ----- rules, and the names and numbers beside them -------------------------------------------------------------------

WRONG: list[Any] = [5, 1.5, True, b"x", object(), [5], [None], [["w"]], (b"w",), ["w", 3], np.ones(2), np.float32]
BY_RULES: dict[str, Any] = {
    "rules": lambda c, x: Rules(x),
    "follow": lambda c, x: Rules("w -> x", follow=x),
    "sources": lambda c, x: Rule(x, "y"),
    "targets": lambda c, x: Rule("y", x),
    "steps": lambda c, x: Rule("w", "x", x),
    "optional": lambda c, x: Rule("w", "x", optional=x if x is not True else 1),
    "on": lambda c, x: Rules("w -> x").on(x),
    "on_arrays": lambda c, x: Rules("w -> x").on_arrays(x),
    "inverse": lambda c, x: Rules("w -> x").inverse(x),
    "prefix": lambda c, x: storage.load(c, prefix=x),
    "memory_limit": lambda c, x: storage.merge(c, f"{c}-out", memory_limit=_unless_number(x)),
    "threads": lambda c, x: storage.convert(c, f"{c}-out", format="zarr", threads=_unless_number(x)),
    "max_shard_bytes": lambda c, x: storage.merge(c, f"{c}-out", max_shard_bytes=_unless_number(x)),
    "keys of a blend": lambda c, x: _copied(c, keys=x),
    "drop of a blend": lambda c, x: _copied(c, drop=x),
    "rows": lambda c, x: storage.virtual.rows(c, x),
    "a range of rows": lambda c, x: storage.virtual.rows(c, {"w": x}),
    "an end of rows": lambda c, x: storage.virtual.rows(c, {"w": (0, x if type(x) is not int else "1")}),
    "size of pad": lambda c, x: _stepped(value_steps.Pad, axis=0, size=x if type(x) is not int else None),
    "sizes of split": lambda c, x: _stepped(steps.Split, sizes=x),
    "axis of concat": lambda c, x: _stepped(steps.Concat, axis=x),
    "weights": lambda c, x: storage.virtual.weighted_sum([c] * 3, x),
    "integers": lambda c, x: storage.virtual.mean([c], integers=x),
    "steps of a mean": lambda c, x: storage.virtual.mean(c, steps=x),
    "steps of a run": lambda c, x: storage.virtual.ema(c, decay=0.5, steps=x),
}


def _unless_number(x: Any) -> Any:
    return "1" if isinstance(x, int | float) else x


def _copied(where: str, **options: Any) -> Any:
    return storage.blended({"merge_method": "passthrough", "models": [{"model": where}]}, **options)


def _stepped(step: Any, **fields: Any) -> Any:
    return Rules(Rule("w", "x", step(**fields))).on_arrays({"w": W})


@pytest.mark.parametrize("name", BY_RULES)
def test_arguments_of_a_wrong_type_beside_rules(tmp_path: Path, name: str) -> None:
    where = mt.save(tmp_path / "c", {"w": W}).path
    for wrong in WRONG:
        with pytest.raises(errors.CheckpointError):
            BY_RULES[name](where, wrong)


def test_what_is_no_text_no_truth_value_and_no_tree(tmp_path: Path) -> None:
    where = mt.save(tmp_path / "c", {"w": W}).path
    for make in (
        lambda: storage.serve(where, token=5),
        lambda: storage.serve(where, token=""),
        lambda: mt.CheckpointManager(tmp_path / "run", asynchronous="no"),
        lambda: mt.save(tmp_path / "again", storage.virtual.mean([where])),
        lambda: mt.save(tmp_path / "again", {"model": mt.open_checkpoint(where)}),
        lambda: storage.virtual.repin(tmp_path / "nowhere"),
        lambda: storage.virtual.repin(where),
    ):
        with pytest.raises(errors.CheckpointError):
            make()


# ----- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["zarr", "safetensors", "dcp"])
def test_a_prefix_that_is_one_leaf_gives_it(tmp_path: Path, form: str) -> None:
    tree = {"p": {"w": W, "list": [W + 1, W + 2]}, "p.x": W + 3, "step": 1, "none": None}
    mt.save(tmp_path / "c", tree)
    storage.convert(tmp_path / "c", given := tmp_path / form, format=form)
    found = {"p.w": W, "p.list.1": W + 2, "p.x": W + 3} | ({"step": 1, "none": None} if form != "safetensors" else {})
    for prefix, value in found.items():
        got = storage.load(given, prefix=prefix)
        assert got is value if value is None else np.array_equal(got, value)
        storage.convert(given, tmp_path / f"of {prefix}", format="zarr", prefix=prefix)
        assert np.array_equal(storage.load(tmp_path / f"of {prefix}"), got)
        assert storage.verify(tmp_path / f"of {prefix}")
    storage.merge(given, tmp_path / "merged", prefix="p.w")
    assert np.array_equal(storage.load(tmp_path / "merged")[""], W)


@pytest.mark.parametrize("value", [W, "adam", None])
def test_a_leaf_whose_name_others_begin_with_is_no_prefix(tmp_path: Path, value: Any) -> None:
    for i, tree in enumerate([{"opt": value, "opt.m": W, "opt.v": W + 1}, {"opt.m": W, "opt.v": W + 1, "opt": value}]):
        given = tmp_path / str(i)
        mt.save(given, tree)
        calls = {
            "load": lambda prefix, given=given: storage.load(given, prefix=prefix),
            "merge": lambda prefix, given=given: storage.merge(given, f"{given}-merged", prefix=prefix),
            "convert": lambda prefix, given=given: storage.convert(given, f"{given}-c", format="zarr", prefix=prefix),
        }
        for call in calls.values():
            with pytest.raises(errors.CheckpointKeyError, match=r"'opt' is a leaf.*\(opt\.m, opt\.v\).*prefix='opt\.'"):
                call("opt")
        assert not Path(f"{given}-merged").exists()
        assert not Path(f"{given}-c").exists()
        assert np.array_equal(calls["load"]("opt.")["v"], W + 1)
        calls["merge"]("opt."), calls["convert"]("opt.")
        assert sorted(storage.load(f"{given}-merged")) == sorted(storage.load(f"{given}-c")) == ["m", "v"]


def test_a_prefix_of_two_groups_is_refused(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"x": {"a": W}, "x/b": W + 1, "y/z": W})
    with pytest.raises(errors.CheckpointKeyError, match=r"prefix='x' is 'x\.' or 'x/'"):
        storage.load(tmp_path / "c", prefix="x")
    assert [list(storage.load(tmp_path / "c", prefix=p)) for p in ("x.", "x/", "y")] == [["a"], ["b"], ["z"]]


# ----- places that are not what they seem -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a file", "a link to nowhere"])
@pytest.mark.parametrize("how", ["merge", "convert"])
def test_what_lies_where_an_unfinished_transfer_would_is_named(tmp_path: Path, kind: str, how: str) -> None:
    """As a download leaves it: no other process is at work."""
    mt.save(tmp_path / "source", {"w": W})
    part = tmp_path / "model.part"
    part.write_text("a download") if kind == "a file" else part.symlink_to("nothing")
    use = {"merge": storage.merge, "convert": lambda a, b: storage.convert(a, b, format="zarr")}[how]
    with pytest.raises(errors.CheckpointExists, match=r"model\.part is in the way: it is no directory"):
        use(tmp_path / "source", tmp_path / "model")
    assert os.path.lexists(part)


def test_a_relative_path_where_the_working_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    uses = (mt.load, lambda p: mt.save(p, {"w": W}), CheckpointManager, mt.verify, lambda p: storage.merge(p, p))
    for use in uses:
        with pytest.raises(errors.StoreError, match=r"'run' leads nowhere, as the working directory is gone"):
            use("run")
    mt.save(tmp_path / "run", {"w": W})  # an absolute one leads where it leads


def test_steps_of_other_names_are_no_run(tmp_path: Path) -> None:
    for step in (100, 200):
        mt.save(tmp_path / f"step-{step}", {"w": W}, step=step)
    told = "no steps of a CheckpointManager, which step-100, step-200 are not; .*a list of checkpoints"
    with pytest.raises(errors.CheckpointKeyError, match=told):
        storage.virtual.mean(tmp_path)


def test_a_file_that_may_not_be_looked_at_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mt.save(tmp_path / "c", {"w": W}, pack=False)
    stat = os.stat

    def refused(path: Any, *more: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("c.0.0"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, *more, **named)

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(errors.StoreError, match=r"c\.0\.0 cannot be looked at: Permission denied"):
        mt.verify(tmp_path / "c")


@pytest.mark.parametrize("how", ["no room", "filled up"])
def test_a_full_disk_under_an_adapter_names_the_adapter(tmp_path: Path, how: str) -> None:
    mt.save(tmp_path / "base", {"l.weight": np.zeros((4, 4), "f4")})
    mt.save(tmp_path / "tuned", {"l.weight": np.ones((4, 4), "f4")})

    class Full(Files):
        def free_bytes(self, path: str) -> int:
            return 0 if how == "no room" and ".tmp-" in path else super().free_bytes(path)

        def write(self, *args: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with using(Full()), pytest.raises(errors.StorageFull, match=r"adapter/adapter_model\.safetensors needs") as e:
        storage.extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "adapter", rank=1)
    assert ".tmp-" not in str(e.value)
