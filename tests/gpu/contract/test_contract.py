"""What CuPy asks of this package, on machines without a GPU: its own code over a fake CUDA (``fake_cuda.py``), in which
kernels do nothing.

So values do not exist, except those of our own kernels, which the emulator runs. Held are: no error that a CPU does not
raise, shapes and dtypes as on a CPU, how many kernels are launched and how often something is copied or awaited
(``budget.py``), that ``mt.host_waits`` tells each wait, the streams of copies, the device of results, and what cannot
be captured.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import op_samples
import pytest

Sweep = Callable[..., Any]
FAMILIES = {
    n: getattr(op_samples, n.upper()) for n in ("elements", "structure", "indexing", "wide", "networks", "random")
}

_spec = importlib.util.spec_from_file_location("contract_budget", Path(__file__).with_name("budget.py"))
budget = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(budget)

REFUSED = {
    # Of ops: what a GPU does not compute, in the words of the error, and why that is so.
    "erf": r"\[erf\] of complex64 is computed on a CPU alone",
    "gelu": r"\[erf\] of complex64 is computed on a CPU alone",
    "gelu_backward": r"\[erf\] of complex64 is computed on a CPU alone",
    "huber": r"Wrong type .* cupy_clip",  # nor does mt.nn.huber_loss take complex numbers on a CPU
    "index_max": r"cannot write complex values",  # nor does x.at on a CPU, which checks before it calls the op
    "index_min": r"cannot write complex values",
    "round_to": r"is not defined for bfloat16, bfloat16",  # mt.round calls it with float32
}
real_library = pytest.mark.skipif(
    "MESHTAPE_EMULATED_GPU" in os.environ, reason="this process has the fake library under the same name"
)
EXCUSED = {
    # Examples of docstrings that go another way where all numbers are zero.
    "ravel_multi_index": "is outside its length",
    "unravel_index": "is outside an array",
    "geometric": "p must be above 0|name 'x' is not defined",
    "triangular": "must ascend|name 'x' is not defined",
    "Trainer": "at step 1 the loss is 0.0 and .* a positive weight alone|name 'result' is not defined",
}


BY_VALUE = {
    # Tests of the GPU suite that fail where kernels do nothing.
    "a result of CuPy's": """
        test_another_stream_may_take_the_items; test_arrays_of_cupy_come_in;
        test_cupy_reads_the_memory_itself_and_sees_no_later_write;
        test_prefetched_batches_are_intact_while_slow_kernels_read_them[1024];
        test_prefetched_batches_are_intact_while_slow_kernels_read_them[33554432]
    """,
    "a result of ours": """
        test_a_step_waits_nowhere; test_tiles_of_short_floats_are_joined_in_float32[bfloat16];
        test_tiles_of_short_floats_are_joined_in_float32[float16]; test_unchecked_indices_wrap_around;
        test_values_do_not_alias
    """,
    "an error, for a number that is found on the device": """
        test_errors_have_the_words_of_the_cpu; test_indices_among_the_arguments_are_checked;
        test_indices_out_of_range_are_refused; test_labels_out_of_range_are_refused
    """,
    "a shape, by a mask": "test_masks; test_ops_agree_with_the_cpu[<lambda>15]",
    "the sizes of CuPy's pool, which is not in use": "test_memory_that_is_used_up_is_an_error_with_the_sizes",
}


def named(table: dict[str, str]) -> list[tuple[str, str]]:
    """The names of a table, each with what it stands at."""
    return [(name, at) for at, names in table.items() for name in " ".join(names.split()).split("; ")]


def test_every_runtime_in_cupy_is_redirected(sweep: Sweep) -> None:
    redirected = sweep("promises")["redirected"]
    assert set(redirected) == {
        *("cupy_backends.cuda.api.runtime", "cupy.cuda.thrust", "cupy.cuda.cub", "cupy.random._generator_api")
    }
    assert sweep("promises")["properties"] == [80 << 30, 32, 1024, 9]  # CuPy's layout of them is ours
    needed = {"cudaMalloc", "cudaFree", "cudaMemcpyAsync", "cudaLaunchKernel", "cudaStreamSynchronize", "cudaGetDevice"}
    for name, functions in redirected.items():
        assert needed <= {f for f, fake in functions.items() if fake}, name
        assert len(functions) > 400, name


@pytest.mark.parametrize("kind", ["ops", "derivatives"])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_the_cpu(kind: str, family: str, sweep: Sweep) -> None:
    found = []
    rows = {name: row for name, row in sweep(kind).items() if name in FAMILIES[family]}
    for name, row in rows.items():
        found += [f"{name}{d}" for d in row["differences"] if not re.search(REFUSED.get(name, "$^"), d)]
    if kind == "ops" and family != "wide":  # whose functions cast for LAPACK, which has two floats
        found += [f"{name}({d}): not by its own rule" for name, row in rows.items() for d in row["other_rule"]]
    assert not found, "\n".join([f"{len(found)} differences", *found[:40]])


def test_large_calls_take_operands_of_any_layout(sweep: Sweep) -> None:
    found = [
        f"{name}{d}"
        for name, row in sweep("large").items()
        for d in row["differences"]
        if not re.search(REFUSED.get(name.partition(", ")[2], "$^"), d)
    ]
    assert not found, "\n".join([f"{len(found)} differences", *found[:40]])


def test_each_wait_is_told(sweep: Sweep) -> None:
    """As often as a call waits, and no more often."""
    found = [
        f"{kind}, {name}{said}" for kind in budget.KINDS for name, row in sweep(kind).items() for said in row["untold"]
    ]
    assert found == []


@pytest.mark.parametrize("kind", budget.KINDS)
def test_each_call_costs_what_its_budget_says(kind: str, sweep: Sweep, record_property: Callable[..., None]) -> None:
    """Not more, nor less: a budget above the count would hide the next launch too many. (``budget.py`` writes them.)"""
    told, rows = budget.told(kind), sweep(kind)
    counted = budget.counted(rows)
    record_property("counted", f"{kind}: {sum(row.get('calls', 1) for row in rows.values())} calls of {len(rows)}")
    found = [
        f"{name}: {counted.get(name)}\n    the budget says {told.get(name)}"
        for name in dict.fromkeys([*told, *counted])
        if counted.get(name) != told.get(name)
    ]
    assert not found, "\n".join(found)


def test_steps_have_the_shapes_of_the_cpu(sweep: Sweep) -> None:
    steps = sweep("steps")
    assert {name: row["differences"] for name, row in steps.items() if row["differences"]} == {}
    graphs = [steps[n] for n in ("layers, graphs", "decoder, graph", "layers, donated", "decoder, donated")]
    assert [row["graphs"] for row in graphs] == [1] * 4  # the kernels of the budget copy
    assert [name for name, row in steps.items() if row["traces"] > 1] == []  # of three calls


def test_examples_raise_nothing_else(sweep: Sweep, record_property: Callable[..., None]) -> None:
    answer = sweep("doctests")
    record_property("counted", f"{answer['examples']} examples of docstrings")
    raised = {
        name: [r for r in answer["raised"] if re.search(f"{name}: .*({said})", r)] for name, said in EXCUSED.items()
    }
    found = [r for r in answer["raised"] if not any(r in of for of in raised.values())]
    assert answer["examples"] > 1250
    assert not found, "\n".join(found)
    assert [name for name, of in raised.items() if not of] == []  # an excuse that is not needed


def test_the_gpu_suite_runs(sweep: Sweep, record_property: Callable[..., None]) -> None:
    """All of it but for its values: other tests than the named ones end well."""
    answer = sweep("suite")
    record_property("counted", f"{answer['run']} tests of the GPU suite")
    assert answer["run"] > 320
    failed = {said.partition(": ")[0]: said for said in (*answer["values"], *answer["raised"])}
    known = dict(named(BY_VALUE))
    assert [said for name, said in failed.items() if name not in known] == []
    assert known.keys() - failed.keys() == set()  # an excuse that is not needed


def test_our_kernels_compute_what_the_cpu_does(sweep: Sweep, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    cache = getattr(request.config, "cache", None)
    found = sweep("kernels", str(tmp_path if cache is None else cache.mkdir("kernels")))
    assert len(found) == 23
    assert {name: said for name, said in found.items() if said} == {}


def test_values_of_a_few_ops_are_those_of_the_cpu(sweep: Sweep, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """By CuPy's own kernels, which g++ compiles, and libraries that NumPy and LAPACK answer."""
    cache = getattr(request.config, "cache", None)
    found = sweep("values", str(tmp_path if cache is None else cache.mkdir("values")))
    assert found.pop("singular").startswith("LinAlgError: [inv]")
    assert found.pop("float8") == []
    assert len(found) == 12
    assert {name: said for name, said in found.items() if said} == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_kernels_that_cupy_writes_compile(sweep: Sweep, tmp_path: Path) -> None:
    """Each of a thousand, for one layout of its operands. (In this process, which is not changed: there the compiler
    works.)"""
    nvrtc = pytest.importorskip("cupy.cuda.nvrtc")
    sweep("ops", str(tmp_path / "sources"))
    kernels = {}
    for source, options in json.loads((tmp_path / "sources").read_text()):
        kernels.setdefault(
            (re.search(r"__global__ void (?:__\w+\([^)]*\) )?(\w+)", source) or [0, source])[1], (source, options)
        )
    found = []
    for name, (source, options) in kernels.items():
        program = nvrtc.createProgram(source, "kernel.cu", (), ())
        try:
            nvrtc.compileProgram(program, (*options, "-arch=compute_90"))
        except nvrtc.NVRTCError:
            found.append(f"{name}: {nvrtc.getProgramLog(program)[:600]}")
        finally:
            nvrtc.destroyProgram(program)
    assert len(kernels) > 1000
    assert not found, "\n".join(found[:20])


def test_the_benchmark_runs_and_judges_itself(sweep: Sweep, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All of its rows; and where one fails, where no time is left, and where the process had to begin again."""
    found = sweep("benchmark", str(tmp_path_factory.mktemp("benchmark")))
    whole, late, resumed = (found[n]["rows"] for n in ("whole", "late", "resumed"))
    failed = [r for r in whole if "error" in r]
    assert [(r["name"].split(",")[0], r["error"]) for r in failed] == [
        ("the rest of row_norm_rows", "RuntimeError: this one fails")
    ] * 2
    assert len({r["name"] for r in whole}) == len(whole) > 110
    by = {r["name"]: r["by"] for r in whole if r not in failed}
    assert [name for name, how in by.items() if how != "graph"] == ["places of a mask, 1024"]  # whose number is awaited
    assert all(p["seconds"] > 0 for r in whole for p in r.get("peers", {}).values())
    add, small, *steps, memory = sorted(found["whole"]["host"], key=lambda h: ("MB" in h, "decoder" in h["name"]))
    assert [list(h["us"]) for h in (add, small, *steps)] == [
        ["ours", "cupy"],
        ["eager", "compiled", "graph"],
        *[["eager", "eager, of the host", "compiled", "graph"]] * 2,
    ]
    without = [(h["met"], h["reason"]) for h in (*steps, memory)]
    assert without == [*[(None, "PyTorch with CUDA is not here")] * 2, (None, "the memory is not CuPy's pool")]
    assert found["resumed"]["host"] == found["whole"]["host"]
    assert late == found["late"]["host"] == []
    assert len(found["late"]["dropped"]) == len(whole) + len(found["whole"]["host"])
    assert found["late"]["verdict"]["dropped"] == found["late"]["dropped"]
    assert [r["name"] for r in resumed] == [r["name"] for r in whole]
    assert found["late"]["status"] == found["whole"]["status"] == 1  # as the clock of the fake is not to be believed
    assert {f"{r['name']}: {r['error']}" for r in failed} <= set(found["whole"]["verdict"]["failed"])
    norm = next(r for r in whole if r["name"] == "AdamW, 4 arrays of 16 float32")
    assert (norm["met"], norm["targets"]["85% of the copy"]) == (False, False)  # whatever the fake's events say
    assert norm["targets"]["at most 1.00 of torch"] is None
    assert f"{norm['name']}: 85% of the copy" in found["whole"]["verdict"]["missed"]
    assert found["ended"]["verdict"]["failed"][:2] == [
        "the clock was not checked",
        "stopped: IndexError: list index out of range",
    ]
    checked = {c["name"]: c["ok"] for c in found["whole"]["checks"]}
    assert checked["a copy by a graph over one by events"]
    assert not checked["16 copies in a graph over 8"]  # its events are always 1 ms apart


# ----- products by cuBLASLt -------------------------------------------------------------------------------------------


def test_products_are_those_of_numpy(sweep: Sweep, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """In each dtype, layout and stack; a bias, and the sums of an operand; launches, copies and algorithms asked for."""
    cache = getattr(request.config, "cache", None)
    found = sweep("products", str(tmp_path if cache is None else cache.mkdir("values")))
    assert found["calls"] > 250
    assert found["differences"] == found["failures"] == []
    assert found["costs"] == {"served": [1, 0, 0, 0], "of other memory": [3, 0, 0, 0], "in float8": [8, 0, 0, 0]}
    assert found["asked"] == {
        "again": 0,
        "float32": [0, 0, 68, 1, 2],
        "with TF32": [0, 0, 77, 1, 2],
        "in any order": [0, 0, 68, 1, 3],
        "float8_e4m3fn": [[28, 28, 68, 1, 2]],
        "float8_e5m2": [[0, 0, 68, 1, 2]],  # two of which the library does not multiply
        **{
            f"scaled, {d}": [
                [28, 28, 68, 1, 2],
                [29, 28, 68, 1, 2],
                [28, 29, 68, 1, 2],
            ]  # the value, and by each operand
            for d in ("float32", "bfloat16", "float16")
        },
    }
    assert found["captured"] == {"graphs": 1, "waits": 0, "replays": [True, True]}
    assert found["compiled"] == {"launches": 2, "epilogues": [4, 256], "near": True}


@real_library
def test_the_numbers_are_those_of_the_library() -> None:
    """Of NVIDIA's header, and by what the library itself keeps of an attribute; neither needs a device."""
    from meshtape.arrays.backends import cublaslt as lt

    assert [ctypes.sizeof(lt.HeuristicResult), lt.HeuristicResult.workspace.offset] == [96, 64]
    pathfinder = pytest.importorskip("cuda.pathfinder")
    try:
        place = Path(pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path)
    except RuntimeError:
        pytest.skip("the wheel nvidia-cublas, of half a gigabyte, is not installed")
    kinds = {
        "MatmulDesc": (lt.DESCRIPTION, (lt.COMPUTE_32F, 0), "MATMUL_DESC"),
        "MatrixLayout": (lt.LAYOUT, (14, 8, 4, 8), "MATRIX_LAYOUT"),
        "MatmulPreference": (lt.PREFERENCE, (), "MATMUL_PREF"),
    }
    get = ctypes.CDLL(str(place))
    for kind, (attributes, arguments, _) in kinds.items():
        made = lt.Object(kind, attributes, *arguments)
        for name, (number, of_type) in attributes.items():
            made.set(**{name: 1 << (3 * ctypes.sizeof(of_type))})
            kept, size = of_type(), ctypes.c_size_t()
            read = getattr(get, f"cublasLt{kind}GetAttribute")
            length = ctypes.c_size_t(ctypes.sizeof(of_type))
            assert read(made.handle, number, ctypes.byref(kept), length, ctypes.byref(size)) == 0
            assert (kept.value, size.value) == (1 << (3 * ctypes.sizeof(of_type)), ctypes.sizeof(of_type)), name
    header = place.parents[1] / "include/cublasLt.h"
    if not header.exists():
        pytest.skip(f"the library keeps its attributes; its header is not at {header}")
    numbers = dict(re.findall(r"\b(CUBLASLT_\w+) = (\d+),", header.read_text()))
    for attributes, _, prefix in kinds.values():
        assert {n: numbers[f"CUBLASLT_{prefix}_{n}"] for n in attributes} == {
            n: str(number) for n, (number, _) in attributes.items()
        }
    assert numbers["CUBLASLT_EPILOGUE_BIAS"] == str(lt.EPILOGUE_BIAS)
    assert numbers["CUBLASLT_EPILOGUE_BGRADA"] == str(lt.EPILOGUE_BGRADA)
    assert numbers["CUBLASLT_REDUCTION_SCHEME_INPLACE"] == str(lt.REDUCTION_INPLACE)
    assert numbers["CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE"] == str(lt.REDUCTION_COMPUTE_TYPE)


# ----- convolutions by cuDNN ------------------------------------------------------------------------------------------


def test_convolutions_are_those_of_the_cpu(sweep: Sweep, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """In each dtype and layout, with groups, steps and padding; derivatives, in a CUDA graph too; what is asked for."""
    cache = getattr(request.config, "cache", None)
    found = sweep("convolutions", str(tmp_path if cache is None else cache.mkdir("values")))
    assert found["calls"] == 216
    assert found["differences"] == found["failures"] == []
    assert set(map(tuple, found["costs"].values())) == {(1, 0, 0, 0)}
    kinds, last = ("Forward", "BackwardData", "BackwardFilter"), True
    ordered, free = (
        [["Forward", 1], ["BackwardData", 1], ["BackwardFilter", 1]],
        [["Forward", 1], *([k, 0] for k in kinds[1:])],
    )
    assert (
        found["asked"]
        == {
            "again": [[], ordered[:1]],
            "float32": [[[k, 0, not last, 3] for k in kinds], ordered],  # CUDNN_FMA_MATH
            "with TF32": [[["Forward", 0, not last, 0]], ordered[:1]],
            "in any order": [[[k, 0, not last, 3] for k in kinds], free],
            "short, in any order": [[[k, 2, not last, 1] for k in kinds], ordered],
            "channels last": [[["Forward", 0, last, 3]], ordered[:1]],
            "groups, short, channels last": [[["Forward", 2, not last, 1]], ordered[:1]],  # of matrix units
            "mixed": [[], ordered[:1]],
            "complex": [[], []],
        }
    )
    assert [strides[1] for strides in found["layouts"]] == [1, 1, 1]  # as the operands
    assert found["info"] == {"cuBLASLt": "13.2.0", "cuDNN": "9.28.1"}
    assert found["more"] == {"eager": True, "graph": [True, True], "counts": [1, 0]}


def test_convolutions_without_cudnn_are_the_same(sweep: Sweep, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    cache = getattr(request.config, "cache", None)
    found = sweep("convolutions", str(tmp_path if cache is None else cache.mkdir("values")))
    assert found["absent"] == 0  # calls of the library
    assert found["told"] is None
    assert (found["refused"], found["refused in the call"]) == (2, 2)  # the two adjoints
    assert found["fails to ask"].startswith("BackendError: [conv] cudnnGetConvolutionForwardAlgorithm_v7 failed with")
    assert found["fails"].startswith("BackendError: [conv] cudnnConvolutionForward failed with status 5000 (an error")


@real_library
def test_the_numbers_are_those_of_cudnn() -> None:
    """Of NVIDIA's headers, and by what the library itself keeps of a description; neither needs a device."""
    from meshtape.arrays.kernels.cudnn import convolution as cudnn

    assert [ctypes.sizeof(cudnn.Performance), cudnn.Performance.memory.offset] == [48, 16]
    assert [cudnn.Performance.determinism.offset, cudnn.Performance.math.offset] == [24, 28]
    if (functions := cudnn.library()) is None:
        pytest.skip("the wheel nvidia-cudnn, of half a gigabyte, is not installed")
    assert functions["GetErrorString"](3000).decode() == "CUDNN_STATUS_NOT_SUPPORTED"
    get, shape, places = ctypes.CDLL("libcudnn.so.9"), (2, 6, 4, 5), (ctypes.c_int * 8)()
    made = cudnn.Descriptor("Tensor", 9, 4, cudnn._ints(*shape), cudnn._ints(*cudnn._strides(shape, True)))
    kind, ndim, sizes, strides = ctypes.c_int(), ctypes.c_int(), (ctypes.c_int * 8)(), (ctypes.c_int * 8)()
    kept = ctypes.byref(kind), ctypes.byref(ndim), sizes, strides
    assert get.cudnnGetTensorNdDescriptor(made.handle, 8, *kept) == 0
    assert (kind.value, tuple(sizes[:4]), list(strides[:4])) == (9, shape, [120, 1, 30, 6])
    kernel = cudnn.Descriptor("Filter", 9, cudnn.NHWC, 4, cudnn._ints(4, 3, 3, 2))
    about = cudnn.Descriptor("Convolution", 2, *(cudnn._ints(*n) for n in ((1, 0), (2, 1), (1, 2))), 1, 0)
    cudnn.call("SetConvolutionGroupCount", about.handle, 2)
    assert get.cudnnGetConvolutionNdForwardOutputDim(about.handle, made.handle, kernel.handle, 4, places) == 0
    assert places[:4] == [2, 4, 2, 3]
    with pytest.raises(cudnn.Unserved):  # of 2**31 elements
        cudnn.Descriptor("Tensor", 0, 4, cudnn._ints(1 << 15, 1 << 10, 8, 8), cudnn._ints(1 << 16, 64, 8, 1))
    loaded = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudnn.so" in line
    )
    headers = Path(loaded).resolve().parents[1].glob("include/cudnn_*_v9.h")
    numbers = dict(
        re.findall(r"\b(CUDNN_\w+)\s*(?:CUDNN_DEPRECATED_ENUM)?\s*= (\d+)", " ".join(h.read_text() for h in headers))
    )
    if not numbers:
        pytest.skip("the library keeps its descriptions; its headers are not beside it")
    names = ("DATA_FLOAT", "DATA_DOUBLE", "DATA_HALF", "DATA_BFLOAT16")
    assert [int(numbers[f"CUDNN_{n}"]) for n in names] == list(cudnn.DATA_TYPES.values())
    names = ("DEFAULT_MATH", "TENSOR_OP_MATH", "FMA_MATH", "CROSS_CORRELATION", "DETERMINISTIC")
    assert {n: int(numbers[f"CUDNN_{n}"]) for n in names} == {n: getattr(cudnn, n) for n in names}
    assert numbers["CUDNN_TENSOR_OP_MATH_ALLOW_CONVERSION"] == str(cudnn.ALLOW_CONVERSION)
    assert [numbers[f"CUDNN_TENSOR_{n}"] for n in ("NCHW", "NHWC")] == [str(cudnn.NCHW), str(cudnn.NHWC)]
    algorithms = {
        "Forward": ("FWD", ("IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM"), ()),
        "BackwardData": ("BWD_DATA", ("1",), ("0",)),
        "BackwardFilter": ("BWD_FILTER", ("1",), ("0", "3")),
    }
    for name, (prefix, *both) in algorithms.items():
        found = [{int(numbers[f"CUDNN_CONVOLUTION_{prefix}_ALGO_{n}"]) for n in names} for names in both]
        assert found == [cudnn.KINDS[name].algorithms, cudnn.KINDS[name].unordered]
        assert int(numbers[f"CUDNN_CONVOLUTION_{prefix}_ALGO_COUNT"]) <= cudnn.MOST_ALGORITHMS


# ----- donated inputs of CUDA graphs ----------------------------------------------------------------------------------

IN_PLACE = "right, 1 graph, 2 and 0 copies"
"""A step, by its arrays that are copied in and out: the batch alone."""
BACK = "right, 1 graph, 6 and 0 copies"
"""The state is copied to where the first graph reads it."""
ASIDE = "right, 1 graph, 6 and 4 copies"
"""The second graph, which copies all of the state."""


@pytest.fixture
def donated(sweep: Sweep, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    cache = getattr(request.config, "cache", None)
    return sweep("donated", str(tmp_path if cache is None else cache.mkdir("values")))


def test_a_state_that_is_given_up_is_not_copied(donated: dict[str, Any]) -> None:
    assert donated["steps"] == [IN_PLACE] * 3
    assert donated["the second device"] == [IN_PLACE, "cuda:1"]
    assert donated["failures"] == []


@pytest.mark.slow
def test_a_decoder_that_is_given_up_is_not_copied(sweep: Sweep, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """60 parameters and slots, by values; the tokens are copied. (The first call has the state of the caller.)"""
    cache = getattr(request.config, "cache", None)
    found = sweep("decoder", str(tmp_path if cache is None else cache.mkdir("values")))
    assert found == [[True, 61, 0], [True, 1, 0], [True, 1, 0]]


def test_whoever_holds_a_result_keeps_its_values(donated: dict[str, Any]) -> None:
    """Until it is dropped, another graph takes the steps."""
    held = donated["held"]
    assert held.pop("pickled") == held.pop("a copy") == [IN_PLACE] * 4
    # The first of all also records the second graph.
    assert held.pop("a view") == [ASIDE.replace("1 graph", "2 graph"), ASIDE, BACK, IN_PLACE]
    assert len(held) == 6
    assert all(steps == [ASIDE, ASIDE, BACK, IN_PLACE] for steps in held.values()), held
    assert len(donated["old values"]) == 9
    assert all(donated["old values"].values()), donated["old values"]
    assert donated["recordings"] == 2
    assert donated["outlives the function"]


def test_blocks_of_workers_keep_their_values_until_they_are_spilled(donated: dict[str, Any]) -> None:
    assert donated["with a kept block"] == [ASIDE, ASIDE]
    assert donated["with a spilled block"] == [BACK, IN_PLACE]
    assert donated["the block"]


def test_blocks_of_a_mesh_leave_a_device_that_is_full(donated: dict[str, Any]) -> None:
    """For the host, with memory for six tenths of a state: the step has the same bits."""
    found = donated["short memory"]
    assert found["alike"]
    assert [copies > 50 for copies in found["copies"][1]] == [True, True]
    assert [copies < 20 for copies in found["copies"][0]] == [True, True]


def test_what_a_graph_was_given_is_gone(donated: dict[str, Any]) -> None:
    assert len(donated["gone"]) == 8
    told = r"DonatedArrayError: .*float32\[16,8\].* was given up to _momentum"
    assert [name for name, said in donated["gone"].items() if not re.match(told, said)] == []
    assert donated["gone is on"] == ["cuda:0", [16, 8]]


def test_a_state_may_move_to_another_stream_and_thread(donated: dict[str, Any]) -> None:
    """The graph waits there for all that was queued on the stream before, as results may have been read on it."""
    assert donated["another stream"] == [IN_PLACE, 1, True]
    assert donated["after a stream of others"] == IN_PLACE
    assert donated["waits"] == ["a CUDA graph moves to another stream, at /sweeps.py, in step"]
    assert donated["threads"] == ["right"]


# ----- promises, one by one -------------------------------------------------------------------------------------------


def test_bfloat16_stays_bfloat16(sweep: Sweep) -> None:
    assert sweep("promises")["bfloat16"] == {}


def test_failures_of_solvers_are_errors(sweep: Sweep) -> None:
    found = sweep("promises")["solvers"]
    assert len(found) == 9
    assert all(said.startswith("LinAlgError: [") for said in found.values()), found


def test_short_numbers_are_written_and_index(sweep: Sweep) -> None:
    assert sweep("promises")["writes"] == {}
    assert sweep("promises")["short_indices"] == ["a result"] * 4


def test_used_up_memory_is_told_with_its_sizes(sweep: Sweep) -> None:
    found = sweep("promises")["memory"]
    assert len(found) == 7
    assert all(re.match(r"OutOfMemory: .* are free, CuPy holds .* are in use", said) for said in found), found


def test_exchange_with_other_libraries(sweep: Sweep) -> None:
    assert sweep("promises")["exchange"] == {
        "pickled": ["cuda:0", [0.0, 1.0, 2.0, 3.0]],
        "read-only": 1,
        "shared": True,
        "to the host": [1, 1],
    }


def test_prefetching_has_one_stream_and_awaits_what_was_dropped(sweep: Sweep) -> None:
    assert sweep("promises")["prefetch"] == {
        "streams": 1,
        "apart": True,
        "batch": ["float32[5] on cuda:0", "int64[] on cuda:0"],
        "awaits only marks of the consumer": True,
        "awaits what was dropped": True,
    }


def test_results_lie_beside_the_arrays_on_the_second_device(sweep: Sweep) -> None:
    assert sweep("promises")["two_devices"] == {}


def test_arguments_that_do_not_fit_their_kernel_are_errors(sweep: Sweep) -> None:
    """So the launches of all sweeps have those of their kernels."""
    assert sweep("promises")["kinds of arguments"] > 300
    found = sweep("promises")["arguments"]
    assert {said for name, said in found.items() if name.startswith("right")} == {"a result"}
    found = {name: said for name, said in found.items() if not name.startswith("right")}
    assert len(found) == 16
    assert {name: said for name, said in found.items() if not re.match(r"Misfit: \S+( \d+>)? takes ", said)} == {}


def test_a_small_call_costs_the_host_little(sweep: Sweep) -> None:
    """About 2 microseconds over CuPy's own: ten calls in Python, without contexts, texts or generators."""
    assert max(sweep("promises")["frames"].values()) <= 11


def test_pointwise_functions_are_one_launch_each_way(sweep: Sweep) -> None:
    """In every real floating dtype, of all operands together."""
    assert sweep("promises")["launches"] == {}


def test_dask_sees_the_bytes_on_the_device(sweep: Sweep) -> None:
    assert sweep("promises")["bundles"] > 8000


def test_blocks_wait_in_pinned_memory_as_they_are(sweep: Sweep) -> None:
    assert sweep("promises")["spilled"] == []


def test_each_wait_is_told_once(sweep: Sweep) -> None:
    assert sweep("promises")["waits"] == {
        "an index from the host": [0, 0],
        "a part of an index from the host": [0, 0],
        "places that were counted": [0, 0],
        "places that were counted down": [0, 0],
        "an index from the host, at the other end": [0, 0],
        "labels from the host": [0, 0],
        "labels with a mark": [0, 0],
        "labels of bytes with a mark": [0, 0],
        "nothing but marks": [0, 0],
        "an index that was copied out": [0, 0],
        "an index that another library holds": [1, 1],
        "a list": [0, 0],
        "a mask of the host": [0, 0],
        "an index": [1, 1],
        "labels": [1, 1],
        "experts": [0, 0],
        "det": [1, 1],
        "laplace": [0, 0],
        "a truth": [1, 1],
    }


def test_a_step_stays_on_the_stream_of_its_caller(sweep: Sweep) -> None:
    """Kernels, copies, fills and waits, also those of libraries: plain, compiled and as a CUDA graph."""
    found = sweep("promises")["streams"]
    assert found["off"] == {}
    libraries = {"cublasLtMatmul", "cublasGemmEx", "cudnnConvolutionForward", "cudnnConvolutionBackwardFilter"}
    libraries |= {"cufftExecZ2Z", "cusolverDnDgetrs", "cusolverDnDgesvd", "cusolverDnXsyevd", "built-in"}  # cub's
    assert libraries - {*found["launched"]} == set()


def test_the_extras_bring_the_libraries() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert all("[ctk]" in extras[name][0] for name in ("cuda12", "cuda13"))


def test_what_cannot_be_captured_is_refused(sweep: Sweep) -> None:
    assert sweep("promises")["capture"] == {
        "a sum of two": "captured",
        "a product": "captured",
        "a product of CuPy's": "refused",
        "a value": "refused",
        "a solution": "refused",
        "a wait for the device": "refused",
        "a wait for an event of its own": "refused",
        "a question to an event of its own": "refused",
        "a wait for an event of before": "captured",
        "work behind an event of before": "refused",
        "work behind an event of its own": "captured",
        "what is left of a refusal that is not told": "refused",
        "a sum of two, again": "captured",
        "its own stream": True,
        "its own pool": True,
    }


def test_calls_that_cupy_takes_in_another_way(sweep: Sweep) -> None:
    found = sweep("promises")
    assert found["heaviside"] == found["2**x"] == ["float64[3, 3] on cuda:0"]
    assert found["solve"] == ["float64[2, 3, 3] on cuda:0", "float64[2, 3, 1] on cuda:0"]
    assert all(re.match(r"DTypeError: .* float8 has no fixed memory in a graph", said) for said in found["float8"])
    assert found["power"].startswith("ArgumentError: [pow] Integers to negative integer powers")


def test_what_takes_real_numbers_alone_says_so(sweep: Sweep) -> None:
    """In the words of the CPU."""
    found = sweep("promises")["complex"]
    assert len(found) == 14
    assert {n: said for n, said in found.items() if said[0] != said[1] or not said[0].startswith("DTypeError: [")} == {}


# ----- what the page says, by count -----------------------------------------------------------------------------------


def test_a_bias_is_added_in_the_launch_of_its_product(sweep: Sweep) -> None:
    """In all floats. In the wide ones its gradient is summed in the launch of the weights' gradient; for short ones that
    takes three more."""
    assert sweep("promises")["biases"] == {"float64": [1, 2], "float32": [1, 2], "float16": [1, 5], "bfloat16": [1, 5]}


def test_the_loss_of_a_vocabulary_is_two_launches_a_tile(sweep: Sweep) -> None:
    """Forward, and four backward, and a fill of memory; float16 looks for the power of its slopes, too."""
    assert sweep("promises")["the_loss_of_a_vocabulary"] == {"bfloat16": [33, 74], "float16": [33, 95]}


def test_long_attention_holds_no_square(sweep: Sweep) -> None:
    """Of 65,536 tokens it would take 8 GB in two bytes and 16 GB in four. Short floats take a result and three
    cotangents, float32 has tiles of 128 MB."""
    found = sweep("promises")["long_attention"]
    assert all(row["shapes"] for row in found.values())
    assert {name: row["launches"] for name, row in found.items()} == {
        "bfloat16": [1, 2],
        "bfloat16, causal": [3, 4],  # a launch and a fill look for what is not finite
        "float32": [768, 1535],
        "float32, causal": [1532, 4077],
    }
    operand, tile = 2 * 64 << 16, 4 << 25
    in_use, held = ({name: row["bytes"][i] for name, row in found.items()} for i in (0, 1))
    assert all(size < (4.2 * operand if "bfloat16" in name else 5 * tile) for name, size in in_use.items()), in_use
    assert all(size < (4.2 * operand if "bfloat16" in name else 6 * tile) for name, size in held.items()), held
