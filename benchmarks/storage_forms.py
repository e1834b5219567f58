"""Rows of ``storage.py``: bytes and seconds of each form of a checkpoint on a real training run, and models blended
beside mergekit."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import timing
from storage_table import Bench, Candidate, files_below, sync

import meshtape as mt
from meshtape import storage

de = mt.models.decoder
CONFIG = de.Config(vocab=256, width=256, layers=4, heads=4, max_length=128)
EVERY = 5  # steps from one checkpoint to the next


def text_of(files: Iterable[Path]) -> np.ndarray:
    """The bytes of files as tokens."""
    return np.frombuffer(b"".join(p.read_bytes() for p in files), np.uint8).astype(np.int32)


class TrainingRun:
    """A decoder that learns a text with AdamW: by default one of 3.3 million parameters, and that of this repository.
    ``last``: its last layer alone."""

    def __init__(
        self,
        last: bool = False,
        rate: float = 1e-3,
        config: de.Config = CONFIG,
        text: np.ndarray | None = None,
        params: Any = None,
        rows: int = 8,
    ) -> None:
        self.text = text_of(sorted(Path(__file__).parents[1].glob("*/*/*.py"))) if text is None else text
        self.rng, self.rows, self.length = np.random.default_rng(0), rows, config.max_length
        self.params = de.init(mt.random.key(0), config) if params is None else params
        optimizer = mt.optim.adamw(rate)
        trained = lambda params: params["layers"][-1] if last else params  # noqa: E731
        joined = lambda p, new: {**p, "layers": [*p["layers"][:-1], new]} if last else new  # noqa: E731
        self.state = optimizer.init(trained(self.params))

        @mt.compile
        def step(params: Any, state: Any, batch: Any) -> Any:
            def loss(new: Any) -> Any:
                total, count = de.loss(joined(params, new), batch, config)
                return total / count

            value, grads = mt.value_and_grad(loss)(trained(params))
            new, state = optimizer.update(trained(params), grads, state)
            return value, joined(params, new), state

        self._step = step

    def step(self) -> float:
        """Make a step; returns its loss."""
        starts = self.rng.integers(0, len(self.text) - self.length - 1, self.rows)
        ids = np.stack([self.text[i : i + self.length + 1] for i in starts])
        batch = {"ids": ids[:, :-1], "labels": ids[:, 1:]}
        loss, self.params, self.state = self._step(self.params, self.state, batch)
        return float(loss)

    @property
    def tree(self) -> Any:
        return {"params": self.params, "opt": self.state}


def forms(bench: Bench, home: Path, tree: dict[str, np.ndarray], steps: int = 20) -> None:
    """The checkpoints of a run of 20 steps in each form; *shared* is of a run that trains the last of four layers
    alone."""
    out, found = home / "forms", dict[str, tuple[int, float, float]]()
    options: dict[str, Callable[[str | None], dict[str, Any]]] = {
        "plain": lambda before: {},
        "weights": lambda before: {"compression": "weights"},
        "dual": lambda before: {"layout": "dual"},
        "plain, last layer": lambda before: {},
        "shared, last layer": lambda before: {"share": before},
    }
    for last in (False, True):
        run, before = TrainingRun(last), dict[str, str]()
        for number in range(1, steps + 1):
            run.step()
            for name, how in options.items():
                if number % EVERY or last != name.endswith("last layer"):
                    continue
                place, start = out / name / str(number), time.perf_counter()
                storage.save(place, run.tree, step=number, **how(before.get(name)))
                saved = time.perf_counter() - start
                storage.load(place)
                _, a, b = found.get(name, (0, 0.0, 0.0))
                nbytes = sum({p.stat().st_ino: p.stat().st_size for p in files_below(out / name)}.values())
                found[name] = nbytes, a + saved, b + time.perf_counter() - start - saved
                before[name] = str(place)
    start = time.perf_counter()
    parents = sorted((out / "plain").iterdir(), key=lambda p: int(p.name))
    averaged = [storage.virtual.with_rules(p, "opt.step -> _") for p in parents]  # no average of counts
    where = storage.virtual.write(out / "ema.json", storage.virtual.ema(averaged, decay=0.9))
    made = time.perf_counter() - start
    storage.load(where)
    found["virtual: EMA of plain"] = (out / "ema.json").stat().st_size, made, time.perf_counter() - start - made
    for name, (nbytes, a, b) in found.items():
        whole = found["plain, last layer" if name.endswith("last layer") else "plain"][0]
        value = f"{nbytes / 1e6:.3f} MB = {nbytes / whole:.1%}, written in {a:.2f} s, loaded in {b:.2f} s"
        bench.note(f"{steps // EVERY} checkpoints of {steps} steps, {name}", value)
    shutil.rmtree(out)


def llama(where: Path, nbytes: int, seed: int, width: int = 1024, layers: int = 8) -> None:
    """Write a Llama model of about so many bytes, in bfloat16."""
    ffn = (nbytes // 2 - 512 * width) // layers // width // 3 - 4 * width // 3
    drawn = np.random.default_rng(seed).standard_normal(width * max(ffn, width), np.float32).astype(ml_dtypes.bfloat16)

    def weight(*shape: int) -> np.ndarray:
        return np.roll(drawn[: math.prod(shape)], len(held)).reshape(shape)

    held: dict[str, np.ndarray] = {}
    for name in ("model.embed_tokens", "lm_head"):
        held[f"{name}.weight"] = weight(256, width)
    held["model.norm.weight"] = weight(width)
    for i in range(layers):
        at = f"model.layers.{i}"
        held |= {f"{at}.self_attn.{n}_proj.weight": weight(width, width) for n in "qkvo"}
        held |= {f"{at}.mlp.{n}_proj.weight": weight(ffn, width) for n in ("gate", "up")}
        held[f"{at}.mlp.down_proj.weight"] = weight(width, ffn)
        held |= {f"{at}.{n}_layernorm.weight": weight(width) for n in ("input", "post_attention")}
    storage.save_safetensors(where / "model.safetensors", held)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    shape = {"hidden_size": width, "intermediate_size": ffn, "vocab_size": 256, "num_attention_heads": 8}
    (where / "config.json").write_text(json.dumps(config | shape | {"torch_dtype": "bfloat16"}))


def blending(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """Three models in bfloat16 to their weighted mean, by ours and by mergekit in the same process."""
    for seed, name in enumerate("abc"):
        llama(home / name, bench.blend * 1_000_000, seed)
    models = [
        {"model": str(home / n), "parameters": {"weight": w}} for n, w in zip("abc", (0.3, 0.7, 0.45), strict=True)
    ]
    said, out = {"merge_method": "linear", "models": models}, home / "out"
    mergekit = timing.peer("mergekit.merge") if bench.wants("mergekit") else None

    def theirs() -> None:
        from mergekit.config import MergeConfiguration
        from mergekit.options import MergeOptions

        mergekit.run_merge(
            MergeConfiguration.model_validate(said), str(out / "theirs"), MergeOptions(quiet=True, copy_tokenizer=False)
        )
        sync(out / "theirs")

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()

    peers: dict[str, tuple[Candidate, float | None]] = {"mergekit": (None if mergekit is None else theirs, 0.5)}
    work = f"blend 3 × {bench.blend} MB, linear, bfloat16, synced, verified, warm"
    bench.row(work, lambda: storage.blend(said, out / "ours"), peers, clear)
    clear()
    grown = subprocess.run(
        [sys.executable, "-P", "-c", _PEAK, json.dumps(said), str(out / "peak")], check=True, capture_output=True
    )
    bench.note("the same: the process holds at most", f"{int(grown.stdout)} MiB", "≤ 512 MiB")
    shutil.rmtree(out)


_PEAK = """
import json, sys
from meshtape import storage
storage.blend(json.loads(sys.argv[1]), sys.argv[2])
print(next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) >> 10)
"""
