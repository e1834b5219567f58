"""What a run shows and writes: lines and bars, files of numbers, its status."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.training.job.status import read_status, with_life
from meshtape.parallel.training.logging.metrics import EventFile, JsonLines, read_lines

from .conftest import losses


@pytest.fixture(scope="module")
def trainer(small_run):
    return small_run(1, steps=12)


# ----- what is shown --------------------------------------------------------------------------------------------------


def test_plain_lines_where_there_is_no_terminal(trainer, capfd):
    trainer(steps=4, progress=True).fit()
    lines = [text for text in capfd.readouterr().err.splitlines() if text.startswith("step ")]
    assert [text.split()[1] for text in lines] == ["1/4", "2/4", "3/4", "4/4"]
    for text in lines:
        assert re.search(r"loss \d+\.\d{4}  \S+/s  \S+ [KMG]?i?B", text), text
    assert re.search(r"  \d+:\d\d:\d\d left$", lines[2])
    assert "left" not in lines[3]


def test_a_bar_on_a_terminal(trainer, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    trainer(steps=3).fit()
    shown = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert re.search(
        r"training .* 3/3 .*loss \d\.\d{4}  \S+/s  \S+ [KMG]?i?B .*\d:\d\d:\d\d", shown.splitlines()[-1]
    ), shown


# ----- what is written ------------------------------------------------------------------------------------------------


def events_of(file):
    """(step, status of its session, scalars) of each record, as TensorBoard's own message reads it."""
    from tensorboardX.proto.event_pb2 import Event

    data, at, out = file.read_bytes(), 0, []
    while at < len(data):
        (n,) = struct.unpack("<Q", data[at : at + 8])
        e = Event.FromString(data[at + 12 : at + 12 + n])
        out.append((e.step, e.session_log.status or None, {v.tag: v.simple_value for v in e.summary.value}))
        at += 16 + n
    return out


def test_numbers_are_written_as_json_lines_and_tensorboard_events(trainer, tmp_path):
    trainer(steps=3, directory=tmp_path).fit()
    result = trainer(steps=6, directory=tmp_path).fit()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines[3:]] == losses(result)
    assert {"grad_norm", "per_second", "memory", "epoch", "step_ms"} <= set(lines[0])
    files = sorted((tmp_path / "events").iterdir(), key=lambda f: f.stat().st_mtime_ns)
    assert len(files) == 2
    version, session, *events = events_of(files[1])
    assert version == (0, None, {})
    assert session == (4, 1, {})  # START: what is said elsewhere of step 4 and later ones no longer holds
    assert [s for s, _, _ in events] == [4, 5, 6]
    np.testing.assert_allclose([v["loss"] for _, _, v in events], losses(result), rtol=1e-6)


def test_events_need_a_package_that_the_error_names(trainer, tmp_path, monkeypatch):
    """A run without it writes the other files."""
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(mt.errors.TrainingError, match=r"pip install 'meshtape\[tensorboard\]'"):
        EventFile(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    trainer(steps=1, directory=tmp_path).fit()
    assert not (tmp_path / "events").exists()


def test_tensorboard_reads_the_events(tmp_path):
    """What TensorBoard itself shows of a run that went on from a step before its last: each step once."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, steps, factor in ((0, range(1, 6), 1.0), (3, range(4, 8), 10.0)):
        file = EventFile(tmp_path, first)
        for step in steps:
            file.write(step, {"loss": step * factor, "odd/name with ä": float("nan"), "text": "left out", "whole": 7})
        file.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "odd/name with ä", "whole"]
    found = [(e.step, e.value) for e in events.Scalars("loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0), (7, 70.0)]
    assert {e.value for e in events.Scalars("whole")} == {7.0}


def test_lines_of_steps_that_are_done_again_are_dropped(tmp_path):
    file = tmp_path / "m.jsonl"
    w = JsonLines(file)
    for step in range(1, 6):
        w.write(step, {"loss": float("nan") if step == 2 else step})
    w.close()
    with file.open("a") as f:
        f.write('{"step": 6, "lo')  # cut off by a crash
    w = JsonLines(file, step=3)
    w.write(4, {"loss": 0.5})
    w.close()
    assert [(r["step"], r["loss"]) for r in read_lines(file)] == [(1, 1), (2, "nan"), (3, 3), (4, 0.5)]
    file.write_text("[]\n")
    with pytest.raises(mt.errors.TrainingError, match="line 1"):
        read_lines(file)


def test_status_says_how_a_run_stands(trainer, tmp_path):
    result = trainer({"data": 2}, steps=3, directory=tmp_path).fit()
    s = read_status(tmp_path)
    assert (s["state"], s["step"], s["steps"], s["mesh"], s["alive"]) == ("finished", 3, 3, {"data": 2}, True)
    assert s["checkpoint"] == result.checkpoint
    s["pid"] = 2**22 + 1  # beyond what Linux gives out
    (tmp_path / "status.json").write_text(json.dumps(s))
    assert read_status(tmp_path)["alive"] is False
    # A child that ended and was not waited for, and a process that got the number after the run began.
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        child.stdout.read()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert with_life({**s, "pid": child.pid, "started": time.time()})["alive"] is False
    assert with_life({**s, "pid": os.getpid(), "started": 0.0})["alive"] is False
    with pytest.raises(mt.errors.TrainingError, match="no directory of a run"):
        read_status(tmp_path / "nothing")
