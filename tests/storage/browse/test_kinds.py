"""Every kind of stored array, met by everything that reads arrays: library, commands, notebook, pages.

Each ends right or in a typed error. What a file holds and nobody here can read is named by all of them, whatever the
format.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import meshtape as mt
from meshtape import errors, storage
from meshtape.cli.main import main
from meshtape.storage.browse.model.health import Health, scan

GOLDEN = Path(__file__).parents[1] / "golden"
W = np.arange(24.0, dtype="f4").reshape(4, 6)


def zarr_group(path: Path, version: int, **arrays: Any) -> Path:
    import zarr

    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, a in arrays.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            group.create_array(name, shape=a.shape, dtype=a.dtype, chunks=tuple(min(n, 4) for n in a.shape))[...] = a
    return path


def numpy_file(path: Path, **arrays: Any) -> Path:
    (np.savez_compressed if "packed" in path.name else np.savez)(path, **arrays)
    return path


def packed_bits(path: Path) -> Path:
    header = json.dumps({"q": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x12\x34")
    return path


def ours(path: Path, **options: Any) -> Path:
    storage.save(path, {"w": W, "v": W[0]}, **options)
    return path


def tensors(path: Path) -> Path:
    save_file({"w": W}, path)
    return path


MIXED = {"w": W, "when": np.array(["2020-01-01", "NaT"], "M8[D]"), "text": np.array(["ab", "c"])}
KINDS: dict[str, Any] = {
    "ours": lambda d: ours(d / "c"),
    "compressed": lambda d: ours(d / "c", compression="zstd"),
    "packs": lambda d: ours(d / "c", pack=True),
    "safetensors": lambda d: tensors(d / "m.safetensors"),
    "bits": lambda d: packed_bits(d / "q.safetensors"),
    "npy": lambda d: (np.save(d / "x.npy", W.T), d / "x.npy")[1],
    "npz": lambda d: numpy_file(d / "x.npz", w=W, odd=W.astype(">f4"), rec=np.ones(2, "f4,i4"), t=MIXED["text"]),
    "deflated": lambda d: numpy_file(d / "packed.npz", w=W, bf=W.astype(ml_dtypes.bfloat16), o=np.array([{}], object)),
    "big-endian": lambda d: zarr_group(d / "z", 2, w=W.astype(">f4"), h=W.astype(">f2"), c=W.astype(">c8")),
    "zarr 2": lambda d: zarr_group(d / "z", 2, **MIXED, rec=np.ones(2, [("a", "f4"), ("b", "i4")])),
    "zarr 3": lambda d: zarr_group(d / "z", 3, **MIXED, rec=np.ones(2, [("a", "f4"), ("b", "i4")])),
    "torch": lambda d: GOLDEN / "torch-2.15.pt",
    "torch odd": lambda d: GOLDEN / "torch-2.13-odd.pt",
    "dcp": lambda d: GOLDEN / "torch-2.13-dcp",
    "dcp odd": lambda d: GOLDEN / "torch-2.13-dcp-odd",
    "dcp safetensors": lambda d: GOLDEN / "torch-2.13-dcp-safetensors",
    "orbax 2": lambda d: GOLDEN / "orbax-0.12" / "files-zarr2",
    "orbax 3": lambda d: GOLDEN / "orbax-0.12" / "files-zarr3",
}
SKIPPED = {
    "npz": {"odd", "rec", "t"},
    "deflated": {"bf", "o"},
    "zarr 2": {"when", "text", "rec"},
    "zarr 3": {"when", "text", "rec"},
    "dcp odd": {"np", "scalar"},
}


@pytest.fixture(params=KINDS)
def kind(request: Any, tmp_path: Path) -> tuple[str, Path]:
    return request.param, KINDS[request.param](tmp_path)


def command(*words: Any) -> str:
    done = CliRunner().invoke(main, [str(w) for w in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    return done.output


@pytest.mark.filterwarnings("ignore:.*is loaded without what cannot be read")
def test_everything_that_reads_arrays_meets_every_kind(
    kind: tuple[str, Path], tmp_path: Path, visit: Any, kit: Any
) -> None:
    name, path = kind
    ckpt = mt.open_checkpoint(path)
    assert name not in SKIPPED or set(ckpt.skipped) == SKIPPED[name]
    assert (name in SKIPPED or name == "torch odd") == bool(ckpt.skipped)
    lost = list(ckpt.skipped)
    assert ckpt._repr_html_()
    assert (f"not readable here ({len(lost)})" in repr(ckpt)) == bool(lost)
    assert (f"not readable here ({len(lost)})" in command("ls", path)) == bool(lost)
    assert set(json.loads(command("ls", path, "--json"))["skipped"]) == set(lost)
    v = visit(path)
    for view in ("checkpoint", "map", "details", "health"):
        assert v.get(view, at="0").status == 200
    details = v.get("details", at="0", format="json").json
    assert set(details["skipped"]) == set(lost)
    for n, a in ckpt.items():
        assert a._repr_html_()
        assert command("show", path, n)
        assert command("show", path, n, "--json")
        page = v.get("array", at="0", name=n)
        assert page.status == 200, page.text
        assert a.tensor.how in kit.Markup(page.text).check().text
        assert v.get("array", at="0", name=n, check=1).status == 200
        assert v.get("statistics", at="0", name=n).status in (200, 422)
        assert v.get("values", at="0", name=n).status in (200, 422)
    for n in lost:
        assert n not in ckpt
        for ask in (lambda n=n: ckpt[n], lambda n=n: mt.load(path, keys=[n])):
            with pytest.raises(errors.CheckpointDTypeError, match=r"cannot be read"):
                ask()
        assert "cannot be read" in command("show", path, n)
        assert v.get("array", at="0", name=n).status in (404, 422)
    assert {f.name for f in scan(ckpt, Health()).findings if f.level == "note" and f.kind == "unreadable"} == set(lost)
    said = command("verify", path)
    if "checksums" not in said:
        assert set(storage.verify(path).skipped) == set(lost)
        assert ("not readable here" in said) == bool(lost)
        assert all(f"{n} ({ckpt.skipped[n]})" in said for n in lost[:1])
    if name == "bits":
        return
    right = {n: a.read() for n, a in ckpt.items()}
    for n, a in mt.load(path, keys=list(ckpt)).items() if name in SKIPPED else ():
        np.testing.assert_array_equal(np.asarray(a), right[n])
    for n, wanted in right.items():
        if wanted.ndim == 2 and wanted.size:
            np.testing.assert_array_equal(ckpt[n][1:, ::2], wanted[1:, ::2])
    for form in ("zarr", "safetensors"):
        drop = [n for n, a in right.items() if "fnuz" in a.dtype.name or "e8m0" in a.dtype.name] or None
        report = storage.convert(path, tmp_path / form, format=form, drop=drop)
        assert set(lost) <= set(report.skipped)
        made = mt.open_checkpoint(tmp_path / form)
        assert not made.skipped
        for n, a in made.items():
            assert a.read().tobytes() == right[n].tobytes(), (form, n)
    assert storage.diff(path, tmp_path / "zarr").same == (not lost)
    assert set(storage.diff(path, tmp_path / "zarr").skipped) == set(lost)
    assert storage.diff(path, tmp_path / "zarr", drop=lost).same
    assert set(lost) <= set(storage.reshard(path, tmp_path / "cut", mesh={"m": 2}).skipped)
    rules = [f"{n} -> {n}, reshape([-1])" for n in right]
    flat = storage.merge(path, tmp_path / "flat", rules="\n".join(rules), drop=[*lost, *(drop or [])])
    assert not set(lost) & set(flat.skipped)
    for n, a in mt.open_checkpoint(tmp_path / "flat").items():
        assert a.read().tobytes() == right[n].tobytes(), n
    if lost:
        with pytest.warns(UserWarning, match=r"loaded without what cannot be read; not readable here"):
            mt.load(path)
        report = mt.LoadReport()
        mt.load(path, report=report)
        assert list(report.skipped) == lost
        assert "not readable here" in str(report)


def test_what_cannot_be_read_is_told_from_what_is_missing(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", w=W, **{"a.odd": np.array(["x"])})
    like = {"w": W, "a.odd": W}
    with pytest.raises(errors.CheckpointKeyError, match=r"a\.odd is there and cannot be read"):
        mt.load(tmp_path / "x.npz", like=like)
    with pytest.raises(errors.CheckpointDTypeError, match=r"a\.odd"):
        mt.load(tmp_path / "x.npz", prefix="a")
    with pytest.raises(errors.CheckpointDTypeError, match=r"a\.odd"):
        mt.load(tmp_path / "x.npz", rules="a.odd -> b")
    assert mt.load(tmp_path / "x.npz", like={"w": W})["w"].shape == W.shape


def test_statistics_of_the_smallest_numbers(visit: Any, tmp_path: Path) -> None:
    storage.save(tmp_path / "c", {"w": np.array([np.nan, np.inf, -0.0, 5e-324])})
    v = visit(tmp_path / "c")
    assert v.get("statistics", at="0", name="w").status == 200
    assert v.get("array", at="0", name="w").status == 200


def test_values_of_torch_keep_their_kind() -> None:
    """Infinities and NaN are numbers; keys that no name has lose themselves alone, and not what lies beside them."""
    got = mt.load(GOLDEN / "torch-2.13-odd.pt", keys=["inf", "ninf", "nan", "losses.*", "hyper.*", "m.k", "clash.0"])
    assert (got["inf"], got["ninf"], got["losses"]) == (np.inf, -np.inf, [1.0, np.inf])
    assert np.isnan([got["nan"], got["hyper"]["eps"]]).all()
    assert set(got["m"]) == {"k"}
    ckpt = mt.open_checkpoint(GOLDEN / "torch-2.13-odd.pt")
    assert {"m.('a', 1)", "m.None", "m.2.5", "'clash'.'0'"} < set(ckpt.skipped)
    dcp = mt.load(GOLDEN / "torch-2.13-dcp-odd", keys=["best", "nan", "step"])
    assert (dcp["best"], dcp["step"]) == (np.inf, 7)
    assert np.isnan(dcp["nan"])


def test_views_of_torch_are_read() -> None:
    x = np.arange(24, dtype="f4").reshape(4, 6)
    wanted = {
        "columns": x[:, 1:3],
        "steps": x[::2, ::3],
        "turned": x[:, 1:3].T,
        "one": x[1:2, 2:3],
        "expanded": np.broadcast_to(np.arange(3, dtype="f4")[:, None], (3, 4)),
        "windows": np.lib.stride_tricks.sliding_window_view(np.arange(6, dtype="f4"), 3),
        **dict.fromkeys(("buffer", "parameter", "tagged"), np.arange(6, dtype="f4").reshape(2, 3)),
    }
    ckpt = mt.open_checkpoint(GOLDEN / "torch-2.13-odd.pt")
    for name, a in wanted.items():
        np.testing.assert_array_equal(ckpt[name].read(), a, name)
        for i in range(a.shape[0]):
            for j in range(a.shape[1]):
                np.testing.assert_array_equal(ckpt[name][i:, j], a[i:, j], name)
                np.testing.assert_array_equal(ckpt[name][i, j:], a[i, j:], name)
