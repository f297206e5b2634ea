"""Tiny modules that tests patch, and variants of them with another method."""

import torch
from torch import nn


class Holder(nn.Module):
    """A model of one module and no output embedding."""

    def __init__(self, module):
        super().__init__()
        self.inner = module


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, act=None, bias=True):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(12, 16, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(16, 12, bias=bias)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    """An RMSNorm."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(12) + 0.5), 1e-6

    def forward(self, x):
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * r).to(x.dtype)


def variant(base, forward, **attributes):
    """A module of a subclass with another forward, and attributes of its own; tensors are buffers.

    ``forward`` gets the module and its arguments, and may call that of ``base``.
    """
    module = type(f"Other{base.__name__}", (base,), {"forward": forward})()
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)
    return module
