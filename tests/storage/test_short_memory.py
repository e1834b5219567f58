"""Where memory is short: an error that says for which key or place, and never the end of the process."""

import numpy as np
import pytest
import zarr

import meshtape as mt
from meshtape import errors, storage
from meshtape.storage import virtual
from meshtape.storage.format import compression
from meshtape.storage.readers import compressed, raw_tensor, tensor, zarr_bounds, zarr_tensor
from meshtape.storage.transform.sinks import raw_writer, sink

ROWS = np.random.default_rng(0).standard_normal((64, 96)).astype("f4")


def refuse(*_, **__):
    raise MemoryError


def _zarr(at):
    zarr.open_group(at, mode="w").create_array("w", data=ROWS, chunks=(8, 96))


def _delta(at):
    manager = mt.CheckpointManager(at.parent, anchor_every=3)
    for step in (1, 2):
        manager.save(step, {"w": ROWS * np.float32(1 + step * 1e-6)})
    (at.parent / "step-00000002").rename(at)


def _virtual(at):
    mt.save(at.parent / "parent", {"w": ROWS}, compression="zstd")
    virtual.write(at, virtual.cast(at.parent / "parent", "float16"))


SOURCES = {
    "zstd": lambda at: mt.save(at, {"w": ROWS}, compression="zstd"),
    "delta": _delta,
    "Zarr of others": _zarr,
    "virtual": _virtual,
}
USES = {
    "load": lambda at, out: mt.load(at),
    "slices": lambda at, out: mt.open_checkpoint(at)["w"][:2, :3],
    "steps": lambda at, out: mt.open_checkpoint(at)["w"][::3, ::2],
    "merge": lambda at, out: storage.merge(at, out),
    "convert": lambda at, out: storage.convert(at, out, format="zarr", compression="zstd"),
    "reshard": lambda at, out: storage.reshard(at, out, mesh={"m": 2}, shardings={"w": {"m": 0}}),
    "diff": lambda at, out: storage.diff(at, out.parent / "other"),
    "verify": lambda at, out: storage.verify(at),
}


@pytest.mark.parametrize(
    ("source", "use"),
    # (Of Zarr of others there is nothing to verify.)
    [(s, u) for s in SOURCES for u in USES if (s, u) != ("Zarr of others", "verify")],
)
def test_the_error_names_the_key_or_the_place(tmp_path, monkeypatch, source, use):
    at = tmp_path / ("at.json" if source == "virtual" else "at")
    SOURCES[source](at)
    mt.save(tmp_path / "other", {"w": ROWS})
    for module in (compressed, raw_tensor, tensor, raw_writer, sink):
        monkeypatch.setattr(module, "scratch", refuse)
    monkeypatch.setattr(zarr_tensor.ZarrTensor, "_opened", refuse)
    with pytest.raises(errors.OutOfMemory) as e:
        USES[use](at, tmp_path / "out")
    assert "key 'w'" in str(e.value) or str(tmp_path) in str(e.value)
    assert "this process gets no more memory; " in str(e.value)


@pytest.mark.parametrize("kind", ["weights", "Zarr of others"])
def test_blosc_is_not_called_where_its_own_memory_is_not_there(monkeypatch, kind):
    """Its library does not look whether it got any."""
    data = ROWS.reshape(-1).view(np.uint8)
    frame = np.frombuffer(compression.ShuffledZstd().compress(data, 4), np.uint8)
    out, asked = np.empty_like(data), []
    monkeypatch.setattr(compression, "_unpack", lambda *_: pytest.fail("it was called"))

    def none(nbytes, *_):
        asked.append(nbytes)
        raise MemoryError

    unpack = {
        "weights": lambda: compression.ShuffledZstd().decompress(frame, out),
        "Zarr of others": lambda: zarr_bounds._check("numcodecs.blosc", frame.tobytes(), data.size),
    }
    with monkeypatch.context() as now:
        now.setattr(np, "empty", none)
        with pytest.raises(MemoryError):
            unpack[kind]()
    assert asked[0] >= 3 * data.size
