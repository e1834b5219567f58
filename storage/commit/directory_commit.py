"""The atomic commit of a directory of files, and its replacement by another.

The protocol, for a target ``NAME``:

1. A directory ``NAME.tmp-ID`` is made beside the target. ``ID`` names the host and process that owns it.
2. Every file is written there under its final name, and synced. Nothing of an older generation is touched.
3. The directories are synced. Then the *last* file is written and synced (the manifest, or an index): its presence is
   what makes the directory complete, so it must not be durable before what it vouches for.
4. A new target: ``NAME.tmp-ID`` is renamed to ``NAME``; the parent directory is synced.
5. A replaced target: the two names are exchanged in one step (Linux ``renameat2``). At every instant ``NAME`` is the
   old generation or the new one. Where the system cannot exchange, ``NAME`` is renamed to ``NAME.old-ID``, then
   ``NAME.tmp-ID`` to ``NAME``. Between the two, ``NAME`` does not exist; `resolve` makes a reader take ``NAME.old-ID``
   then, which is whole, and `recover` lets the next writer rename it back.
6. The old generation is renamed to ``NAME.trash-ID`` and deleted from there, so that half a deletion is never taken for
   a checkpoint.

A kill at any point leaves ``NAME`` (or ``NAME.old-ID``) whole, and at most one ``.tmp-``, ``.old-`` or ``.trash-``
directory. The process that fills, moves or deletes one of these holds a lock on it (see ``owners``). Only a writer
deletes those beside its target whose owner is gone (`recover`). Readers and starting managers delete nothing.

A replacement deletes only the checkpoint's own files (see ``contents``). Documents that stay are linked into the new
generation before step 4.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ...arrays.core.errors import CheckpointExists
from ...arrays.core.formatting import some
from ..format import manifest
from ..stores import owners
from ..stores.atomic_directory import Folder, discard, new_beside, owned, recover
from ..stores.contract import listed
from ..stores.filesystem import active
from . import contents
from .anchor_lock import PATIENCE, locked


def is_begun(root: str) -> bool:
    """Whether a writer fills the directory under its final name: never."""
    return False


@contextlib.contextmanager
def replacing(target: str, *, overwrite: bool, tables: frozenset[str]) -> Iterator[Folder]:
    """Give a directory to fill and `Folder.commit`; without the commit, nothing is left behind.

    ``tables`` are the tables of contents of what may be replaced (see ``contents``): ``overwrite=True`` never deletes
    anything else.
    """
    fs = active()
    target = os.path.abspath(target)
    recover(os.path.dirname(target))
    check_target(target, overwrite, tables)
    held, _ = new_beside(target, fs.mkdir)
    folder = Folder(held.path, lambda: _swap_in(held.path, target, overwrite, tables))
    try:
        yield folder
    finally:
        if not folder.committed:
            # The error that brought us here matters more than one of the clean-up; the next writer collects the rest.
            with contextlib.suppress(OSError):
                fs.remove_tree(held.path)
        held.release()


def adopt(directory: str, target: str, without: str, *, overwrite: bool, tables: frozenset[str]) -> None:
    """Commit a finished directory beside the target, less its file ``without``."""
    fs = active()
    check_target(target, overwrite, tables)
    temporary = f"{target}.tmp-{owners.new_id()}"
    # Locked before it has a name that others collect.
    with owned(directory), owned(temporary):
        fs.rename(directory, temporary)
        # Only now: a directory of the former name without this file could not be told from somebody else's.
        fs.unlink(os.path.join(temporary, without))
        fs.fsync_dir(temporary)
        try:
            _swap_in(temporary, target, overwrite, tables)
        except BaseException:
            with contextlib.suppress(OSError):
                fs.remove_tree(temporary)
            raise


def check_target(target: str, overwrite: bool, tables: frozenset[str]) -> list[str]:
    """Raise `CheckpointExists` where ``target`` may not be replaced; returns the documents there that stay."""
    if not os.path.lexists(target):
        return []
    if os.path.islink(target):
        raise CheckpointExists(
            f"{target} is a link to {os.readlink(target)}, and only directories are replaced; give the place itself"
        )
    if os.path.ismount(target):
        raise CheckpointExists(f"{target} is a mount point, which cannot be replaced; choose a place below it")
    if not os.path.isdir(target):
        raise CheckpointExists(f"{target} is not a directory; overwrite=True replaces checkpoint directories alone")
    if overwrite:
        return contents.check(target, tables)
    if (held := set(listed(target))) and not held & tables:
        raise CheckpointExists(
            f"{target} exists and holds no checkpoint of the kind that is written, but {some(sorted(held))}; choose "
            "another place"
        )
    raise CheckpointExists(f"{target} exists; pass overwrite=True to replace it")


def _swap_in(temporary: str, target: str, overwrite: bool, tables: frozenset[str]) -> None:
    fs = active()
    parent = os.path.dirname(target)
    if not os.path.lexists(target):
        fs.rename(temporary, target)
        fs.fsync_dir(parent)
        return
    check_target(target, overwrite, tables)  # before a lock that this save of a delta may share
    old = f"{target}.old-{owners.new_id()}"
    ours = os.path.exists(os.path.join(target, manifest.FILE))
    turn = locked(parent, patience=10 * PATIENCE) if ours else contextlib.nullcontext()
    with turn, owned(target), owned(old):
        try:
            # Again: somebody may have put something there while we wrote, or a delta from it.
            _bring(target, temporary, check_target(target, overwrite, tables))
            exchanged = fs.exchange(temporary, target)
            if not exchanged:
                fs.rename(target, old)
        except FileNotFoundError:
            if os.path.lexists(target):
                raise
            exchanged = False  # another process has deleted it meanwhile
        if not exchanged:
            try:
                fs.rename(temporary, target)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    fs.rename(old, target)
                raise
        fs.fsync_dir(parent)
        old = temporary if exchanged else old
    # The new generation is in place and durable: from here on an error is no longer one of the save.
    with contextlib.suppress(OSError):
        discard(old)


def _bring(source: str, target: str, documents: list[str]) -> None:
    """Bring documents that stay into the next generation, as links where there are such."""
    fs = active()
    brought = [d for d in documents if not os.path.lexists(os.path.join(target, d))]
    for name in brought:
        there, here = os.path.join(source, name), os.path.join(target, name)
        try:
            fs.link(there, here)
        except OSError as e:
            if e.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES):
                raise
            with open(there, "rb") as f:
                fs.write_file(here, f.read())
    if brought:
        fs.fsync_dir(target)
