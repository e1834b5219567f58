"""Promises of the package as a whole."""

import subprocess
import sys


def test_import_brings_no_heavy_library():
    code = (
        "import sys, meshtape.storage; assert not {'zarr', 'dask', 'rich', 'cupy', 'google_crc32c', 'asyncio', "
        "'obstore', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_zarr_imported_first_knows_our_dtypes():
    code = "import zarr, meshtape.storage; assert 'bfloat16' in zarr.dtype.data_type_registry.contents"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
