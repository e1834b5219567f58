"""The functions that make virtual checkpoints. Each opens its parents, checks them, and reads no array."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ...arrays.core.errors import CheckpointError, CheckpointKeyError, CorruptCheckpoint, NotACheckpoint
from ...arrays.core.formatting import some
from ..base import strict_json
from ..base.names import patterns_of
from ..checkpoint import branches, numbered
from ..checkpoint.checkpoint import Checkpoint
from ..format import dtypes
from ..loading import runs
from ..rules.rules import Rules
from ..stores import store
from ..transform.model_config import config_of
from . import adapters
from . import expressions as ex
from .document import Opening, build, loads, read_document
from .identity import identity_of

Source = str | os.PathLike[str] | Checkpoint
Integers = Literal["equal", "first", "last"]
_CONFIG = "adapter_config.json"
_PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?")  # patterns of modules that are names, so that none takes for ever
_OTHERS = (
    *(f"use_{method}" for method in ("dora", "qalora", "bdlora")),
    *("layer_replication", "alora_invocation_tokens", "target_parameters"),
    *(f"{method}_config" for method in ("arrow", "kasa", "monteclora", "velora")),
)
"""Members of a configuration with which the weights of an adapter mean something else than plain LoRA."""
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")  # of factors beside a base that stays as it is


class Sources:
    """The operands of an expression: nodes, and the checkpoints behind them."""

    def __init__(self) -> None:
        self.parents: dict[ex.Parent, Checkpoint] = {}
        self._opening = Opening()

    def add(self, source: Source) -> Any:
        """The node of a path, or of an open checkpoint: a virtual one without a document gives its expression."""
        where = source.path if isinstance(source, Checkpoint) else store.location(source)
        ckpt = source if isinstance(source, Checkpoint) else self._opening.open(where)
        if not ckpt.whole:
            raise CheckpointError(
                f"{ckpt.path} is a part of a checkpoint, or was made of one by rules; give the whole, and "
                "virtual.with_rules"
            )
        if ckpt.computed is not None and not ckpt.computed.identity:
            self.parents |= ckpt.computed.parents
            return ckpt.computed.expression
        if isinstance(source, Checkpoint) and ckpt.manifest is None:
            # With its checksums, which one that was opened without them lacks, and with parents that others share.
            ckpt.generation.check()
            ckpt = self._opening.open(where)
        own = self._opening.opened.get(where) is ckpt
        parent = ex.Parent(where, self._opening.identity_of(where) if own else identity_of(ckpt))
        self.parents[parent] = ckpt
        return parent

    def build(self, node: ex.Node) -> Checkpoint:
        """The checkpoint of an expression of these operands."""
        return build(node, self.parents, self._opening.known)


def _made(kind: type[ex.Node], sources: Iterable[Source], **params: Any) -> Checkpoint:
    held = Sources()
    return held.build(kind(tuple(held.add(s) for s in sources), **params))


def _several(sources: Any, what: str) -> list[Source]:
    if isinstance(sources, (str, os.PathLike, Checkpoint)) or not isinstance(sources, Iterable):
        raise CheckpointError(f"{what} takes a list of checkpoints, got {sources!r:.80}")
    return list(sources)


def mean(
    parents: str | os.PathLike[str] | Iterable[Source],
    *,
    steps: Iterable[int] | None = None,
    integers: Integers = "equal",
) -> Checkpoint:
    """The mean of checkpoints: their sum over their number.

    Parameters
    ----------
    parents
        Paths, URLs or open checkpoints, virtual ones too, with the same names, shapes and dtypes. Structure, values
        that are no arrays, metadata and documents are those of the first; the step is theirs where all have one. Or
        the directory of a run, as in `ema`.
    steps
        Steps of the run to take, as in `ema`.
    integers
        As in `weighted_sum`.

    Returns
    -------
    Checkpoint
        Virtual: its arrays are computed, box by box, when they are read. ``write`` keeps it as a document.

    Raises
    ------
    CheckpointKeyError, CheckpointShapeError, CheckpointDTypeError
        The parents do not fit each other; the message lists all.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from meshtape.storage import save
    >>> home = tempfile.mkdtemp()
    >>> steps = [save(os.path.join(home, str(i)), {"w": np.full(2, float(i))}).path for i in (1, 2, 6)]
    >>> mean(steps)["w"][...]
    array([3., 3.])
    """
    held = _steps(parents, steps, "mean")
    if not held:
        raise CheckpointError("mean takes one checkpoint or more, got none")
    return weighted_sum(held, [1.0] * len(held), normalize=True, integers=integers)


def weighted_sum(
    parents: Iterable[Source], weights: Sequence[float], *, normalize: bool = False, integers: Integers = "equal"
) -> Checkpoint:
    """``w0 * x0 + w1 * x1 + …`` of checkpoints, in their order; with ``normalize`` over the sum of the weights.

    Sums are taken in float32 (float64 for float64 arrays) and cast to the dtype of the array. Of integers and booleans,
    such as counts of steps, there are no sums: by ``integers`` they must be ``"equal"`` in all parents, else reading
    them is an error; or they are those of the ``"first"`` or the ``"last"`` parent.

    Raises
    ------
    CheckpointError
        There are not as many weights as parents, or they sum to 0 and ``normalize`` is true.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from meshtape.storage import save
    >>> home = tempfile.mkdtemp()
    >>> steps = [save(os.path.join(home, str(i)), {"w": np.full(2, float(i))}).path for i in (1, 3)]
    >>> weighted_sum(steps, [1, 3], normalize=True)["w"][...]
    array([2.5, 2.5])
    """
    weights = list(weights) if isinstance(weights, Iterable) else weights
    return _made(ex.Sum, _several(parents, "weighted_sum"), weights=weights, normalize=normalize, integers=integers)


def ema(
    run: str | os.PathLike[str] | Iterable[Source],
    *,
    decay: float,
    steps: Iterable[int] | None = None,
    integers: Integers = "equal",
) -> Checkpoint:
    """The exponential moving average over checkpoints, oldest first: ``m = decay * m + (1 - decay) * x``, from the
    first on.

    Parameters
    ----------
    run
        A directory of a `CheckpointManager`, of which the current branch counts, or of numbered checkpoints that
        another program wrote (``checkpoint-500``, ``step-100``, ``100``); or a list of checkpoints.
    decay
        From 0 (the last alone) to 1 (the first alone).
    steps
        Steps of the run to take, each once, the oldest first however they are given; a list of checkpoints has any
        order. By default all that are there now and can be read; a warning names each of the others. Later ones do not
        join.
    integers
        As in `weighted_sum`; the last is the newest.

    Returns
    -------
    Checkpoint
        Virtual, with step, structure, values, metadata and documents of the last.
    """
    sources = _steps(run, steps, "ema")
    return _made(ex.Ema, sources, decay=decay, integers=integers)


def _steps(run: Any, steps: Any, what: str) -> list[Source]:
    """The checkpoints of a run's directory, by step, or those of a list."""
    if not isinstance(run, (str, os.PathLike)):
        if steps is not None:
            raise CheckpointError(f"{what} takes steps= of a run's directory; of a list, leave out what is not wanted")
        return _several(run, what)
    directory = store.location(run)
    if not isinstance(steps, Iterable | None):
        raise CheckpointError(f"steps of {what} is a list of whole numbers, got {steps!r:.80}")
    found = runs.steps_of(directory, warn=steps is None)
    line = {s.step: s.path for s in branches.current(directory, found).line(found)}
    wanted = sorted(line if steps is None else map(ex.index, steps))
    if twice := [s for s, n in Counter(wanted).items() if n > 1]:
        raise CheckpointError(f"steps of {what} has {some(twice, 3)} twice; a list of checkpoints may")
    if not line:
        there = store.at(directory)
        named = list(filter(numbered.series, there.folders() if there.lists else []))
        told = f", which {some(named, 3)} are not" if named else ""
        if broken := [f"{path}: {why}" for path, why in numbered.survey(directory)[1].items()]:
            told = f" that can be opened ({some(broken, 2)})"
        raise CheckpointKeyError(
            f"{directory} is no run: it holds no steps of a CheckpointManager{told}; give one, or a list of checkpoints"
        )
    if lost := [s for s in wanted if s not in line]:
        raise CheckpointKeyError(f"{directory} has no step {lost}; it has {list(line)[:20]}")
    return [line[s] for s in wanted]


def difference(a: Source, b: Source, *, integers: Integers = "equal") -> Checkpoint:
    """``a - b``, array by array: the task vector of a fine-tuned ``a`` whose base is ``b``. ``integers`` is as in
    `weighted_sum`."""
    return _made(ex.Difference, [a, b], integers=integers)


def add(base: Source, delta: Source, scale: float = 1.0, *, integers: Integers = "equal") -> Checkpoint:
    """``base + scale * delta``, in the dtypes of the base; those of the delta may be other floating ones. ``integers``
    is as in `weighted_sum`."""
    return _made(ex.Add, [base, delta], scale=scale, integers=integers)


def lora(base: Source, adapter: Source, scale: float = 1.0) -> Checkpoint:
    """A base with an adapter of PEFT applied: ``W + scale * (alpha / r) * B @ A``, with ``alpha / √r`` for rslora.

    Parameters
    ----------
    base
        The model. Its weights are called as in the adapter, with ``.weight`` at their end or without.
    adapter
        The directory of the adapter, with ``adapter_config.json`` (``r``, ``lora_alpha``, ``use_rslora``,
        ``rank_pattern``, ``alpha_pattern``, ``fan_in_fan_out``), or a virtual adapter, such as the `mean` of a run.
        What its configuration says is kept in the expression.
    scale
        A further factor.

    Raises
    ------
    CheckpointKeyError
        Keys of the adapter have no counterpart, or factors do not fit their weight; lists all.
    CheckpointError
        The configuration is missing, malformed, or of another method (DoRA, QALoRA, aLoRA, …).
    """
    held = Sources()
    nodes = held.add(base), held.add(adapter)
    ckpt = held.parents[nodes[1]] if isinstance(nodes[1], ex.Parent) else held.build(nodes[1])
    if ckpt.computed is None:
        where = adapter.path if isinstance(adapter, Checkpoint) else store.location(adapter)
        config = _checked(
            store.join(where, _CONFIG), lambda: strict_json.loads(store.at(where).get(_CONFIG), unique=True)
        )
    elif not math.isclose(ex.weight_of(ckpt.computed.expression), 1, abs_tol=1e-6):
        raise CheckpointError(f"{ckpt.path} is a difference of adapters, and none itself before it is added to one")
    elif said := config_of(ckpt.documents, _CONFIG):
        config = _checked(f"the {_CONFIG} of {ckpt.path}", lambda: said)
    else:
        raise CheckpointError(f"{ckpt.path} has no {_CONFIG}, which says the rank and alpha of an adapter")
    modules = {m[1]: ckpt[n].shape for n in ckpt if (m := adapters.ADAPTER.match(n)) and m[3] == "A"}
    default = _factor(config, "", config["r"])
    factors = {m: _factor_of(config, m, int(shape[0])) for m, shape in modules.items() if shape}
    own = [(m, f) for m, f in sorted(factors.items()) if f != default]
    params = {"factor": default, "factors": own, "transposed": bool(config.get("fan_in_fan_out"))}
    tokens = config.get("trainable_token_indices") or {}
    params["tokens"] = list((tokens if isinstance(tokens, dict) else {"": tokens}).items())
    params["copies"] = list(config["modules_to_save"] or ()) if "modules_to_save" in config else None
    return held.build(adapters.Lora(nodes, scale, **params))


def _checked(file: str, read: Callable[[], Any]) -> dict[str, Any]:
    """The configuration of an adapter; a typed error that begins with ``file`` for one that is none."""
    try:
        config = read()
        if not isinstance(config, dict):
            raise TypeError("it is no object")
        if other := [k for k in _OTHERS if config.get(k)] or config.get("peft_type", "LORA") != "LORA":
            said = other if other is not True else config["peft_type"]
            raise CheckpointError(f"{file}: only plain LoRA is applied, and it says {said}")
        for key in ("r", "lora_alpha"):
            said = config.get(key)
            if isinstance(said, bool) or not isinstance(said, (int, float)) or not math.isfinite(said):
                raise ValueError(f"{key} is {said!r:.40}, and no finite number")
        if config["r"] <= 0:
            raise ValueError(f"r is {config['r']!r:.40}, and not positive")
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern, value in (config.get(key) or {}).items():
                if not _PLAIN.fullmatch(pattern):
                    raise CheckpointError(
                        f"{file}: {key} has the pattern {pattern!r:.80}; only names of modules are understood: let "
                        "PEFT merge this one (merge_and_unload)"
                    )
                ex.number(value)
        tokens, copies = (config.get(k) or [] for k in ("trainable_token_indices", "modules_to_save"))
        lists = {"modules_to_save": [copies]}
        lists["trainable_token_indices"] = list(tokens.values()) if isinstance(tokens, dict) else [tokens]
        for key, held in lists.items():
            if not all(isinstance(x, list) for x in held):
                raise ValueError(f"{key} is {config[key]!r:.40}, and no list")
    except CheckpointError:  # which is a ValueError
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{store.split(file)[0]} is no adapter of PEFT, which is a directory with {_CONFIG} beside its factors"
        ) from None
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptCheckpoint(f"{file}: {e}") from None
    if (begun := config.get("init_lora_weights")) not in _BEGINNINGS:
        raise CheckpointError(
            f"{file}: its factors began as {begun!r:.40}, beside another base than the one that is stored; let PEFT "
            "convert it to plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    return config


def _factor(config: Mapping[str, Any], module: str, rank: float) -> float:
    """The factor of a module's product; that of most modules for an empty name, which no pattern fits."""
    alpha = _said(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _factor_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The same for a module of the adapter, whose rank must be the one that the configuration says."""
    said = _said(config.get("rank_pattern") or {}, module, config["r"])
    if said != rank:
        raise CheckpointError(f"the factors of {module!r} have rank {rank}, and adapter_config.json says {said}")
    return _factor(config, module, rank)


def _said(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that fits a module, as PEFT finds it."""
    return next((float(v) for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), float(default))


def repin(document: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint of a document whose parents are others than it says, with those that are there now.

    For parents without checksums, which are known by lengths and times: a copy of them counts as another. Whether they
    are the same is the caller's word. `write` it with ``overwrite=True`` to pin them.
    """
    where = store.location(document)
    try:
        node = loads(read_document(where), where)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NotACheckpoint(f"{where} is no file of a document") from None
    held = Sources()
    known = {p: held.add(p.path) for p in dict.fromkeys(ex.parents_of(node))}

    def again(x: Any) -> Any:
        return known[x] if isinstance(x, ex.Parent) else replace(x, of=tuple(map(again, x.of)))

    return held.build(again(node))


def cast(parent: Source, dtype: Any) -> Checkpoint:
    """Floating arrays in another floating dtype. Values that it cannot hold are an error when they are read, as in
    `convert`."""
    return _made(ex.Cast, [parent], dtype=dtypes.name_of(dtype))


def quantize(parent: Source, *, bits: int = 8, keys: Iterable[str] = ("*",)) -> Checkpoint:
    """Floating arrays as 8 or 4 bit integers with a scale for each row: what `quantize` makes of a tree, which
    `dequantize` restores."""
    return _made(ex.Quantize, [parent], bits=bits, keys=patterns_of(keys))


def with_rules(parent: Source, rules: Any) -> Checkpoint:
    """What key rules (`Rules`, or their text) make of a checkpoint: other names, layouts, dtypes, sizes. It is flat, as
    of `load`."""
    return _made(ex.KeyRules, [parent], rules=str(Rules(rules)))


def rows(parent: Source, ranges: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Parts of arrays, such as the first 32,000 rows of a vocabulary.

    Parameters
    ----------
    parent
        The checkpoint.
    ranges
        Names or patterns, each with ``(start, stop)`` of rows, or ``(start, stop, axis)``. Arrays that none matches
        stay whole.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from meshtape.storage import save
    >>> tree = {"embed": np.arange(6.0).reshape(3, 2), "bias": np.ones(3)}
    >>> base = save(os.path.join(tempfile.mkdtemp(), "c"), tree).path
    >>> rows(base, {"embed": (1, 3)})["embed"][...].tolist()
    [[2.0, 3.0], [4.0, 5.0]]
    """
    try:
        held = [(pattern, *(axis or [0]), start, stop) for pattern, (start, stop, *axis) in ranges.items()]
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError("rows are given as {pattern: (start, stop)} or {pattern: (start, stop, axis)}") from None
    return _made(ex.Rows, [parent], ranges=held)
