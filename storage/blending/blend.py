"""`blend`: models merged as a configuration says, streaming; and `blended`, the same as a virtual checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Unpack

from ...arrays.core.errors import CheckpointError, NotACheckpoint
from ...arrays.core.formatting import count
from ..base.names import dropped, taken
from ..checkpoint.checkpoint import Checkpoint, flat
from ..format import dtypes
from ..format.documents import Documents, untied, with_dtype
from ..stores import store
from ..transform.convert import ConvertReport, TransformOptions, convert
from ..transform.model_config import following, untrue
from ..transform.tokenizer import FILES, TEMPLATE, renumbered
from ..virtual import expressions as ex
from ..virtual.derive import Integers, Sources, lora
from .config import BlendConfig, read_config
from .plan import BlendedArray, Planner, parameters_of

CONFIG = "mergekit_config.yml"  # the name under which readers of merged models look for the configuration


@dataclass(frozen=True)
class BlendReport(ConvertReport):
    """Report of a blend: the fields of a conversion's report, and how each array was made.

    >>> made = {"w": BlendedArray("linear", ("a: w", "b: w"), {"normalize": True})}
    >>> report = BlendReport("out", 1, [], 8, 8, 0, made=made)
    >>> print(report.table())
    w: linear(normalize=True) of a: w; b: w
    """

    made: dict[str, BlendedArray] = field(default_factory=dict)

    def table(self) -> str:
        """A line for each array: its method, parameters and sources."""
        return "\n".join(parameters_of(self.made))


def blended(
    config: str | os.PathLike[str] | Mapping[str, Any],
    seed: int = 0,
    *,
    keys: Iterable[str] | None = None,
    drop: Iterable[str] | None = None,
    integers: Integers = "equal",
) -> Checkpoint:
    """The checkpoint that a configuration describes, computed box by box when it is read.

    Parameters
    ----------
    config
        A configuration of mergekit: the path of its YAML, its text, or a dict.
    seed
        Of the random numbers of ``dare`` and ``della``. They are a function of it, of the array's name, of the number
        of the model and of the place of the element, so that they depend neither on workers nor on order.
    keys, drop
        Names or patterns of the arrays to take and to leave out; what is left out is not compared.
    integers
        Whose integers and booleans are taken, of which there are no sums: they must be ``"equal"`` in all models, or
        are those of the ``"first"`` or the ``"last"`` that the configuration lists; a base that is not listed is the
        first.

    Returns
    -------
    Checkpoint

    Raises
    ------
    CheckpointError
        The configuration is wrong, or the models do not fit each other: one error lists everything.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from meshtape.storage import save_safetensors
    >>> home = tempfile.mkdtemp()
    >>> for name, x in (("a", 1.0), ("b", 3.0)):
    ...     _ = save_safetensors(f"{home}/{name}.safetensors", {"w": np.full(2, x, np.float32)})
    >>> models = [{"model": f"{home}/{n}.safetensors", "parameters": {"weight": 1}} for n in "ab"]
    >>> blended({"merge_method": "linear", "models": models})["w"][:]
    array([2., 2.], dtype=float32)
    """
    return _blended(read_config(config), seed, keys, drop, integers)[0]


@dataclass(frozen=True)
class Blend(ex.Node):
    """The models of a configuration, blended. Operands are its models in the order of `BlendConfig.models`, whatever it
    calls them."""

    config: Mapping[str, Any]
    seed: int
    keys: tuple[str, ...] | None
    drop: tuple[str, ...]
    integers: str
    parsed: BlendConfig | None = field(default=None, compare=False)  # with the text of a file
    plans: list[Planner] = field(default_factory=list, compare=False, repr=False)  # of `apply`

    kind = "blend"
    operands = (1, ex.MOST_READS)
    params: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "config": lambda x: x,
        "seed": lambda x: x,
        "keys": lambda x: None if x is None else ex.texts(x),
        "drop": ex.texts,
        "integers": ex.choice,
    }

    def check(self) -> None:
        if not isinstance(self.config, Mapping) or type(self.seed) is not int:
            raise CheckpointError(
                f"config is a mapping and seed a whole number, got {self.config!r:.40} and {self.seed!r:.40}"
            )
        parsed = self.parsed or read_config(self.config)
        if len(parsed.models) != len(self.of):
            raise CheckpointError(f"the configuration names {count(len(parsed.models), 'model')}, got {len(self.of)}")
        if len(parsed.slices) > ex.MOST_READS:
            raise CheckpointError(
                f"the configuration has {len(parsed.slices)} slices, at most {ex.MOST_READS} are allowed"
            )
        object.__setattr__(self, "parsed", parsed)

    def __str__(self) -> str:
        return self._told(self.kind, str(self.config["merge_method"]), *self._shown("integers"))

    def apply(self, made: Sequence[Checkpoint]) -> Checkpoint:
        assert self.parsed is not None
        plan = Planner(self.parsed, made, self.seed, self.keys, self.drop, self.integers)
        self.plans.append(plan)
        label = str(self)
        out = flat(label, "virtual", plan.tensors, {ex.LINEAGE: label})
        for a in out.arrays.values():
            a.rule = label
        out.documents = _documents(self.parsed, plan)
        return out


ex.NODES[Blend.kind] = Blend


def _blended(
    config: BlendConfig, seed: int, keys: Iterable[str] | None, drop: Iterable[str] | None, integers: str
) -> tuple[Checkpoint, Planner]:
    held = Sources()
    try:
        models = [held.add(m.path if m.lora is None else lora(m.path, m.lora)) for m in config.models]
    except NotACheckpoint as e:
        if "no such file" not in str(e):
            raise
        hint = "a model is a path or URL; models of a hub and their revisions are downloaded first"
        raise NotACheckpoint(f"{e}; {hint}") from None
    node = Blend(tuple(models), config.said, seed, taken(keys), dropped(drop), integers, parsed=config)  # type: ignore[arg-type]
    return held.build(node), node.plans[-1]


def _documents(config: BlendConfig, plan: Planner) -> Documents:
    """Those of the base, or of the first model, with what the blend changes."""
    held = plan.donor.ckpt.documents
    out = held.every() if isinstance(held, Documents) else {}
    for card in [n for n in out if n.startswith("README")]:
        del out[card]  # it describes another model
    if plan.vocabulary is not None:
        out = {n: data for n, data in out.items() if not n.startswith((*FILES, TEMPLATE))} | plan.vocabulary.documents
        own = plan.vocabulary.models[config.models[0]]
        for name in [n for n in ("config.json", "generation_config.json") if n in out]:
            out[name], notes = renumbered(name, out[name], own, plan.vocabulary.tokens)
            plan.notes += notes
    if config.chat_template is not None:
        out["chat_template.jinja"] = config.chat_template.encode()
    if (said := out.get("config.json")) is not None:
        order = [(plan.parents[m].config, i) for m, i in plan.order]
        said, notes = following(said, plan.donor.tensors, plan.tensors, order or None)
        plan.notes += [*notes, *untrue(said, plan.tensors)]
        if any(n.endswith("lm_head.weight") and n not in plan.donor.tensors for n in plan.tensors):
            said = untied(said)  # blended by itself, it is not the embedding any more
        floats = {t.dtype.name for t in plan.tensors.values()}.intersection(dtypes.FLOATS)
        if (dtype := config.out_dtype or config.dtype or (floats.pop() if len(floats) == 1 else None)) is not None:
            said = with_dtype(said, dtype)  # to which transformers casts what it loads
        out["config.json"] = said
    out[CONFIG] = config.text.encode()
    if not isinstance(held, Documents):
        held = Documents("blend", {})
    documents = held.replaced(held, out)  # which knows what else lies beside the model
    documents.notes = tuple(dict.fromkeys(plan.notes))
    return documents


def blend(
    config: str | os.PathLike[str] | Mapping[str, Any],
    dst: str | os.PathLike[str],
    *,
    seed: int = 0,
    format: Literal["safetensors", "zarr"] = "safetensors",
    max_shard_bytes: int | None = None,
    integers: Integers = "equal",
    **options: Unpack[TransformOptions],
) -> BlendReport:
    """Blend models as mergekit's configuration says, streaming; a run that was interrupted goes on where it stopped.

    The sources may have any layout that `open_checkpoint` opens. Memory is bounded by ``memory_limit``, whatever their
    size, and the result is the same to the byte for any memory limit, threads and workers.

    Parameters
    ----------
    config
        The path of a YAML file of mergekit, its text, or a dict.
    dst
        The directory to make, all or nothing: a Hugging Face directory with the documents of the base model, or of the
        first.
    seed
        As in `blended`.
    format
        ``"safetensors"``, or ``"zarr"``: a checkpoint as `save` writes it.
    max_shard_bytes
        For safetensors: largest size of a file's arrays together; None puts all in one file.
    integers
        As in `blended`.
    options
        ``rules``, ``keys``, ``drop``, ``prefix``, ``dtype``, ``memory_limit``, ``threads``, ``allow_overflow``,
        ``overwrite``, ``progress``, ``client`` and the others of `convert`. Arrays that ``keys`` and ``drop`` leave out
        are not compared either.

    Returns
    -------
    BlendReport
        ``made`` has for each array its method, sources and the parameters that applied.

    Raises
    ------
    CheckpointError
        The configuration is wrong, or the models do not fit each other: one error lists everything, and nothing was
        written.
    Lossy
        A value is beyond the range of the dtype of the result, and ``allow_overflow`` is false.
    """
    said = read_config(config)
    keys, drop = options.get("keys"), options.get("drop")
    if options.get("rules") is not None or options.get("prefix") is not None:
        keys = drop = None  # they speak of the names after these
    else:
        options = {**options, "keys": None, "drop": None}  # type: ignore[assignment]
    ckpt, plan = _blended(said, seed, keys, drop, integers)
    target = store.location(dst)
    sources = [store.location(x) for m in said.models for x in (m.path, m.lora) if x]
    if any(x == target or x.startswith(f"{target}/") for x in sources):
        raise CheckpointError(f"{target} is one of the sources; write to another place")
    report = convert(ckpt, dst, format=format, max_shard_bytes=max_shard_bytes, **options)
    return BlendReport(**vars(report), made=plan.arrays)
