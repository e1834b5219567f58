"""Every kernel compiles to machine code for every architecture that is promised, on a machine without a GPU."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from meshtape.arrays import kernels
from meshtape.arrays.kernels import launch

ARCHITECTURES = (75, 80, 90, 100)
VARIANTS = sorted(set(kernels.variants()))
FILES = sorted({file for file, _ in VARIANTS})


SPILLS = {
    # Bytes that may be spilled, by a pattern of kernels, where all variants are compiled, and why.
    "double": 300,  # held up by their arithmetic, a sixty-fourth of that of float32 on most devices
    "attention_(?!.*128)|experts_(?!hidden)": 0,
    "attention_|experts_hidden<true, true": 160,  # but on 9.0: sums of 32 rows of 128 columns, or of 128 x 256 tiles
    "": 16,  # one or two registers, once a row, rather than have half of the threads
}


def _spilled(name: str, architecture: int) -> int:
    if architecture == 90 and name.startswith(("attention_", "experts_")) and "double" not in name:
        return 0
    return next(most for pattern, most in SPILLS.items() if re.search(pattern, name))


@pytest.fixture
def check(machine_code: Callable[..., dict[str, str]]) -> Callable[..., None]:
    """All of these kernels compile, and none keeps in memory what belongs in registers."""

    def check(
        file: str, names: Sequence[str], architecture: int, most: Callable[[str, int], int] = lambda *_: 0
    ) -> None:
        found = {name: machine_code.figures(text) for name, text in machine_code(file, names, architecture).items()}
        for name, of in sorted(found.items()):
            print(f"sm_{architecture} {of.registers:>4} registers  {name}")
        spilled = {n: f.spilled for n, f in found.items() if f.spilled > most(n, architecture)}
        assert not spilled, f"registers are spilled to memory on sm_{architecture}: {spilled}"

    return check


def groups(file: str) -> dict[tuple[str, ...], list[str]]:
    """The variants of a file by kernel and dtypes."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    words = set(launch.NAMES.values())
    for f, name in VARIANTS:
        if f == file:
            kernel, _, arguments = name.rstrip(">").partition("<")
            found[kernel, *(a for a in arguments.split(", ") if a in words)].append(name)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_every_dtype_compiles_for_the_oldest_and_some_for_each_architecture(
    file: str, architecture: int, check: Callable[..., None]
) -> None:
    """Of each kernel and its dtypes one geometry, another one for each architecture: all of them for the oldest, which
    can least, for 9.0 those of the budgets, and for each of the others a sixth."""
    if architecture == 90:
        check(file, [*budgets(file)], architecture)
        return
    at = ARCHITECTURES.index(architecture)
    geometries = [
        names[(i + at * (len(names) // 4 or 1)) % len(names)] for i, names in enumerate(groups(file).values())
    ]
    check(file, geometries if at == 0 else geometries[(at - 1) % len(geometries) :: 6], architecture)


MOST = 120
"""Kernels that one test compiles: on a busy machine the six hundred of norms take minutes."""


def shares() -> Iterator[tuple[str, list[str]]]:
    """Every kernel once, with those of its file."""
    for file in FILES:
        names = [n for f, n in VARIANTS if f == file]
        count = -(-len(names) // MOST)
        yield from ((file, names[i::count]) for i in range(count))


SHARES = [*shares()]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("file", "names"), SHARES, ids=[f"{file}-{i}" for i, (file, _) in enumerate(SHARES)])
def test_every_variant_compiles_for_every_architecture(
    file: str, names: list[str], architecture: int, check: Callable[..., None]
) -> None:
    check(file, names, architecture, _spilled)


BUDGETS = """
    attention.cu    | attention_backward_keys<bfloat16, 128, 64>                          | 255 34  91
    attention.cu    | attention_backward_queries<bfloat16, 128>                           | 255 57 204
    attention.cu    | attention_forward<bfloat16, 64>                                     | 232 25 208
    attention.cu    | attention_forward<bfloat16, 128>                                    | 255 41 240
    attention.cu    | attention_forward<float16, 128>                                     | 255 41 240
    attention.cu    | attention_backward_keys<bfloat16, 256, 64>                          | 255 50  59
    attention.cu    | attention_backward_queries<bfloat16, 256>                           | 255 53 150
    attention.cu    | attention_forward<bfloat16, 256>                                    | 255 49 168
    attention.cu    | attention_poison<bfloat16>                                          |  32  1   0
    channel_norm.cu | backward_factors<false, float, bfloat16, float>                     |  40  0  58 | few numbers
    channel_norm.cu | backward_factors<true, float, bfloat16, bfloat16>                   |  40  0  37 | few numbers
    channel_norm.cu | backward_factors<true, float, float, float>                         |  40  0  37 | few numbers
    channel_norm.cu | channel_sums<false, false, bfloat16, bfloat16, 8>                   |  80  4   5
    channel_norm.cu | channel_sums<false, true, bfloat16, bfloat16, 8>                    |  80  4   5
    channel_norm.cu | channel_sums<true, false, bfloat16, bfloat16, 8>                    |  80  4  40
    channel_norm.cu | channel_sums<true, true, bfloat16, bfloat16, 8>                     | 128  4  40
    channel_norm.cu | channel_sums<true, true, float, float, 4>                           |  80  4  20
    channel_norm.cu | channel_sums<true, true, bfloat16, bfloat16, 1>                     |  64  0  21 | not aligned
    channel_norm.cu | channel_sums<false, false, float, float, 4>                         |  64  4   5
    channel_norm.cu | channel_sums<true, true, double, double, 2>                         |  80  4  10
    channel_norm.cu | forward_factors<true, float, bfloat16, float>                       |  32  0  33 | few numbers
    channel_norm.cu | forward_factors<true, float, float, float>                          |  32  0  33 | few numbers
    channel_norm.cu | linear<true, true, bfloat16, bfloat16, bfloat16, 8>                 |  40 11   0
    channel_norm.cu | linear<false, true, bfloat16, bfloat16, bfloat16, 8>                |  40  3   8
    channel_norm.cu | linear<false, true, float, float, float, 4>                         |  40  3   8
    channel_norm.cu | linear<true, true, float, float, float, 4>                          |  32  7   0
    columns.cu      | sum_parts<float, bfloat16>                                          |  32  0   6 | lie apart
    float8.cu       | magnitudes<bfloat16>                                                |  32  3   6
    float8.cu       | magnitudes<float>                                                   |  32  5   6
    float8.cu       | narrow_scaled<4, bfloat16>                                          |  32  1   8
    float8.cu       | narrow_scaled<4, float>                                             |  32  1   8
    float8.cu       | narrow_to<4, float>                                                 |  32  0  10 | one a thread
    float8.cu       | scale_of<4>                                                         |  32  0   6 | one number
    float8.cu       | widen<4>                                                            |  32  0  10 | one a thread
    gather.cu       | gather_rows<u64, 2, i64>                                            |  48  8   1
    group_norm.cu   | group_norm_backward<bfloat16, bfloat16, false>                      |  80  6  51
    group_norm.cu   | group_norm_backward<bfloat16, bfloat16, true>                       |  80  6  56
    group_norm.cu   | group_norm_backward<float, float, false>                            |  80 14  57
    group_norm.cu   | group_norm_backward<float, float, true>                             |  80 14  62
    group_norm.cu   | group_norm_forward<bfloat16, bfloat16, 256, 16, false>              |  64  4  32
    group_norm.cu   | group_norm_forward<bfloat16, bfloat16, 512, 0, true>                |  80  4  23
    group_norm.cu   | group_norm_forward<float, float, 256, 16, false>                    |  56  8  32
    group_norm.cu   | group_norm_forward<float, float, 512, 0, true>                      |  56  8  35
    group_norm.cu   | group_norm_forward<double, double, 256, 16, false>                  |  88 16  32
    grouped.cu      | count_pairs                                                         |  24  0   7 | choices
    grouped.cu      | experts_hidden<false, false, float>                                 | 128 16  45
    grouped.cu      | experts_hidden<false, true, bfloat16>                               | 248 24 127
    grouped.cu      | experts_hidden<true, false, float>                                  | 128 48 231
    grouped.cu      | experts_hidden<true, true, bfloat16>                                | 255 48 937
    grouped.cu      | experts_hidden<false, true, float16>                                | 248 24 127
    grouped.cu      | experts_hidden<false, false, double>                                | 208 24  45
    grouped.cu      | experts_matrices<1, true, bfloat16>                                 | 240 24 230
    grouped.cu      | experts_matrices<2, true, bfloat16>                                 | 240 24 230
    grouped.cu      | experts_rows<false, false, float>                                   | 112 24  91
    grouped.cu      | experts_rows<false, true, bfloat16>                                 | 232 24 235
    grouped.cu      | experts_rows<true, true, bfloat16>                                  | 232 24 227
    grouped.cu      | place_pairs                                                         |  40  0  36 | counts
    grouped.cu      | sum_pairs<bfloat16, 8>                                              |  40 29   9
    philox.cu       | dropout<true, bfloat16>                                             |  40  3  26
    philox.cu       | fold_keys                                                           |  40  0   5 | one a thread
    philox.cu       | philox_fill<Exponential<float>, float>                              |  32  2  10
    philox.cu       | philox_fill<Uniform<bfloat16>, bfloat16>                            |  32  1  10
    philox.cu       | philox_fill<Uniform<double>, double>                                |  32  2   6
    reductions.cu   | column_sums<bfloat16, 8>                                            |  40  5   3
    reductions.cu   | row_extremes<Max, bfloat16, 256>                                    |  40  3   2
    reductions.cu   | row_extremes<Max, float16, 256>                                     |  40  3   2
    reductions.cu   | row_places<true, float, 256>                                        |  64  7   2
    rotary.cu       | rotary<bfloat16, float, 8>                                          |  48 12   0
    rotary.cu       | rotary<double, double, 2>                                           |  48 10   0
    row_norm.cu     | norm_backward<false, true, bfloat16, bfloat16, bfloat16, 512, 32, false> |  96 24   2
    row_norm.cu     | norm_backward<true, false, bfloat16, bfloat16, bfloat16, 512, 0, false> |  64 23   2
    row_norm.cu     | norm_backward<true, false, bfloat16, bfloat16, bfloat16, 512, 32, false> |  96 20   2
    row_norm.cu     | norm_backward<true, false, bfloat16, bfloat16, bfloat16, 512, 32, true> |  96 12  71
    row_norm.cu     | norm_backward<true, true, bfloat16, bfloat16, float, 512, 32, false> |  96 32   2
    row_norm.cu     | norm_backward<false, true, float, float, float, 512, 32, false>     | 120 48   2
    row_norm.cu     | norm_backward<true, false, float, float, float, 512, 0, false>      |  64 51   2
    row_norm.cu     | norm_backward<true, false, float, float, float, 512, 32, false>     | 120 40   2
    row_norm.cu     | norm_backward<true, false, double, double, double, 512, 16, false>  | 120 40   2
    row_norm.cu     | norm_columns<true, bfloat16, bfloat16>                              |  32  0  21 | lie apart
    row_norm.cu     | norm_columns<true, float, float>                                    |  32  0  21 | lie apart
    row_norm.cu     | norm_forward<false, true, bfloat16, bfloat16, 512, 32, false>       |  64 20   0
    row_norm.cu     | norm_forward<true, false, bfloat16, bfloat16, 512, 0, false>        |  64 14   0
    row_norm.cu     | norm_forward<true, false, bfloat16, bfloat16, 512, 32, false>       |  64 16   0
    row_norm.cu     | norm_forward<true, false, bfloat16, bfloat16, 512, 32, true>        |  64  8  68
    row_norm.cu     | norm_forward<false, true, float, float, 512, 32, false>             |  80 40   0
    row_norm.cu     | norm_forward<true, false, float, float, 512, 0, false>              |  48 30   0
    row_norm.cu     | norm_forward<true, false, float, float, 512, 32, false>             |  72 32   0
    row_norm.cu     | norm_forward<true, false, float16, float16, 512, 32, false>         |  64 16   0
    row_norm.cu     | norm_forward<true, false, double, double, 512, 0, false>            |  64 32   0
    scans.cu        | count_true                                                          |  40  1  17
    scans.cu        | running_columns<Sum, bfloat16, bfloat16, 2>                         |  64  0  24 | one a thread
    scans.cu        | running_columns<Sum, float, float, 1>                               |  64  0  16 | one a thread
    scans.cu        | running_rows<Sum, bfloat16, bfloat16, 32, 8>                        |  40  2  16
    scans.cu        | running_rows<Sum, float, float, 256, 4>                             |  40  2   8
    scans.cu        | write_true                                                          |  48  1  33
    scatter.cu      | add_atomically<bfloat16, float, 8>                                  |  32  1   1
    scatter.cu      | add_in_order<bfloat16, float, 8>                                    |  48 31  15
    scatter.cu      | add_in_order<float16, float, 8>                                     |  48 31  15
    scatter.cu      | join_chunks<bfloat16, float>                                        |  32  0  16 | lie apart
    scatter.cu      | kept_by_mark<int>                                                   |  32  0  15 | places
    scatter.cu      | kept_by_order<i64>                                                  |  32  0  20 | places
    scatter.cu      | mark_last<int>                                                      |  16  0   1 | places
    scatter.cu      | read_kept<unsigned short>                                           |  32  0  40 | lie apart
    scatter.cu      | write_kept<unsigned short>                                          |  32  0  80 | lie apart
    softmax.cu      | cross_entropy_backward<bfloat16, bfloat16, 512, 0, 8>               |  64  6   6
    softmax.cu      | cross_entropy_backward<bfloat16, bfloat16, 512, 32, 8>              |  64  8   6
    softmax.cu      | cross_entropy_backward<bfloat16, float, 256, 16, 8>                 |  64  6   6
    softmax.cu      | cross_entropy_backward<bfloat16, float, 512, 0, 8>                  |  64  9   6
    softmax.cu      | cross_entropy_backward<float, float, 512, 32, 4>                    |  64 16   6
    softmax.cu      | cross_entropy_forward<bfloat16, 512, 0, 8>                          |  64  6   7
    softmax.cu      | cross_entropy_forward<float, 512, 0, 4>                             |  64 14   7
    softmax.cu      | cross_entropy_forward<double, 512, 0, 2>                            |  88 12   7
    softmax.cu      | cross_entropy_of_tiles<float>                                       |  40  0  25 | lie apart
    softmax.cu      | cross_entropy_tile<float, 256, 16, 4>                               |  64  4   7
    softmax.cu      | cross_entropy_tile<float, 512, 0, 4>                                |  64 14   8
    softmax.cu      | softmax_backward<true, bfloat16, 512, 0, 8>                         |  64 15   4
    softmax.cu      | softmax_backward<true, bfloat16, 512, 32, 8>                        |  64 12   3
    softmax.cu      | softmax_backward<true, float, 512, 0, 4>                            |  64 35   4
    softmax.cu      | softmax_backward<true, float, 512, 32, 4>                           | 104 24   3
    softmax.cu      | softmax_forward<true, bfloat16, 512, 0, 8>                          |  64  9   3
    softmax.cu      | softmax_forward<true, bfloat16, 512, 32, 8>                         |  64  8   2
    softmax.cu      | softmax_forward<true, float, 512, 0, 4>                             |  64 21   3
    softmax.cu      | softmax_forward<true, float, 512, 32, 4>                            |  64 16   2
    softmax.cu      | softmax_forward<true, float16, 512, 32, 8>                          |  64  8   2
    softmax.cu      | softmax_forward<true, double, 512, 16, 2>                           |  80 16   2
"""
"""File and kernel, on compute capability 9.0: registers at most, accesses of 16 bytes at least (asynchronous copies of
tiles, too), narrower ones at most, and why where none is of 16 bytes. Element by element goes what is not aligned."""


def budgets(file: str) -> dict[str, tuple[int, ...]]:
    """Those of a file's kernels."""
    rows = [[cell.strip() for cell in line.split("|")] for line in BUDGETS.strip().splitlines()]
    return {name: tuple(map(int, numbers.split())) for f, name, numbers, *_ in rows if f == file}


def test_kernels_stay_within_their_budgets(machine_code: Callable[..., dict[str, str]]) -> None:
    found = []
    for file in FILES:
        of_file = budgets(file)
        for name, text in machine_code(file, [*of_file], 90).items():
            if said := machine_code.figures(text).over(*of_file[name]):
                found.append(f"{name}: {said}")
    assert not found, "\n".join(found)


def test_every_kernel_has_a_budget() -> None:
    """Each template, so that a new one without a row fails; and each row is of a kernel that there is."""
    told = {(file, name) for file in FILES for name in budgets(file)}
    assert told <= set(VARIANTS)
    rows = [row.split("|") for row in BUDGETS.strip().splitlines()]
    assert [row for row in rows if (row[2].split()[1] == "0") != (len(row) == 4)] == []  # with why none is wide, or not
    assert {(f, name.partition("<")[0]) for f, name in VARIANTS} == {(f, n.partition("<")[0]) for f, n in told}


def test_products_of_short_floats_are_on_tensor_cores(machine_code: Callable[..., dict[str, str]]) -> None:
    """Those of two bytes from compute capability 8.0 on, and all tiles are copied asynchronously."""
    of_experts = [n[i % len(n)] for i, n in enumerate(groups("grouped.cu").values()) if n[0].startswith("experts_")]
    assert all(any(f"true, {d}" in name for name in of_experts) for d in ("bfloat16", "float16"))
    for name, text in machine_code("grouped.cu", of_experts, 80, binary=False).items():
        assert ("mma.sync.aligned.m16n8k16" in text) == ("true, bfloat16" in name or "true, float16" in name), name
        assert "cp.async.cg" in text, name


_FLOATS = re.compile(r"\b(fma|mul|sub|add)(?:\.rn)?\.f32\b")


@pytest.mark.parametrize("center", ["true", "false"])
def test_norms_of_a_sum_have_the_arithmetic_of_the_norm(
    machine_code: Callable[..., dict[str, str]], center: str
) -> None:
    """The same products are contracted into the same sums: only an addition for each element comes to them."""
    for kernel, size in (("norm_forward", "float, float, 512, 32"), ("norm_backward", "float, float, float, 512, 32")):
        names = [f"{kernel}<{center}, {add}, {size}, false>" for add in ("false", "true")]
        plain, of_sum = (
            Counter(_FLOATS.findall(t)) for t in machine_code("row_norm.cu", names, 90, binary=False).values()
        )
        assert of_sum - plain == {"add": 32}
        assert not plain - of_sum


def test_the_cotangent_of_a_row_of_one_element_is_zero(machine_code: Callable[..., dict[str, str]]) -> None:
    """It is a product less the mean of that product, which is rounded: so the product is, and not contracted."""
    name = "norm_backward<true, false, float, float, float, 32, 8, false>"
    (text,) = machine_code("row_norm.cu", [name], 90, binary=False).values()
    assert len(re.findall(r"\bmul\.rn\.f32\b", text)) >= 8


@pytest.mark.parametrize("architecture", [80, 90])
def test_atomic_sums_add_four_numbers_at_once_where_the_device_can(
    machine_code: Callable[..., dict[str, str]], architecture: int
) -> None:
    names = ["add_atomically<bfloat16, float, 8>", "add_atomically<float, float, 4>"]
    for name, text in machine_code("scatter.cu", names, architecture, binary=False).items():
        added = {m[1] for m in re.finditer(r"\b(?:red|atom)\.global\.add\.(\S+)", text)}
        assert added == ({"v4.f32"} if architecture >= 90 else {"f32"}), name


def test_sources_need_no_header_of_a_toolkit() -> None:
    for file in FILES:
        assert "#include" not in launch.source(file), file


def test_names_are_those_of_the_dtypes() -> None:
    for dtype in launch.NAMES:
        assert np.dtype(dtype).itemsize in (1, 2, 4, 8)
    assert launch.named("k", np.dtype(np.float16), False, 3) == "k<float16, false, 3>"
