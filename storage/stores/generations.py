"""Generations: which of the checkpoints that lay in a place, one after another, is being read.

A writer that overwrites puts a whole checkpoint in the place of another, while readers may be at work. Each of them
stays with the generation that it opened, by three means. A checkpoint is opened from files that were all there at one
instant: their tags (inode, birth, length and time of a file; ETag of an object) are taken while they are read, and
compared when the last one was. Chunks of our own format are bound to the manifest by their checksums, so a chunk of
another generation cannot pass; where it fails, `guarded` looks whether the manifest is still the one that was opened,
and says which of the two is the reason. Files without checksums are compared with their tag whenever they were read.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

from ...arrays.core.errors import CheckpointError, CheckpointReplaced, CorruptCheckpoint, IncompleteCheckpoint
from ..base.threads import UPLOADS, in_threads
from ..base.waiting import is_late
from . import store as stores
from .contract import Reader, recording

P = ParamSpec("P")
T = TypeVar("T")

ABSENT = "no such file"  # the tag of one
ATTEMPTS = 10  # to open or load a checkpoint that writers keep replacing


def once_more(read: Callable[P, T]) -> Callable[P, T]:
    """A function that starts again where a writer replaces the checkpoint it reads, in at most `ATTEMPTS` attempts."""

    @functools.wraps(read)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        kwargs.update({k: list(v) for k, v in kwargs.items() if isinstance(v, Iterator)})  # each attempt begins anew
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(CheckpointReplaced):
                return read(*args, **kwargs)
        return read(*args, **kwargs)

    return whole


@contextlib.contextmanager
def one() -> Iterator[None]:
    """Raise `CheckpointReplaced`, whatever else went wrong, where a file that this thread has read within the block, or
    the function, is another at its end."""
    with recording() as tags:
        try:
            yield
        except BaseException as e:
            if isinstance(e, Exception) and not is_late(e):
                Generation(tags()).check()
            raise
        Generation(tags()).check()


def were_replaced(tags: Callable[[], dict[str, str]], error: Exception) -> bool:
    """Whether files that were read are others by now, which may be the reason of an error. A store that does not answer
    is not asked."""
    with contextlib.suppress(CheckpointReplaced):
        if not is_late(error):
            Generation(tags()).check()
        return False
    return True


def refuse(where: str, then: str, now: str | None) -> None:
    """Raise `CheckpointReplaced` where the tag of a file is another ``now`` than it was ``then``."""
    if then and now != then:
        raise CheckpointReplaced(
            f"{where} was replaced after it was opened: it had {then}; "
            + (f"now it has {now}. Open it again" if now else "now it is gone. Open another checkpoint")
        )


class FetchedBytes(Protocol):
    """Bytes that were fetched before they are read (see ``read_ahead``)."""

    def reader(self, where: str, reader: Reader) -> Reader:
        """A reader of an object that takes from them."""


@dataclass(frozen=True)
class Generation:
    """The files by which a checkpoint was opened, with the tag of each then."""

    tags: Mapping[str, str] = field(default_factory=dict)
    ahead: FetchedBytes | None = field(default=None, compare=False, kw_only=True)  # that those share who read it

    def check(self) -> None:
        """Raise `CheckpointReplaced` where one of the files is another by now."""

        def look(where: str) -> str | None:
            store, name = stores.holding(where)
            return store.tag(name)

        where = list(self.tags)
        found = in_threads(look, where, UPLOADS, alone=not any(map(stores.is_url, where)))
        for file, now in zip(where, found, strict=True):
            refuse(file, self.tags[file], now)

    def of(self, where: str) -> Generation:
        """The part that speaks of one file."""
        return Generation({where: self.tags[where]} if where in self.tags else {})

    def changes(self) -> dict[str, int]:
        """The ctime of each local file, its last write or rename: unlike the time in a tag, it cannot be set back."""
        out = {}
        for file in self.tags:
            with contextlib.suppress(OSError):
                if not stores.is_url(where := self.path_of(file)):
                    out[file] = os.stat(where).st_ctime_ns
        return out

    def path_of(self, file: str) -> str:
        """The place of a file that ``tags`` names."""
        return file

    def of_files(self) -> dict[str, str]:
        """The tags of files that were read by themselves: none of those that were listed together."""
        return dict(self.tags)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Damage and missing files that come from a replacement are told as one."""
        try:
            yield
        except (CorruptCheckpoint, IncompleteCheckpoint):
            self.check()
            raise
        except (FileNotFoundError, NotADirectoryError) as e:
            if isinstance(e, CheckpointError):
                raise
            self.check()
            name = e.filename or str(e).rpartition(": ")[0] or e  # stores of objects say the name, a colon and why
            raise IncompleteCheckpoint(f"{name} is missing; restore it or another checkpoint") from None


NONE = Generation()


@dataclass(frozen=True)
class Listed(Generation):
    """The generation of a Zarr hierarchy by others, where any file may change: the tags of all files below ``root``, or
    below some folders there; where nothing lists them (HTTP), of those that are ``known``. What begins as ``apart`` is
    written there meanwhile, and does not count."""

    root: str = ""
    below: tuple[str, ...] = ("",)
    apart: tuple[str, ...] = ()

    @classmethod
    def now(
        cls, root: str, below: tuple[str, ...] = ("",), apart: tuple[str, ...] = (), known: Iterable[str] = ()
    ) -> Generation:
        """The generation that lies there."""
        store = stores.at(root)
        if store.lists:
            found = {e.name: e.tag for b in below for e in store.entries(b) if not e.name.startswith(apart)}
        elif files := list(known):
            found = {f: tag or ABSENT for f, tag in zip(files, store.tags(files), strict=True)}
        else:
            return NONE
        return cls(found, root, below, apart)

    def path_of(self, file: str) -> str:
        return stores.join(self.root, file)

    def check(self) -> None:
        now = Listed.now(self.root, self.below, self.apart, self.tags).tags
        for name in sorted(self.tags.keys() | now.keys()):
            self._refuse(name, now.get(name))

    def of_files(self) -> dict[str, str]:
        return {}

    def check_files(self, files: Sequence[str]) -> None:
        """The same of some files, or places of files, alone."""
        for name, tag in zip(files, stores.at(self.root).tags(files), strict=True):
            self._refuse(name, tag)

    def _refuse(self, name: str, now: str | None) -> None:
        then = self.tags.get(name, ABSENT)
        if then != (now or ABSENT):
            refuse(stores.join(self.root, name), then, now)


@dataclass(frozen=True)
class JointGeneration(Generation):
    """The generations of several checkpoints from which another is computed: whole while each of them is."""

    parts: tuple[Generation, ...] = ()

    @classmethod
    def of_all(cls, parts: Iterable[Generation]) -> JointGeneration:
        # Each once, however many checkpoints between are computed from it.
        each = (g for p in parts for g in (p.parts if isinstance(p, JointGeneration) else [p]))
        held = tuple({id(g): g for g in each}.values())
        tags = {g.path_of(file): tag for g in held for file, tag in g.tags.items()}
        return cls(tags, parts=held)

    def of_files(self) -> dict[str, str]:
        return {file: tag for part in self.parts for file, tag in part.of_files().items()}

    def check(self) -> None:
        for part in self.parts:
            part.check()
