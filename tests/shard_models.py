"""Models whose rows are spread over ranks, beside one process, for ``test_shards``."""

import copy
import os
import subprocess
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import liger_multi
from liger_multi import memory
from liger_multi.distributed import shard_sequence, unshard_sequence
from liger_multi.errors import PatchError
from tests import models
from tests.sweep import cases

LOSS, GRADIENT = 1e-5, 5e-4
"""Relative difference of losses; of gradients, to the largest number of their tensor."""
NOISE = 1e-6  # of the largest gradient of a model: what is zero but for rounding

UNPACKED = ("gpt_oss",)  # in one process, packed rows are refused


def build(name: str) -> Any:
    """A tiny patched model, by its class, with weights that let tokens matter."""
    if name in models.ARCHITECTURES:
        model = models.build(name)
    else:
        model = cases.build(next(p for p in cases.registered() if p.cls == name))
    models.scaled_to_width(model)
    if hasattr(model, "router_aux_loss_coef"):
        model.config.output_router_logits = True
        model.router_aux_loss_coef = 0.3
    if model.config._attn_implementation != "liger_multi":
        model.set_attn_implementation("liger_multi")
    liger_multi.patch(model)
    return model.eval()


def batches(vocabulary: int) -> dict[str, dict[str, torch.Tensor]]:
    """A row that ranks do not divide, packed rows whose samples cross shares, rows with padding."""
    generator = torch.Generator().manual_seed(2)

    def ids(rows: int, length: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (rows, length), generator=generator)

    row, packed, padded = ids(1, 37), ids(1, 40), ids(2, 24)
    positions = torch.cat([torch.arange(n) for n in (11, 6, 23)])[None]
    mask = torch.ones_like(padded)
    mask[1, 17:] = 0
    masked = padded.masked_fill(mask == 0, -100)
    return {
        "row": {"input_ids": row, "labels": row},
        "packed": {"input_ids": packed, "labels": packed, "position_ids": positions},
        "padded": {"input_ids": padded, "labels": masked, "attention_mask": mask},
    }


def step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a batch, and all gradients."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss), gradients


def check(name: str, checkpointing: bool = False) -> None:
    """Compare a model on all ranks with one process."""
    one = build(name)
    spread = copy.deepcopy(one)
    if checkpointing:
        spread.gradient_checkpointing_enable()
        spread.train()
    shard_sequence(spread)
    size = dist.get_world_size()
    for form, batch in batches(one.config.get_text_config().vocab_size).items():
        if form == "packed" and name in UNPACKED:
            continue
        loss, expected = step(one, batch)
        actual_loss, gradients = step(spread, batch)
        assert abs(actual_loss - loss) <= LOSS * abs(loss), (name, form, actual_loss, loss)
        scale = max(float(g.abs().max()) for g in expected.values())
        for key, gradient in expected.items():
            actual = gradients.get(key, torch.zeros_like(gradient)) / size
            dist.all_reduce(actual)
            limit = GRADIENT * float(gradient.abs().max()) + NOISE * scale
            error = float((actual - gradient).abs().max())
            assert error <= limit, (name, form, key, error, limit)
    unshard_sequence(spread)


def refuse() -> None:
    """Three ranks do not divide four heads; what is sharded has no cache, until it is no more."""
    model = build("LlamaForCausalLM")
    ids = batches(model.config.vocab_size)["row"]["input_ids"]
    expected = model.generate(ids, max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="attention has 4 heads or channels, which 3 ranks"):
        shard_sequence(model)
    shard_sequence(model, check=False)
    for call in (
        lambda: model.generate(ids, max_new_tokens=2),
        lambda: model(input_ids=ids, use_cache=True),
        lambda: model(input_ids=ids, logits_to_keep=1),
    ):
        with pytest.raises(ValueError, match="is sharded over the sequence and cannot generate"):
            call()
    with pytest.raises(PatchError, match="is sharded"):
        shard_sequence(model)
    unshard_sequence(model)
    assert torch.equal(model.generate(ids, max_new_tokens=2, do_sample=False), expected)


# --- engines ---


def fsdp(model: Any, mesh: Any) -> Any:
    """FSDP2 around every layer and the rest, before the rows are spread over the last axis."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    memory.apply_recompute(model, "keep_attention")
    memory.offload_activations(model, min_bytes=512)
    return shard_sequence(model, mesh["sp"] if mesh.ndim > 1 else mesh, check=False)


def data_parallel() -> None:
    """Two groups of two ranks: the gradient is the mean of those of their rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    one = build("LlamaForCausalLM")
    spread = fsdp(copy.deepcopy(one), mesh)
    forms = batches(one.config.vocab_size)
    rows = [forms["row"], forms["packed"]]
    steps = [step(one, batch) for batch in rows]
    group = mesh["dp"].get_local_rank()
    loss = spread(**rows[group], use_cache=False).loss
    loss.backward()
    assert abs(float(loss) - steps[group][0]) <= LOSS * steps[group][0]
    for name, parameter in spread.named_parameters():
        expected = sum(gradients[name] for _, gradients in steps) / 2
        error = (parameter.grad.full_tensor() - expected).abs().max()
        assert float(error) <= GRADIENT * float(expected.abs().max()), name


def restart(folder: str) -> None:
    """Losses after a checkpoint are those without a stop, and one process reads it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    batch = batches(build("LlamaForCausalLM").config.vocab_size)["packed"]

    def started() -> tuple[Any, Any]:
        model = fsdp(build("LlamaForCausalLM"), mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def train(model: Any, optimizer: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    first = started()
    train(*first, 2)
    weights, states = get_state_dict(*first)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    full = get_model_state_dict(first[0], options=StateDictOptions(full_state_dict=True))
    expected = train(*first, 2)
    again = started()
    weights, states = get_state_dict(*again)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert train(*again, 2) == expected
    one = build("LlamaForCausalLM")
    if dist.get_rank() == 0:  # which has the whole state
        one.load_state_dict(full)
        assert abs(step(one, batch)[0] - expected[0]) <= LOSS * expected[0]
    dist.barrier()


def measured(checkpointing: bool) -> None:
    """The peak of a rank is what an estimate says."""
    sizes = {"hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 6, "head_dim": 16}
    model = models.build(tied=False, max_position_embeddings=512, **sizes).train()
    options = {"device": "cpu", "dtype": "float32", "optimizer": "none", "patched": True}
    options["checkpointing"] = checkpointing
    estimated = memory.estimate(model, 1, 511, ranks=2, **options)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.set_attn_implementation("liger_multi")
    liger_multi.patch(model)
    shard_sequence(model)
    ids = torch.arange(511)[None] % 200
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with memory.measure("cpu", known=[*model.parameters(), *model.buffers()]) as peak:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert abs(estimated.peak_bytes / peak.peak_bytes - 1) < 0.02, (estimated, peak)


def ended() -> None:
    """A rank ends in the middle of training: the other one learns it, in time."""
    model = build("LlamaForCausalLM")
    shard_sequence(model)
    batch = batches(model.config.vocab_size)["row"]
    step(model, batch)
    if dist.get_rank() == 1:
        print("done", flush=True)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="another rank, which has ended"):
        step(model, batch)
    assert time.monotonic() - start < SECONDS + 5
    print("done", flush=True)
    os._exit(0)  # no group is left to be destroyed


def parted() -> None:
    """The cable between two hosts is cut: both learn it, in time."""
    model = build("LlamaForCausalLM")
    shard_sequence(model)
    batch = batches(model.config.vocab_size)["row"]
    step(model, batch)
    dist.barrier()
    start = time.monotonic()
    subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
    with pytest.raises(RuntimeError, match="is late beyond the time limit"):
        step(model, batch)
    assert time.monotonic() - start < 2 * SECONDS + 5
    print("done", flush=True)
    os._exit(0)


SECONDS = 20  # the time limit of a group
