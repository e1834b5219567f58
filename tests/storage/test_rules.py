"""Key rules: the text, what matches, what is refused, and that they commute with sharding and with their inverse."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtape import errors
from meshtape.arrays.core.blocks import Box
from meshtape.storage import LoadReport, Rule, Rules, load, open_checkpoint, save
from meshtape.storage.rules import steps, value_steps


def arange(*shape):
    return np.arange(np.prod(shape, dtype=int), dtype="f4").reshape(shape)


def numbered(*names, shape=(4, 6)):
    return {n: arange(*shape) + 1000 * i for i, n in enumerate(names)}


# ----- the table of what others get wrong -----------------------------------------------------------------------------


def test_a_star_below_a_capture_collects(kit):
    held = {f"l.{i}.e.{x}.w": np.full((2, 3), 10 * i + x) for i in (0, 1) for x in (10, *range(10))}
    got = Rules("l.{layer}.e.{expert}.w -> m.{layer}.w, concat(axis=0)").on_arrays(held)
    assert list(got) == ["m.0.w", "m.1.w"]
    assert got["m.1.w"][::2, 0].tolist() == [*range(10, 21)]  # 2 before 10


def test_a_pattern_without_a_match_is_an_error_that_names_the_nearest():
    for text in ("l.{layer}.zz -> x.{layer}", "q.{i}.w -> f", "l.0.weigth -> y"):
        with pytest.raises(errors.RuleMatchError, match="matches no key") as e:
            Rules(text).on_arrays(numbered("l.0.weight", "l.1.weight", "other"))
        assert "'l.0.weight'" in str(e.value)
        assert text.split(" ->")[0] in str(e.value)
    assert list(Rules("q.{i}.w -> f, optional()").on_arrays(numbered("a"))) == ["a"]


def test_layers_of_different_numbers_of_experts_have_rules_of_their_own():
    held = {f"l.{i}.e.{x}.w": np.full((1, 2), x) for i, n in ((0, 2), (1, 3), (2, 0)) for x in range(n)}
    with pytest.raises(errors.RuleMatchError, match=r"x=2 is missing for i=0.*a rule for each array that has fewer"):
        Rules("l.{i}.e.{x}.w -> l.{i}.w, concat(axis=0)").on_arrays(held)
    got = Rules("l.0.e.{x}.w -> l.0.w, concat(axis=0)\nl.1.e.{x}.w -> l.1.w, concat(axis=0)").on_arrays(held)
    assert {n: a.shape for n, a in got.items()} == {"l.0.w": (2, 2), "l.1.w": (3, 2)}


def test_keys_that_belong_together_and_are_not_all_there():
    held = numbered("l.0.q", "l.0.k", "l.1.q", "l.2.k")
    with pytest.raises(errors.RuleMatchError, match=r"for i=1 there is no key 'l\.\{i\}\.k'"):
        Rules("l.{i}.q, l.{i}.k -> l.{i}.qk, concat(axis=0)").on_arrays(held)
    with pytest.raises(errors.RuleMatchError, match=r"for i=2 there is no key"):
        Rules("l.{i}.q, l.{i}.k -> l.{i}.qk, concat(axis=0)").on_arrays({k: v for k, v in held.items() if k != "l.1.q"})
    held = numbered("e.0.g", "e.0.u", "e.1.g")
    with pytest.raises(errors.RuleMatchError, match=r"'x': '1'.*some keys are missing"):
        Rules("e.{x}.g, e.{x}.u -> all, concat(axis=0)").on_arrays(held)


def test_a_target_given_twice_names_both_rules():
    with pytest.raises(errors.RuleConflict, match=r"'z' is given twice") as e:
        Rules("a -> z\nb -> z").on_arrays(numbered("a", "b"))
    assert "a -> z" in str(e.value)
    assert "b -> z" in str(e.value)
    with pytest.raises(errors.RuleConflict, match="which no rule reads or drops"):
        Rules("a -> b").on_arrays(numbered("a", "b"))
    with pytest.raises(errors.RuleConflict, match="2 arrays given to 1 target"):
        Rules("q.{i} -> f").on_arrays(numbered("q.0", "q.1"))


def test_rules_are_simultaneous_so_a_swap_is_a_swap(kit):
    held = numbered("a", "b")
    got = Rules("a -> b\nb -> a").on_arrays(held)
    assert kit.same(got["a"], held["b"])
    assert kit.same(got["b"], held["a"])


def test_what_is_dropped_and_wanted_is_missing_not_silent(tmp_path):
    save(tmp_path / "c", numbered("a", "b"))
    with pytest.raises(errors.CheckpointKeyError, match=r"missing in the checkpoint \(1\): a"):
        load(tmp_path / "c", like=numbered("a", "b"), rules="a -> _")
    with pytest.raises(errors.RuleConflict, match="dropped by"):
        load(tmp_path / "c", rules="a -> _\na -> c")


def test_a_source_no_rule_uses_is_reported(tmp_path):
    save(tmp_path / "c", numbered("a", "b"))
    with pytest.raises(errors.CheckpointKeyError, match=r"unexpected, not in like \(1\): b"):
        load(tmp_path / "c", like=numbered("z"), rules="a -> z")


def test_shapes_are_checked_before_anything_is_read(tmp_path):
    save(tmp_path / "c", {"a": arange(4, 6), "b": arange(4, 7)})
    (tmp_path / "c" / "a" / "c.0.0").write_bytes(b"")  # would be an error if it were read
    with pytest.raises(errors.CheckpointShapeError, match=r"z: stored shape \(4, 6\), wanted \(8, 6\)"):
        load(tmp_path / "c", like={"z": np.zeros((8, 6), "f4"), "b": arange(4, 7)}, rules="a -> z")
    with pytest.raises(errors.CheckpointShapeError, match=r"'a' of shape \(4, 6\) and 'b' of shape \(4, 7\)") as e:
        load(tmp_path / "c", rules="a, b -> z, concat(axis=0)")
    assert "concat() of the rule\n  a, b -> z" in str(e.value)


def test_steps_are_a_chain_and_axes_may_be_negative(kit):
    held = numbered("a", "b", shape=(2, 3))
    got = Rules("a, b -> c, permute([1, 0]), concat(axis=-1), cast(bfloat16)  # a comment").on_arrays(held)
    assert kit.same(got["c"], np.concatenate([held["a"].T, held["b"].T], -1).astype(ml_dtypes.bfloat16))


def test_odd_names(kit):
    held = numbered("a-b/c", "0.weight", "sp ace, (x)", "grün.{q}", "_", 'quo"te', "@x", "a->b", "#")
    rules = Rules(
        'a-b/c -> a+b\n0.weight -> 1.weight\n"sp ace, (x)" -> \'y, z\'\ngrün.{{q}} -> {{}}\n"_" -> under\n'
        "'quo\"te' -> q\n'@x' -> at\n'a->b' -> arrow\n'#' -> hash"
    )
    got = rules.on_arrays(held)
    assert list(got) == ["a+b", "1.weight", "y, z", "{}", "under", "q", "at", "arrow", "hash"]
    assert Rules(str(rules)) == rules
    back = rules.inverse(held)
    assert list(back.on_arrays(got)) == list(held)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float64", "bool", "complex64", "uint16"])
def test_casts_to_every_dtype_and_never_unasked(kit, dtype):
    a = np.array([[0.0, 1.0, 1.0]], "f4")
    got = Rules(f"a -> b, cast({dtype})").on_arrays({"a": a})["b"]
    from meshtape.storage.format.dtypes import by_name

    assert kit.same(got, a.astype(by_name(dtype)))
    with pytest.raises(errors.CheckpointDTypeError, match=r"put cast\(\.\.\.\) before"):
        Rules("a, b -> c, concat(axis=0)").on_arrays({"a": a, "b": got})
    with pytest.raises(errors.Lossy, match="imaginary"):
        Rules("a -> b, cast(float32)").on_arrays({"a": a.astype("c8") + 1j})


@pytest.mark.parametrize(
    ("line", "column", "what"),
    [
        ("a b", 3, "expected '->'"),
        ("->", 1, "expected a name"),
        ("a ->", 5, "expected a name"),
        ("a -> b, foo(1)", 9, "unknown step 'foo'; known are concat"),
        ("a -> b, concat(axis=x)", 16, "axis cannot be 'x'"),
        ("a -> b, concat(1, 2)", 19, "concat takes axis"),
        ("a -> b, cast()", 9, "cast needs dtype"),
        ("a -> b, permute([1, 0]", 23, "expected ','"),
        ("a, b -> c, concat(0), d", 23, "names stand before the steps"),
        ('a -> "b', 6, "never closed"),
        ("a.{layer -> b", 1, "braces"),
        ("a, _ -> b", 1, "stands alone"),
        ("_ -> _", 1, "at least one side"),
        ("a -> b, concat(0) extra", 19, "expected ','"),
        ("@follow opt.m", 9, "one {}"),
        ("a -> b, slice(axis=0, start=0)", 9, "needs stop"),
    ],
)
def test_a_syntax_error_shows_line_column_and_caret(line, column, what):
    with pytest.raises(errors.RuleSyntaxError) as e:
        Rules(f"# first\n\n{line}")
    text = str(e.value)
    assert text.startswith(f"line 3, column {column}: "), text
    assert what in text
    assert text.splitlines()[-1].index("^") == column + 1  # below the column, two blanks in


def test_empty_programs_and_zero_sized_arrays(kit):
    held = {"a": np.ones((0, 3), "f4"), "s": np.array(2.0), "b": np.ones((2, 3), "f4")}
    assert list(Rules("").on_arrays(held)) == list(held)
    assert list(Rules("\n  # nothing\n").on_arrays({})) == []
    got = Rules("a, b -> c, concat(axis=0), permute()\ns -> t, reshape([1, 1])").on_arrays(held)
    assert got["c"].shape == (3, 2)
    assert kit.same(got["t"], np.array([[2.0]]))
    assert kit.same(Rules("a -> z, reshape([3, 0])").on_arrays({"a": held["a"]})["z"], np.ones((3, 0), "f4"))


# ----- vectors --------------------------------------------------------------------------------------------------------


def test_fused_qkv_vector(kit):
    held = {"q": arange(8, 3), "k": arange(4, 3) + 100, "v": arange(4, 3) + 200}
    rules = Rules("q, k, v -> f, fuse_qkv(heads=4, groups=2, axis=0)")
    f = rules.on_arrays(held)["f"]
    q, k, v = held.values()
    assert kit.same(f, np.concatenate([q[0:4], k[0:2], v[0:2], q[4:8], k[2:4], v[2:4]]))
    assert all(kit.same(rules.inverse(held).on_arrays({"f": f})[n], a) for n, a in held.items())
    # Each of two ranks holds one whole group.
    assert kit.same(f[:8], np.concatenate([q[0:4], k[0:2], v[0:2]]))
    for wrong in ("heads=3, groups=2", "heads=4, groups=0", "heads=8, groups=4, axis=1"):
        with pytest.raises(errors.CheckpointShapeError):
            Rules(f"q, k, v -> f, fuse_qkv({wrong})").on_arrays(held)


def test_fused_ffn_vector_from_two_parts_to_four(kit):
    f = arange(3, 16)
    got = Rules("f -> f, split_ffn(parts=2, axis=1), fuse_ffn(parts=4, axis=1)").on_arrays({"f": f})["f"]
    order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert kit.same(got, f[:, order])


def test_old_qkv_layout_of_whole_blocks_a_rank(kit):
    q, k, v = arange(8, 2), arange(4, 2) + 50, arange(4, 2) + 90
    got = Rules("q, k, v -> f, interleave(parts=2)").on_arrays({"q": q, "k": k, "v": v})["f"]
    assert kit.same(got, np.concatenate([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]]))


def test_split_by_uneven_sizes_and_by_number(kit):
    w = arange(16, 3)
    got = Rules("w -> q, k, v, split(axis=0, sizes=[8, 4, 4])").on_arrays({"w": w})
    assert [a.shape for a in got.values()] == [(8, 3), (4, 3), (4, 3)]
    assert kit.same(got["k"], w[8:12])
    got = Rules("w -> e.{x}.w, split(axis=0, parts=4)").on_arrays({"w": w})
    assert list(got) == [f"e.{i}.w" for i in range(4)]
    assert kit.same(got["e.2.w"], w[8:12])
    with pytest.raises(errors.CheckpointShapeError, match="does not split into 3"):
        Rules("w -> a, b, c, split(axis=0)").on_arrays({"w": w})
    with pytest.raises(errors.CheckpointShapeError, match="add up to 15"):
        Rules("w -> a, b, split(axis=0, sizes=[8, 7])").on_arrays({"w": w})
    with pytest.raises(errors.RuleConflict, match="parts="):
        Rules("w -> e.{x}, split(axis=0)").on_arrays({"w": w})


def test_permuting_a_square_matrix_is_not_nothing(kit):
    w = arange(3, 3)
    assert kit.same(Rules("w -> w, permute([1, 0])").on_arrays({"w": w})["w"], w.T)
    with pytest.raises(errors.CheckpointShapeError, match="names others"):
        Rules("w -> w, permute([0, 0])").on_arrays({"w": w})


def test_vocabulary_growth(kit):
    w = arange(5, 3)
    got = Rules("w -> w, pad(axis=0, size=8, value=-1)").on_arrays({"w": w})["w"]
    assert kit.same(got[:5], w)
    assert (got[5:] == -1).all()
    with pytest.raises(errors.CheckpointShapeError, match="more than pad's 4"):
        Rules("w -> w, pad(axis=0, size=4)").on_arrays({"w": w})


def test_new_arrays_temporary_names_and_tied_weights(kit):
    held = {"a": arange(2, 3), "b": arange(3, 3)}
    rules = Rules(
        "a -> $t, permute()\n$t, b -> c, concat(axis=1)\nb -> tied\n_ -> n, init(shape=[2], dtype=int32, value=7)"
    )
    got = rules.on_arrays(held)
    assert sorted(got) == ["c", "n", "tied"]
    assert kit.same(got["c"], np.concatenate([held["a"].T, held["b"]], 1))
    assert kit.same(got["n"], np.full(2, 7, "i4"))
    back = rules.inverse(held)
    assert all(kit.same(back.on_arrays(got)[n], a) for n, a in held.items())
    assert set(back.on_arrays(got)) == set(held)
    with pytest.raises(errors.RuleConflict, match="read by no later rule"):
        Rules("a -> $t").on_arrays(held)
    with pytest.raises(errors.RuleMatchError):
        Rules("$t -> c").on_arrays(held)


def test_what_has_no_inverse_names_the_rule():
    held = {"a": arange(4, 2), "b": arange(4, 2).astype("f8")}
    for text in ("a -> _", "a -> c, slice(axis=0, start=0, stop=2)", "a -> c, cast(bfloat16)"):
        with pytest.raises(errors.CheckpointError, match="has no inverse") as e:
            Rules(text).inverse(held)
        assert text.split(",")[0] in str(e.value)
    assert str(Rules("a -> c, cast(bfloat16, back=float32)").inverse(held)) == (
        "c -> a, cast(dtype=float32, back=bfloat16)"
    )
    assert str(Rules("a -> c, cast(float64)").inverse(held)) == "c -> a, cast(dtype=float32, back=float64)"
    with pytest.raises(errors.CheckpointError, match="different dtypes"):
        Rules("a, b -> c, cast(float64), concat(axis=0)").inverse(held)


def test_the_state_of_an_optimizer_follows(kit):
    held = {"q": arange(4, 3), "k": arange(2, 3), "emb": arange(5, 2)}
    state = {f"opt.m.{n}": a * 2 for n, a in held.items()}
    steps = {f"opt.t.{n}": np.array(7) for n in held}
    rules = Rules(
        "q, k -> qk, concat(axis=0), cast(bfloat16)\nemb -> emb, pad(axis=0, size=6, value=9)\n"
        "@follow opt.m.{}\n@follow opt.t.{}"
    )
    assert Rules(str(rules)) == rules
    got = rules.on_arrays(held | state | steps)
    assert set(got) == {"qk", "emb", "opt.m.qk", "opt.m.emb", "opt.t.qk", "opt.t.emb"}
    assert got["qk"].dtype == ml_dtypes.bfloat16
    assert kit.same(got["opt.m.qk"], np.concatenate([state["opt.m.q"], state["opt.m.k"]]))
    assert (got["opt.m.emb"][5] == 0).all()
    assert kit.same(got["opt.t.qk"], np.array(7))
    with pytest.raises(errors.CheckpointError, match="must agree"):
        rules.on_arrays(held | state | steps | {"opt.t.k": np.array(8)})
    split = Rules("w -> a, b, split(axis=0)", follow="opt.{}.t").on_arrays({"w": arange(4, 1), "opt.w.t": np.array(3)})
    assert kit.same(split["opt.a.t"], split["opt.b.t"])
    back = Rules("q, k -> qk, concat(axis=0)", follow=["opt.m.{}", "opt.t.{}"])
    everything = held | state | steps
    assert all(
        kit.same(back.inverse(everything).on_arrays(back.on_arrays(everything))[n], a) for n, a in everything.items()
    )


def test_many_keys():
    held = {f"layers.{i}.e.{x}.w": np.zeros((), "f4") for i in range(20) for x in range(1000)}
    rules = Rules("layers.{i}.e.{x}.w -> blocks.{i}.{x}\nlayers.{i}.f.{x}.w -> f.{i}.{x}, optional()")
    from meshtape.storage.rules.lazy_tensors import InMemoryTensor
    from meshtape.storage.rules.match import BoundRules

    out = BoundRules(rules.rules, (), {n: InMemoryTensor(n, a) for n, a in held.items()}, {}).outputs()
    assert len(out) == 20_000
    assert list(out)[1002] == "blocks.1.2"


# ----- with files and shardings ---------------------------------------------------------------------------------------


def test_values_in_the_tree_pass_and_can_be_dropped(tmp_path):
    save(tmp_path / "c", {"a": arange(2, 2), "epoch": 3, "opt": {"lr": 0.5}})
    got = load(tmp_path / "c", rules="a -> b\nopt.lr -> _")
    assert sorted(got) == ["b", "epoch"]
    with pytest.raises(errors.RuleConflict, match="is a value"):
        load(tmp_path / "c", rules="epoch -> e")
    nested = load(
        tmp_path / "c", like={"m": [np.zeros((2, 2), "f4")], "epoch": 0, "opt": {"lr": 0.0}}, rules="a -> m.0"
    )
    assert nested["epoch"] == 3
    assert nested["m"][0].shape == (2, 2)


def test_transpose_then_concat_then_shard_three_ways_reads_little(kit, tmp_path):
    host = kit.Host({"x": 3}, processes=3)
    held = {"a": kit.random(np.dtype("f4"), (600, 900)), "b": kit.random(np.dtype("f4"), (600, 300), 1)}
    save(tmp_path / "c", held)
    whole = np.concatenate([held["a"].T, held["b"].T], 0)
    report = LoadReport()
    got = load(
        tmp_path / "c",
        rules="a, b -> c, permute(), concat(axis=0)",
        shardings=lambda path, shape, dtype: kit.Sharding(host, (0,)),
        report=report,
    )
    assert got["c"].whole().tobytes() == whole.tobytes()
    assert report.bytes_needed == whole.nbytes
    assert report.bytes_read < 2 * whole.nbytes


_programs = st.sampled_from(
    [
        "a, b -> c, concat(axis=0)",
        "a, b -> c, concat(axis=1), permute()",
        "a -> c, reshape([2, 3, 8]), permute([2, 0, 1])",
        "a -> c, reshape([-1])\nb -> d, reshape([3, -1]), permute()",
        "a, b -> c, interleave(parts=3, axis=0)",
        "a -> x, y, z, split(axis=0, sizes=[1, 3, 2])",
        "a -> x, y, split(axis=1), permute()\nb -> z, pad(axis=0, size=9)",
        "a, b -> c, cast(float64), concat(axis=0), reshape([4, 24])",
        "a, a2, b -> c, fuse_qkv(heads=2, groups=1), reshape([-1, 2, 8])\n_ -> n, init(shape=[3, 2], dtype=int8, "
        "value=4)",
        "a, b -> c, fuse_ffn(parts=2, axis=1)",
        "a -> $t, permute()\n$t -> c, reshape([24, 2])\nb -> d\nb -> e",
        "a -> c, reshape([16, 3]), permute(), reshape([6, 8])",
    ]
)


@settings(max_examples=60, deadline=None)
@given(_programs, st.integers(0, 2**32 - 1))
def test_apply_then_shard_is_shard_aware_apply_and_the_inverse_leads_back(program, seed):
    rng = np.random.default_rng(seed)
    held = {"a": rng.normal(size=(6, 8)).astype("f4"), "b": rng.normal(size=(6, 8)).astype("f4")}
    if "a2" in program:
        held = {"a": arange(4, 8), "a2": arange(2, 8) + 50, "b": arange(2, 8) + 90}
    rules = Rules(program)
    whole = rules.on_arrays(held)
    back = rules.inverse(held).on_arrays(whole)
    assert set(back) == set(held)
    assert all(back[n].tobytes() == a.tobytes() for n, a in held.items())
    from meshtape.storage.readers.tensor import read_box
    from meshtape.storage.rules.lazy_tensors import InMemoryTensor
    from meshtape.storage.rules.match import BoundRules

    for name, t in (
        BoundRules(rules.rules, (), {n: InMemoryTensor(n, a) for n, a in held.items()}, {}).outputs().items()
    ):
        for _ in range(6):
            lo = [int(rng.integers(0, n + 1)) for n in t.shape]
            hi = [int(rng.integers(a, n + 1)) for a, n in zip(lo, t.shape, strict=True)]
            box = Box(tuple(lo), tuple(b - a for a, b in zip(lo, hi, strict=True)))
            part, _ = read_box(t.only(box), box)
            assert part.tobytes() == np.ascontiguousarray(whole[name][box.slices]).tobytes()


_names = st.text(min_size=1, max_size=8).map(lambda s: s.replace("{", "{{").replace("}", "}}"))
_ints = st.integers(-5, 99)
_sizes = st.lists(st.integers(-1, 50), min_size=1, max_size=3).map(tuple)
_steps = st.one_of(
    st.builds(steps.Concat, _ints),
    st.builds(steps.Split, _ints, st.none() | _sizes, st.none() | _ints),
    st.builds(steps.Permute, st.none() | _sizes),
    st.builds(steps.Reshape, _sizes),
    st.builds(value_steps.Cast, st.sampled_from(["float32", "bfloat16"]), st.sampled_from([None, "float64"])),
    st.builds(value_steps.Pad, _ints, _ints, st.floats(allow_nan=False)),
    st.builds(steps.Slice, _ints, _ints, _ints),
    st.builds(steps.Interleave, _ints, _ints),
    st.builds(steps.Deinterleave, _ints, _ints, _sizes),
    st.builds(steps.FuseQKV, _ints, _ints, _ints),
    st.builds(steps.SplitQKV, _ints, _ints, _ints),
    st.builds(steps.FuseFFN, _ints, _ints),
    st.builds(steps.SplitFFN, _ints, _ints),
    st.builds(value_steps.Init, _sizes, st.just("int8"), _ints),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_names, min_size=1, max_size=3), st.lists(_names, max_size=3), st.lists(_steps, max_size=3), st.booleans()
)
def test_text_and_objects_are_equivalent(sources, targets, steps, optional):
    rule = Rule(sources, targets, *(steps if targets else ()), optional=optional)
    assert Rules(str(rule)).rules == (rule,)


def test_objects_take_one_name_or_several():
    assert Rule("a", ["b", "c"], steps.Split(0)) == Rules("a -> b, c, split(axis=0)").rules[0]
    assert Rules(Rule("a", ())) == Rules("a -> _")
    with pytest.raises(errors.RuleSyntaxError, match="braces"):
        Rule("a{", "b")
    with pytest.raises(errors.RuleSyntaxError, match="template"):
        Rules("a -> b", follow="opt.m")


def test_an_opened_checkpoint_under_rules_reads_when_indexed(kit, tmp_path):
    w = kit.random(np.dtype("f4"), (40, 30))
    save(tmp_path / "c", {"w": w}, step=5)
    view = Rules("w -> v, permute(), reshape([5, 6, 40])").on(open_checkpoint(tmp_path / "c"))
    assert view.step == 5
    assert view["v"].shape == (5, 6, 40)
    assert kit.same(view["v"][2, 1:3], w.T.reshape(5, 6, 40)[2, 1:3])
