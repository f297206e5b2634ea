"""A model of one's own, from the modules of liger_multi.nn: nothing to patch.

On a CPU, tiny:

    python examples/custom_model.py

On a GPU, larger:

    python examples/custom_model.py --device cuda --hidden 2048 --vocabulary 128256 --steps 100
"""

import argparse
from types import SimpleNamespace

import torch
from torch import nn

import liger_multi.nn as lnn


class Block(nn.Module):
    """Attention and an MLP; the sum with the residual stream is part of the norm."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.before_attention = lnn.FusedAddRMSNorm(config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.before_mlp = lnn.FusedAddRMSNorm(config.hidden_size)
        self.mlp = lnn.SwiGLUMLP(config)

    def forward(self, x, residual):
        x, residual = self.before_attention(x, residual)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(mixed.transpose(1, 2).flatten(-2))
        x, residual = self.before_mlp(x, residual)
        return self.mlp(x), residual


class Model(nn.Module):
    """A decoder whose loss never holds rows x vocabulary."""

    def __init__(self, config):
        super().__init__()
        self.embedding = lnn.Embedding(config.vocabulary, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = lnn.FusedAddRMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocabulary, bias=False)
        self.loss = lnn.FusedLinearCrossEntropyLoss()

    def forward(self, ids):
        x = self.embedding(ids)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        x, _ = self.norm(x, residual)
        return self.loss(x[:, :-1], self.head.weight, ids[:, 1:])


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=97)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    config = SimpleNamespace(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        hidden_act="silu",
        heads=4,
        layers=2,
        vocabulary=options.vocabulary,
    )
    model = Model(config).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = torch.randint(options.vocabulary, (8, 1), device=options.device)
    ids = (start + torch.arange(32, device=options.device)) % options.vocabulary
    losses = []
    for step in range(options.steps):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
