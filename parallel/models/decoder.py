"""A GPT-style decoder: RoPE, grouped queries, RMSNorm, SwiGLU, tied head; dense or with experts. Llama's
architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays import random
from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import ShapeError
from ...arrays.nn import nn
from ...arrays.ops.creation import asarray, ones
from ...arrays.ops.manipulation import astype, matrix_transpose
from ...arrays.reductions.reductions import sum as sum_
from ...autodiff import checkpoint
from ...storage import load, open_checkpoint
from ...storage.checkpoint.checkpoint import Checkpoint
from ...storage.stores.generations import once_more
from ..transforms.ring_attention import ring_attention
from . import huggingface, moe
from .decoder_families import FAMILIES, rules
from .layers import (
    Keys,
    Recompute,
    RopeScaling,
    beside,
    check_ids,
    check_recompute,
    dense,
    expected,
    join_heads,
    linear,
    maybe_dropout,
    part_of,
    placed,
    residual_std,
    rotary_tables,
    split_heads,
)
from .plans import AXES, Plan, Stages, block_cuts, constrained, parse, split_blocks

PARAMETERS = {
    "tp": {"*attn.[qkv]": 1, "*attn.o": 0, "*ffn.gate": 1, "*ffn.up": 1, "*ffn.down": 0, "*experts.gate": 2}
    | {"*experts.up": 2, "*experts.down": 1},
    "vocab": {"embed": 0, "head": 1},
    "ep": {"*experts.*": 0},
}
ACTIVATIONS = {
    "tp": {"residual": -1},
    "sp": {"residual": 1, "region": -1},
    "cp": {"residual": 1},
    "ep": moe.ACTIVATIONS,
}


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder.

    Parameters
    ----------
    vocab
        Number of tokens.
    width
        Length of a token's vector.
    layers, heads
        Number of blocks, and of query heads in each.
    kv_heads
        Number of key and value heads, a divisor of ``heads``; each serves ``heads / kv_heads`` query heads.
    ffn
        Hidden units of the feed-forward part; by default 8/3 of ``width`` rounded up to a multiple of 32.
    max_length
        Longest sequence.
    theta
        Base of the rotary wave lengths.
    rope
        Scaling of the rotary angles (``mt.models.decoder.RopeScaling``), or None.
    eps
        Of the RMS norms.
    tied
        Whether the head is the transposed embedding.
    dropout
        Rate behind attention and feed-forward, in training.
    experts
        None for a dense decoder, or the ``mt.models.moe.Config`` of every block's feed-forward part.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.models.decoder.Config(vocab=256, width=64, layers=2, heads=4).ffn
    192
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int | None = None
    ffn: int | None = None
    max_length: int = 2048
    theta: float = 10000.0
    rope: RopeScaling | None = None
    eps: float = 1e-5
    tied: bool = True
    dropout: float = 0.0
    experts: moe.Config | None = None

    __is_tree__ = False

    def __post_init__(self) -> None:
        for name, default in (("kv_heads", self.heads), ("ffn", -(-8 * self.width // 96) * 32)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("vocab", "width", "layers", "heads", "kv_heads", "ffn", "max_length"):
            if getattr(self, name) < 1:
                raise ShapeError(f"[decoder] {name} must be at least 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ShapeError(f"[decoder] width {self.width} is no multiple of 2 * heads = {2 * self.heads}")
        if self.heads % self.kv_heads:
            raise ShapeError(f"[decoder] {self.heads} heads cannot share {self.kv_heads} key and value heads evenly")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"[decoder] dropout must be from 0 to below 1, got {self.dropout}")

    @property
    def head_size(self) -> int:
        """Length of a head."""
        return self.width // self.heads

    @classmethod
    def from_huggingface(cls, path: str | Path | Checkpoint, *, max_length: int | None = None) -> Config:
        """From the ``config.json`` of a Llama, Mistral or Mixtral model.

        Parameters
        ----------
        path
            Of the file; or an open checkpoint that has one beside its arrays.
        max_length
            The longest sequence, where it is to be less than the model's: no longer than Mistral's sliding window, for
            example.

        Raises
        ------
        UnsupportedModel
            Where the model is of another kind, or has features that this one lacks; names each field.
        """
        c = huggingface.read(path, FAMILIES, max_length=max_length)
        kv_heads, experts = c["num_key_value_heads"], None
        if "num_local_experts" in c:
            experts = moe.Config(c["num_local_experts"], c["num_experts_per_tok"], capacity_factor=None)
        return cls(
            **{ours: c[theirs] for ours, theirs in huggingface.SIZES.items()},
            kv_heads=kv_heads,
            theta=float(c["rope_theta"]),
            rope=c["rope"],
            eps=c["rms_norm_eps"],
            tied=c["tie_word_embeddings"],
            experts=experts,
        )


def init(key: Array, config: Config, *, dtype: Any = np.float32) -> dict[str, Any]:
    """Random parameters, as GPT-2 starts them: normal with deviation 0.02, smaller where a layer adds to the residual.

    Weights have shape ``(inputs, outputs)``. The numbers are a function of the key alone.

    >>> import meshtape as mt
    >>> c = mt.models.decoder.Config(vocab=256, width=64, layers=2, heads=4, kv_heads=2)
    >>> p = mt.models.decoder.init(mt.random.key(0), c)
    >>> p["layers"][0]["attn"]["k"].shape, sum(x.size for x in mt.tree.flatten(p)[0])
    ((64, 32), 115008)
    """
    keys, small = Keys(key), residual_std(config.layers)

    def leaf(path: trees.Path, x: Any) -> Any:
        if isinstance(x, dict):
            assert config.experts is not None
            return moe.init(keys(), config.experts, config.width, config.ffn, out_std=small, dtype=dtype)
        if len(x) == 1:
            return ones(x, dtype=dtype)
        return dense(keys(), *x, small if path[-1] in ("o", "down") else 0.02, dtype)

    return trees.map_with_path(leaf, shapes(config), is_leaf=lambda x: isinstance(x, tuple) or "router" in x)


def apply(
    params: Any,
    ids: Any,
    config: Config,
    *,
    key: Array | None = None,
    plan: Plan | None = None,
    recompute: Recompute = "none",
    with_aux: bool = False,
) -> Any:
    """Logits of the next token at every place.

    Parameters
    ----------
    params
        Tree of :func:`init`; its dtype is that of the computation (norms and attention weights are kept in float32).
    ids
        Integers of shape ``(batch, sequence)``.
    config
        The sizes.
    key
        For dropout; without it nothing is dropped.
    plan
        The plan by which the arrays lie on their mesh (:func:`plan`); it moves activations. Not needed off a mesh.
    recompute
        What the backward pass computes again instead of keeping it (Chen et al., 2016): ``"none"``; ``"blocks"``, all
        but the input of each block. ``"attention"`` is ``"none"``: scores and weights of attention are never kept.
    with_aux
        Also give the balance loss of the experts (0 for a dense decoder).

    Returns
    -------
    Array
        Shape ``(batch, sequence, vocab)``; with ``with_aux`` a pair.

    Examples
    --------
    >>> import meshtape as mt
    >>> c = mt.models.decoder.Config(vocab=256, width=32, layers=1, heads=2)
    >>> p = mt.models.decoder.init(mt.random.key(0), c)
    >>> mt.models.decoder.apply(p, mt.asarray([[1, 2, 3]]), c).shape
    (1, 3, 256)
    """
    ids = check_ids("decoder", ids, config.max_length, params["embed"])
    x = embed(params, ids, config, key=key, plan=plan)
    x, aux = blocks(params["layers"], x, config, first=0, key=key, plan=plan, recompute=recompute)
    logits = project(params, x, config, plan=plan)
    return (logits, aux) if with_aux else logits


def embed(params: Any, ids: Array, config: Config, *, key: Array | None = None, plan: Plan | None = None) -> Array:
    """The first stage: vectors of tokens ``(batch, sequence, width)``."""
    return constrained(plan, nn.embedding(ids, params["embed"]), "residual")


def blocks(
    layers: Any,
    x: Array,
    config: Config,
    *,
    first: int = 0,
    key: Array | None = None,
    plan: Plan | None = None,
    recompute: Recompute = "none",
) -> tuple[Array, Array]:
    """A run of blocks, of which the first has the number ``first``; and the sum of their balance losses."""
    check_recompute(recompute)
    aux = asarray(np.float32(0), device=beside(x))
    tables = rotary_tables(np.arange(x.shape[1]), config.head_size, config.theta, config.rope, beside(x))
    for i, layer in enumerate(layers):
        block_key = None if key is None else random.fold_in(key, first + i)

        def run(layer: Any, x: Array, block_key: Any = block_key) -> Any:
            return _block(layer, x, config, tables, block_key, plan)

        x, loss = (checkpoint(run) if recompute == "blocks" else run)(layer, x)
        aux = aux if loss is None else aux + loss
    return x, aux


def project(params: Any, x: Array, config: Config, *, plan: Plan | None = None) -> Array:
    """The last stage: norm and head, to logits."""
    return linear(*_head(params, x, config, plan))


def _head(params: Any, x: Array, config: Config, plan: Plan | None) -> tuple[Array, Array]:
    x = constrained(plan, nn.rms_norm(x, config.width, params["norm"], eps=config.eps), "region")
    return x, matrix_transpose(params["embed"]) if config.tied else params["head"]


def _block(
    p: Any,
    x: Array,
    c: Config,
    tables: tuple[Array, Array],
    key: Array | None,
    plan: Plan | None,
) -> tuple[Array, Any]:
    keys = None if key is None else Keys(key)
    h = constrained(plan, nn.rms_norm(x, c.width, p["attn_norm"], eps=c.eps), "region")
    attended = _attention(p["attn"], h, c, tables, plan)
    attended = constrained(plan, maybe_dropout(attended, c.dropout, keys), "residual")
    h, x = nn.add_rms_norm(x, attended, c.width, p["ffn_norm"], eps=c.eps)
    h = constrained(plan, h, "region")
    aux = None
    if c.experts is None:
        f = p["ffn"]
        out = linear(nn.swiglu(linear(h, f["gate"]), linear(h, f["up"])), f["down"])
    else:
        out, aux = moe.apply(p["ffn"], h, c.experts, plan=plan)
    return x + constrained(plan, maybe_dropout(out, c.dropout, keys), "residual"), aux


def _attention(p: Any, h: Array, c: Config, tables: tuple[Array, Array], plan: Plan | None) -> Array:
    # Queries as (b, kv_heads, group, s, d): keys and values of one head serve its group by broadcasting.
    q = nn.rotary_embedding(split_heads(linear(h, p["q"]), c.kv_heads, c.heads // c.kv_heads), *tables)
    k = nn.rotary_embedding(split_heads(linear(h, p["k"]), c.kv_heads), *tables)
    v = split_heads(linear(h, p["v"]), c.kv_heads)
    here = q.sharding
    if plan is not None and "cp" in plan.parts and here is not None and AXES["cp"] in here.mesh.names:
        out = ring_attention(q, k, v, axis=AXES["cp"], is_causal=True)
    else:
        out = nn.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(join_heads(out), p["o"])


def loss(
    params: Any,
    batch: Any,
    config: Config,
    *,
    key: Array | None = None,
    plan: Plan | None = None,
    recompute: Recompute = "none",
) -> tuple[Array, Array]:
    """Sum of the next-token losses in nats, and the number of tokens that count, as ``mt.Trainer`` takes them.

    ``batch`` has ``"ids"`` and ``"labels"``, integers of one shape ``(batch, sequence)``; places labelled -100 do not
    count. With experts their balance loss, times ``experts.aux_weight`` and the number of tokens, is in the sum.
    """
    ids, labels = (part_of("decoder", batch, part) for part in ("ids", "labels"))
    ids = check_ids("decoder", ids, config.max_length, params["embed"])
    x = embed(params, ids, config, key=key, plan=plan)
    x, aux = blocks(params["layers"], x, config, key=key, plan=plan, recompute=recompute)
    return _balanced(*_token_loss(params, x, labels, config, plan), aux, config)


def _balanced(total: Array, weight: Array, aux: Any, config: Config) -> tuple[Array, Array]:
    """The loss with the balance loss of the experts, if there are any."""
    return (total if config.experts is None else total + config.experts.aux_weight * aux * weight), weight


def _token_loss(params: Any, x: Array, labels: Any, config: Config, plan: Plan | None) -> tuple[Array, Array]:
    labels = placed(labels, x)
    total = nn.linear_cross_entropy(*_head(params, x, config, plan), labels, reduction="sum", ignore_index=-100)
    return total, sum_(astype(labels != -100, total.dtype))


def stages(
    config: Config, count: int, *, plan: Plan | None = None, recompute: Recompute = "none"
) -> list[Callable[[Any, Any, Any, Any], Any]]:
    """The decoder cut into stages of a pipeline, for ``mt.training.Pipeline``; the last gives total and weight of the
    loss.

    Blocks are dealt evenly, the first stages getting one more. With experts the sum of their balance losses travels
    along.
    """
    cuts = block_cuts("decoder", config.layers, count)

    def stage(number: int) -> Callable[[Any, Any, Any, Any], Any]:
        def run(params: Any, x: Any, batch: Any, key: Any) -> Any:
            before: Any = 0.0
            if number == 0:
                ids = check_ids("decoder", part_of("decoder", batch, "ids"), config.max_length, params["embed"])
                x = embed(params, ids, config, key=key, plan=plan)
            elif config.experts is not None:
                x, before = x
            x, aux = blocks(params["layers"], x, config, first=cuts[number], key=key, plan=plan, recompute=recompute)
            aux = before + aux
            if number < count - 1:
                return x if config.experts is None else (x, aux)
            labels = part_of("decoder", batch, "labels")
            return _balanced(*_token_loss(params, x, labels, config, plan), aux, config)

        return run

    return [stage(i) for i in range(count)]


def split_stages(params: Any, config: Config, count: int) -> tuple[list[Any], list[Any]]:
    """Parameters of the stages, and which are tied (the embedding, where the head is its transpose), for
    ``mt.training.Pipeline``."""
    out = split_blocks("decoder", params, config.layers, count, ("norm", "embed" if config.tied else "head"))
    return out, [((0, "embed"), (count - 1, "embed"))] if config.tied and count > 1 else []


def staged(config: Config, *, plan: Plan | None = None, recompute: Recompute = "none") -> Stages:
    """The stages of a decoder, for the option ``stages`` of ``mt.Trainer`` and a plan with ``pp``.

    Parameters
    ----------
    config
        The sizes.
    plan, recompute
        As :func:`apply` takes them, within a stage.
    """
    return Stages(
        lambda count: stages(config, count, plan=plan, recompute=recompute),
        lambda params, count: split_stages(params, config, count)[0],
    )


def generate(params: Any, ids: Any, config: Config, steps: int) -> Array:
    """``ids`` continued by the likeliest token, ``steps`` times. The whole sequence is computed anew for each."""
    ids = np.asarray(check_ids("decoder.generate", ids, config.max_length, params["embed"]))
    for _ in range(steps):
        logits = np.asarray(apply(params, ids, config)[:, -1])
        ids = np.concatenate([ids, logits.argmax(axis=-1)[:, None].astype(ids.dtype)], axis=1)
    return placed(ids, params["embed"])


def plan(name: str | Plan) -> Plan:
    """The plan of that name for a decoder: ``dp``, ``fsdp``, ``tp``, ``sp``, ``vocab``, ``cp``, ``ep`` and ``pp``,
    joined by ``+``.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2, "model": 2})
    >>> mt.models.decoder.plan("dp+tp").sharding("layers.0.attn.o", (8, 8), mesh)
    Sharding(data=Replicate(), model=Shard(0))
    """
    return parse(name, PARAMETERS, ACTIVATIONS)


def shapes(config: Config) -> Any:
    """Shapes of the parameters, in the tree of :func:`init`."""
    c = config
    up, down = (c.width, c.ffn), (c.ffn, c.width)
    ffn: dict[str, Any] = {"gate": up, "up": up, "down": down}
    if c.experts is not None:
        n = c.experts.experts
        ffn = {"router": (c.width, n), "experts": {name: (n, *shape) for name, shape in ffn.items()}}
    kv = (c.width, c.kv_heads * c.head_size)
    attn = {"q": (c.width, c.width), "k": kv, "v": kv, "o": (c.width, c.width)}
    layer = {"attn_norm": (c.width,), "attn": attn, "ffn_norm": (c.width,), "ffn": ffn}
    whole: dict[str, Any] = {"embed": (c.vocab, c.width), "layers": [layer] * c.layers, "norm": (c.width,)}
    return whole if c.tied else whole | {"head": (c.width, c.vocab)}


@once_more
def from_pretrained(
    directory: str | Path,
    mesh: Any = None,
    plan: str | Plan = "dp",
    *,
    dtype: Any = np.float32,
    allow_overflow: bool = False,
    max_length: int | None = None,
) -> tuple[dict[str, Any], Config]:
    """Parameters and sizes of a Llama, Mistral or Mixtral model in a Hugging Face directory (``config.json`` and
    safetensors).

    With a mesh each rank reads its own blocks, as the plan says. ``dtype`` is that of the result; weights that it
    cannot hold are a `Lossy` unless ``allow_overflow``. See also :meth:`Config.from_huggingface`.
    """
    held = open_checkpoint(directory)
    config = Config.from_huggingface(held, max_length=max_length)
    like = expected(shapes(config), mesh, parse(plan, PARAMETERS, ACTIVATIONS), dtype)
    return load(held, like=like, rules=rules(config), cast=True, allow_overflow=allow_overflow), config
