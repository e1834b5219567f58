"""The decoder of `meshtape.models` as PyTorch's users would write it."""

from __future__ import annotations

from typing import Any

import numpy as np

import meshtape as mt


def torch_decoder(torch: Any, c: Any, length: int) -> Any:
    """A module with random parameters, which maps ids and labels ``(rows, length)`` to the mean loss."""
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(0)

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def weight(*shape: int) -> Any:
                return torch.nn.Parameter(torch.randn(*shape, generator=generator) * 0.02)

            self.embed = weight(c.vocab, c.width)
            self.norm = torch.nn.Parameter(torch.ones(c.width))
            self.layers = torch.nn.ModuleList()
            for _ in range(c.layers):
                layer = torch.nn.Module()
                for name, o, i in (
                    ("q", c.width, c.width), ("k", c.width, c.width), ("v", c.width, c.width), ("o", c.width, c.width),
                    ("gate", c.ffn, c.width), ("up", c.ffn, c.width), ("down", c.width, c.ffn),
                ):  # fmt: skip
                    setattr(layer, name, weight(o, i))
                layer.n1, layer.n2 = (torch.nn.Parameter(torch.ones(c.width)) for _ in range(2))
                self.layers.append(layer)
            cosines, sines = mt.models.decoder.rotary_tables(np.arange(length), c.head_size, c.theta)
            for name, table, sign in (("cosines", cosines, 1), ("sines", sines, -1)):
                half = torch.from_numpy(np.asarray(table))
                self.register_buffer(name, torch.cat([sign * half, half], -1))

        def turn(self, x: Any) -> Any:
            half = x.shape[-1] // 2
            return x * self.cosines + torch.cat([x[..., half:], x[..., :half]], -1) * self.sines

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.embed[ids]
            b, s, _ = x.shape
            for p in self.layers:
                h = F.rms_norm(x, (c.width,), p.n1, c.eps)
                q, k, v = (F.linear(h, w).view(b, s, c.heads, -1).transpose(1, 2) for w in (p.q, p.k, p.v))
                a = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
                x = x + F.linear(a.transpose(1, 2).reshape(b, s, c.width), p.o)
                h = F.rms_norm(x, (c.width,), p.n2, c.eps)
                x = x + F.linear(F.silu(F.linear(h, p.gate)) * F.linear(h, p.up), p.down)
            logits = F.linear(F.rms_norm(x, (c.width,), self.norm, c.eps), self.embed)
            return F.cross_entropy(logits.view(-1, c.vocab), labels.view(-1))

    return Decoder()
