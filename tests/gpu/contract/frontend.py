"""cuDNN's frontend, as far as attention needs it: graphs of one operation with their checks, computed by NumPy. A call in
a captured stream keeps its addresses, and is computed when the graph runs."""

from __future__ import annotations

import ctypes
import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

data_type = SimpleNamespace(HALF=np.float16, BFLOAT16=ml_dtypes.bfloat16, FLOAT=np.float32)
heur_mode = SimpleNamespace(A="A")
planned: list[tuple[Any, ...]] = []
"""Of each plan its operation, the shape of the queries, whether keys are hidden, and whether sums have one order."""
launched: list[int] = []
"""The number of each plan that ran."""
mistakes: dict[str, Any] = {}
"""How this frontend is to be wrong: ``scale``, ``hidden``, ``refuses`` (an operation), ``fails`` (a call)."""
libraries: Any = None
_library: Any = None
_calls: list[Call] = []


class cudnnGraphNotSupportedError(Exception):
    pass


def start(of: Any, path: str, captured: list[Any]) -> None:
    """Answer the library at ``path``, by the functions of ``of``. Calls in graphs go to ``captured``."""
    global libraries, _library

    def capture(w: Any) -> int:
        captured.append(_calls[w.long(1)])
        w.put(0, len(captured) - 1)
        return 0

    libraries, _library = of, ctypes.CDLL(path)
    of.ANSWERS.update(cudnnBackendExecute=lambda w: _calls[w.long(1)].run(), cudnnBackendExecuteCapture=capture)


def backend_version() -> int:
    return 92801


def create_handle() -> int:
    made = ctypes.c_void_p()
    assert _library.cudnnCreate(ctypes.byref(made)) == 0
    return made.value


def set_stream(handle: int, stream: int) -> None:
    assert _library.cudnnSetStream(ctypes.c_void_p(handle), ctypes.c_void_p(stream)) == 0


class Call(NamedTuple):
    graph: Any
    pack: dict[int, int]

    def run(self) -> int:
        self.graph.compute({name: self.graph.array(name, self.pack[uid]) for name, uid in self.graph.uids.items()})
        launched.append(self.graph.number)
        return 0


class Tensor:
    def __init__(self, uid: int, dim: Any = None, stride: Any = None, data_type: Any = None) -> None:
        self.uid, self.dim, self.stride, self.type, self.output = uid, dim, stride, data_type, False

    def get_uid(self) -> int:
        return self.uid

    def _set(self, name: str, value: Any) -> Tensor:
        setattr(self, name, value)
        return self

    def set_output(self, value: bool) -> Tensor:
        return self._set("output", value)

    def set_dim(self, value: list[int]) -> Tensor:
        return self._set("dim", value)

    def set_stride(self, value: list[int]) -> Tensor:
        return self._set("stride", value)

    def set_data_type(self, value: Any) -> Tensor:
        return self._set("type", value)


class pygraph:
    def __init__(self, *, io_data_type: Any, intermediate_data_type: Any, compute_data_type: Any, handle: int) -> None:
        assert intermediate_data_type is compute_data_type is np.float32
        self.own, self._numbers, self.tensors = io_data_type, itertools.count(1), {}

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: Any) -> Tensor:
        self.tensors[name] = Tensor(next(self._numbers), dim, stride, data_type)
        return self.tensors[name]

    def _operation(
        self, name: str, results: tuple[str, ...], scale: float, causal: bool, ordered: bool
    ) -> list[Tensor]:
        self.name, self.scale, self.causal, self.ordered = name, scale, causal, ordered
        self.tensors |= {x: Tensor(next(self._numbers)) for x in results}
        return [self.tensors[x] for x in results]

    def sdpa(self, *, q: Any, k: Any, v: Any, attn_scale: float, use_causal_mask: bool, generate_stats: bool) -> Any:
        assert generate_stats
        return self._operation("sdpa", ("o", "stats"), attn_scale, use_causal_mask, True)

    def sdpa_backward(
        self,
        *,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        dO: Any,
        stats: Any,
        attn_scale: float,
        use_causal_mask: bool,
        use_deterministic_algorithm: bool,
    ) -> Any:
        names = ("dq", "dk", "dv")
        return self._operation("sdpa_backward", names, attn_scale, use_causal_mask, use_deterministic_algorithm)

    def validate(self) -> None:
        t = self.tensors
        (b, h, s, d), (_, kv, n, e) = t["q"].dim, t["v"].dim
        shapes = {"q": (b, h, s, d), "k": (b, kv, n, d), "v": (b, kv, n, e), "o": (b, h, s, e), "stats": (b, h, s, 1)}
        shapes |= {"dO": shapes["o"], **{f"d{x}": shapes[x] for x in "qkv"}}
        for name, x in t.items():
            assert tuple(x.dim) == shapes[name], name
            assert x.type is (np.float32 if name == "stats" else self.own), name
            assert x.stride[-1] == 1, name
            assert all(step > 0 and (step % 8 == 0 or name == "stats") for step in x.stride[:-1]), name
            assert x.output == (name in ("dq", "dk", "dv") or (self.name == "sdpa" and name in ("o", "stats"))), name
        if h % kv or d % 8 or e % 8 or mistakes.get("refuses") == self.name:
            raise cudnnGraphNotSupportedError(f"{self.name} is refused")

    def build_operation_graph(self) -> None:
        self.uids = {name: x.uid for name, x in self.tensors.items()}

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A"]

    def check_support(self) -> None:
        pass

    def build_plans(self) -> None:
        self.number = len(planned)
        planned.append((self.name, tuple(self.tensors["q"].dim), self.causal, self.ordered))

    def get_workspace_size(self) -> int:
        """As of cuDNN 9.28 for Hopper."""
        (b, h, s, _), n = self.tensors["q"].dim, self.tensors["k"].dim[2]
        return 256 if self.name == "sdpa" else b * h * s * (2 * n if self.ordered else 512)

    def execute(self, pack: dict[int, int], workspace: int, *, handle: int) -> None:
        assert workspace
        assert set(pack) == set(self.uids.values())
        assert all(at % 16 == 0 for at in pack.values())
        if mistakes.get("fails") == self.name:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        _calls.append(Call(self, dict(pack)))
        status = _library.cudnnBackendExecute(ctypes.c_void_p(handle), ctypes.c_uint64(len(_calls) - 1))
        assert status == 0, libraries.failures

    def array(self, name: str, address: int) -> np.ndarray:
        x = self.tensors[name]
        return libraries.strided(address, x.type, x.dim, x.stride)

    def compute(self, arrays: dict[str, np.ndarray]) -> None:
        wide = {name: x.astype(np.float32) for name, x in arrays.items()}
        q, groups = wide["q"], arrays["q"].shape[1] // arrays["k"].shape[1]
        k, v = (np.repeat(wide[name], groups, axis=1) for name in "kv")
        with np.errstate(all="ignore"):
            scores = q @ k.swapaxes(-1, -2) * (mistakes.get("scale", 1.0) * self.scale)
            if self.causal:
                hidden = ~np.tri(*scores.shape[-2:], dtype=bool)
                scores = np.where(hidden, scores * math.nan if "hidden" in mistakes else -math.inf, scores)
            if self.name == "sdpa":
                most = scores.max(axis=-1, keepdims=True)
                sums = most + np.log(np.exp(scores - most).sum(axis=-1, keepdims=True))
                arrays["stats"][...] = sums
                found = {"o": np.exp(scores - sums) @ v}
            else:
                weights, g = np.exp(scores - wide["stats"]), wide["dO"]
                slopes = weights * (g @ v.swapaxes(-1, -2) - (g * wide["o"]).sum(axis=-1, keepdims=True)) * self.scale
                found = {"dq": slopes @ k, "dk": slopes.swapaxes(-1, -2) @ q, "dv": weights.swapaxes(-1, -2) @ g}
                for name in ("dk", "dv"):
                    x = found[name]
                    found[name] = x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(axis=2)
            for name, x in found.items():
                arrays[name][...] = x.astype(arrays[name].dtype)
