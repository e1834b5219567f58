"""``meshtape run`` and ``meshtape status`` on processes started by hand: exit codes, signals, summary, logs, TLS."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import dask
import psutil
import pytest
from click.testing import CliRunner
from forked import Forked

import meshtape as mt
from meshtape.cli.main import main
from meshtape.parallel.training.job.rank_logs import collected
from meshtape.parallel.training.logging.metrics import read_lines
from meshtape.parallel.training.logging.progress import METADATA_KEY

LIMIT = 250.0

SCRIPT = """
import sys
import numpy as np
import meshtape as mt

x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
trainer = mt.Trainer(
    lambda p, b, key: mt.mean((b["x"] @ p - b["y"]) ** 2), mt.zeros(6, dtype=mt.float32), mt.optim.sgd(0.01),
    {"x": x, "y": x @ np.arange(6, dtype=np.float32)}, batch=16, steps=int(sys.argv[1]), save_every=5, log_every=1,
    mesh=mt.cluster_mesh({"data": -1}), elastic=mt.training.Elastic(rejoin=0.0),
)
result = trainer.fit()
print("arrived at", result.step, trainer.mesh.describe())
"""


def address_in(file: Path) -> str:
    """What a scheduler's file says; nothing before it is there, and while it is written."""
    try:
        return json.loads(file.read_text())["address"]
    except (FileNotFoundError, ValueError):
        return ""


class Processes:
    """Real processes, all of them ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.all = folder, []

    def start(self, *command: str, name: str, terminal: bool = False) -> subprocess.Popen:
        """With ``terminal`` it leads a group of its own, as what a shell starts does."""
        with (self.folder / f"{name}.log").open("w") as log:
            p = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=terminal,
            )
        self.all.append(p)
        return p

    def dask(self, *command: str, name: str) -> Forked:
        p = Forked("-m", *command, log=self.folder / f"{name}.log", cwd=self.folder)
        self.all.append(p)
        return p

    def scheduler(self, file: Path, *options: str) -> None:
        self.dask(
            "distributed.cli.dask_scheduler", "--port", "0", "--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file),
            *options, name="scheduler",
        )  # fmt: skip
        end = time.monotonic() + LIMIT
        while not address_in(file):
            assert time.monotonic() < end
            time.sleep(0.05)

    def worker(self, file: Path, number: int, *options: str) -> Forked:
        return self.dask(
            "distributed.cli.dask_worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-nanny", "--no-dashboard",
            "--host", "127.0.0.1", *options, name=f"worker{number}",
        )  # fmt: skip

    def job(self, name: str, *options: str) -> subprocess.Popen:
        return self.start("meshtape", "run", "job.py", "-d", str(self.folder / "run"), *options, name=name)

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def end(self) -> None:
        for p in self.all:
            p.kill()
            p.wait()


@pytest.fixture
def processes_by_hand(tmp_path):
    (tmp_path / "job.py").write_text(textwrap.dedent(SCRIPT))
    p = Processes(tmp_path)
    yield p
    p.end()


def until(condition, process, what):
    end = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, f"the job ended while {what}"
        assert time.monotonic() < end, what
        time.sleep(0.05)


def status(folder, home="run"):
    try:
        return json.loads((folder / home / "status.json").read_text())
    except FileNotFoundError:
        return {"step": 0, "restarts": 0, "state": ""}


def meshtape(*command):
    """A command of ours in this process: a new one takes seconds to start."""
    done = CliRunner().invoke(main, list(command))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.timeout(600)
def test_a_job_on_a_scheduler_loses_a_worker_is_stopped_and_goes_on(processes_by_hand, tmp_path):
    p, file = processes_by_hand, tmp_path / "scheduler.json"
    p.scheduler(file)
    workers = [p.worker(file, i) for i in range(2)]
    options = ("--scheduler-file", str(file), "--workers", "2", "--mesh", "data=2", "--", "100000")
    job = p.job("first", *options)
    until(lambda: status(tmp_path)["step"] > 10, job, "the first steps")
    workers[0].kill()
    until(lambda: status(tmp_path)["restarts"] == 1 and status(tmp_path)["state"] == "running", job, "the restart")
    facts = json.loads(meshtape("status", str(tmp_path / "run"), "--json"))[0]
    assert (facts["state"], facts["alive"], len(facts["workers"])) == ("running", True, 1)
    address = address_in(file)
    told = json.loads(meshtape("status", "--scheduler", address, "--json"))
    assert [j["name"] for j in told] == ["run"]
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=LIMIT) == 128 + signal.SIGTERM
    said = p.text("first")
    assert re.search(r"^step \d+/100000  loss ", said, re.MULTILINE)
    # A peer may know of the death before the scheduler does, which alone knows the address.
    assert re.search(r"^restart 1: (tcp://\S+|a rank) was lost at step \d+", said, re.MULTILINE)
    assert re.search(r"^going on from \S*(step-\d{8}$|the beginning$)", said, re.MULTILINE)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["reason"], summary["exit_code"], summary["restarts"]) == ("SIGTERM", 143, 1)
    assert Path(summary["checkpoint"]).name == f"step-{summary['step']:08d}"
    logs = list((tmp_path / "run" / "logs").glob("*.log"))
    assert len(logs) == 2  # also the killed one's
    assert all(log.read_text() for log in logs)

    # The same command goes on, here with as many steps more, on the one worker that is left.
    more = summary["step"] + 20
    again = p.job("second", "--scheduler", address, "--mesh", "data=-1", "--", str(more))
    assert again.wait(timeout=LIMIT) == 0, p.text("second")
    assert f"arrived at {more} {{'data': 1}}" in p.text("second")
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(1, more + 1))


def lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


FIRST = """
import os, signal, time
from pathlib import Path

with Path("runs.txt").open("a") as f:
    print(os.getpid(), file=f)

import neighbour
from meshtape.parallel.training.job.jobs import current_job
from meshtape.parallel.dask.workers import known_workers

def found():
    import neighbour
    return neighbour.WHO

client = current_job().client
address, pid = next(iter(client.run(os.getpid).items()))
os.kill(pid, signal.SIGKILL)
there = {address}
while address in there or len(there) < 2:
    time.sleep(0.1)
    there = set(known_workers(client))
assert set(client.run(found).values()) == {"beside the script"}
"""


@pytest.mark.timeout(600)
def test_a_job_of_this_machine_that_is_interrupted_or_killed_leaves_nothing_behind(
    processes_by_hand, tmp_path, eventually
):
    """Ctrl-C in a terminal goes to all processes of the group: the job saves the state, which its workers hold. One
    that gets SIGKILL takes its scheduler and workers with it, and leaves a whole checkpoint. Before that a worker of it
    is lost and started anew: it does not run the script, and finds the script's neighbours as the others do."""
    p, families = processes_by_hand, {}
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "summary.json").write_text('{"exit_code": 0}')  # of a run before
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "killed.py").write_text(FIRST + SCRIPT)
    (tmp_path / "scripts" / "neighbour.py").write_text('WHO = "beside the script"')
    jobs = {
        name: p.start("meshtape", "run", script, "-d", name, "--local", "2", "--", "100000", name=name, terminal=True)
        for name, script in (("interrupted", "job.py"), ("killed", "scripts/killed.py"))
    }
    for name, job in jobs.items():
        until(lambda n=name: status(tmp_path, n)["step"] > 10, job, "the first steps")
        families[name] = psutil.Process(job.pid).children(recursive=True)
        assert len(families[name]) >= 2
    saved = mt.CheckpointManager(tmp_path / "killed" / "checkpoints")  # they are written beside the steps
    until(lambda: max(saved.steps(), default=0) >= 10, jobs["killed"], "the checkpoint of step 10")
    os.killpg(jobs["interrupted"].pid, signal.SIGINT)
    jobs["killed"].kill()
    assert jobs["interrupted"].wait(timeout=LIMIT) == 128 + signal.SIGINT, p.text("interrupted")
    summary = json.loads((tmp_path / "interrupted" / "summary.json").read_text())
    assert (summary["reason"], summary["exit_code"], summary["restarts"]) == ("SIGINT", 130, 0), p.text("interrupted")
    assert Path(summary["checkpoint"]).name == f"step-{summary['step']:08d}"
    assert jobs["killed"].wait(timeout=LIMIT) == -signal.SIGKILL
    assert len((tmp_path / "runs.txt").read_text().split()) == 1
    eventually(lambda: not any(map(lives, families["interrupted"] + families["killed"])))
    ours = tuple(f"meshtape-{q.pid}-" for q in [*jobs.values(), *families["interrupted"], *families["killed"]])
    assert not [f for f in Path("/dev/shm").glob("meshtape-*") if f.name.startswith(ours)]
    assert not (tmp_path / "killed" / "summary.json").exists()
    (facts,) = json.loads(meshtape("status", str(tmp_path / "killed"), "--json"))
    assert (facts["state"], facts["alive"]) == ("running", False)
    newest = mt.CheckpointManager(tmp_path / "killed" / "checkpoints").latest()
    assert mt.open_checkpoint(newest).metadata[METADATA_KEY]["step"] >= 10
    assert mt.load(newest)["params"].shape == (6,)


def test_a_job_on_a_cluster_with_tls(processes_by_hand, tmp_path, certificate, monkeypatch):
    """Everything between the processes is encrypted and asks for a certificate: one made here by hand, as a site's
    would be."""
    p, file, pem = processes_by_hand, tmp_path / "scheduler.json", str(certificate)
    tls = ("--protocol", "tls", "--tls-ca-file", pem, "--tls-cert", pem, "--tls-key", pem)
    p.scheduler(file, *tls)
    for i in range(2):
        p.worker(file, i, *tls)
    mine = ("--tls-ca", pem, "--tls-cert", pem, "--tls-key", pem)
    job = p.job("encrypted", "--scheduler-file", str(file), "--workers", "2", "--mesh", "data=2", *mine, "--", "12")
    monkeypatch.chdir(tmp_path)
    address = address_in(file)
    assert address.startswith("tls://")
    done = CliRunner().invoke(main, ["run", "job.py", "-d", "none", "--scheduler", address, "--", "1"])
    assert (done.exit_code, "asks for certificates" in done.output) == (1, True), done.output
    del done
    assert job.wait(timeout=LIMIT) == 0, p.text("encrypted")
    (facts,) = json.loads(meshtape("status", "--scheduler", address, *mine, "--json"))
    assert (facts["name"], facts["state"], facts["step"]) == ("run", "finished", 12)
    assert "arrived at 12 {'data': 2}" in p.text("encrypted")


def test_a_job_in_this_process_and_its_exit_codes(processes_by_hand, tmp_path, monkeypatch):
    plain = processes_by_hand.job("plain", "--", "7")
    monkeypatch.chdir(tmp_path)
    for name, text, code in (("five", "import sys; sys.exit(5)", 5), ("broken", "1 / 0", 1)):
        Path(f"{name}.py").write_text(text)
        done = CliRunner().invoke(main, ["run", f"{name}.py", "-d", name])
        assert done.exit_code == code, done.output
    assert "ZeroDivisionError" in done.output
    assert "ZeroDivisionError" in json.loads((tmp_path / "broken" / "summary.json").read_text())["error"]
    assert plain.wait(timeout=LIMIT) == 0
    assert "arrived at 7 {'data': 1}" in processes_by_hand.text("plain")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["step"], summary["reason"], summary["args"]) == (7, "steps", ["7"])
    assert "finished" in meshtape("status", str(tmp_path / "run"))


def test_workers_of_a_job_are_quiet_on_its_terminal_and_in_their_files_as_ever(processes, tmp_path, eventually):
    """What a lost worker makes the others say goes to the logs; the handlers that write to the terminal are given back
    after."""

    def levels():
        import logging

        return [h.level for h in logging.getLogger("distributed").handlers]

    def speak():
        import logging

        logging.getLogger("distributed.worker").error("said by a worker")

    before = processes.run(levels)
    assert all(before.values())
    with collected(processes, tmp_path, quiet=True):
        assert {level for found in processes.run(levels).values() for level in found} == {50}
        processes.run(speak)
        eventually(lambda: sum("said by a worker" in f.read_text() for f in tmp_path.glob("*.log")) == 2)
    assert processes.run(levels) == before


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_outside_of_training_ends_the_job_with_a_summary(tmp_path, monkeypatch, which):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(f"import os\nos.kill(os.getpid(), {int(which)})\nwhile True:\n    pass\n")
    before = signal.getsignal(which)
    done = CliRunner().invoke(main, ["run", "job.py", "-d", "run"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (done.exit_code, summary["exit_code"]) == (128 + which, 128 + which), done.output
    assert f"{which.name} ended the job at once" in summary["error"]
    assert signal.getsignal(which) is before


def test_wrong_calls_and_schedulers_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "job.py").write_text("")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # so that nobody else gets it, and not listened at
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        for command, code, message in (
            (("run", "job.py", "--local", "1", "--scheduler", address), 2, "exclude each other"),
            (("run", "job.py", "--mesh", "data"), 2, "data=4,model=2"),
            (("run", "job.py", "--tls-ca", "job.py"), 2, "belong together"),
            (("run", "nothing.py"), 2, "does not exist"),
            (("run", "job.py", "--scheduler", address), 1, "no Dask scheduler answers"),
            (("status", "."), 1, "no directory of a run"),
        ):
            with dask.config.set({"meshtape.timeouts.connect": 0.5}):
                done = CliRunner().invoke(main, list(command))
            assert (done.exit_code, message in done.output) == (code, True), (command, done.output)
