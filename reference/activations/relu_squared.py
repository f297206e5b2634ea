"""Squared ReLU, ``y = relu(x)^2``: one rounding, as the rectifier has none."""

import torch

from liger_multi.reference.activations.pointwise import pointwise

forward, backward = pointwise(
    value=lambda x: torch.square(torch.relu(x)), slope=lambda x: torch.relu(x) * 2
)
