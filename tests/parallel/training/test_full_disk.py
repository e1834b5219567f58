"""A disk that fills up under a run: the error names the file, a note for others ends nothing, and nothing half written
is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.training import lock
from meshtape.parallel.training.logging import metrics


def trainer(directory: Path) -> mt.Trainer:
    data = {"x": np.ones((8, 2), np.float32)}
    loss = lambda p, batch, key: mt.mean((batch["x"] @ p) ** 2)  # noqa: E731
    init = lambda key: mt.random.normal(key, (2,), dtype=mt.float32)  # noqa: E731
    return mt.Trainer(
        loss, init, mt.optim.sgd(0.1), data, batch=4, steps=4, directory=directory, log_every=1, save_every=2
    )


def full(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("kind", [metrics.JsonLines, metrics.EventFile])
def test_numbers_that_cannot_be_written_name_their_file(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(kind, "write", full)
    with pytest.raises(
        mt.errors.StorageFull, match=rf"{'metrics.jsonl' if kind is metrics.JsonLines else 'tfevents'}.*filled up"
    ):
        trainer(tmp_path).fit()
    monkeypatch.undo()
    assert trainer(tmp_path).fit().reason == "steps"


def test_files_that_cannot_be_begun_name_their_place(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.JsonLines, "_keep_until", full)
    with pytest.raises(mt.errors.StorageFull, match=r"metrics\.jsonl"):
        trainer(tmp_path).fit()


def test_a_lock_that_cannot_be_written_names_its_file(tmp_path, monkeypatch):
    write = lock._write
    monkeypatch.setattr(lock, "_write", lambda fd, record: full() if record else write(fd, record))
    with pytest.raises(mt.errors.StorageFull, match=str(tmp_path)):
        trainer(tmp_path).fit()


def test_a_status_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch):
    write = Path.write_text

    def half(self: Path, text: str, **options: Any) -> int:
        if not self.name.startswith("status.json"):
            return write(self, text, **options)
        write(self, text[:8], **options)
        return full()

    monkeypatch.setattr(Path, "write_text", half)
    assert trainer(tmp_path).fit().reason == "steps"
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith("status")]
