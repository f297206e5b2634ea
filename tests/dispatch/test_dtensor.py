"""Row-wise operators on DTensors: results with rows are sharded as the rows of the inputs are."""

import pytest
import torch
import torch.distributed as dist

from liger_multi import ops
from liger_multi.dispatch.op import OPS
from liger_multi.testing import samples


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("op", ["hyper_connections", "hyper_connections_pre", "layer_norm"])
def test_outputs_with_rows_are_sharded(mesh, op):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    sample = next(s for s in samples.of(op) if s.size == "small")
    tensors = sample.make(torch.device("cpu"), torch.float32)
    placements = {n: Shard(0) if n in OPS[op].bitwise.batched else Replicate() for n in tensors}
    sharded = {n: distribute_tensor(t, mesh, [placements[n]]) for n, t in tensors.items()}
    result = getattr(ops, op)(**sharded, **sample.options)
    outputs = result if isinstance(result, tuple) else (result,)
    assert [y.placements for y in outputs] == [(Shard(0),)] * len(outputs)
