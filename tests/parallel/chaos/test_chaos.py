"""Faults at random moments end right or in an error that names who was lost, the next program runs, and nothing is left
behind.

``run.py`` beside this file does the rounds, as a program of its own: name spaces are entered before any thread starts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

pytestmark = pytest.mark.timeout(600)
FOLDER = Path(__file__).parent
SAMPLE = [152, 1, 2, 136, 232, 43, 196, 7, 8, 142, 200, 11, 88, 13, 185, 15, 149, 17, 208]
"""Seeds that meet every operation and every fault; those that take long are together with what is over soon."""
CLUSTERS = 3
"""Most of a round is waiting, so that three clusters at once take no longer than one."""


class Rounds:
    """A program that does rounds, one after the other."""

    def __init__(self, folder: Path, *args: str) -> None:
        self._out, self._log = folder / "outcomes", folder / "log"
        self._process = Forked(str(FOLDER / "run.py"), "--out", str(self._out), *args, errors=self._log)

    def outcomes(self, until: int | None = None) -> list[dict[str, Any]]:
        """Those that are there once the round of a seed has ended; all of them, where none is given."""
        assert self._process.stdout is not None
        found = self._found()
        while until is None or until not in {f["seed"] for f in found}:
            if not self._process.stdout.readline():  # each round says when its outcome is there
                found = self._found()
                assert self._process.wait() == 0, f"{[f for f in found if f['wrong']]}\n{self._log.read_text()[-8000:]}"
                break
            found = self._found()
        return found

    def _found(self) -> list[dict[str, Any]]:
        whole = self._out.read_text().rpartition("\n")[0] if self._out.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def close(self) -> None:
        """End it, if it has not ended."""
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def begun(folder: Path, *args: str) -> Iterator[Rounds]:
    folder.mkdir()
    with contextlib.closing(Rounds(folder, *args)) as rounds:
        yield rounds


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rounds]]:
    """Clusters on which the rounds of the sample go on, whichever of them is waited for."""
    folder = tmp_path_factory.mktemp("chaos")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(begun(folder / str(i), *(f"--seed={s}" for s in SAMPLE[i::CLUSTERS])))
            for i in range(CLUSTERS)
        ]


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_fault(seed: int, sample: list[Rounds]) -> None:
    found = sample[SAMPLE.index(seed) % CLUSTERS].outcomes(until=seed)
    (outcome,) = (f for f in found if f["seed"] == seed)
    assert not outcome["wrong"], outcome


def test_the_sample_meets_every_operation_and_every_fault(sample: list[Rounds]) -> None:
    found = [f for rounds in sample for f in rounds.outcomes()]
    assert sorted(f["seed"] for f in found) == sorted(SAMPLE)
    assert len({f["fault"] for f in found}) == 19
    assert len({f["operation"] for f in found}) == 13
    assert sum(f["ended"] != "skipped" for f in found) >= 12


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_500_faults(tmp_path: Path) -> None:
    with begun(tmp_path / "rounds", "--rounds", "500") as rounds:
        assert len(rounds.outcomes()) == 500
