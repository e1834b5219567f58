"""Ctrl-C while the command is being imported: code 130 and not a word."""

import subprocess
import sys

import pytest

_START = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = [{program!r}, "info"]
if sys.argv[0] == "-m":
    runpy.run_module("meshtape", run_name="__main__")
else:
    from meshtape.cli import main
    sys.exit(main())
"""


@pytest.mark.parametrize("program", ["/usr/bin/meshtape", "-m"])
@pytest.mark.parametrize("module", ["numpy", "meshtape.arrays.reductions", "click", "meshtape.cli.storage"])
def test_ctrl_c_during_the_import(module, program, tmp_path):
    code = _START.format(module=module, program=program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_who_imports_the_library_sees_the_traceback(tmp_path):
    code = _START.format(module="meshtape.arrays.reductions", program="train.py")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode != 130
    assert "KeyboardInterrupt" in done.stderr
