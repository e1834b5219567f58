"""Run by a Python that has mergekit, transformers and peft: makes tiny models, merges them with mergekit, opens results
of ours.

``python blend_peers.py make FOLDER``; ``python blend_peers.py merge JOBS.json``; ``python blend_peers.py open MODEL
[BASE ADAPTER]``; ``python blend_peers.py adapters FOLDER``, with what PEFT merges of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make(home: Path) -> None:
    """A base and four models near it, in float32 and bfloat16; an adapter; two models with vocabularies of their
    own."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models

    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=97, **sizes, **heads, dtype=dtype)
        base = LlamaForCausalLM(config).to(kind)
        base.save_pretrained(home / f"base-{dtype}")
        for name in "abcd":
            model = LlamaForCausalLM(config).to(kind)
            with torch.no_grad():
                for p, q in zip(model.parameters(), base.parameters(), strict=True):
                    p.copy_(q + 0.01 * torch.randn(q.shape))
            model.save_pretrained(home / f"{name}-{dtype}")
        adapted = get_peft_model(
            base, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_rslora=True)
        )
        with torch.no_grad():
            for n, p in adapted.named_parameters():
                if "lora_B" in n:
                    p.copy_(0.1 * torch.randn(p.shape))
        adapted.save_pretrained(home / f"lora-{dtype}")
        merged = adapted.merge_and_unload()
        merged.save_pretrained(home / f"lora-merged-{dtype}")
    for name, tokens in (("x", "a b c d <unk>"), ("y", "e b a <unk> f d")):
        words = {t: i for i, t in enumerate(tokens.split())}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes, **heads))
        model.save_pretrained(home / f"words-{name}")
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(home / f"words-{name}")


def adapters(home: Path) -> None:
    """Adapters beside embeddings that were resized, trained as copies, or of which some tokens were trained: NAME-base,
    NAME-adapter and NAME-merged."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    llama = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    kinds = {
        "llama": (LlamaForCausalLM, LlamaConfig, llama, "q_proj", "embed_tokens"),
        "gpt2": (GPT2LMHeadModel, GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 4}, "c_attn", "wte"),
    }
    for kind, (model, config, sizes, matrix, table) in kinds.items():
        cases = {
            "resized": (24, {}),
            "copies": (24, {"modules_to_save": [table, "lm_head"]}),
            "copy": (24, {"modules_to_save": [table]}),
            "tokens": (None, {"trainable_token_indices": [3, 7]}),
            "named": (None, {"trainable_token_indices": {table: [7, 3, 19]}}),
            "new": (24, {"trainable_token_indices": [20, 21, 3]}),
        }
        for tied in (False, True):
            for case, (rows, said) in cases.items():
                name = home / f"{kind}-{case}-{'tied' if tied else 'own'}"
                torch.manual_seed(0)
                model(config(**sizes, vocab_size=20, tie_word_embeddings=tied)).save_pretrained(f"{name}-base")
                base = model.from_pretrained(f"{name}-base")
                if rows:
                    base.resize_token_embeddings(rows)
                adapted = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=[matrix], **said))
                with torch.no_grad():
                    for n, p in adapted.named_parameters():
                        if "lora" in n or "modules_to_save" in n or "trainable_tokens_delta" in n:
                            p.add_(0.1 * torch.randn(p.shape))
                adapted.save_pretrained(f"{name}-adapter")
                again = model.from_pretrained(f"{name}-base")
                if rows:
                    again.resize_token_embeddings(rows)
                merged = PeftModel.from_pretrained(again, f"{name}-adapter").merge_and_unload()
                merged.save_pretrained(f"{name}-merged")


def merge(jobs: str) -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    for job in json.loads(Path(jobs).read_text()):
        run_merge(MergeConfiguration.model_validate(job["config"]), job["out"], MergeOptions(quiet=True))


def look(path: str, base: str | None = None, adapter: str | None = None) -> None:
    """The logits of a model, or of one with an adapter, on a few tokens."""
    model = AutoModelForCausalLM.from_pretrained(base or path, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        out = model(torch.tensor([[1, 2, 3]])).logits
    print(json.dumps({"layers": model.config.num_hidden_layers, "logits": out.flatten().tolist()}))


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    {"make": lambda p: make(Path(p)), "adapters": lambda p: adapters(Path(p)), "merge": merge, "open": look}[command](
        *args
    )
