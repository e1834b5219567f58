"""``meshtape run`` and ``meshtape status``: a training script as a job on a Dask cluster, and how it stands.

The script is run in this process, which is the job's client; the workers compute. It asks for its mesh with
``mt.cluster_mesh()`` and needs to know nothing else of the cluster.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import datetime
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import click

from ..errors import ClusterError, Interrupted, MeshtapeError
from .parts import JSON, each, examples, print_json
from .parts import as_json as json_text

SUMMARY = "summary.json"


_TLS = tuple(
    click.option(name, type=click.Path(exists=True, dir_okay=False), help=text)
    for name, text in (
        ("--tls-ca", "Certificate of the authority, for tls:// schedulers."),
        ("--tls-cert", "Certificate of this client."),
        ("--tls-key", "Key of this client's certificate."),
    )
)


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "meshtape run job.py --local 2 --mesh data=2 -- --epochs 3",
        "meshtape run job.py --scheduler tcp://10.0.0.1:8786 --mesh data=-1,model=2",
    ),
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--scheduler", metavar="ADDRESS", help="Run on this Dask scheduler, such as tcp://host:8786 or tls://host:8786."
)
@click.option(
    "--scheduler-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="Run on the scheduler that wrote this file (dask scheduler --scheduler-file).",
)
@click.option("--local", metavar="N", type=click.IntRange(min=1), help="Start N worker processes on this machine.")
@click.option("--mesh", "axes", metavar="AXES", help="Axes of the mesh, such as data=4,model=2; one may be -1.")
@click.option(
    "--workers", metavar="N", type=click.IntRange(min=1), help="Wait until the scheduler has so many workers."
)
@click.option("--wait", default=60.0, show_default=True, metavar="SECONDS", help="How long to wait for workers.")
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|never|PATH",
    help="Go on from the newest checkpoint in the directory, begin anew, or go on from a checkpoint.",
)
@click.option(
    "--directory",
    "-d",
    type=click.Path(file_okay=False),
    help="Where checkpoints, numbers, logs and the summary go. Workers must see it too. Default: runs/SCRIPT.",
)
@each(_TLS)
@JSON
def run(
    script: str,
    args: tuple[str, ...],
    scheduler: str | None,
    scheduler_file: str | None,
    local: int | None,
    axes: str | None,
    workers: int | None,
    wait: float,
    resume: str,
    directory: str | None,
    as_json: bool,
    **tls: str | None,
) -> None:
    """Run a script as a job on a Dask cluster.

    The script asks for its mesh with mt.cluster_mesh() and trains with mt.Trainer, which saves, resumes and stops by
    itself. SIGINT and SIGTERM save a checkpoint after the step that is running and end the job; the same command goes
    on from there. With --json the summary is the only thing on the standard output; what the script prints goes to the
    standard error.

    Exit codes: 0 done; 1 the script or the cluster failed; 2 wrong call;
    130 and 143 stopped by SIGINT or SIGTERM, with a checkpoint; otherwise the script's own.
    """
    if sum(x is not None for x in (scheduler, scheduler_file, local)) > 1:
        raise click.UsageError("--scheduler, --scheduler-file and --local exclude each other")
    from ..parallel.training.job.jobs import Job, parse_axes
    from ..parallel.training.job.rank_logs import collected
    from ..parallel.training.lock import held

    try:
        wanted = None if axes is None else parse_axes(axes)
    except MeshtapeError as e:
        raise click.BadParameter(str(e), param_hint="--mesh") from None
    home = Path(directory or Path("runs") / Path(script).stem).absolute()
    home.mkdir(parents=True, exist_ok=True)
    security = _security(**tls)
    click.get_current_context().with_resource(held(home))
    (home / SUMMARY).unlink(missing_ok=True)  # a job that is killed leaves none, and not that of the one before
    summary: dict[str, Any] = {
        "script": str(Path(script).absolute()),
        "args": list(args),
        "directory": str(home),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    began = time.monotonic()
    code = 1
    try:
        with (
            _sigterm_like_ctrl_c(),
            _as_started_by_python(script, args),
            _client(scheduler, scheduler_file, local, security, home) as client,
        ):
            if client is not None:
                _wait_for_workers(client, workers, wait)
                _same_versions(client)
            job = Job(home, client, wanted, resume, holds=True)
            aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
            with collected(client, home / "logs", quiet=local is not None), aside:
                code = _script(script, job, summary)
            summary |= _outcome(job)
    except MeshtapeError as e:
        summary["error"] = f"{type(e).__name__}: {e}"
        raise
    except KeyboardInterrupt as e:  # before the script, or after it
        code = _interrupted(e, summary)
    finally:
        summary |= {"exit_code": code, "seconds": round(time.monotonic() - began, 3)}
        beside = home / (SUMMARY + ".new")
        beside.write_text(json_text(summary) + "\n", encoding="utf-8")
        beside.replace(home / SUMMARY)
        if as_json:
            print_json(summary)
    sys.exit(code)


class CommandTerminated(KeyboardInterrupt):
    """SIGTERM came where no training was there to take it."""


@contextlib.contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the job as Ctrl-C does also outside of training: what is open is closed, and the summary written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise CommandTerminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(error: KeyboardInterrupt, summary: dict[str, Any]) -> int:
    """The exit code of a job that a signal ended at once: it came outside of training, or for the second time."""
    came = signal.SIGTERM if isinstance(error, CommandTerminated) else signal.SIGINT
    text = f"{came.name} ended the job at once, without a checkpoint of its last step"
    summary["error"] = f"{type(error).__name__}: {text}"
    click.echo(f"Error: {text}", err=True)
    return 128 + came


def _security(tls_ca: str | None, tls_cert: str | None, tls_key: str | None) -> Any:
    given = [x is not None for x in (tls_ca, tls_cert, tls_key)]
    if not any(given):
        return None
    if not all(given):
        raise click.UsageError("--tls-ca, --tls-cert and --tls-key belong together")
    from distributed.security import Security

    return Security(tls_ca_file=tls_ca, tls_client_cert=tls_cert, tls_client_key=tls_key, require_encryption=True)


@contextlib.contextmanager
def _client(
    scheduler: str | None, scheduler_file: str | None, local: int | None, security: Any, home: Path
) -> Iterator[Any]:
    """A client of the cluster that the options name; None for a job in this process."""
    from ..parallel.dask.cluster import connect, local_cluster

    if local is not None:
        from ..parallel.dashboard import pages

        with pages.mounted(str(home)), local_cluster(local) as client:
            click.echo(f"watch it at {pages.address(client)}", err=True)
            yield client
        return
    if scheduler_file is not None:
        try:
            scheduler = json.loads(Path(scheduler_file).read_text(encoding="utf-8"))["address"]
        except (ValueError, KeyError, TypeError) as e:
            raise ClusterError(f"{scheduler_file} is no scheduler file: {type(e).__name__}: {e}") from e
    if scheduler is None:
        yield None
        return
    with connect(scheduler, security=security) as client:
        yield client


def _wait_for_workers(client: Any, workers: int | None, seconds: float) -> None:
    from ..parallel.dask.workers import known_workers

    wanted = workers or 1
    try:
        client.wait_for_workers(wanted, timeout=seconds)
    except TimeoutError:
        have = len(known_workers(client))
        raise ClusterError(
            f"the scheduler at {client.scheduler.address} has {have} worker(s) after {seconds:.0f} s, {wanted} are "
            "needed: start some with `dask worker ADDRESS --nthreads 1`"
        ) from None


def _same_versions(client: Any) -> None:
    """Every worker runs this Python, in so far as programs are carried by pickle: its minor version is what counts."""
    from ..parallel.dask.workers import ask, known_workers

    mine = sys.version_info[:2]
    for address, theirs in ask(client, _python_version, workers=list(known_workers(client))).items():
        if tuple(theirs) != mine:
            raise ClusterError(
                f"worker {address} runs Python {theirs[0]}.{theirs[1]}, this process {mine[0]}.{mine[1]}: use one "
                "version everywhere"
            )


def _python_version() -> tuple[int, int]:
    return sys.version_info[:2]


@contextlib.contextmanager
def _as_started_by_python(script: str, args: tuple[str, ...]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as in ``python script args``. Worker processes of this machine, which begin with
    the path that is in force when they are started, find the script's neighbours as well."""
    before = sys.argv[:], sys.path[:]
    sys.argv, sys.path[:0] = [script, *args], [str(Path(script).absolute().parent)]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = before


def _script(script: str, job: Any, summary: dict[str, Any]) -> int:
    """Run the script as the job; its exit code."""
    from ..parallel.training.job.jobs import running

    try:
        with running(job):
            _run_as_main(script)
    except Interrupted as e:
        return e.code
    except SystemExit as e:
        if isinstance(e.code, str):
            click.echo(e.code, err=True)
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        return code or _stopped(job)
    except KeyboardInterrupt as e:
        return _interrupted(e, summary)
    except MeshtapeError as e:
        summary["error"] = f"{type(e).__name__}: {e}"
        click.echo(f"Error: {e}", err=True)
        return 1
    except Exception as e:
        summary["error"] = f"{type(e).__name__}: {e}"
        traceback.print_exc()
        return 1
    return _stopped(job)


def _run_as_main(script: str) -> None:
    """Run a script as the module ``__main__``, in this process alone.

    A nanny starts a worker anew through multiprocessing, whose child first imports what is ``__main__`` in its parent:
    the script would train once more inside the worker. A main module whose spec is named like a package's ``__main__``
    is left alone (``multiprocessing.spawn``), which is why this is not ``runpy.run_path``.
    """
    module = ModuleType("__main__")
    module.__file__ = script
    module.__spec__ = ModuleSpec("meshtape.__main__", None)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), module.__dict__)
    finally:
        sys.modules["__main__"] = before


def _stopped(job: Any) -> int:
    """128 and the number of the signal that stopped the last training, or 0."""
    last = job.results[-1] if job.results else None
    return 128 + signal.Signals[last.reason] if last is not None and last.stopped else 0


def _outcome(job: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"meshes": [m.describe() for m in job.meshes]}
    if job.results:
        r = job.results[-1]
        out |= {n: getattr(r, n) for n in ("reason", "step", "epoch", "consumed", "loss", "restarts", "checkpoint")}
        out["loss"] = r.loss if math.isfinite(r.loss) else None
    return out


@click.command(epilog=examples("meshtape status runs/job", "meshtape status --scheduler tcp://10.0.0.1:8786 --json"))
@click.argument("path", required=False, type=click.Path())
@click.option(
    "--scheduler", metavar="ADDRESS", help="Ask a Dask scheduler for its jobs instead of reading a directory."
)
@each(_TLS)
@JSON
def status(path: str | None, scheduler: str | None, as_json: bool, **tls: str | None) -> None:
    """Show how jobs stand.

    Step, loss, workers, last checkpoint.

    PATH is the directory of a run, or its status.json; by default all runs in ./runs are shown.
    """
    from ..parallel.training.job.status import FILE, read_status, scheduler_jobs

    if path is not None and scheduler is not None:
        raise click.UsageError("give a directory or --scheduler, not both")
    if scheduler is not None:
        from ..parallel.dask.cluster import connect

        with connect(scheduler, security=_security(**tls)) as client:
            jobs = scheduler_jobs(client)
    else:
        places = [Path(path)] if path is not None else sorted(p.parent for p in Path("runs").glob(f"*/{FILE}"))
        jobs = [read_status(p) for p in places]
    if as_json:
        print_json(jobs)
        return
    if not jobs:
        click.echo("no jobs")
        return
    for facts in jobs:
        _show(facts)


def _show(facts: dict[str, Any]) -> None:
    from ..storage.browse.model.text import visible
    from .tables import Column, write

    state = facts["state"]
    if facts["alive"] is False and state in ("starting", "running", "restarting"):
        state += " (its process is gone)"
    mesh = " × ".join(f"{n}={s}" for n, s in (facts.get("mesh") or {}).items())
    loss, rate = facts.get("loss"), facts.get("per_second")
    rows = {
        "state": state,
        "step": f"{facts.get('step', 0)} of {facts.get('steps') or '?'}, epoch {facts.get('epoch', 0)}",
        "loss": "-" if loss is None else f"{loss:.5g}",
        "rate": "-" if rate is None else f"{rate:.4g}/s",
        "mesh": mesh or "none",
        "workers": ", ".join(facts.get("workers") or []) or "this process",
        "last checkpoint": facts.get("checkpoint") or "none",
        "restarts": str(facts.get("restarts", 0)),
        "updated": f"{max(0.0, time.time() - facts.get('updated', time.time())):.0f} s ago by "
        f"{facts.get('host')}:{facts.get('pid')}",
    }
    if facts.get("error"):
        rows["error"] = facts["error"]
    lines = [[what, visible(str(value), 10**4)] for what, value in rows.items()]
    write([Column(""), Column("")], lines, title=visible(str(facts.get("name", "run"))))


COMMANDS = (run, status)
