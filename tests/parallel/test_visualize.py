"""What people see of arrays on meshes: drawings, texts, notebooks."""

from __future__ import annotations

import io
import math
import re
from xml.etree import ElementTree

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import meshtape as mt
from meshtape.parallel.mesh.block_grid import colour_of, grid_of


def drawn(x: mt.Array) -> list[str]:
    return mt.visualize(x).splitlines()


def test_a_matrix_over_two_axes():
    mesh = mt.Mesh({"data": 2, "model": 3})
    x = mt.distribute(np.zeros((4, 6), "f4"), mesh, data=mt.Shard(0), model=mt.Shard(1))
    assert drawn(x) == [
        "float32[4@data,6@model]  2×3 ranks",
        "┌────────┬────────┬────────┐",
        "│ rank 0 │ rank 1 │ rank 2 │",
        "├────────┼────────┼────────┤",
        "│ rank 3 │ rank 4 │ rank 5 │",
        "└────────┴────────┴────────┘",
    ]


def test_replicas_share_a_block():
    mesh = mt.Mesh({"data": 2, "model": 2})
    assert drawn(mt.distribute(np.zeros((4, 4)), mesh, model=mt.Shard(0))) == [
        "float64[4@model,4]  2×2 ranks",
        "┌────────────┐",
        "│ ranks 0, 2 │",
        "├────────────┤",
        "│ ranks 1, 3 │",
        "└────────────┘",
    ]
    assert drawn(mt.distribute(np.zeros(3), mesh))[2] == "│ ranks 0-3 │"


def test_ranks_without_elements_are_named():
    mesh = mt.Mesh({"data": 4})
    assert drawn(mt.distribute(np.zeros(5), mesh, data=mt.Shard(0))) == [
        "float64[5@data]  4 ranks",
        "┌────────┬────────┬────────┐",
        "│ rank 0 │ rank 1 │ rank 2 │",
        "└────────┴────────┴────────┘",
        "dimension 0 in blocks of 2, 2, 1, 0",
        "no elements on rank 3",
    ]


def test_pending_sums_nested_axes_and_numbers():
    mesh = mt.Mesh({"a": 2, "b": 2})
    x = mt.distribute(np.ones((2, 8)), mesh, a=mt.Shard(0), b=mt.Shard(1))
    assert drawn(mt.sum(x, axis=0))[0] == "float64[8@b]{Partial('sum'):a}  2×2 ranks"
    nested = mt.distribute(np.ones(8), mesh, b=mt.Shard(0), a=mt.Shard(0))
    assert drawn(nested)[0] == "float64[8@b+a]  2×2 ranks"
    assert drawn(nested)[2] == "│ rank 0 │ rank 2 │ rank 1 │ rank 3 │"
    assert drawn(mt.distribute(np.float64(1), mesh))[0] == "float64[]  2×2 ranks"


def test_an_array_of_no_elements_and_one_on_no_mesh():
    mesh = mt.Mesh({"a": 2})
    assert drawn(mt.distribute(np.zeros((0, 3)), mesh, a=mt.Shard(0)))[0] == "float64[0@a,3]  2 ranks"
    assert mt.visualize(mt.ones((2, 3))) == "float64[2,3]  on cpu"


def test_more_than_two_dimensions_have_a_table_for_each_place_of_the_others():
    mesh = mt.Mesh({"a": 2})
    assert drawn(mt.distribute(np.zeros((4, 2, 2)), mesh, a=mt.Shard(0)))[1:] == [
        "[0:2, …]",
        "┌────────┐",
        "│ rank 0 │",
        "└────────┘",
        "[2:4, …]",
        "┌────────┐",
        "│ rank 1 │",
        "└────────┘",
    ]
    assert len(drawn(mt.distribute(np.zeros((4, 2, 2)), mesh, a=mt.Shard(1)))) == 6
    many = mt.distribute(np.zeros((20, 2, 2)), mt.Mesh({"a": 10}), a=mt.Shard(0))
    assert [line for line in drawn(many) if "…" in line] == [
        *(f"[{i}:{i + 2}, …]" for i in (0, 2, 4, 6)),
        "… 5 more places",
        "[18:20, …]",
    ]


def test_pending_sums_are_named():
    mesh = mt.Mesh({"a": 2, "b": 2})
    x = mt.sum(mt.distribute(np.ones((2, 8)), mesh, a=mt.Shard(0), b=mt.Shard(1)), axis=0)
    assert drawn(x)[-1] == "along a each rank of a block holds a part of a pending sum"


def test_wide_tables_fit_the_width():
    mesh = mt.Mesh({"a": 64})
    x = mt.distribute(np.zeros((3, 64)), mesh, a=mt.Shard(1))
    for width in (20, 60, 100, 400):
        lines = drawn_within(x, width)
        assert max(map(len, lines[1:])) <= width
        assert " 63 │" in lines[2]
        assert ("…" in lines[2]) == (width < 400)
    tall = drawn(mt.distribute(np.zeros((64, 3)), mesh, a=mt.Shard(0)))
    assert len(tall) == 19
    assert tall[-3:] == ["│    …    │", "│ rank 63 │", "└─────────┘"]
    grid = mt.Mesh({"a": 64, "b": 64})
    drawing = drawn(mt.distribute(np.zeros((64, 64)), grid, a=mt.Shard(0), b=mt.Shard(1)))
    assert len(drawing) < 20
    assert max(map(len, drawing)) <= 100
    huge = mt.Mesh({"a": 1024, "b": 4})
    assert (
        mt.visualize(mt.distribute(np.zeros((1024, 4)), huge, a=mt.Shard(0), b=mt.Shard(1)))
        ._repr_html_()
        .count("<rect")
        == 63 * 4
    )


def drawn_within(x: mt.Array, width: int) -> list[str]:
    return mt.visualize(x, width=width).splitlines()


PLACEMENTS = st.sampled_from([mt.Replicate(), mt.Shard(0), mt.Shard(1), mt.Shard(2)])


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.sampled_from([(1,), (4,), (2, 3), (3, 2, 2), (8, 8)]),
    st.sampled_from([(), (0,), (5,), (1, 4), (6, 0), (3, 7), (2, 5, 3), (4, 1, 2, 3)]),
    st.lists(PLACEMENTS, min_size=3, max_size=3),
)
def test_every_rank_is_in_each_drawing_as_often_as_it_holds_something(sizes, shape, placements):
    """Text, terminal and HTML agree: they have one table, whose blocks cover the array."""
    mesh = mt.Mesh(dict(zip("abc", sizes, strict=False)))
    fit = [p if not isinstance(p, mt.Shard) or p.dim < len(shape) else mt.Replicate() for p in placements]
    x = mt.distribute(np.zeros(shape), mesh, **dict(zip(mesh.names, fit, strict=False)))
    grid = grid_of(shape, x.sharding)
    drawing = mt.visualize(x)
    assert drawing.__rich__().plain == drawing
    seen = [r for slab in grid.slabs for row in slab.ranks for cell in row for r in cell]
    assert sorted([*seen, *grid.idle]) == list(range(mesh.size))
    cells = sum(len(row) for slab in grid.slabs for row in slab.ranks)
    html = drawing._repr_html_()
    assert html.count("<rect") == (cells if len(grid.slabs) <= 6 else cells // len(grid.slabs) * 5)
    if math.prod(shape):
        area = sum((r1 - r0) * (c1 - c0) for slab in grid.slabs for r0, r1 in slab.rows for c0, c1 in slab.columns)
        assert area * math.prod(shape[:-2]) == math.prod(shape) * len(grid.slabs)
        ElementTree.fromstring(html.replace("<br>", "<br/>"))
    else:
        assert drawing.splitlines()[1] == "no elements"


def test_a_terminal_shows_each_rank_in_a_colour_of_its_own():
    mesh = mt.Mesh({"a": 2, "b": 2})
    x = mt.distribute(np.zeros((4, 4)), mesh, a=mt.Shard(0), b=mt.Shard(1))
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor", width=80).print(mt.visualize(x))
    colours = re.findall(r"\x1b\[30;48;2;([0-9;]+)m", out.getvalue())
    assert len(colours) == len(set(colours)) == 4
    assert len({colour_of(r) for r in range(64)}) == 64
    plain = io.StringIO()
    Console(file=plain, width=80).print(mt.visualize(x))
    assert plain.getvalue() == mt.visualize(x) + "\n"


def test_repr_says_values_and_sharding():
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(np.arange(3), mesh, a=mt.Shard(0))
    assert repr(x) == "Array([0, 1, 2], sharding=Sharding(a=Shard(0)))"
    assert repr(x + 0.5) == "Array([0.5, 1.5, 2.5], dtype=float64, sharding=Sharding(a=Shard(0)))"
    assert repr(mt.sum(x)) == "Array(3, sharding=Sharding(a=Partial('sum')))"


def test_html_computes_nothing_and_shows_the_blocks():
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(np.zeros((4, 2)), mesh, a=mt.Shard(0)) + 1
    html = x._repr_html_()
    assert len(mesh.pending) == 1
    assert html.count("<rect") == 2
    assert "ranks 0: [0:2, 0:2]" in html
    assert "ranks of Mesh(a=2): a=Shard(0)" in html
    assert "<svg" not in mt.distribute(np.zeros((0, 2)), mesh)._repr_html_()


def test_shardings_and_meshes_draw_themselves_without_an_array():
    mesh = mt.Mesh({"a": 2, "b": 3, "c": 2})
    html = mesh._repr_html_()
    assert html.count("<rect") == 12
    assert "Mesh(a=2, b=3, c=2): 12 ranks; rows: a × b, columns: c" in html
    assert "ranks 7: [3:4, 1:2]" in html
    for alone in (mt.Mesh({}), mt.Mesh({"a": 1})):
        assert alone._repr_html_().count("<rect") == 1
    drawn = mt.Sharding(mesh, a=mt.Shard(0), b=mt.Shard(-1), c=mt.Partial())._repr_html_()
    assert drawn.count("<rect") == 6
    assert "ranks 6-7: [1:2, 0:1]" in drawn
    assert "dimension 0 in 2, dimension -1 in 3" in drawn
    assert "a pending sum" in drawn
    whole = mt.Sharding(mesh)._repr_html_()
    assert whole.count("<rect") == 1
    assert "splits no dimension" in whole
    # More ranks than can be drawn: the ends alone.
    assert mt.Mesh({"a": 64, "b": 64})._repr_html_().count("<rect") == 64 * 64
    assert mt.Mesh({"a": 1024, "b": 2})._repr_html_().count("<rect") == 63 * 2
    for text in (html, drawn, whole):
        ElementTree.fromstring(text.replace("<br>", "<br/>"))


def test_explain_shows_each_step_with_its_bytes():
    mesh = mt.Mesh({"data": 2, "model": 2})
    x = mt.distribute(np.ones((4, 4)), mesh, data=mt.Shard(0), model=mt.Shard(1))
    w = mt.distribute(np.ones((4, 2)), mesh, model=mt.Shard(0))
    assert mt.explain(lambda x, w: mt.nn.relu(x @ w), x, w).splitlines() == [
        "rank program(%0: float64[4@data,4@model], %1: float64[4@model,2]):",
        "  %2 = matmul(%0, %1)  : float64[4@data,2]{sum:model}",
        "  %4 = all_reduce(model) %2  : float64[4@data,2]  # 128 bytes, as relu is not linear in it",
        "  %3 = relu(%4)  : float64[4@data,2]",
        "  return %3",
    ]


def test_explain_writes_indices_as_python_does():
    mesh = mt.Mesh({"data": 2})
    x = mt.distribute(np.ones((4, 4)), mesh, data=mt.Shard(0))
    ids = mt.distribute(np.array([1, 3]), mesh)
    for fn, words in (
        (lambda x, i: x[:, 1:3], "= %0[:, 1:3]  :"),
        (lambda x, i: x[:, ::-2], "= %0[:, ::-2]  :"),
        (lambda x, i: x[:, None, i], "= %0[:, None, %1]  :"),
        (lambda x, i: x[i], "= read_part(%0, at=[%1, :])  :"),
        (lambda x, i: x.at[i, 2].add(1.0), "= write_part(%0, 1.0, at=[%1, 2])  :"),
    ):
        assert words in mt.explain(fn, x, ids), mt.explain(fn, x, ids)


def test_explain_names_constants():
    mesh = mt.Mesh({"data": 2})
    x = mt.distribute(np.ones((4, 2)), mesh, data=mt.Shard(0))
    assert mt.explain(lambda x: x + mt.asarray([1.0, 2.0]), x).splitlines()[1:3] == [
        "  %1 = constant  : float64[2]",
        "  %2 = add(%0, %1)  : float64[4@data,2]",
    ]


def test_explain_brackets_what_travels_together():
    mesh = mt.Mesh({"data": 2})
    x = mt.distribute(np.ones((4, 4)), mesh, data=mt.Shard(0))
    assert mt.explain(lambda x: (mt.sum(x), mt.max(x, axis=0), mt.prod(x)), x).splitlines()[-4:] == [
        "┌ %4 = all_reduce(data) %1  : float64[]  # 16 bytes, as results are whole",
        "│ %5 = all_reduce(data) %2  : float64[4]  # 64 bytes, as results are whole",
        "└ %6 = all_reduce(data) %3  : float64[]  # 16 bytes, as results are whole",
        "  return %4, %5, %6",
    ]


def test_explain_names_every_collective():
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(np.ones((4, 4)), mesh, a=mt.Shard(0))

    def all_of_them(x: mt.Array) -> list[mt.Array]:
        whole = mt.reshard(x, a=mt.Replicate())
        pending = mt.sum(mt.expand_dims(x, axis=1), axis=0)
        return [
            whole,
            mt.reshard(x, a=mt.Shard(1)),
            mt.reshard(whole * 2, a=mt.Shard(0)),
            mt.reshard(pending, a=mt.Shard(1)),
            mt.sum(x),
        ]

    text = mt.explain(all_of_them, x)
    for words in ("all_gather(a)", "all_to_all(a)", "slice(a)", "reduce_scatter(a)", "all_reduce(a)"):
        assert f"= {words} %" in text


def test_explain_says_why():
    mesh = mt.Mesh({"a": 2})
    rows = mt.distribute(np.ones((4, 4)), mesh, a=mt.Shard(0))
    cols = mt.distribute(np.ones((4, 4)), mesh, a=mt.Shard(1))
    small = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))
    for fn, args, why in (
        (lambda x: mt.sort(x, axis=0), (rows,), "as sort needs dimension 0 whole"),
        (lambda x, y: x + y, (rows, cols), "as add then moves the fewest bytes"),
        (lambda x, y: mt.sum(x, axis=0) + y, (rows, small), "as add has other operands that are not pending"),
        (lambda x: mt.reshard(x, a=mt.Shard(1)), (rows,), "as reshard asks"),
        (lambda x: mt.exp(mt.sum(x, axis=0)), (rows,), "as exp is not linear in it"),
    ):
        assert why in mt.explain(fn, *args), mt.explain(fn, *args)


def test_explain_of_arrays_on_no_mesh_is_the_program():
    assert mt.explain(lambda x: x + 1, mt.ones(2)).startswith("program(%0: float64[2]):")
