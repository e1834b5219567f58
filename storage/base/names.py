"""Names: of leaves as people read them, of leaves as Zarr nodes, and of files that come from untrusted text.

A leaf's *name* is its keys joined by dots (``layers.0.w``). Its Zarr name is the same wherever that is safe; otherwise
bytes are percent-escaped, so any string is a legal, bounded, unreserved file name on every system.

>>> zarr_names(["layers.0.w", "a/b", "zarr.json", ""])
['layers.0.w', 'a%2Fb', '%7Aarr.json', '%']
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ...arrays.core.errors import CheckpointError, CheckpointKeyError, CorruptCheckpoint
from .locations import is_url, join

_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
# Zarr's own files, ours, and the device names that Windows cannot use as files.
_RESERVED = frozenset(
    ["zarr.json", ".zgroup", ".zattrs", ".zarray", ".zmetadata", "meshtape.json", "con", "prn", "aux", "nul"]
    + [f"{device}{n}" for device in ("com", "lpt") for n in range(10)]
)
_LONGEST = 160
STEP = re.compile(r"step-\d{8,}")  # the folder of a numbered checkpoint
_PLAIN = re.compile(  # most names, which stay as they are
    rf"(?!__|(?i:{'|'.join(map(re.escape, sorted(_RESERVED)))})(?:\.|\Z))[\w-][\w.-]{{0,98}}[\w-]", re.ASCII
)
_NAME_MAX, _PATH_MAX = 255, 1024  # no file system has longer ones
_NODE = re.compile(r"(?!__|zarr\.json\Z)[\w-](?:[\w .-]{0,98}[\w-])?")  # what Zarr allows and a URL keeps apart
# Nearly all names; not . or .. or a long one.
_SIMPLE = re.compile(r"[\w-][\w.-]{0,99}(?:/[\w-][\w.-]{0,99}){0,3}", re.ASCII)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _escape(name: str) -> str:
    if _PLAIN.fullmatch(name):
        return name
    raw = name.encode("utf-8", "surrogatepass")
    if not raw:
        return "%"
    out = "".join(chr(b) if b in _SAFE else f"%{b:02X}" for b in raw)
    # The first character decides whether a name is hidden or reserved; a final dot is lost on Windows.
    heads = {out.casefold(), out.split(".")[0].casefold()}  # Windows reserves "nul.txt" as well
    if out.startswith((".", "__")) or heads & _RESERVED:
        out = f"%{raw[0]:02X}{out[1:]}"
    if out[-1] == ".":
        out = f"{out[:-1]}%2E"
    if len(out) > _LONGEST:
        out = f"{out[: _LONGEST - 17]}~{_digest(name)}"
    return out


def zarr_names(names: Sequence[str]) -> list[str]:
    """One Zarr node name for each leaf name; distinct even where the file system ignores case."""
    escaped = [_escape(name) for name in names]
    folded = [e.casefold() for e in escaped]
    if len(set(folded)) == len(folded):
        return escaped
    count = Counter(folded)
    return [
        e if count[f] == 1 else f"{e[: _LONGEST - 17]}~{_digest(name)}"
        for e, f, name in zip(escaped, folded, names, strict=True)
    ]


def zarr_paths(names: Sequence[str]) -> list[str]:
    """The nodes of leaf names in a hierarchy where slashes lead into groups. A name that would lie below that of
    another array is one node. No file system is asked, so that names stay which it would refuse or confuse. Bytes are
    escaped after a tilde, which no client of HTTP escapes once more: of a percent sign some do, and some do not.

    >>> zarr_paths(["a", "a/b", "g/x.y", "g/../w", "A", "con"])
    ['a', 'a~2Fb', 'g/x.y', 'g/~2E~2E/w', 'A', 'con']
    """
    arrays = set(names)

    def nested(name: str) -> bool:
        return "/" in name and not any(name[:i] in arrays for i, c in enumerate(name) if c == "/")

    parts = [n.split("/") if nested(n) else [n] for n in names]
    return ["/".join(p if _NODE.fullmatch(p) else _escape(p).replace("%", "~") for p in each) for each in parts]


def leaf_name(path: Sequence[str | int]) -> str:
    """A path as people read it: ``('layers', 0, 'w')`` becomes ``layers.0.w``."""
    try:
        return ".".join(path)  # type: ignore[arg-type]
    except TypeError:  # of lists and tuples keys are numbers
        return ".".join(map(str, path))


def matching(pattern: str, known: Collection[str]) -> list[str]:
    """Those of the ``known`` names that a name or pattern takes: one of them takes itself alone.

    >>> matching("w[0]", ["w[0]", "w0"]), matching("w*", ["w[0]", "w0"])
    (['w[0]'], ['w[0]', 'w0'])
    """
    return [pattern] if pattern in known else [n for n in known if fnmatchcase(n, pattern)]


def chooser(
    keys: str | Iterable[str] | None, drop: str | Iterable[str] | None, known: Container[str]
) -> Callable[[str], bool]:
    """Whether ``keys`` (None: all) take a name, and ``drop`` does not leave it out. Those of them that are ``known``
    names match themselves alone.

    >>> list(filter(chooser(["w*"], "w[0]", {"w[0]", "w0"}), ["w[0]", "w0", "b"]))
    ['w0']
    """
    kept = None if keys is None else patterns_of(keys)
    left = dropped(drop)

    def among(name: str, patterns: Iterable[str]) -> bool:
        return any(name == p or (p not in known and fnmatchcase(name, p)) for p in patterns)

    return lambda name: (kept is None or among(name, kept)) and not among(name, left)


def patterns_of(keys: str | Iterable[str], what: str = "keys are names or patterns") -> list[str]:
    """Names or patterns that a caller gives: one, or several. An error says ``what`` they are."""
    held = [keys] if isinstance(keys, str) or not isinstance(keys, Iterable) else list(keys)
    if not all(isinstance(k, str) for k in held):
        raise CheckpointError(f"{what}, got {keys!r:.80}")
    return held


def taken(keys: str | Iterable[str] | None) -> list[str] | None:
    """The same of ``keys``, of which something is to be made; None takes all."""
    held = None if keys is None else patterns_of(keys)
    if held == []:
        raise CheckpointKeyError("keys is empty, so nothing would be taken; leave it out to take all")
    return held


def dropped(drop: str | Iterable[str] | None) -> list[str]:
    """The same of ``drop``; None leaves nothing out."""
    return [] if drop is None else patterns_of(drop, "drop takes names or patterns")


def check_distinct(paths: Sequence[Sequence[str | int]], named: Sequence[str]) -> None:
    """Raise `CheckpointKeyError`, listing every case, when two paths have one name."""
    if len(set(named)) == len(named):
        return
    first: dict[str, Sequence[str | int]] = {}
    clashes = []
    for path, name in zip(paths, named, strict=True):
        if name in first:
            clashes.append(f"  {list(first[name])} and {list(path)} are both named {name!r}")
        first.setdefault(name, path)
    raise CheckpointKeyError("\n".join([f"keys collide ({len(clashes)}):", *clashes, "rename one of each"]))


def plain(relative: object, source: str) -> list[str]:
    """The parts of a file's name below a directory; `CorruptCheckpoint` where untrusted text is none, or leads out."""
    if isinstance(relative, str) and _SIMPLE.fullmatch(relative):
        return relative.split("/")
    if not isinstance(relative, str) or not relative:
        raise CorruptCheckpoint(f"{source}: {relative!r} is not a file name")
    parts = relative.split("/")
    if "\0" in relative or "\\" in relative or ":" in parts[0] or any(p in ("", ".", "..") for p in parts):
        raise CorruptCheckpoint(f"{source}: file name {relative!r} leaves the checkpoint or is malformed; refused")
    with contextlib.suppress(UnicodeEncodeError):  # half of a surrogate pair
        if max(len(os.fsencode(p)) for p in parts) <= _NAME_MAX and len(relative) <= _PATH_MAX:
            return parts
    raise CorruptCheckpoint(f"{source}: file name {relative[:80]!r} is too long for a file, or no text; refused")


def inside(root: str, relative: object, source: str) -> str:
    """The path of a file that untrusted text ``relative`` names below ``root``.

    Absolute paths, ``..``, backslashes, NUL and links that leave the directory raise `CorruptCheckpoint` naming
    ``source``, where the text stood. Links into ``blobs`` beside ``snapshots`` are followed, from any folder of a
    snapshot: the Hugging Face cache is made of them.
    """
    parts = plain(relative, source)
    if is_url(root):  # no links there
        return join(root, relative)
    step = root.rstrip(os.sep)
    for part in parts:
        step = f"{step}{os.sep}{part}"
        try:
            if stat.S_ISLNK(os.lstat(step).st_mode):
                break
        except OSError:
            return join(root, relative)
    else:
        return step
    path = join(root, relative)
    try:
        real, home = Path(path).resolve(), Path(root).resolve()
    except (OSError, RuntimeError) as e:  # links that lead in a circle
        raise CorruptCheckpoint(f"{source}: file {relative!r} is a link that leads nowhere: {e}") from None
    allowed = [home]
    # The models of a pipeline lie in folders of its snapshot.
    allowed += [p.parent.parent / "blobs" for p in (home, *home.parents) if p.parent.name == "snapshots"]
    if not any(real.is_relative_to(a) for a in allowed):
        raise CorruptCheckpoint(f"{source}: file {relative!r} is a link out of the checkpoint (to {real}); refused")
    return path
