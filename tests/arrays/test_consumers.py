"""SciPy and scikit-learn take our arrays through the array-API standard, and give ours back.

SciPy reads its switch when it is imported, hence a process of its own for all of it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import warnings; warnings.simplefilter("ignore")
import numpy as np
import scipy.fft, scipy.special, scipy.stats
from scipy.cluster.vq import whiten
from scipy.interpolate import PchipInterpolator
import sklearn
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.preprocessing import MinMaxScaler
import meshtape as mt

x = np.random.default_rng(0).standard_normal((20, 4))
y = (x[:, 0] > 0).astype(np.int64)
CASES = {
    "logsumexp": lambda x, y: scipy.special.logsumexp(x, axis=1),
    "softmax": lambda x, y: scipy.special.softmax(x, axis=1),
    "erf": lambda x, y: scipy.special.erf(x),
    "zscore": lambda x, y: scipy.stats.zscore(x),
    "skew": lambda x, y: scipy.stats.skew(x),
    "ttest": lambda x, y: scipy.stats.ttest_ind(x[:10], x[10:]).pvalue,
    "fft": lambda x, y: abs(scipy.fft.fft(x, axis=0)),
    "whiten": lambda x, y: whiten(x),
    "MinMaxScaler": lambda x, y: MinMaxScaler().fit_transform(x),
    "PCA": lambda x, y: abs(PCA(2, svd_solver="full").fit_transform(x)),
    "Ridge": lambda x, y: Ridge(solver="svd").fit(x, x[:, 0]).coef_,
    "LDA": lambda x, y: LinearDiscriminantAnalysis().fit(x, y).predict(x),
}
with sklearn.config_context(array_api_dispatch=True):
    for name, fn in CASES.items():
        ours, theirs = fn(mt.asarray(x), mt.asarray(y)), fn(x, y)
        assert isinstance(ours, mt.Array), (name, type(ours))
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-9, atol=1e-12, err_msg=name)
        print(name, "ok")
try:  # its code writes into a slice of a slice, which would be lost
    PchipInterpolator(mt.arange(5.0), mt.asarray([0.0, 2.0, 1.0, 1.0, 3.0]))
except mt.errors.NumPyFunctionError as e:
    assert "x[i, j] = v" in str(e)
    print("Pchip raises")
"""


def test_scipy_and_scikit_learn_take_our_arrays() -> None:
    pytest.importorskip("sklearn")
    env = {**os.environ, "SCIPY_ARRAY_API": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("ok") == 12
    assert "Pchip raises" in done.stdout
