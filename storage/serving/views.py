"""`as_zarr`, `zarr_references`, `icechunk_references` and `serve`: a checkpoint of any kind for readers of other
formats."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoint.checkpoint import Checkpoint
from ..loading.open import open_checkpoint
from . import references
from .zarr_view import ZarrView

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from .server import CheckpointServer


def as_zarr(path: str | os.PathLike[str] | Checkpoint, *, verify: bool = True) -> Store:
    """A checkpoint of any kind as a Zarr v3 hierarchy that can only be read, without copying it.

    Parameters
    ----------
    path
        Anything that `open_checkpoint` opens, or an open checkpoint.
    verify
        Compare what is read with its checksum, where there is one.

    Returns
    -------
    zarr.abc.store.Store
        A group with one array for each name, dots included: ``group["model.embed.weight"]``, with consolidated
        metadata; names with slashes lie in groups, ``group["sub/deep/w"]``. Attributes and names of dimensions of
        another writer's Zarr are there. What cannot be read here is not, and a warning names it. A tensor that lies in
        a file as one run of bytes (safetensors, raw layouts) is cut into chunks of rows of at most 16 MiB, each a
        ranged read; chunks of all other arrays are computed when they are read. bfloat16 and float8 have the names of
        TensorStore. Writing raises `StoreError`.

    Raises
    ------
    CheckpointError
        As `open_checkpoint`. Reads raise `CheckpointReplaced` where a file was replaced, and `CorruptCheckpoint` where
        a checksum does not fit. The checksum of a tensor in safetensors is that of all of it: it is compared where one
        chunk holds the tensor and is read whole.

    Examples
    --------
    >>> import numpy as np, tempfile, zarr
    >>> from meshtape.storage import save_safetensors
    >>> where = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = save_safetensors(where, {"embed.weight": np.arange(6.0).reshape(3, 2)})
    >>> zarr.open_group(as_zarr(where), mode="r")["embed.weight"][1]
    array([2., 3.])
    """
    from ..format.zarr_dtypes import register
    from .zarr_adapter import CheckpointStore

    register()
    return CheckpointStore(_view(path, verify))


def _view(path: str | os.PathLike[str] | Checkpoint, verify: bool = True) -> ZarrView:
    view = ZarrView(open_checkpoint(path, verify=verify))
    if view.lost:
        warnings.warn(view.lost, stacklevel=3)
    return view


def zarr_references(path: str | os.PathLike[str] | Checkpoint) -> dict[str, Any]:
    """A checkpoint of raw tensors as references of kerchunk (version 1), which fsspec opens as a Zarr v3 hierarchy.

    Parameters
    ----------
    path
        A safetensors file, a Hugging Face directory, or another checkpoint whose arrays, or their chunks (layout
        "dual"), are runs of bytes in files.

    Returns
    -------
    dict
        JSON: ``fsspec.filesystem("reference", fo=…)`` takes it. It names files by their absolute paths or URLs, without
        credentials, and does not notice when they are replaced.

    Raises
    ------
    CheckpointError
        An array is not a run of bytes in a file; names it.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from meshtape.storage import save_safetensors
    >>> where = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> nbytes = save_safetensors(where, {"w": np.ones((4, 2))})
    >>> zarr_references(where)["refs"]["w/c/0/0"] == [where, nbytes - 64, 64]
    True
    """
    return references.kerchunk(_view(path))


def icechunk_references(
    path: str | os.PathLike[str] | Checkpoint,
    repository: Any,
    *,
    branch: str = "main",
    message: str = "References to a checkpoint",
) -> str:
    """Commit references to a checkpoint of raw tensors into an icechunk repository, as virtual chunks; returns the
    snapshot.

    Parameters
    ----------
    path
        As in `zarr_references`.
    repository
        An open ``icechunk.Repository`` whose configuration has a ``VirtualChunkContainer`` that holds the files:
        ``file:///…/`` or the prefix of their URLs. Who reads it authorises access to that container, here by
        ``storage.options(where, virtual_chunks="file:///…/")``. A file that is replaced is an error then.
    branch, message
        Where it is committed, and its message.

    Raises
    ------
    CheckpointError
        An array is not a run of bytes in a file, or a file is another by now; nothing is committed.
    """
    return references.icechunk(_view(path), repository, branch, message)


def serve(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    follow: bool = False,
    missing: Literal["error", "fill"] = "error",
) -> CheckpointServer:
    """Serve the bytes of a checkpoint of any kind over HTTP, from a thread of this process, without copying it.

    Parameters
    ----------
    path
        Anything that `open_checkpoint` opens, or an open checkpoint, such as a virtual one. Once it was replaced,
        requests are answered by 409.
    host
        The address to listen at. Anything but loopback asks for a token, which is then part of ``url``.
    port
        0 takes a free one.
    token
        Ask for this token even on loopback, where other users of the machine can connect as well.
    follow
        Open the checkpoint anew where another takes its place. Clients that read chunk after chunk and look at no ETag,
        as those of Zarr, may then have some of the one and some of the other.
    missing
        Of Zarr by others: refuse chunks that are not there, or take them for the fill value (``"fill"``).

    Returns
    -------
    CheckpointServer
        A context manager. Below its ``url`` lie ``safetensors/`` (a directory as Hugging Face has them: the very files,
        or one ``model.safetensors`` that is computed while it is read) and ``zarr/`` (the hierarchy of `as_zarr`).
        Ranges, HEAD, ETag and If-Range are answered. ``close()`` ends it.

    Raises
    ------
    CheckpointError
        As `open_checkpoint`; chunks of Zarr by others are missing; or the address cannot be listened at.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from meshtape.storage import open_checkpoint, save
    >>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
    >>> _ = save(where, {"w": np.arange(6.0).reshape(3, 2)})
    >>> with serve(where) as server:
    ...     open_checkpoint(server.url + "safetensors")["w"][1]
    array([2., 3.])
    """
    from .server import CheckpointServer

    server = CheckpointServer(path, host=host, port=port, token=token, follow=follow, missing=missing)
    if server.source.lost:
        warnings.warn(server.source.lost, stacklevel=2)
    server.start()
    return server
