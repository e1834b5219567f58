"""Runs that other programs write: folders whose names end with a step, read and never changed."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from safetensors.numpy import save_file

import meshtape as mt
from meshtape import errors
from meshtape.cli.main import main
from meshtape.storage import virtual
from meshtape.storage.browse.model.runs import history
from meshtape.storage.loading import runs
from meshtape.storage.loading.runs import is_run
from meshtape.storage.stores import store as stores

GOLDEN = Path(__file__).parent / "golden"


def trainer(home: Path) -> dict[int, str]:
    for step in (4, 8, 12):
        folder = home / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": np.full(3, float(step), "f4")}, folder / "model.safetensors", {"format": "pt"})
        for name in ("optimizer.pt", "rng_state.pth", "trainer_state.json", "config.json"):
            (folder / name).write_text("{}")
    (home / "runs").mkdir()
    return {step: f"checkpoint-{step}" for step in (4, 8, 12)}


def torch_dcp(home: Path) -> dict[int, str]:
    for step in (100, 1000):
        shutil.copytree(GOLDEN / "torch-2.13-dcp", home / f"step-{step}")
    return {step: f"step-{step}" for step in (100, 1000)}


def padded(home: Path) -> dict[int, str]:
    """Steps that are called as a manager calls its own."""
    for step in (100, 1000):
        shutil.copytree(GOLDEN / "torch-2.13-dcp", home / f"step-{step:08d}")
    return {step: f"step-{step:08d}" for step in (100, 1000)}


def orbax(home: Path) -> dict[int, str]:
    for step in (0, 100):
        shutil.copytree(GOLDEN / "orbax-0.12" / "files-zarr3", home / str(step) / "default")
        (home / str(step) / "_CHECKPOINT_METADATA").write_text("{}")
    (home / "200.orbax-checkpoint-tmp-7").mkdir()
    return {step: str(step) for step in (0, 100)}


def state(home: Path) -> dict[str, bytes]:
    return {str(p.relative_to(home)): p.read_bytes() for p in home.rglob("*") if p.is_file()}


def command(*args: object) -> str:
    done = CliRunner().invoke(main, [*map(str, args)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("write", [trainer, torch_dcp, padded, orbax])
def test_a_run_of_another_writer_is_known_and_stays_as_it_is(tmp_path: Path, write) -> None:
    home = tmp_path / "run"
    steps = write(home)
    before = state(home)
    opened = {s: mt.open_checkpoint(home / n) for s, n in steps.items()}

    listed = json.loads(command("ls", home, "--json"))["steps"]
    assert [(r["step"], r["name"], r["arrays"], r["nbytes"], r["kind"]) for r in listed] == [
        (s, steps[s], len(c), c.nbytes, c.kind) for s, c in opened.items()
    ]
    assert [r["marks"] for r in listed] == [[]] * (len(steps) - 1) + [["latest"]]
    assert is_run(str(home))
    assert f"(run, {opened[max(steps)].kind})" in command("ls", home)

    used = json.loads(command("du", home, "--json"))
    sizes = {s: sum(p.stat().st_size for p in (home / n).rglob("*") if p.is_file()) for s, n in steps.items()}
    assert [(r["step"], r["arrays"], r["nbytes"], r["file_nbytes"], r["freed"]) for r in used["steps"]] == [
        (s, len(opened[s]), opened[s].nbytes, sizes[s], sizes[s]) for s in steps
    ]
    assert used["file_nbytes"] == sum(map(len, before.values()))

    line = [str(home / n) for n in steps.values()]
    floats = [n for n, a in opened[max(steps)].items() if a.dtype.kind == "f"]
    for made, wanted in (
        (virtual.mean(home), virtual.mean(line)),
        (virtual.ema(home, decay=0.5), virtual.ema(line, decay=0.5)),
        (virtual.ema(home, decay=0.5, steps=[max(steps)]), virtual.ema(line[-1:], decay=0.5)),
    ):
        assert made.path == wanted.path
        for n in floats:
            np.testing.assert_array_equal(made[n][...], wanted[n][...])
    command("derive", "mean", home, "--steps", min(steps), "--out", tmp_path / "mean.json")

    assert mt.storage.gc(home, older_than=-1, parts=True) == []
    assert json.loads(command("gc", home, "--json"))["leftovers"] == []
    manager = mt.CheckpointManager(home, keep=1)
    assert (manager.steps(), manager.latest()) == ([], None) if write is not padded else manager.steps() == []
    for step in (5, 6):
        manager.save(step, {"w": np.ones(2)})
    assert manager.steps() == [6]
    shutil.rmtree(home / "step-00000006")
    assert state(home) == before


def test_steps_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    trainer(tmp_path)
    file = tmp_path / "checkpoint-8" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.warns(UserWarning, match="skipped .*checkpoint-8"):
        made = virtual.mean(tmp_path)
    assert made["w"][0] == 8
    run = history(str(tmp_path))
    assert [s.step for s in run.complete] == [4, 12]
    assert "checkpoint-8" in run.steps[1].note
    with pytest.raises(errors.CheckpointKeyError, match=r"no step \[8\]; it has \[4, 12\]"):
        virtual.mean(tmp_path, steps=[4, 8])
    assert [s.step for s in mt.storage.usage(tmp_path).steps] == [4, 12]


@pytest.mark.parametrize("also", ["epoch_1", "checkpoint-012"])
def test_two_runs_in_one_folder_have_no_average(tmp_path: Path, also: str) -> None:
    trainer(tmp_path)
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / also)
    with pytest.raises(errors.CheckpointError, match=f"more than one run: .*{also}.*a list"):
        virtual.ema(tmp_path, decay=0.5)
    assert len(history(str(tmp_path)).complete) == 4


def models(home: Path, *names: str) -> None:
    for name in names:
        (home / name).mkdir(parents=True)
        save_file({"w": np.ones(3, "f4")}, home / name / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "names", [("base", "gemma2", "gpt-small", "llama3"), ("llama2", "llama3"), ("gpt-2", "llama-3", "llama-4")]
)
def test_a_folder_of_models_is_no_run(tmp_path: Path, names: tuple[str, ...]) -> None:
    models(tmp_path, *names)
    assert not is_run(str(tmp_path))
    for args in (["ls", tmp_path], ["du", tmp_path], ["derive", "mean", tmp_path, "--out", tmp_path / "m.json"]):
        done = CliRunner().invoke(main, [*map(str, args)])
        assert (done.exit_code, done.stdout) == (1, ""), done.output
    for look in (virtual.mean, lambda run: virtual.ema(run, decay=0.5)):
        with pytest.raises(errors.CheckpointError, match=r"no run.*a list of checkpoints"):
            look(tmp_path)


def test_few_checkpoints_are_opened_to_tell_that_a_folder_is_no_run(tmp_path: Path, monkeypatch) -> None:
    models(tmp_path, *(f"model-{chr(97 + i)}-{k}" for i in range(20) for k in range(12)))
    opened = []
    monkeypatch.setattr(runs, "open_checkpoint", lambda path: opened.append(path) or mt.open_checkpoint(path))
    assert not is_run(str(tmp_path))
    assert len(opened) < 20


@pytest.mark.parametrize(
    "names",
    [
        ("step100", "step1000"),
        ("global_step7", "global_step8"),
        ("epoch_3", "epoch_4"),
        ("iter_0000100", "iter_0000200"),
        ("my-run_1", "my-run_2"),
        ("ckpt7", "ckpt8"),
    ],
)
def test_a_run_says_which_checkpoints_beside_it_are_no_steps(tmp_path: Path, names: tuple[str, ...]) -> None:
    models(tmp_path, *names, "final", "llama3", f"{names[0]}.old-1", "9.orbax-checkpoint-tmp-7")
    (tmp_path / "logs").mkdir()
    said = "no steps of it: final, llama3; name each"
    for look in (virtual.mean, lambda run: virtual.ema(run, decay=0.5), mt.storage.usage):
        with pytest.warns(UserWarning, match=said) as told:
            look(tmp_path)
        assert len(told) == 1
    assert [s.name for s in history(str(tmp_path)).complete] == list(names)
    with pytest.warns(UserWarning, match=said):
        listed = json.loads(command("ls", tmp_path, "--json"))["steps"]
    assert [r["name"] for r in listed] == list(names)


def test_a_run_of_ours_is_not_mixed_with_others(tmp_path: Path) -> None:
    trainer(tmp_path)
    mt.CheckpointManager(tmp_path).save(7, {"w": np.ones(3, "f4")})
    assert [s.step for s in history(str(tmp_path)).steps] == [7]
    assert virtual.mean(tmp_path)["w"][0] == 1


def test_one_checkpoint_of_another_writer_has_its_bytes(tmp_path: Path) -> None:
    trainer(tmp_path)
    for where in (tmp_path / "checkpoint-4", tmp_path / "checkpoint-4" / "model.safetensors"):
        (step,) = mt.storage.usage(where).steps
        assert (step.path, step.arrays, step.total_size) == (str(where), 1, 12)
        assert step.nbytes == sum(p.stat().st_size for p in ([where] if where.is_file() else where.iterdir()))
    with pytest.raises(errors.NotACheckpoint, match="holds checkpoints, such as"):
        mt.load(tmp_path)
    with pytest.raises(errors.NotACheckpoint):
        mt.storage.usage(tmp_path / "runs")


def test_a_run_in_a_bucket(tmp_path: Path, s3) -> None:
    trainer(tmp_path / "run")
    url = f"{s3.url}/run"
    for p in (tmp_path / "run").rglob("*"):
        if p.is_file():
            stores.at(url).put(p.relative_to(tmp_path / "run").as_posix(), p.read_bytes())
    there, here = (mt.storage.usage(x) for x in (url, tmp_path / "run"))
    assert [(s.step, s.total_size, s.nbytes) for s in there.steps] == [
        (s.step, s.total_size, s.nbytes) for s in here.steps
    ]
    assert there.nbytes == here.nbytes
    assert [s.name for s in history(url).complete] == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]
    assert virtual.mean(url)["w"][...].tolist() == [8.0] * 3
    file = f"{url}/checkpoint-4/model.safetensors"
    assert mt.storage.usage(file).nbytes == (tmp_path / "run" / "checkpoint-4" / "model.safetensors").stat().st_size


def test_steps_of_others_beside_a_run_of_ours_are_named(tmp_path):
    trainer(tmp_path)
    with pytest.raises(errors.NotACheckpoint, match="no complete checkpoint of a CheckpointManager"):
        mt.CheckpointManager(tmp_path).restore()
    manager = mt.CheckpointManager(tmp_path, keep=None)
    manager.save(40, {"w": np.full(3, 40, "f4")})
    (tmp_path / "v2").mkdir()  # no checkpoint
    for look in (virtual.mean, lambda run: virtual.ema(run, decay=0.5), mt.storage.usage):
        with pytest.warns(
            UserWarning, match=r"of another writer .*: checkpoint-4, checkpoint-8, checkpoint-12;"
        ) as told:
            look(tmp_path)
        assert len(told) == 1
    with pytest.warns(UserWarning, match="of another writer"):
        assert "step-00000040" in command("ls", tmp_path)


def test_the_checkpoints_below_a_model_are_named(tmp_path):
    trainer(tmp_path)
    save_file({"w": np.ones(3, "f4")}, tmp_path / "model.safetensors", {"format": "pt"})
    said = command("ls", tmp_path)
    assert "checkpoints below: checkpoint-4, checkpoint-8, checkpoint-12" in said
    assert "checkpoints below" not in command("ls", tmp_path / "checkpoint-12")
    assert "checkpoints below" not in command("ls", tmp_path / "model.safetensors")


def group(at: Path, names: Iterable[str], **how: int) -> None:
    held = zarr.open_group(at, mode="w", **how)
    for name in names:
        held.create_array(name, data=np.ones(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda at: mt.save(at, [np.ones(24), np.ones(2)]),
        lambda at: mt.save(at, {"a-1": np.ones(3), "a-2": np.ones(3), "b-1": np.ones(3), "w ": np.ones(3)}),
        lambda at: mt.save(at, {"step-1": np.ones(3), "step-00000002": np.ones(4)}),
        lambda at: group(at, "012"),
        lambda at: group(at, "012", zarr_format=2),
        lambda at: group(at, ("0/w", "1/w")),
        lambda at: shutil.copytree(GOLDEN / "orbax-0.12" / "files-zarr2", at),
    ],
)
@pytest.mark.filterwarnings("error:.*beside this run")
def test_arrays_with_numbers_are_no_steps(tmp_path, make):
    make(tmp_path / "one")
    held = mt.open_checkpoint(tmp_path / "one")
    found = mt.storage.usage(tmp_path / "one")
    assert [(Path(s.path).name, s.arrays) for s in found.steps] == [("one", len(held))]
    assert not found.unread
    assert not is_run(str(tmp_path / "one"))
    with pytest.raises(errors.CheckpointKeyError, match="is no run"):
        virtual.mean(tmp_path / "one")


def test_a_run_in_the_folder_of_a_checkpoint(tmp_path):
    mt.save(tmp_path / "one", {"step-1": np.ones(3)})
    manager = mt.CheckpointManager(tmp_path / "one")
    for step in (1, 3):
        manager.save(step, {"w": np.full(3, float(step))})
    assert is_run(str(tmp_path / "one"))
    assert [s.step for s in mt.storage.usage(tmp_path / "one").steps] == [1, 3]
    assert virtual.mean(tmp_path / "one")["w"][0] == 2
    assert list(mt.open_checkpoint(tmp_path / "one")) == ["step-1"]


def test_steps_are_taken_once_and_in_their_order(tmp_path):
    manager = mt.CheckpointManager(tmp_path, keep=None)
    paths = [manager.save(step, {"w": np.full(1, float(step))}) for step in (10, 20, 30)]
    for look in (virtual.mean, lambda run, steps: virtual.ema(run, decay=0.5, steps=steps)):
        with pytest.raises(errors.CheckpointError, match="has 10 twice"):
            look(tmp_path, steps=[10, 20, 10])
    assert virtual.ema(tmp_path, decay=0.25, steps=[30, 10])["w"][0] == 25
    assert virtual.ema([manager.directory + f"/step-{s:08d}" for s in (30, 10)], decay=0.25)["w"][0] == 15
    assert len(paths) == 3
