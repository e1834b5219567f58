"""A BERT-style encoder (Devlin et al., 2019), and sentence embeddings from it (Reimers and Gurevych, 2019)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...arrays import random
from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import ShapeError
from ...arrays.linalg.matrix_norms import vector_norm
from ...arrays.nn import nn
from ...arrays.ops.creation import ones, zeros
from ...arrays.ops.elementwise import maximum, where
from ...arrays.ops.manipulation import astype, expand_dims
from ...arrays.reductions.reductions import sum as sum_
from ...autodiff import checkpoint
from ...storage import Rules, load, open_checkpoint
from ...storage.checkpoint.checkpoint import Checkpoint
from ...storage.stores.generations import once_more
from . import huggingface
from .layers import (
    Keys,
    Recompute,
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
    split_heads,
)
from .plans import Plan, Stages, block_cuts, constrained, parse, split_blocks

PARAMETERS = {
    "tp": {"*attn.[qkv].weight": 1, "*attn.[qkv].bias": 0, "*attn.o.weight": 0}
    | {"*ffn.up.weight": 1, "*ffn.up.bias": 0, "*ffn.down.weight": 0},
    "vocab": {"embed.word": 0},
}
ACTIVATIONS = {"tp": {"residual": -1}, "sp": {"residual": 1, "region": -1}}


FAMILIES = {
    "bert": huggingface.Family(
        "mt.models.encoder",
        dict.fromkeys(huggingface.SIZES.values(), ...) | {"type_vocab_size": 2, "layer_norm_eps": 1e-12},
        {
            "hidden_act": ("gelu",),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "is_encoder_decoder": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True, False),
            "tie_encoder_decoder": (False,),
        },
    )
}
"""The model types of Hugging Face that are this model, with the defaults of their ``config.json``."""


@dataclass(frozen=True)
class Config:
    """Sizes of an encoder, those of all-MiniLM-L6-v2 by default.

    Parameters
    ----------
    vocab, types, max_length
        Rows of the three embeddings: tokens, segments and places.
    width, layers, heads, ffn
        Length of a token's vector, number of blocks, heads of each, hidden units.
    eps
        Of the layer norms.
    dropout
        Rate behind embedding, attention and feed-forward, in training.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.models.encoder.Config(width=32, heads=4).head_size
    8
    """

    vocab: int = 30522
    width: int = 384
    layers: int = 6
    heads: int = 12
    ffn: int = 1536
    max_length: int = 512
    types: int = 2
    eps: float = 1e-12
    dropout: float = 0.0

    __is_tree__ = False

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "layers", "heads", "ffn", "max_length", "types"):
            if getattr(self, name) < 1:
                raise ShapeError(f"[encoder] {name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ShapeError(f"[encoder] width {self.width} is no multiple of {self.heads} heads")

    @property
    def head_size(self) -> int:
        """Length of a head."""
        return self.width // self.heads

    @classmethod
    def from_huggingface(cls, path: str | Path | Checkpoint) -> Config:
        """From the ``config.json`` of a BERT model, or the open checkpoint that it lies in. Raises
        :class:`UnsupportedModel` where it is of another kind; names each field."""
        c = huggingface.read(path, FAMILIES)
        sizes = {ours: c[theirs] for ours, theirs in huggingface.SIZES.items()}
        return cls(**sizes, types=c["type_vocab_size"], eps=c["layer_norm_eps"])


def init(key: Array, config: Config, *, dtype: Any = np.float32) -> dict[str, Any]:
    """Random parameters: normal with deviation 0.02, biases 0, norms 1. Weights have shape ``(inputs, outputs)``.

    >>> import meshtape as mt
    >>> c = mt.models.encoder.Config(vocab=100, width=32, layers=1, heads=2, ffn=64, max_length=16)
    >>> mt.models.encoder.init(mt.random.key(0), c)["layers"][0]["ffn"]["up"]["weight"].shape
    (32, 64)
    """
    keys = Keys(key)

    def leaf(path: trees.Path, shape: tuple[int, ...]) -> Array:
        if len(shape) == 2:
            return dense(keys(), *shape, 0.02, dtype)
        return (ones if path[-1] == "weight" else zeros)(shape, dtype=dtype)

    return trees.map_with_path(leaf, shapes(config), is_leaf=lambda x: isinstance(x, tuple))


def apply(
    params: Any,
    ids: Any,
    config: Config,
    *,
    mask: Any = None,
    types: Any = None,
    key: Array | None = None,
    plan: Plan | None = None,
    recompute: Recompute = "none",
) -> Array:
    """Vectors of all tokens.

    Parameters
    ----------
    params
        Tree of :func:`init`.
    ids
        Integers of shape ``(batch, sequence)``.
    mask
        Like ``ids``; 0 or false where a token is padding, which no other looks at.
    types
        Segment of each token, like ``ids``; 0 by default.
    key, plan, recompute
        As for the decoder. With dropout the weights of attention are kept, unless ``recompute`` is ``"attention"``.

    Returns
    -------
    Array
        Shape ``(batch, sequence, width)``.
    """
    check_recompute(recompute)
    x = _tokens(params["embed"], ids, config, types, key, plan)
    seen = None if mask is None else _seen(mask, x)
    return _blocks(params["layers"], x, seen, config, 0, key, plan, recompute)


def _tokens(p: Any, ids: Any, c: Config, types: Any, key: Array | None, plan: Plan | None) -> Array:
    ids = check_ids("encoder", ids, c.max_length, p["word"])
    segment = p["type"][0] if types is None else nn.embedding(types, p["type"])
    x = nn.embedding(ids, p["word"]) + p["place"][: ids.shape[1]] + segment
    return constrained(
        plan, maybe_dropout(_norm(x, p["norm"], c), c.dropout, None if key is None else Keys(key)), "residual"
    )


def _seen(mask: Any, x: Array) -> Array:
    """The mask as attention takes it."""
    mask = placed(mask, x)
    if mask.shape != x.shape[:2]:
        raise ShapeError(f"[encoder] the mask {mask.shape} must have the shape of ids {x.shape[:2]}")
    return expand_dims(astype(mask, bool), axis=(1, 2, 3))


def _blocks(
    layers: Any,
    x: Array,
    seen: Array | None,
    c: Config,
    first: int,
    key: Array | None,
    plan: Plan | None,
    recompute: str,
) -> Array:
    """Consecutive blocks, numbered from ``first``."""
    for i, layer in enumerate(layers, first):
        # One key a block, drawn outside it: a block that is computed again draws the same. The first is the
        # embedding's.
        block_key = None if key is None else random.fold_in(key, i + 2)

        def run(layer: Any, x: Array, block_key: Any = block_key) -> Array:
            return _block(layer, x, seen, c, None if block_key is None else Keys(block_key), plan, recompute)

        x = (checkpoint(run) if recompute == "blocks" else run)(layer, x)
    return x


def _linear(x: Array, p: Any) -> Array:
    return linear(x, p["weight"]) + p["bias"]


def _norm(x: Array, p: Any, c: Config) -> Array:
    return nn.layer_norm(x, c.width, p["weight"], p["bias"], eps=c.eps)


def _norm_of_sum(x: Array, y: Array, p: Any, c: Config) -> Array:
    return nn.add_layer_norm(x, y, c.width, p["weight"], p["bias"], eps=c.eps)[0]


def _block(
    p: Any, x: Array, seen: Array | None, c: Config, keys: Keys | None, plan: Plan | None, recompute: str
) -> Array:
    a, f = p["attn"], p["ffn"]
    inside = constrained(plan, x, "region")
    q, k, v = (split_heads(_linear(inside, a[n]), c.heads) for n in ("q", "k", "v"))
    rate = c.dropout if keys is not None else 0.0
    dropout_key = keys() if keys is not None and rate else None
    attend = partial(nn.scaled_dot_product_attention, mask=seen, dropout_rate=rate, dropout_key=dropout_key)
    mixed = (checkpoint(attend) if recompute == "attention" and rate else attend)(q, k, v)
    out = maybe_dropout(_linear(join_heads(mixed), a["o"]), c.dropout, keys)
    x = constrained(plan, _norm_of_sum(x, out, a["norm"], c), "residual")
    out = maybe_dropout(_linear(nn.gelu(_linear(constrained(plan, x, "region"), f["up"])), f["down"]), c.dropout, keys)
    return constrained(plan, _norm_of_sum(x, out, f["norm"], c), "residual")


def embed(
    params: Any,
    ids: Any,
    config: Config,
    *,
    mask: Any = None,
    pooling: Literal["mean", "cls", "last"] = "mean",
    normalize: bool = True,
    **options: Any,
) -> Array:
    """Sentence embeddings: the tokens' vectors pooled, and scaled to length one.

    Parameters
    ----------
    params, ids, config, mask
        As in :func:`apply`, which takes ``options`` too.
    pooling
        ``"mean"`` of the tokens that are no padding, the first (``"cls"``) or the ``"last"`` of them.
    normalize
        Scale to length one; a zero vector stays zero.

    Returns
    -------
    Array
        Shape ``(batch, width)``.

    Examples
    --------
    >>> import meshtape as mt
    >>> c = mt.models.encoder.Config(vocab=100, width=32, layers=1, heads=2, ffn=64, max_length=16)
    >>> p = mt.models.encoder.init(mt.random.key(0), c)
    >>> mt.models.encoder.embed(p, mt.asarray([[5, 6, 7, 0]]), c, mask=mt.asarray([[1, 1, 1, 0]])).shape
    (1, 32)
    """
    x = apply(params, ids, config, mask=mask, **options)
    return unit(pool(x, mask, pooling)) if normalize else pool(x, mask, pooling)


def pool(x: Array, mask: Any, pooling: str = "mean") -> Array:
    """``(batch, sequence, width) -> (batch, width)``; see :func:`embed`. A sentence of nothing but padding gives
    zeros."""
    if pooling not in ("mean", "cls", "last"):
        raise ValueError(f"[encoder] pooling must be 'mean', 'cls' or 'last', got {pooling!r}")
    if pooling == "cls":
        return x[:, 0]
    weights = ones(x.shape[:2], dtype=x.dtype, device=beside(x)) if mask is None else astype(placed(mask, x), x.dtype)
    count = sum_(weights, axis=1, keepdims=True)
    if pooling == "last":
        place = astype(maximum(count - 1, 0), np.int64)
        weights = weights * astype(placed(np.arange(x.shape[1]), x) == place, x.dtype)
        count = sum_(weights, axis=1, keepdims=True)
    return sum_(x * expand_dims(weights, axis=2), axis=1) / where(count == 0, 1.0, count)


def unit(x: Array) -> Array:
    """Rows scaled to length one; zero rows stay zero."""
    length = vector_norm(x, axis=-1, keepdims=True)
    return x / where(length == 0, 1.0, length)


def staged(
    config: Config,
    loss: Callable[[Any, Array, Any, Any], Any],
    *,
    plan: Plan | None = None,
    recompute: Recompute = "none",
    tied: bool = False,
) -> Stages:
    """The stages of an encoder, for the option ``stages`` of ``mt.Trainer``.

    Batches have ``"ids"``, and where they are used ``"mask"`` and ``"types"``, as :func:`apply` takes them. Blocks are
    dealt evenly, the first stages getting one more.

    Parameters
    ----------
    config
        The sizes.
    loss
        ``loss(params, x, batch, key)``: a loss function of the vectors ``x`` of all tokens, ``(batch, sequence,
        width)``. ``params`` has the other branches of the tree than ``"embed"`` and ``"layers"``: the parameters of a
        head.
    plan, recompute
        As :func:`apply` takes them.
    tied
        Whether ``params`` of the loss has ``"embed"`` as well, for a head that uses it.

    Examples
    --------
    >>> import meshtape as mt
    >>> c = mt.models.encoder.Config(vocab=8, width=4, layers=2, heads=1, ffn=4, max_length=4)
    >>> cut = mt.models.encoder.staged(c, lambda p, x, batch, key: mt.mean(mt.square(x)))
    >>> [sorted(part) for part in cut.split(mt.models.encoder.init(mt.random.key(0), c), 2)]
    [['embed', 'layers'], ['layers']]
    """
    check_recompute(recompute)

    def head(params: Any) -> list[str]:
        return [n for n in params if n != "layers" and (tied or n != "embed")]

    def stage(number: int, cuts: list[int]) -> Callable[[Any, Any, Any, Any], Any]:
        def run(params: Any, x: Any, batch: Any, key: Any) -> Any:
            if number == 0:
                x = _tokens(params["embed"], part_of("encoder", batch, "ids"), config, batch.get("types"), key, plan)
                # Stages between see no batch: the mask travels along, as a float, since cotangents travel back.
                mask = batch.get("mask")
                mask = None if mask is None else astype(placed(mask, x), x.dtype)
            else:
                x, mask = x if isinstance(x, tuple) else (x, None)
            seen = None if mask is None else _seen(mask, x)
            x = _blocks(params["layers"], x, seen, config, cuts[number], key, plan, recompute)
            if number < len(cuts) - 2:
                return x if mask is None else (x, mask)
            return loss({n: params[n] for n in head(params)}, x, batch, key)

        return run

    def functions(count: int) -> list[Callable[[Any, Any, Any, Any], Any]]:
        cuts = block_cuts("encoder", config.layers, count)
        return [stage(i, cuts) for i in range(count)]

    def split(params: Any, count: int) -> list[Any]:
        return split_blocks("encoder", params, config.layers, count, head(params))

    return Stages(functions, split)


def plan(name: str | Plan) -> Plan:
    """The plan of that name for an encoder: ``dp``, ``fsdp``, ``tp``, ``sp``, ``vocab`` and ``pp``, joined by ``+``."""
    return parse(name, PARAMETERS, ACTIVATIONS)


def rules(config: Config | None = None) -> Rules:
    """Key rules from the names of Hugging Face's ``BertModel`` to this tree; ``.inverse`` leads back. The pooler is
    dropped.

    They store weights as ``(outputs, inputs)``.
    """
    theirs = {
        "attn.q": "attention.self.query",
        "attn.k": "attention.self.key",
        "attn.v": "attention.self.value",
        "attn.o": "attention.output.dense",
        "ffn.up": "intermediate.dense",
        "ffn.down": "output.dense",
    }
    lines = [
        "embeddings.word_embeddings.weight -> embed.word",
        "embeddings.position_embeddings.weight -> embed.place",
        "embeddings.token_type_embeddings.weight -> embed.type",
        "embeddings.LayerNorm.{n} -> embed.norm.{n}",
        "pooler.{rest*} -> _, optional()",
        "embeddings.position_ids -> _, optional()",
    ]
    for ours, name in theirs.items():
        lines.append(f"encoder.layer.{{i}}.{name}.weight -> layers.{{i}}.{ours}.weight, permute()")
        lines.append(f"encoder.layer.{{i}}.{name}.bias -> layers.{{i}}.{ours}.bias")
    lines.append("encoder.layer.{i}.attention.output.LayerNorm.{n} -> layers.{i}.attn.norm.{n}")
    lines.append("encoder.layer.{i}.output.LayerNorm.{n} -> layers.{i}.ffn.norm.{n}")
    return Rules("\n".join(lines))


@once_more
def from_pretrained(
    directory: str | Path,
    mesh: Any = None,
    plan: str | Plan = "dp",
    *,
    dtype: Any = np.float32,
    allow_overflow: bool = False,
) -> tuple[dict[str, Any], Config]:
    """Parameters and sizes of a BERT model in a Hugging Face directory (``config.json`` and ``model.safetensors``).

    Of a model with a head, whose encoder is named ``bert``, the head is left. With a mesh each rank reads its own
    blocks, as the plan says. ``dtype`` is that of the result; weights that it cannot hold are a `Lossy` unless
    ``allow_overflow``.
    """
    held = open_checkpoint(directory)
    config = Config.from_huggingface(held)
    if any(name.startswith("bert.") for name in held):
        held = held.below("bert")
    like = expected(shapes(config), mesh, parse(plan, PARAMETERS, ACTIVATIONS), dtype)
    return load(held, like=like, rules=rules(config), cast=True, allow_overflow=allow_overflow), config


def shapes(config: Config) -> Any:
    """Shapes of the parameters, in the tree of :func:`init`."""
    c = config

    def linear(inputs: int, outputs: int) -> dict[str, Any]:
        return {"weight": (inputs, outputs), "bias": (outputs,)}

    norm = {"weight": (c.width,), "bias": (c.width,)}
    layer = {
        "attn": {n: linear(c.width, c.width) for n in ("q", "k", "v", "o")} | {"norm": norm},
        "ffn": {"up": linear(c.width, c.ffn), "down": linear(c.ffn, c.width), "norm": norm},
    }
    embed = {"word": (c.vocab, c.width), "place": (c.max_length, c.width), "type": (c.types, c.width), "norm": norm}
    return {"embed": embed, "layers": [layer] * c.layers}
