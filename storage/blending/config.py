"""mergekit's configuration: its YAML as typed values, with every problem of it told at once."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from ...arrays.core.errors import CheckpointError
from ..base.waiting import uninterrupted
from ..stores import store as stores

REQUIRED = object()
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class MethodSpec:
    """The inputs and parameters of a method: ``shared`` by all inputs, and of ``each`` (without the base, where
    ``base`` is not "ignored").

    ``least`` and ``most`` count the inputs beside the base; where it is "ignored", all.
    """

    shared: Mapping[str, Any] = field(default_factory=dict)
    each: Mapping[str, Any] = field(default_factory=dict)
    base: str = "required"
    least: int = 1
    most: int | None = None


def _vectors(normalize: bool = False, rescale: bool = False, **more: float) -> MethodSpec:
    shared = {"normalize": normalize, "rescale": rescale, "lambda": 1.0}
    return MethodSpec(shared, {"weight": REQUIRED, "density": 1.0, **more})


METHODS: dict[str, MethodSpec] = {
    "linear": MethodSpec({"normalize": True}, {"weight": REQUIRED}, "ignored"),
    "passthrough": MethodSpec({}, {"scale": None}, "ignored", 1, 1),
    "slerp": MethodSpec({"t": REQUIRED}, {}, "required", 1, 1),
    "nuslerp": MethodSpec({"nuslerp_row_wise": False, "nuslerp_flatten": True}, {"weight": REQUIRED}, "optional", 2, 2),
    "multislerp": MethodSpec({"normalize_weights": True, "eps": 1e-8}, {"weight": REQUIRED}, "optional"),
    "karcher": MethodSpec({"max_iter": 10, "tol": 1e-5}, {}, "ignored"),
    "model_stock": MethodSpec({"filter_wise": False}, {}, "required", 2),
    "sce": MethodSpec({"select_topk": 1.0}),
    "nearswap": MethodSpec({"t": REQUIRED}, {}, "required", 1, 1),
    "arcee_fusion": MethodSpec({}, {}, "required", 1, 1),
    "ram": MethodSpec({"epsilon": 1e-5}),
    "ramplus_tl": MethodSpec({"epsilon": 1e-5, "r": 0.1, "alpha": 0.2}),
    "task_arithmetic": _vectors(),
    "ties": _vectors(normalize=True),
    "dare_linear": _vectors(rescale=True),
    "dare_ties": _vectors(rescale=True),
    "breadcrumbs": _vectors(gamma=0.01),
    "breadcrumbs_ties": _vectors(gamma=0.01),
    "della": _vectors(normalize=True, rescale=True, epsilon=0.15),
    "della_linear": _vectors(rescale=True, epsilon=0.15),
}
_WITHOUT_EFFECT = frozenset(["int8_mask"])  # of results
_ALL = list(dict.fromkeys([*(p for m in METHODS.values() for p in (*m.shared, *m.each)), *_WITHOUT_EFFECT]))


@dataclass(frozen=True, order=True)
class ModelRef:
    """A model, or one with a LoRA adapter applied: ``path+adapter``."""

    path: str
    lora: str | None = None

    @classmethod
    def of(cls, said: Any) -> ModelRef:
        if isinstance(said, Mapping):
            problems, given = Problems(), {k: v for k, v in said.items() if v is not None}
            problems.unknown("a model", given, ("model", "lora"))
            for key, x in given.items():
                if isinstance(x, Mapping):
                    given[key] = x.get("path")
                    problems.unknown(f"{key}:", {k: v for k, v in x.items() if v is not None}, ("path",))
            problems.refuse(f"no model: {said!r}")
            if given.get("model") and given.get("lora", "path"):
                return cls(str(given["model"]), None if "lora" not in given else str(given["lora"]))
        text = str(said) if isinstance(said, (str, os.PathLike)) else ""
        if not text:
            raise CheckpointError(f"no model: {said!r}; write its path, or path+adapter")
        path, plus, lora = text.partition("+")
        if not plus or (not stores.is_url(text) and os.path.exists(text)):
            if plus and os.path.exists(path) and os.path.exists(lora):
                raise CheckpointError(
                    f"model {text!r} is a folder, and {path!r} with the adapter {lora!r}, too: write {{model: {text}}} "
                    f"or {{model: {path}, lora: {lora}}}"
                )
            return cls(text)
        return cls(path, lora)

    def __str__(self) -> str:
        return self.path if self.lora is None else f"{self.path}+{self.lora}"


@dataclass(frozen=True)
class Source:
    model: ModelRef
    layers: tuple[int, int] | None  # all
    parameters: Settings
    listed: bool = True  # and not the base, which the text names as such alone


@dataclass(frozen=True)
class Slice:
    """Layers of the result, and the sources that they are made of."""

    sources: tuple[Source, ...]
    base: ModelRef | None
    parameters: Settings


@dataclass(frozen=True)
class BlendConfig:
    method: str
    slices: tuple[Slice, ...]
    base: ModelRef | None
    parameters: tuple[Settings, ...]  # of the module, then of all
    dtype: str | None
    out_dtype: str | None
    tokenizer: Mapping[str, Any] | None
    chat_template: str | None
    text: str  # as YAML
    said: Mapping[str, Any] = field(default_factory=dict)  # its values

    @functools.cached_property
    def models(self) -> tuple[ModelRef, ...]:
        """Every model that is named, the base first."""
        named = [*([self.base] if self.base else []), *(m for s in self.slices for m in _named(s))]
        return tuple(dict.fromkeys(named))


def _named(s: Slice) -> Iterator[ModelRef]:
    if s.base is not None:
        yield s.base
    yield from (x.model for x in s.sources)


class Problems(list[str]):
    """Faults that are told together."""

    def refuse(self, where: str, kind: type[CheckpointError] = CheckpointError) -> None:
        if self:
            raise kind("\n  ".join([f"{where}:", *dict.fromkeys(self)]))

    def unknown(self, what: str, given: Any, known: Sequence[str]) -> None:
        if not isinstance(given, Mapping):
            self.append(f"{what} has keys ({', '.join(known)}), got {given!r}")
            return
        for key in given:
            if key not in known:
                close = get_close_matches(str(key), known, 1)
                hint = f"; close is {close[0]!r}" if close else ""
                self.append(f"{what} has no key {key!r}{hint}; it has {', '.join(known)}")


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> BlendConfig:
    """A configuration from a file, its text, or a dict. Raises `CheckpointError` that lists what is wrong."""
    with uninterrupted():
        import yaml

    if isinstance(config, Mapping):
        parsed, where = config, "configuration"
        plain = _plain(config, iter(range(_MOST)))
        text = yaml.safe_dump(plain, sort_keys=False)
    else:
        if not isinstance(config, (str, os.PathLike)):
            raise CheckpointError(f"a configuration is a YAML file, its text, or a dict; got {config!r:.80}")
        text, where = os.fspath(config), "configuration"
        if not text.strip():
            raise CheckpointError("the configuration is empty: give the path of a YAML file, its text, or a dict")
        if ("\n" not in text and ":" not in text.replace(":\\", "")) or ("\0" not in text and os.path.isfile(text)):
            where = text
            try:
                with open(text, encoding="utf-8") as f:
                    text = f.read()
            except (OSError, ValueError):  # ValueError: a NUL, or no text
                raise CheckpointError(f"{text:.200} is no file of a configuration that can be read") from None
        try:
            parsed = _parsed(text)
            plain = _plain(parsed, iter(range(_MOST)))  # what holds itself has no end
        except RecursionError:
            raise CheckpointError(f"{where} is no configuration: it holds itself, or is too deeply nested") from None
        except CheckpointError as e:
            raise CheckpointError(f"{where}: {e}") from None
        except (yaml.YAMLError, ValueError) as e:  # ValueError: an integer of thousands of digits
            raise CheckpointError(f"{where} is no YAML: {e}") from None
    if not isinstance(parsed, Mapping):
        raise CheckpointError(f"{where} holds no keys: a configuration has merge_method: and models: or slices:")
    problems = Problems()
    out = _config(parsed, text, problems)
    problems.refuse(where)
    assert out is not None
    return replace(out, said=plain)


def _parsed(text: str) -> Any:
    """The values of a YAML text. Unlike YAML's own reader, it refuses a mapping that gives a key twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            names = {key.value: i for i, key in reversed([*enumerate(keys)])}  # the first of each
            for i, key in enumerate(keys):
                if names[key.value] < i:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            return node

    return yaml.load(text, Loader)


_MOST = 100_000  # values: aliases of YAML make any number of a few lines


def _plain(node: Any, room: Iterator[int]) -> Any:
    if next(room, None) is None:
        raise CheckpointError(f"a configuration has at most {_MOST:,} values")
    if isinstance(node, Mapping):
        return {str(k): _plain(v, room) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [_plain(v, room) for v in node]
    if isinstance(node, int) and node.bit_length() > 64:
        raise CheckpointError("a configuration has integers of at most 64 bits")
    return node if isinstance(node, (bool, int, float)) or node is None else str(node)


_KEYS = (
    *("merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype", "out_dtype"),
    *("tokenizer_source", "tokenizer", "chat_template"),
)


def _config(said: Mapping[str, Any], text: str, problems: Problems) -> BlendConfig | None:
    problems.unknown("a configuration", said, _KEYS)
    method = said.get("merge_method")
    if not isinstance(method, str) or method not in METHODS:
        close = get_close_matches(str(method), METHODS, 1)
        hint = f"; close is {close[0]!r}" if close else ""
        problems.append(f"there is no merge_method {method!r}{hint}; there are {', '.join(METHODS)}")
        for given in _given(said):
            problems.unknown("parameters:", given, _ALL)
        return None
    given = [k for k in ("models", "slices", "modules") if said.get(k)]
    if len(given) != 1:
        problems.append(
            f"one of models:, slices: and modules: says what is blended; there are {', '.join(given) or 'none'}"
        )
        return None
    parameters: list[Settings] = [_settings(said, method, problems)]
    if given == ["modules"]:
        modules = said["modules"]
        if not isinstance(modules, Mapping) or len(modules) != 1:
            problems.append(
                "modules: of several parts of a model are not blended here; give the one as models: or slices:"
            )
            return None
        (inner,) = modules.values()
        problems.unknown("a module", inner, ("models", "slices", "parameters"))
        parameters.insert(0, _settings(inner, method, problems))
        said = {**said, "models": inner.get("models"), "slices": inner.get("slices")}
        if bool(said["models"]) == bool(said["slices"]):
            problems.append("a module has either models: or slices:")
            return None
    base = _model(said.get("base_model"), problems)
    slices: list[Slice] = []
    if said.get("models"):
        sources = list(_sources(said["models"], method, problems, ("model", "parameters")))
        if base is not None and all(s.model != base for s in sources):
            sources.append(Source(base, None, {}, listed=False))
        slices.append(Slice(tuple(sources), None, {}))
    for s in _list(said.get("slices"), "slices", problems):
        problems.unknown("a slice", s, ("sources", "base_model", "parameters"))
        sources = list(_sources(s.get("sources"), method, problems, ("model", "layer_range", "parameters")))
        slices.append(Slice(tuple(sources), _model(s.get("base_model"), problems), _settings(s, method, problems)))
    for s in slices:
        _check_count(method, s, s.base or base, problems)
    tokenizer = said.get("tokenizer")
    if said.get("tokenizer_source") is not None:
        if tokenizer is not None:
            problems.append("tokenizer_source: and tokenizer: say the same; give one")
        tokenizer = {"source": said["tokenizer_source"]}
    if tokenizer is not None:
        problems.unknown("tokenizer:", tokenizer, ("source", "tokens", "pad_to_multiple_of"))
    names = {}
    for key in ("dtype", "out_dtype"):
        name = said.get(key)
        names[key] = None if name is None else str(name).removeprefix("torch.")
        if names[key] not in (None, "float16", "bfloat16", "float32", "float64"):
            problems.append(f"{key}: is float16, bfloat16, float32 or float64, not {name!r}")
    template = said.get("chat_template")
    if template is not None and not (isinstance(template, str) and "{" in template):
        problems.append(
            "chat_template: is the text of a Jinja template, as in the chat_template.jinja of a model; names of "
            f"templates and 'auto' are not known here, got {template!r}"
        )
    parts = tuple(slices), base, tuple(parameters)
    return BlendConfig(method, *parts, **names, tokenizer=tokenizer, chat_template=template, text=text)


def _given(node: Any) -> Iterator[Mapping[str, Any]]:
    """All that stands under parameters: anywhere."""
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ():
        yield from [value] if key == "parameters" and isinstance(value, Mapping) else _given(value)


def _list(said: Any, what: str, problems: Problems) -> list[Mapping[str, Any]]:
    if said is None:
        return []
    if not isinstance(said, list) or not all(isinstance(s, Mapping) for s in said):
        problems.append(f"{what}: is a list of keys and values, got {said!r}")
        return []
    return said


def _model(said: Any, problems: Problems) -> ModelRef | None:
    if said is None:
        return None
    try:
        return ModelRef.of(said)
    except CheckpointError as e:
        problems.append(str(e))
        return None


def _sources(said: Any, method: str, problems: Problems, keys: tuple[str, ...]) -> Iterator[Source]:
    for s in _list(said, "models" if len(keys) == 2 else "sources", problems):
        problems.unknown("a model" if len(keys) == 2 else "a source", s, keys)
        model = _model(s.get("model") or "", problems)
        layers = s.get("layer_range")
        if "layer_range" in keys and not (
            isinstance(layers, (list, tuple))
            and len(layers) == 2
            and all(type(n) is int for n in layers)
            and 0 <= layers[0] < layers[1]
        ):
            problems.append(f"layer_range: is [first, end], with first below end, got {layers!r} for {model}")
            layers = (0, 1)
        if model is not None:
            own = _settings(s, method, problems)
            problems.extend(
                f"{method}: {p} holds for all models; give it under parameters: of a slice or of the configuration, "
                f"not of {model}"
                for p in own
                if p in METHODS[method].shared or p in _WITHOUT_EFFECT
            )
            yield Source(model, tuple(layers) if layers else None, own)


def _settings(said: Any, method: str, problems: Problems) -> Settings:
    given = said.get("parameters") if isinstance(said, Mapping) else None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        problems.append(f"parameters: has names and values, got {given!r}")
        return {}
    spec = METHODS[method]
    problems.unknown(f"{method}: parameters:", given, [*spec.shared, *spec.each, *_WITHOUT_EFFECT])
    return given


def _check_count(method: str, s: Slice, base: ModelRef | None, problems: Problems) -> None:
    spec = METHODS[method]
    models = [x.model for x in s.sources]
    if (twice := {m for m in models if models.count(m) > 1}) and len(models) > 1:
        problems.append(f"{method}: {', '.join(sorted(map(str, twice)))} is named more than once in one blend")
    held = base if base in models else None
    if spec.base == "required" and base is None:
        problems.append(f"{method} needs base_model:")
        return
    if spec.base != "ignored" and base is not None and held is None:
        problems.append(f"{method}: the base {base} is not among the sources of a slice")
    n = len(models) - (held is not None and spec.base != "ignored")
    if n < spec.least or (spec.most is not None and n > spec.most):
        wanted = f"{spec.least}" if spec.most == spec.least else f"at least {spec.least}"
        beside = " beside the base" if spec.base == "required" or (spec.base == "optional" and held) else ""
        problems.append(f"{method} needs {wanted} model{'' if wanted == '1' else 's'}{beside}, got {n}")


# ----- parameters of a tensor -----------------------------------------------------------------------------------------


def resolve(name: str, default: Any, settings: Sequence[Settings], tensor: str, t: float) -> Any:
    """The value of a parameter for a tensor: the first of the ``settings`` that has one; ``t`` is the place in its
    slice, 0 to 1."""
    for scope in settings:
        if name in scope:
            value = _evaluate(name, default, scope[name], tensor, t)
            if value is not None:
                return value
    if default is REQUIRED:
        raise CheckpointError(f"parameter {name!r} is missing")
    return default


def _evaluate(name: str, default: Any, said: Any, tensor: str, t: float) -> Any:
    if isinstance(said, Mapping):
        said = [said]
    if not isinstance(said, list):
        return _typed(name, default, said)
    if not said:
        return None
    if not any(isinstance(s, (Mapping, list)) for s in said):
        values = [_typed(name, default, s) for s in said]
        at = t * (len(values) - 1)
        if isinstance(values[0], bool):
            return values[int(at)]
        low = int(at)
        return _typed(
            name, default, (1 - (at - low)) * values[low] + (at - low) * values[min(low + 1, len(values) - 1)]
        )
    for s in said:
        if not isinstance(s, Mapping) or "value" not in s or set(s) - {"filter", "value"}:
            raise CheckpointError(f"parameter {name!r}: {s!r} is no choice; write filter: and value:")
        wanted = s.get("filter")
        if wanted is None or wanted == "*" or str(wanted) in tensor:
            return _evaluate(name, default, s["value"], tensor, t)
    return None


def filters(settings: Any) -> Iterator[str]:
    """The texts of every filter: in settings."""
    if isinstance(settings, Mapping) and settings.get("filter") not in (None, "*"):
        yield str(settings["filter"])
    if isinstance(settings, (Mapping, list, tuple)):
        for inner in settings.values() if isinstance(settings, Mapping) else settings:
            yield from filters(inner)


_UNIT = frozenset(["density", "gamma", "epsilon", "select_topk"])
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")  # YAML reads 1e-5, without a point, as text


def _typed(name: str, default: Any, said: Any) -> Any:
    if isinstance(default, bool):
        if isinstance(said, bool) or said in (0, 1):
            return bool(said)
        raise CheckpointError(f"parameter {name!r} is true or false, got {said!r}")
    try:
        if isinstance(said, bool) or (isinstance(said, str) and not _EXPONENT.fullmatch(said)):
            raise ValueError
        value = float(said)
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(f"parameter {name!r} is a number, got {said!r:.40}") from None
    if not math.isfinite(value) or (name in _UNIT and not 0 <= value <= 1):
        raise CheckpointError(f"parameter {name!r} is {'from 0 to 1' if name in _UNIT else 'finite'}, got {said!r}")
    if name == "max_iter" and (value < 0 or value != int(value)):
        raise CheckpointError(f"parameter {name!r} is a whole number, got {said!r}")
    return value
