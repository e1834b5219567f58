"""Runs cells of notebooks as IPython does, each notebook in a fork of a process that has imported what all of them
import.

A kernel for each would spend most of its time on those imports. One line of JSON asks: ``{"cells": [source, …],
"folder": …, "answer": …}``; what the cells showed is written to the file ``answer``, and a line then says that the
notebook has ended.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path


def run(cells: list[str]) -> list[dict[str, str]]:
    """What the cells show: a dict of MIME type to text for each output."""
    from IPython.core.displayhook import CapturingDisplayHook
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from matplotlib_inline import backend_inline

    shell = InteractiveShell.instance(colors="nocolor")
    # Displayed and last values of cells, in the order in which they come.
    outputs: list[dict] = []
    shell.display_pub = CapturingDisplayPublisher(outputs=outputs)
    shell.display_trap.hook = CapturingDisplayHook(shell, outputs)
    backend_inline.configure_inline_support(shell, "inline")
    shown: list[dict[str, str]] = []
    for source in cells:
        with capture_output(display=False) as printed:
            done = shell.run_cell(source)
        done.raise_error()
        shown += [{"stdout": printed.stdout}, {"stderr": printed.stderr}]
    shown += [out["data"] for out in outputs]
    return [{kind: str(text) for kind, text in one.items()} for one in shown]


def child(asked: dict) -> None:
    os.chdir(asked["folder"])
    quiet = os.open("printed.txt", os.O_RDWR | os.O_CREAT)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    try:
        answer = {"shown": run(asked["cells"])}
    except BaseException:
        answer = {"error": traceback.format_exc(), "printed": Path("printed.txt").read_text()[-3000:]}
    Path(asked["answer"]).write_text(json.dumps(answer))


def main() -> None:
    import matplotlib

    matplotlib.use("module://matplotlib_inline.backend_inline")
    import IPython.core.interactiveshell
    import IPython.utils.capture  # noqa: F401
    import matplotlib.pyplot
    import matplotlib_inline.backend_inline  # noqa: F401
    import sklearn.datasets  # noqa: F401

    import meshtape.storage.browse.server.app  # noqa: F401

    for line in sys.stdin:
        if not (process := os.fork()):
            child(json.loads(line))
            os._exit(0)
        os.waitpid(process, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
