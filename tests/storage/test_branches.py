"""A manager that can go back: `latest` follows the branch begun last, and nothing on the way leaves it without a good
step."""

import os
import warnings

import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import CheckpointManager, load, open_checkpoint
from meshtape.storage.browse.model.runs import history
from meshtape.storage.checkpoint import branches
from meshtape.storage.stores import store


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path):
    if request.param == "local":
        return os.fspath(tmp_path / "run")
    pytest.importorskip("obstore")
    return f"{request.getfixturevalue('s3').url}/run"


def tree(step):
    return {"w": np.full(3, step)}


def filled(place, steps, **kw):
    manager = CheckpointManager(place, **{"keep": None, **kw})
    for step in steps:
        manager.save(step, tree(step), metrics={"loss": 1 / (step + 1)})
    return manager


def latest(manager):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = manager.latest()
    return None if path is None else int(path[-8:])


def test_going_back_and_on(place):
    manager = filled(place, [10, 20, 100])
    assert manager.rollback(20) == manager.path(20)
    again = CheckpointManager(place, keep=None)
    assert latest(manager) == latest(again) == 20
    assert again.branch() == [10, 20]
    with pytest.warns(UserWarning, match=r"step 100 .*is not of branch 1 from step 20.*the latest is step 20"):
        assert np.asarray(again.restore()["w"]).max() == 20
    for step in (30, 40):
        again.save(step, tree(step))
    third = CheckpointManager(place)
    assert latest(third) == 40
    assert third.branch() == [10, 20, 30, 40]
    assert third.steps() == [10, 20, 30, 40, 100]
    assert "branch 1 from step 20" in repr(third)
    assert history(place).latest.step == 40
    held = open_checkpoint(third.path(30)).metadata[branches.KEY]
    assert held["parent"] == 20
    assert held["forks"] == [["00000000", 20]]


def test_rollback_again_and_forth(place):
    manager = filled(place, [10, 20, 30])
    manager.rollback(10)
    manager.save(15, tree(15))
    manager.rollback(30)  # of the abandoned branch
    assert latest(manager) == 30
    assert manager.branch() == [10, 20, 30]
    manager.save(40, tree(40))
    assert manager.branch() == [10, 20, 30, 40]
    manager.rollback(15)
    manager.save(16, tree(16))
    assert manager.branch() == [10, 15, 16]
    assert manager.steps() == [10, 15, 16, 20, 30, 40]
    before = store.at(place).get(branches.FILE)
    manager.rollback(16)  # there already
    assert store.at(place).get(branches.FILE) == before
    manager.rollback(None)
    assert manager.latest() is None
    with pytest.raises(errors.NotACheckpoint):
        manager.restore()
    manager.save(1, tree(1))
    assert latest(CheckpointManager(place)) == 1


def test_a_step_of_the_abandoned_branch_that_is_saved_anew_belongs_to_the_new_one(place):
    manager = filled(place, [10, 20, 30, 40])
    manager.rollback(10)
    with pytest.raises(errors.CheckpointExists):
        manager.save(30, tree(31))
    manager.save(30, tree(31), overwrite=True)
    assert manager.branch() == [10, 30]
    assert np.asarray(load(manager.path(30))["w"]).max() == 31


@pytest.mark.parametrize("keep", [1, 2])
def test_rotation_takes_other_branches_first_and_never_what_the_branch_counts_on(place, keep):
    manager = filled(place, [10, 20, 90, 100])
    manager.rollback(20)
    other = CheckpointManager(place, keep=keep)
    other.save(30, tree(30))
    assert other.steps() == [20, 30][-keep:]
    assert latest(other) == 30
    # One that still writes on the branch from before, and rotates, leaves what the current branch counts on.
    live = CheckpointManager(place, keep=1)
    live.save(40, tree(40))
    other.rollback(40)
    CheckpointManager(place, keep=None).save(50, tree(50))
    live.save(110, tree(110))
    assert {50, 110} <= set(live.steps()) | {50}


def test_a_writer_that_knows_of_no_rollback_does_not_take_the_branch(place):
    live = filled(place, [10, 20, 100], keep=1)
    live.keep = 2
    live.save(110, tree(110))
    CheckpointManager(place).rollback(100)
    live.save(120, tree(120))
    live.save(130, tree(130))
    assert latest(live) == 100
    assert 100 in live.steps()
    assert 130 in live.steps()


def test_restore_of_a_step_and_a_save_below_the_newest_begins_a_branch(place):
    filled(place, [10, 20, 30])
    manager = CheckpointManager(place, keep=None)
    manager.restore(10)
    with pytest.raises(errors.CheckpointExists):
        manager.save(20, tree(21))
    assert latest(manager) == 30
    manager.save(15, tree(15))
    manager.save(25, tree(25))
    assert manager.branch() == [10, 15, 25]
    assert latest(CheckpointManager(place)) == 25
    # A look at an earlier step, from which nothing goes on, is none.
    manager.restore(10)
    manager.save(35, tree(35))
    assert manager.branch() == [10, 15, 25, 35]


def test_a_lower_step_without_going_back_is_told(place):
    manager = filled(place, [10, 20])
    with pytest.warns(UserWarning, match=r"step 15 is saved below step 20.*rollback"):
        manager.save(15, tree(15))
    assert latest(manager) == 20


def test_delete(place):
    manager = filled(place, [10, 20, 30])
    manager.delete(20)
    assert manager.steps() == [10, 30]
    manager.delete(30)
    assert latest(manager) == 10
    with pytest.raises(errors.CheckpointError, match="only complete"):
        manager.delete(10)
    with pytest.raises(errors.NotACheckpoint, match=r"of step 99; its steps are 10"):
        manager.delete(99)
    with pytest.raises(errors.NotACheckpoint, match=r"of step 99"):
        manager.rollback(99)
    manager.save(20, tree(20))
    manager.rollback(10)
    manager.save(15, tree(15))
    manager.delete(15)
    assert latest(manager) == 10
    with pytest.raises(errors.CheckpointError, match="only complete"):
        manager.delete(10)
    manager.delete(20)
    assert manager.steps() == [10]


def test_a_damaged_or_hostile_note_is_no_loss(tmp_path):
    manager = filled(tmp_path, [10, 20])
    for text in (b"", b"{}", b"[1]", b'{"name": "../x", "forks": []}', b'{"name": 3, "forks": 4}', b"\xff"):
        (tmp_path / branches.FILE).write_bytes(text)
        assert manager.latest() == manager.path(20)
    manager.rollback(10)
    assert latest(manager) == 10


@pytest.mark.parametrize("what", ["rollback", "delete", "restore and save"])
def test_killed_at_any_operation(kit, quick, what):
    saw = set()
    for n in range(1, 200):
        home = quick / str(n)
        filled(home, [10, 20, 30])

        def work(home=home):
            manager = CheckpointManager(home, keep=None)
            if what == "rollback":
                manager.rollback(10)
            elif what == "delete":
                manager.delete(30)
            else:
                manager.restore(10)
                manager.save(15, tree(15))

        killed = kit.die_at(n, work)
        again = CheckpointManager(home, keep=None)
        assert {10, 20} <= set(again.steps()) <= {10, 15, 20, 30}
        now = latest(again)
        assert np.asarray(load(again.path(now))["w"]).max() == now
        saw.add(now)
        again.restore()
        again.save(now + 1, tree(now + 1))
        assert latest(again) == now + 1
        assert not [e for e in os.listdir(home) if "." in e and e != branches.FILE]
        if not killed:
            break
    assert saw == {"rollback": {30, 10}, "delete": {30, 20}, "restore and save": {30, 10, 15}}[what]
