"""Faults at random moments in what users do, one after the other: ``python tests/parallel/chaos/run.py --rounds 100``.

Each round has a seed, from which all else follows: ``--seed N`` does the same again. A round ends right, or in an error
of ``meshtape.errors`` that names who was lost; after it the next program runs, and nothing is left behind. What ends
otherwise is told with its seed.
"""

from __future__ import annotations

import spaces  # first: before any thread starts

# isort: split
import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT = 3.0
BRIEF = {
    "meshtape.timeout": TIMEOUT,
    "meshtape.timeouts.collective": TIMEOUT,
    "meshtape.timeouts.connect": TIMEOUT,
    "meshtape.timeouts.silence": 1.5,
    "meshtape.timeouts.abort": 1.5,
    "meshtape.timeouts.lease": TIMEOUT,
}
HUNG = 180.0
"""Seconds after which a round counts as one that does not end: several times the sum of the limits above, for a busy
machine."""
ENDED = "right"


@dataclass
class Outcome:
    """How a round has ended. ``ended`` is ``right``, the name of an error, or ``skipped``."""

    seed: int
    operation: str
    fault: str
    ended: str = ENDED
    text: str = ""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What is not as it should be, by the kinds of the table: ``hung``, ``wrong result``, ``error``, ``afterwards``,
    ``left behind``."""

    def line(self) -> str:
        what = "; ".join(self.wrong) or self.ended
        return f"--seed {self.seed}  {self.fault} / {self.operation}  {self.seconds:.1f} s  {what}  {self.text[:300]}"


def chosen(seed: int) -> tuple[str, str]:
    """The operation and the fault of a seed. Neighbours have different ones, so that a row of seeds meets all of them
    soon."""
    from faults import FAULTS
    from operations import OPERATIONS

    # Their numbers have no common divisor: a row of as many seeds as there are pairs meets each.
    return list(OPERATIONS)[seed % len(OPERATIONS)], list(FAULTS)[seed % len(FAULTS)]


class Runner:
    """Does rounds, one after the other, on a cluster that is mended in between."""

    def __init__(self, missing: dict[str, str]) -> None:
        from world import World

        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        self.world = World(self.folder, missing)

    def close(self) -> None:
        self.world.close()
        if "disk" not in self.world.missing:
            spaces.unmounted(str(self.world.disk))
        shutil.rmtree(self.folder, ignore_errors=True)

    def round(self, seed: int) -> Outcome:
        """One round, in a thread, which is watched."""
        operation, fault = chosen(seed)
        outcome = Outcome(seed, operation, fault)
        from faults import FAULTS

        if (needs := FAULTS[fault].needs) in self.world.missing:
            outcome.ended, outcome.text = "skipped", self.world.missing[str(needs)]
            return outcome
        begun = time.monotonic()
        self.world.ready()
        self._begun = time.monotonic()
        thread = threading.Thread(target=self._round, args=(outcome,), name="round", daemon=True)
        thread.start()
        thread.join(HUNG)
        if thread.is_alive():
            outcome.wrong.append("hung")
            outcome.text = self._stacks()
            self.world.end()  # which ends what it waits for
            thread.join(HUNG)
        outcome.seconds = outcome.seconds or time.monotonic() - begun
        return outcome

    def _stacks(self) -> str:
        print("----- it does not end; stacks of the client:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        log = self.folder / "log"
        at = log.stat().st_size if log.exists() else 0
        for pid in (*self.world.pids.values(), self.world.scheduler):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        with log.open(errors="replace") as f:
            f.seek(at)
            print("----- and of the workers:", f.read(), sep="\n", file=sys.stderr, flush=True)
        return "stacks are above"

    def _round(self, outcome: Outcome) -> None:
        try:
            self._steps(outcome)
        except BaseException as e:
            outcome.wrong.append("afterwards")
            outcome.text += f" [afterwards] {type(e).__name__}: {e}"
            traceback.print_exc()

    def _steps(self, outcome: Outcome) -> None:
        import dask
        import leaks
        import operations
        from faults import FAULTS
        from world import Scene

        fault, rng = FAULTS[outcome.fault], random.Random(outcome.seed)
        folder = self.world.disk / str(outcome.seed)
        folder.mkdir()
        scene = Scene(self.world, rng, folder)
        transport = rng.choice(("auto", "sockets", "comms"))
        watch = leaks.Watch(self.world)
        begin, over, done = threading.Event(), threading.Event(), threading.Event()
        moment, broken = rng.uniform(0.0, 0.6), list[str]()

        def strikes() -> None:
            begin.wait(HUNG)
            time.sleep(moment)
            try:
                with fault.strike(scene):
                    if fault.seconds is None:
                        over.set()
                        done.wait(HUNG)
                    else:
                        done.wait(fault.seconds) if outcome.operation != "training" else time.sleep(fault.seconds)
                        over.set()
            except BaseException:
                broken.append(traceback.format_exc())
            finally:
                over.set()

        with dask.config.set({**BRIEF, "meshtape.transport": transport}):
            thread = threading.Thread(target=strikes, name="fault", daemon=True)
            thread.start()
            start = time.monotonic()
            try:
                operations.run(scene, outcome.operation, begin.set, over.is_set)
            except operations.Wrong as e:
                outcome.ended, outcome.text = "wrong", f"{e} [{transport}]"
                outcome.wrong.append("wrong result")
            except operations.OfDask as e:
                outcome.ended, outcome.text = "Dask's", f"{e}"
            except BaseException as e:
                outcome.ended, outcome.text = type(e).__name__, f"{e} [{transport}, {scene.size} workers]"
                if problem := self._unlike(e, fault):
                    outcome.wrong.append(f"error: {problem}")
                    traceback.print_exc()
                e = None  # type: ignore[assignment]  # its frames hold arrays
            outcome.seconds = time.monotonic() - start
            begin.set()
            # While the fault lasts: those that are left go on.
            if begin.is_set() and not outcome.fault.startswith(("scheduler", "disk")):
                over.wait(HUNG)
                if left := [a for a in self.world.left if a != scene.victim]:
                    self._works(outcome, left, "with those that are left")
            done.set()
            thread.join(HUNG)
            if broken:
                outcome.wrong.append("the fault itself failed")
                outcome.text += broken[0]
            if outcome.fault in ("worker retired", "worker cut off", "cut in two", "worker stopped"):
                self.world.kill(scene.victim)
            gc.collect()
            self.world.ready()
            self._works(outcome, list(self.world.pids), "with all of them")
            if left_behind := watch.left(folder, 10.0):
                outcome.wrong.append("left behind")
                outcome.text += f" [left behind] {left_behind}"
        shutil.rmtree(folder, ignore_errors=True)

    def _unlike(self, e: BaseException, fault: Any) -> str | None:
        """What is not allowed about an error."""
        from meshtape.errors import MeshError

        # A mesh is asked for on a worker that is gone, and is known to be.
        unknown = isinstance(e, MeshError) and "does not know worker" in str(e)
        if not isinstance(e, fault.allowed) and not (fault.allowed and unknown):
            return f"{type(e).__name__} is not what may come of it"
        if fault.names and not any(w in str(e) for w in ("rank", "worker", "scheduler", "Dask client")):
            return "it names nobody"
        return None

    def _works(self, outcome: Outcome, workers: Sequence[str], which: str) -> None:
        """The next program runs."""
        import numpy as np

        import meshtape as mt

        try:
            with mt.Mesh({"a": len(workers)}, client=self.world.client, workers=workers) as mesh:
                x = mt.distribute(np.arange(12.0), mesh, a=mt.Shard(0))
                found = np.asarray(mt.reshard(x + mt.sum(x), a=mt.Replicate()))
                if not np.array_equal(found, np.arange(12.0) + 66.0):
                    outcome.wrong.append("wrong result")
                    outcome.text += f" [afterwards, {which}] {found}"
        except Exception as e:
            outcome.wrong.append("afterwards")
            outcome.text += f" [afterwards, {which}] {type(e).__name__}: {e}"
            traceback.print_exc()


def table(outcomes: Sequence[Outcome]) -> str:
    """Faults by kind and operation, and what was not as it should be."""
    operations = list(dict.fromkeys(o.operation for o in outcomes))
    faults = list(dict.fromkeys(o.fault for o in outcomes if o.ended != "skipped"))
    rows = [["fault", *operations, "all", "hung", "wrong", "other errors", "afterwards", "left behind"]]
    for fault in faults:
        of = [o for o in outcomes if o.fault == fault and o.ended != "skipped"]
        cells = []
        for operation in operations:
            here = [o for o in of if o.operation == operation]
            cells.append(f"{sum(o.ended == ENDED for o in here)}/{len(here)}" if here else "")
        bad = [
            str(sum(any(w.startswith(kind) for w in o.wrong) for o in of))
            for kind in ("hung", "wrong result", "error", "afterwards", "left behind")
        ]
        rows.append([fault, *cells, str(len(of)), *bad])
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    skipped = {o.fault: o.text for o in outcomes if o.ended == "skipped"}
    done = [o for o in outcomes if o.ended != "skipped"]
    lines.append(f"\n{len(done)} faults, of which {sum(not o.wrong for o in done)} ended as they should.")
    lines += [f"Not done: {name}, as {why}." for name, why in skipped.items()]
    return "\n".join(lines)


def seeds_of(args: argparse.Namespace) -> Iterator[int]:
    if args.seed:
        return iter(args.seed)
    every = range(args.first, args.first + args.rounds)
    wanted = (s for s in every if args.only is None or any(args.only in name for name in chosen(s)))
    return itertools.islice(wanted, args.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, action="append", help="do this round; may be given several times")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first round")
    parser.add_argument("--only", help="rounds whose fault or operation has this in its name")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of such files, and do nothing")
    parser.add_argument("--out", type=Path, help="write the outcomes there, as lines of JSON")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no round after these")
    args = parser.parse_args()
    if args.table:
        lines = [line for path in args.table for line in path.read_text().splitlines()]
        print(table([Outcome(**json.loads(line)) for line in lines]))
        return 0
    # Before /dev/shm, where it may lie, is another one.
    out = None if args.out is None else args.out.open("a")
    missing = spaces.enter()
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # before what reads it is imported
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends, too
    import logging

    import dask

    from meshtape.parallel.base import settings

    settings.register()
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    logging.getLogger("meshtape").setLevel(logging.ERROR)
    dask.config.set({"distributed.admin.tick.interval": "500ms"})
    runner, outcomes, begun = Runner(missing), list[Outcome](), time.monotonic()
    try:
        for seed in seeds_of(args):
            if time.monotonic() - begun > 60 * args.minutes:
                break
            outcome = runner.round(seed)
            outcomes.append(outcome)
            if out is not None:
                out.write(json.dumps(asdict(outcome)) + "\n")
                out.flush()
            print(outcome.line(), flush=True)
    finally:
        runner.close()
    print(table(outcomes), flush=True)
    bad = [o for o in outcomes if o.wrong]
    for o in bad:
        print("NOT AS IT SHOULD BE:", o.line(), flush=True)
    sys.stdout.flush()
    os._exit(1 if bad else 0)  # threads that hang are not waited for


if __name__ == "__main__":
    sys.exit(main())
