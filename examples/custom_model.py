"""A model of one's own, from the modules of liger_multi.nn: nothing to patch.

    python examples/custom_model.py --tiny

On a GPU:

    python examples/custom_model.py --hidden 2048 --layers 16 --vocabulary 128256 --steps 100
"""

import argparse
from collections.abc import Sequence
from types import SimpleNamespace

import _common
import torch
from torch import Tensor, nn

import liger_multi.nn as lnn


class Block(nn.Module):  # attention of four heads, and an MLP; norms add the residual stream
    def __init__(self, width: int) -> None:
        super().__init__()
        config = SimpleNamespace(hidden_size=width, intermediate_size=3 * width, hidden_act="silu")
        self.before_attention, self.before_mlp = (lnn.FusedAddRMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = lnn.SwiGLUMLP(config)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.before_attention(x, residual)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x, residual = self.before_mlp(self.out(mixed.transpose(1, 2).flatten(-2)), residual)
        return self.mlp(x), residual


class Model(nn.Module):  # a decoder whose loss never holds rows x vocabulary
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = lnn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = lnn.FusedAddRMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.loss = lnn.FusedLinearCrossEntropyLoss()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        x, _ = self.norm(x, residual)
        loss: Tensor = self.loss(x[:, :-1], self.head.weight, ids[:, 1:])
        return loss


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    for name, size in {"hidden": 32, "layers": 2, "vocabulary": 97, "steps": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = _common.parsed(parser, arguments)
    device = _common.device_of(options)
    model = Model(options.vocabulary, options.hidden, options.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(8, device=device)[:, None] + torch.arange(32, device=device)
    losses: list[float] = []
    for step in range(options.steps):
        loss = model((ids + step) % options.vocabulary)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
