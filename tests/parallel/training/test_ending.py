"""How a run ends and what it holds meanwhile: signals in a plain script, one run a directory, checkpoints in the
background."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from forked import Forked

import meshtape as mt
from meshtape.parallel.training.job.status import read_status
from meshtape.parallel.training.lock import FILE, held
from meshtape.storage.saving import save as saving

tr = mt.training
X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


def trainer(directory, **options):
    options = {"steps": 6, "batch": 4, "log_every": 1, "shuffle": False} | options
    return mt.Trainer(
        lambda p, b, key: mt.mean((b @ p - 1.0) ** 2),
        mt.zeros(4, dtype=mt.float32),
        mt.optim.sgd(0.1),
        X,
        directory=directory,
        **options,
    )


SCRIPT = """
import os, signal, sys
import numpy as np
import meshtape as mt

class Tell(mt.training.Callback):
    def on_log(self, trainer, numbers):
        if trainer.progress.step == 3:
            {event}

t = mt.Trainer(lambda p, b, key: mt.mean((b @ p - 1.0) ** 2), mt.zeros(4, dtype=mt.float32), mt.optim.sgd(0.1),
               np.ones((64, 4), np.float32), batch=4, steps=1000, log_every=1, directory=sys.argv[1], save_every=2, callbacks=[Tell()])
try:
    t.fit()
finally:
    print("cleaned up", flush=True)
print("came back from fit", flush=True)
"""


def script(tmp_path, event):
    (tmp_path / "job.py").write_text(textwrap.dedent(SCRIPT).format(event=event))
    return [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "run")]


@pytest.mark.parametrize(("which", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_in_a_plain_script_saves_and_ends_it(tmp_path, which, code):
    command = script(tmp_path, f"os.kill(os.getpid(), {int(which)})")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert done.stdout == "cleaned up\n"
    assert which.name in done.stderr
    manager = mt.CheckpointManager(tmp_path / "run" / "checkpoints")
    assert manager.steps()[-1] in (3, 4)
    assert read_status(tmp_path / "run")["state"] == "stopped"


def test_an_interrupted_run_is_no_error_to_those_who_catch_errors(tmp_path):
    class Tell(tr.Callback):
        def on_log(self, trainer, numbers):
            if trainer.progress.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(mt.errors.Interrupted) as e, contextlib.suppress(Exception):
        trainer(tmp_path, callbacks=[Tell()]).fit()
    assert e.value.result.step in (2, 3)
    assert e.value.result.checkpoint.endswith(f"step-0000000{e.value.result.step}")


# ----- one run a directory --------------------------------------------------------------------------------------------


HOLD = """
import sys, time
from pathlib import Path
from meshtape.parallel.training.lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = Forked("-c", HOLD, str(tmp_path))
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_told_who_holds_the_directory(tmp_path, holder):
    year = time.strftime("%Y-")
    with pytest.raises(
        mt.errors.DirectoryInUse,
        match=f"process {holder.pid} on {socket.gethostname()}, since {year}.*directory of its own",
    ):
        trainer(tmp_path).fit()
    assert not (tmp_path / "status.json").exists()  # that of the holder is left as it is
    with pytest.raises(mt.errors.DirectoryInUse):
        trainer(None, checkpoints=mt.CheckpointManager(tmp_path)).fit()
    job = tmp_path / "job.py"
    job.write_text("print('ran')")
    command = [sys.executable, "-m", "meshtape", "run", str(job), "-d", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"process {holder.pid}" in done.stderr
    holder.kill()  # kill -9: nothing was given back
    holder.wait()
    assert json.loads((tmp_path / FILE).read_text())["pid"] == holder.pid
    assert trainer(tmp_path).fit().step == 6
    assert (tmp_path / FILE).read_text() == ""


def test_a_directory_is_held_by_one_trainer_of_a_process(tmp_path):
    class Another(tr.Callback):
        def on_log(self, t, numbers):
            with pytest.raises(mt.errors.DirectoryInUse, match=f"process {os.getpid()}"):
                trainer(tmp_path).fit()

    assert trainer(tmp_path, callbacks=[Another()], steps=2).fit().step == 2
    with pytest.raises(ZeroDivisionError), held(tmp_path):
        raise ZeroDivisionError
    assert trainer(tmp_path, steps=3).fit().step == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_what_lies_in_the_lock_does_not_matter(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    if "pid" in text:
        with pytest.warns(UserWarning, match="was not given back"), held(tmp_path):
            pass
    else:
        with held(tmp_path):
            pass


def test_another_host_that_did_not_give_it_back_is_named(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"pid": 7, "host": "node-17", "since": 0.0}))
    with pytest.warns(UserWarning, match="was not given back by process 7 on node-17"):
        assert trainer(tmp_path).fit().step == 6


# ----- checkpoints in the background ----------------------------------------------------------------------------------


class Slow:
    """Background saves that wait to be let go, or fail."""

    def __init__(self, monkeypatch, error=None):
        self.go, self.steps, self.error = threading.Event(), [], error
        whole = saving._Save.run

        def run(save, *args):
            self.steps.append(save.head.step)
            assert self.go.wait(60)
            if self.error is not None:
                raise self.error
            return whole(save, *args)

        monkeypatch.setattr(saving._Save, "run", run)


@pytest.mark.parametrize("axes", [None, {"data": 2}])
def test_steps_go_on_while_a_checkpoint_is_written(tmp_path, monkeypatch, axes):
    slow, states = Slow(monkeypatch), {}

    class Watch(tr.Callback):
        def on_log(self, t, numbers):
            states[t.progress.step] = np.asarray(t.params)
            if t.progress.step == 5:
                assert slow.steps == [3]  # at most one is in flight
                assert t.newest() is None
                assert t.checkpoints.steps() == []
                slow.go.set()

        def on_save(self, t, path):
            assert path in [t.checkpoints.path(s) for s in t.checkpoints.steps()]  # it is complete

    mesh = None if axes is None else mt.Mesh(axes)
    result = trainer(tmp_path, save_every=3, callbacks=[Watch()], mesh=mesh).fit()
    manager = mt.CheckpointManager(tmp_path / "checkpoints")
    assert manager.steps() == [3, 6]
    assert result.checkpoint == manager.path(6)
    for step in (3, 6):
        np.testing.assert_array_equal(np.asarray(mt.load(manager.path(step))["params"]), states[step])


def test_what_goes_wrong_in_the_background_ends_the_run_at_a_next_step(tmp_path, monkeypatch):
    slow = Slow(monkeypatch, OSError("the disk is gone"))
    slow.go.set()
    t = trainer(tmp_path, save_every=2, steps=1000)
    with pytest.raises(OSError, match="the disk is gone"):
        t.fit()
    assert 2 < t.progress.step <= 4
    assert read_status(tmp_path)["state"] == "failed"


def test_what_goes_wrong_with_the_last_one_is_raised_too(tmp_path, monkeypatch):
    slow = Slow(monkeypatch, OSError("the disk is gone"))
    slow.go.set()
    with pytest.raises(OSError, match="the disk is gone"):
        trainer(tmp_path).fit()


def test_the_checkpoint_in_flight_is_complete_when_a_run_ends_by_an_error(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)

    class Wrong(tr.Callback):
        def on_log(self, t, numbers):
            if t.progress.step == 4:
                threading.Timer(0.2, slow.go.set).start()
                raise ZeroDivisionError("of the user's own")

    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, save_every=3, callbacks=[Wrong()]).fit()
    assert mt.CheckpointManager(tmp_path / "checkpoints").steps() == [3]


def test_a_kill_while_one_is_written_leaves_the_one_before(tmp_path):
    event = "pass"
    command = script(tmp_path, event)
    text = (tmp_path / "job.py").read_text()
    hang = """
    from meshtape.storage.saving import save as saving
    whole = saving.finish_directory
    def finish(*args, **kwargs):
        if "step-00000004" in str(args) + str(kwargs):
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **kwargs)
    saving.finish_directory = finish
    """
    (tmp_path / "job.py").write_text(text.replace("\nclass Tell", textwrap.dedent(hang) + "\nclass Tell"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    manager = mt.CheckpointManager(tmp_path / "run" / "checkpoints")
    assert manager.steps() == [2]
    assert mt.load(manager.latest())["params"].shape == (4,)
