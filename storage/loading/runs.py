"""The steps of a run, whoever wrote them: folders whose names end with a number, and that hold checkpoints.

Those of a `CheckpointManager` have manifests, with branches and metrics. Where there are none, the folders are opened,
as those of Trainer, ``torch.distributed`` and Orbax. Steps of others are only read: nothing here or in a manager
rotates, deletes or collects them.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Collection, Iterable

from ...arrays.core.errors import CheckpointError
from ..checkpoint import numbered
from ..checkpoint.branches import Branch
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.numbered import Numbered
from ..foreign import orbax
from ..format import manifest
from ..readers.zarr_tensor import METADATA
from ..stores import store as stores
from ..stores.contract import unlisted
from .open import open_checkpoint

_WHOLE = (manifest.FILE, *METADATA, orbax.FILE)
"""Files of a checkpoint that has its arrays in folders of any names."""
Others = dict[str, Checkpoint | CheckpointError]
_LOOKS = 8  # at the newest folders, to tell whether any is a checkpoint


def folders_of(directory: str) -> list[str]:
    """The folders of a directory, where they can be listed."""
    if not stores.is_url(directory):
        try:
            return sorted(os.listdir(directory))
        except OSError as e:
            unlisted(e)
            raise  # nothing is there
    store = stores.at(directory)
    return store.folders() if store.lists else []


def is_whole(directory: str) -> bool:
    """Whether a directory is a checkpoint whose folders are its arrays, though a manager may keep steps there."""
    there = stores.at(directory)
    return any(there.size(file) is not None for file in _WHOLE)


def is_run(directory: str) -> bool:
    """Whether a directory has the checkpoints of a `CheckpointManager`, or numbered ones of another writer."""
    try:
        if numbered.listed(folders_of(directory)):
            return not is_whole(directory) or bool(numbered.complete(directory))
        return bool(one_run(directory, of_others(directory, _LOOKS)))
    except (OSError, CheckpointError):
        return False


def beside(directory: str, *, ours: bool = False) -> list[str]:
    """Numbered checkpoints of another writer, of the newest, that lie beside steps of a `CheckpointManager`, or in a
    checkpoint of another writer. They are no steps of that run. With ``ours`` none where there is no step of ours."""
    folders = folders_of(directory) if stores.is_url(directory) or os.path.isdir(directory) else []
    steps = numbered.listed(folders)
    if ours and not steps:
        return []
    named = sorted((n for n in folders if n not in steps and numbered.series(n)), key=numbered.series)
    found = []
    for name in named[-_LOOKS:]:
        with contextlib.suppress(CheckpointError, OSError):
            ckpt = open_checkpoint(stores.join(directory, name))
            found += [name] if ckpt.manifest is None and "zarr" not in ckpt.kind.lower() else []
    return found


def warn_of_others(directory: str, steps: Collection[str] = (), stacklevel: int = 3) -> None:
    """Warn of checkpoints that lie beside a run and do not belong to it. ``steps`` has those of another writer's."""
    names, why = [], ""
    if not steps:
        names, why = beside(directory, ours=True), " of another writer"
    for name in folders_of(directory) if steps else ():
        path = stores.join(directory, name)
        if name in steps or re.match(r"\.|.*(tmp|\.old-)", name) or not (stores.is_url(path) or os.path.isdir(path)):
            continue
        with contextlib.suppress(CheckpointError, OSError):
            open_checkpoint(path)
            names.append(name)
    if names:
        told = f"checkpoints{why} beside this run are no steps of it: {', '.join(names)}; name each by its path"
        warnings.warn(f"{directory}: {told}", stacklevel=stacklevel)


def of_others(directory: str, most: int = 0) -> Others:
    """The numbered checkpoints that another writer has left in a directory, by name: open, or the error of opening one.
    Empty where none opens, where there is one of ours, and where the directory is one. ``most`` looks at so many of the
    newest of a word alone, and at two words that have any."""
    if not (stores.is_url(directory) or os.path.isdir(directory)):
        return {}
    there, folders = stores.at(directory), folders_of(directory)
    series = sorted(filter(numbered.series, folders), key=numbered.series)
    if any(there.size(f"{n}/{manifest.FILE}") is not None for n in numbered.listed(folders)):
        return {}
    if not series or is_whole(directory):
        return {}
    found: Others = {}
    words, opened = dict[str, list[str]](), set[str]()
    for name in series:
        words.setdefault(numbered.series(name)[0], []).append(name)
    for word, name in ((w, n) for w, names in words.items() for n in names[-most:]):
        if most and len(opened) > 1:
            break
        try:
            found[name] = ckpt = open_checkpoint(stores.join(directory, name))
            if ckpt.manifest is not None:  # that of one which was just replaced
                return {}
            opened.add(word)
        except CheckpointError as e:
            found[name] = e
    return found if opened else {}


def one_run(directory: str, others: Others) -> Others:
    """The same checkpoints. Raises `CheckpointError` where they have several words: they may be models."""
    found = [n for n, c in others.items() if isinstance(c, Checkpoint)]
    if len({numbered.series(n)[0] for n in found}) > 1:
        raise _several(directory, found)
    return others


def _several(directory: str, found: Iterable[str]) -> CheckpointError:
    told = f"{directory} holds no run, or more than one run: {', '.join(found)}"
    return CheckpointError(f"{told}; give a list of checkpoints, or the path of one")


def steps_of(directory: str, *, warn: bool = False) -> list[Numbered]:
    """The complete checkpoints of a run, by step. With ``warn``, a warning names each of the others.

    Raises `CheckpointError` where another writer has left several runs, or a step twice: nobody can tell which is
    meant.
    """
    others = one_run(directory, of_others(directory))
    if warn:
        warn_of_others(directory, others, 5)
    if not others:
        return numbered.complete(directory, warn)
    found = {n: numbered.series(n) for n, c in others.items() if isinstance(c, Checkpoint)}
    if len({step for _, step in found.values()}) < len(found):
        raise _several(directory, found)
    for n, e in others.items() if warn else ():
        if n not in found:
            warnings.warn(f"skipped {stores.join(directory, n)}: {e}", stacklevel=3)
    return [Numbered(step, stores.join(directory, n), {}, Branch()) for n, (_, step) in found.items()]
