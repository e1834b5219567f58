"""The commit protocol of a place: by renames in a directory, by claims in an object store."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from ..base.locations import is_url
from ..stores.atomic_directory import Folder
from . import directory_commit, object_commit


class CommitProtocol(Protocol):
    """How a place becomes a checkpoint, or none. ``tables``: those of contents that are replaced (see ``contents``)."""

    def is_begun(self, root: str, /) -> bool:
        """Whether a writer has begun to fill a place under its own name, and has not finished."""

    def recover(self, parent: str, /) -> list[str]:
        """Clean up after dead writers in a directory, or at one target in an object store; returns the names."""

    def discard(self, root: str, /) -> None:
        """Delete a checkpoint, so that it is never found half deleted under its own name."""

    def check_target(self, target: str, overwrite: bool, tables: frozenset[str]) -> list[str]:
        """Raise `CheckpointExists` where ``target`` may not be replaced; returns the documents there that stay."""

    def replacing(self, target: str, *, overwrite: bool, tables: frozenset[str]) -> AbstractContextManager[Folder]:
        """Give a directory to fill and `Folder.commit`; without the commit, nothing is left behind."""


def protocol_of(where: str) -> CommitProtocol:
    """The protocol of a location."""
    return object_commit if is_url(where) else directory_commit
