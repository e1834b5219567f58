"""Looking at checkpoints: one model, rendered on the server, with three faces.

``inventory``, ``statistics``, ``slices``, ``layout``, ``health``, ``compare`` and ``runs`` say what a view shows, as
plain data, and read only the bytes that it takes. ``view_*`` turn that into fragments of HTML in which everything from
a file is escaped. Three faces show them: ``server`` (``meshtape browse``, and `show` in a notebook), the Dask
dashboard, which mounts the same ``handlers``, and ``notebook`` (``_repr_html_``), by the hook of notebooks that is
filled here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...arrays.core.formatting import DRAWINGS

__all__ = ["Page", "Server", "close", "show"]


def _draw(name: str, *of: Any, **parameters: Any) -> Any:
    from .server import app, notebook

    return getattr(app if name == "show" else notebook, name)(*of, **parameters)


DRAWINGS["page"] = partial(_draw, "show")
DRAWINGS["checkpoint"] = partial(_draw, "checkpoint_html")
DRAWINGS["stored array"] = partial(_draw, "array_html")
DRAWINGS["run"] = partial(_draw, "run_html")


def __getattr__(name: str) -> Any:
    # Tornado and the views are imported when the first page is asked for.
    if name in __all__:
        from .server import app

        return getattr(app, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
