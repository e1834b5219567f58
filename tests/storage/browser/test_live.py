"""The live page of the Dask dashboard in a real browser, while checkpoints are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.dashboard import pages
from meshtape.parallel.dask.cluster import local_cluster

from .conftest import Browser

pytestmark = pytest.mark.timeout(600)


def test_bytes_of_checkpoints_move_while_they_are_written(
    chromium: Any, screenshots: Path, tmp_path: Path, held_merge: Any
) -> None:
    with pages.mounted(str(tmp_path)), local_cluster(1) as client:
        mesh = mt.Mesh({"data": 2}, client=client)
        x = mt.distribute(np.ones((512, 512)), mesh, data=mt.Shard(0))
        mt.save(tmp_path / "run", {"x": x})
        b = Browser(chromium, pages.address(client), screenshots)
        b.requested()
        with held_merge(tmp_path / "run", tmp_path / "hf") as go:
            b.go()
            b.until(lambda: b.all(".mt-work .mt-fill"), "a bar")
            assert "Merge" in b.text(".mt-work")
            assert " of 2.0 MiB" in b.text(".mt-work")
            b.picture("live")
            b.driver.set_window_size(500, 900)
            narrow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert b.driver.execute_script(narrow) <= 1
            b.driver.set_window_size(1280, 1000)
            go()

            def is_done(name: str) -> bool:
                # Other tests of this process have written, too.
                return any(
                    f"{tmp_path.name}/{name}" in row and " done " in row for row in b.text(".mt-work").splitlines()
                )

            # The page finds out by itself.
            b.until(lambda: is_done("run") and is_done("hf"), "both are done")
            b.click("a[href='browse/']")
            b.until(lambda: "browse/" in b.view and "run" in b.text(), "the checkpoints of the run")
            assert not b.errors()
            strangers = {u for u in b.requested() if not u.startswith((b.base.partition("meshtape/")[0], "data:", "about:", "chrome:"))}  # fmt: skip
            assert not strangers
            chromium.get("about:blank")
        mesh.close()
