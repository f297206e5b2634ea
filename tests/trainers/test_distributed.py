"""Patched models on two ranks train as stock ones in one process do.

Gloo on the CPU; with ``--backend cuda`` NCCL, on the first two devices. All cases share two
processes. This file as a program, ``RANK FILE DEVICE RESULTS CASE...``, is one rank; what a case
raises is written to RESULTS, and the other cases run all the same.
"""

import contextlib
import copy
import functools
import io
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from liger_multi import ops, trees
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.errors import PackingError, PatchError
from liger_multi.integrations.mxfp4 import quantize_mxfp4
from liger_multi.patching import patch, register_attention, unpatch
from tests.comparing import assert_same_gradients, gradients
from tests.models import adapters, build, in_mxfp4, with_lora_on_experts

pytest.importorskip("accelerate")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch is built without gloo", allow_module_level=True)

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests import harness, processes

# --- what a rank runs ---

WORLD = 2
CASES = {}
SLOW = []


def case(table=None, slow=False):
    """Register a case by its name, with blanks, or each of a table of names and options."""

    def add(function):
        named = table or {function.__name__.replace("_", " "): {}}
        CASES.update({n: functools.partial(function, **options) for n, options in named.items()})
        SLOW.extend(named if slow else ())
        return function

    return add


class Run:
    """One rank: its device, its part of the batch, and how results are compared."""

    def __init__(self, rank, device):
        self.rank, self.device = rank, device
        self.fused = 0
        stock = ops.fused_linear_cross_entropy

        def counted(*args, **options):
            self.fused += 1
            return stock(*args, **options)

        ops.fused_linear_cross_entropy = counted

    def build(self, **options):
        return build("llama", **{"tied": False, **options}).to(self.device)

    def pair(self, **options):
        stock = self.build(**options)
        return stock, copy.deepcopy(stock)

    def batch(self, rows=4, length=12):
        ids = torch.randint(3, 223, (rows, length), generator=torch.Generator().manual_seed(1))
        labels = ids.clone()
        for row in range(rows):
            labels[row, : 1 + 2 * row] = -100
        return {"input_ids": ids.to(self.device), "labels": labels.to(self.device)}

    def mine(self, batch):
        return {k: v.chunk(WORLD)[self.rank] for k, v in batch.items()}

    def count(self, labels):
        return int((labels[:, 1:] != -100).sum())

    def mesh(self):
        return init_device_mesh(self.device.type, (WORLD,))

    def folder(self):
        names = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(names)
        return names[0]

    def right(self, stock, batch=None, **arguments):
        """Loss and gradients of one process with the whole batch."""
        loss = stock(**(batch or self.batch()), **arguments).loss
        loss.backward()
        return loss.detach(), {n: g.clone() for n, g in gradients(stock).items()}

    def train(self, model, fused=1):
        """A step with this rank's rows: its share of the loss, times ranks as gradients average."""
        whole, before = self.batch(), self.fused
        total = self.count(whole["labels"])
        loss = model(**self.mine(whole), num_items_in_batch=total).loss
        (loss * WORLD).backward()
        assert self.fused - before == fused, f"{self.fused - before} fused losses"
        return self.summed(loss)

    def summed(self, loss):
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss

    def same_step(self, model, stock):
        """A step with the whole batch, which every rank has, is that of one process."""
        loss = model(**self.batch()).loss
        loss.backward()
        self.same(model, loss, self.right(stock))

    def close(self, got, expected):
        """Losses are equal but for the order of sums in fp32."""
        got, expected = (x.detach().double().cpu() for x in (got, expected))
        torch.testing.assert_close(got, expected, rtol=3e-5, atol=0)

    def gradients(self, results, expected):
        assert_same_gradients(results, expected, rtol=3e-5)

    def same(self, model, loss, expected, name=lambda n: n):
        self.close(loss, expected[0])
        self.gradients({name(n): p.grad for n, p in model.named_parameters()}, expected[1])


# --- data parallelism, and sharded parameters ---


def lora(model, targets="all-linear"):
    return adapters(model, target_modules=targets)


def sharded(run, model, *units, **options):
    """Decoder layers, other units and the rest of a model, sharded by FSDP2."""
    layers = next(m for n, m in model.named_modules() if n.endswith("layers"))
    for unit in (*layers, *units, model):
        fully_shard(unit, mesh=run.mesh(), **options)
    return model


WRAPS = {
    "ddp": lambda run, model: nn.parallel.DistributedDataParallel(model),
    "root": lambda run, model: fully_shard(model, mesh=run.mesh()),
    "layers": sharded,
    "head": lambda run, model: sharded(run, model, model.lm_head),
}
FEW = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
CHECKPOINTED = {"use_reentrant": False}


@case(
    {
        "ddp": {"wrap": "ddp"},
        "ddp of adapters": {"wrap": "ddp", "adapters": True},
        "fsdp2 of the root": {"wrap": "root"},
        "fsdp2 of layers, before the patch": {"wrap": "layers", "patch_last": True},
        "fsdp2 with the head by itself": {"wrap": "head"},
        "fsdp2 of adapters": {"wrap": "layers", "adapters": True},
        "fsdp2 with checkpointing": {"wrap": "layers", "checkpointed": True},
    }
)
def trained_as_stock(run, wrap, adapters=False, checkpointed=False, patch_last=False):
    """A step of wrapped and patched layers is that of one process."""
    stock = lora(run.build(), FEW) if adapters else run.build()
    ours = copy.deepcopy(stock)
    for model in (stock, ours) if checkpointed else ():
        model.gradient_checkpointing_enable(CHECKPOINTED)
    wrapped = WRAPS[wrap](run, ours) if patch_last else ours
    assert patch(ours, strict=True).count("lora") == (10 if adapters else 0)
    wrapped = wrapped if patch_last else WRAPS[wrap](run, ours)
    run.same(ours, run.train(wrapped), run.right(stock))


@case(
    {
        "ddp of a base in four bits": {"wrap": "ddp"},
        "fsdp2 of a base in four bits": {"wrap": "layers"},
    }
)
def in_four_bits(run, wrap):
    """A frozen base in MXFP4 below adapters; FSDP2 gathers its codes."""
    base = run.build(hidden_size=64, intermediate_size=96)
    for layer in [m for m in base.model.layers.modules() if type(m) is nn.Linear]:
        coded = ops.QuantizedWeight(
            *quantize_mxfp4(layer.weight), format="mxfp4", dtype=layer.weight.dtype
        )
        layer.weight = nn.Parameter(coded, requires_grad=False)
    stock = lora(base, FEW)
    ours = copy.deepcopy(stock)
    assert patch(ours, strict=True).count("lora") == 10
    wrapped = WRAPS[wrap](run, ours)
    codes = [
        sum(local.codes.numel() for local in locals_ if isinstance(local, ops.QuantizedWeight))
        for locals_ in (
            [getattr(p, "_local_tensor", p) for p in model.parameters()] for model in (stock, ours)
        )
    ]
    assert codes[1] == codes[0] // (1 if wrap == "ddp" else WORLD) > 0
    run.same(ours, run.train(wrapped), run.right(stock))


def in_nf4(run, storage="uint8", nested=False, reentrant=None):
    """Loss and gradients of one process over a base of bitsandbytes, and the same model patched."""
    from tests.patching.test_four_bits import in_bitsandbytes, replaced

    options = {"quant_type": "nf4", "compress_statistics": nested}
    options["quant_storage"] = getattr(torch, storage)
    base = run.build(hidden_size=64, intermediate_size=128, head_dim=16).cpu()
    base = replaced(base, lambda layer: in_bitsandbytes(layer, **options)).to(run.device)
    base.is_loaded_in_4bit = True  # as from_pretrained says it to PEFT
    stock = lora(base, FEW)
    ours = copy.deepcopy(stock)
    for model in (stock, ours) if reentrant is not None else ():
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert patch(ours, strict=True).count("four_bits") == 14
    return run.right(stock), ours


@contextlib.contextmanager
def keeping_codes(expected):
    """Whether autograd keeps codes; those of a sharded layer would stay gathered by it."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(type(t)) or t, lambda t: t):
        yield
    assert (ops.QuantizedWeight in kept) == expected


@case(
    {
        "ddp of a base of bitsandbytes": {"wrap": "ddp"},
        "fsdp2 of a base of bitsandbytes": {"wrap": "layers"},
        "fsdp2 in fp32 of a base of bitsandbytes": {"wrap": "layers", "storage": "float32"},
    }
)
def of_bitsandbytes(run, wrap, storage="uint8"):
    expected, ours = in_nf4(run, storage)
    wrapped = WRAPS[wrap](run, ours)
    with keeping_codes(wrap == "ddp"):
        loss = run.train(wrapped)
    run.same(ours, loss, expected)


def of_codes(run, format, seed):
    """A patched model with a base in four bits of a seed, and adapters."""
    base = run.build(hidden_size=64, intermediate_size=96)
    g = torch.Generator().manual_seed(seed)
    for layer in [m for m in base.model.layers.modules() if type(m) is nn.Linear]:
        codes, scales = quantize_mxfp4(torch.randn(layer.weight.shape, generator=g) * 0.1)
        more, rows, size = {}, codes.shape[0], codes.numel()
        if format == "nvfp4":
            scales = (torch.rand(rows, size // rows // 8, generator=g) + 0.5).to(
                torch.float8_e4m3fn
            )
            more = {"global_scale": torch.rand(1, generator=g) * 0.1}
        elif format == "int4":
            scales = torch.rand(rows, size // rows // 16, generator=g) * 0.02
            more = {"zeros": torch.full(scales.shape, 7, dtype=torch.uint8)}
        elif format == "nf4":  # blocks of 32, which end with rows
            scales, more = torch.rand(size // 16, generator=g) * 0.2, {"group": 32}
        coded = ops.QuantizedWeight(codes, scales, format=format, dtype=torch.float32, **more)
        layer.weight = nn.Parameter(coded.to(run.device), requires_grad=False)
    model = lora(base, FEW)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=g).to(p) * 0.1
    patch(model, strict=True)
    return model


@case({f"fsdp2 checkpoints of {f} codes": {"format": f} for f in ("mxfp4", "nvfp4", "int4", "nf4")})
def checkpoints_of_codes(run, format):
    """What two ranks save is codes; another model that loads it has the losses of the first.

    So has a model that is whole.
    """
    import torch.distributed.checkpoint as dcp

    folder = run.folder()
    first, second = (sharded(run, of_codes(run, format, seed)) for seed in (1, 2))
    losses = [run.train(model).detach() for model in (first, second)]
    assert losses[0] != losses[1]
    dcp.save(get_model_state_dict(first), checkpoint_id=folder)
    state = get_model_state_dict(second)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(second, state)
    saved = b"".join(file.read_bytes() for file in pathlib.Path(folder).iterdir())
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        one, other = (getattr(t, "_local_tensor", t) for t in (one, other))
        if isinstance(one, ops.QuantizedWeight):
            for a, b in zip(one.tensors, other.tensors, strict=True):
                assert torch.equal(a.float(), b.float())
            assert one.codes.cpu().numpy().tobytes() in saved
    assert torch.equal(run.train(second).detach(), losses[0])
    whole = of_codes(run, format, 3)
    dcp.load(get_model_state_dict(whole), checkpoint_id=folder)
    torch.testing.assert_close(run.train(whole).detach(), losses[0])


@case()
def ddp_accumulating_uneven_batches(run):
    stock, ours = run.pair()
    patch(ours, strict=True)
    wrapped, whole = nn.parallel.DistributedDataParallel(ours), run.batch()
    total, loss = run.count(whole["labels"]), torch.zeros((), device=run.device)
    mine = run.mine(whole)
    for i in range(2):
        with wrapped.no_sync() if i == 0 else contextlib.nullcontext():
            one = {k: v[i : i + 1] for k, v in mine.items()}
            part = wrapped(**one, num_items_in_batch=total).loss
            (part * WORLD).backward()
            loss += part.detach()
    dist.all_reduce(loss)
    run.same(ours, loss, run.right(stock))


@case()
def fsdp2_with_the_head_and_a_norm_in_one_unit(run):
    """As torchtitan has them; both ways to keep the unit, patched before and after."""
    for freed in (True, False):
        for patch_first in (True, False):
            stock, ours = run.pair()
            if patch_first:
                patch(ours, strict=True)
            unit = [ours.model.norm, ours.lm_head]
            fully_shard(unit, mesh=run.mesh(), reshard_after_forward=freed)
            sharded(run, ours)
            if not patch_first:
                patch(ours, strict=True)
            expected = run.right(stock)
            for _ in range(2):
                ours.zero_grad()
                run.same(ours, run.train(ours, fused=0), expected)


@case()
def fsdp2_with_packed_rows(run):
    """All ranks try the model together, also where one of them has rows of one sample."""
    stock, ours = run.pair()
    patch(ours)
    sharded(run, ours)
    whole = run.batch()
    positions = torch.arange(12, device=run.device).repeat(4, 1)
    positions[:2, 7:] -= 7
    whole["position_ids"] = positions
    total = run.count(whole["labels"])
    loss = ours(**run.mine(whole), use_cache=False, num_items_in_batch=total).loss
    (loss * WORLD).backward()
    run.same(ours, run.summed(loss), run.right(stock, whole, use_cache=False))
    positions[2:, 7:] -= 7
    with pytest.raises(PackingError, match="use_cache=False"):
        ours(**run.mine(whole))


@case()
def fsdp2_with_a_loss_outside_of_the_model(run):
    """FSDP2's hook on logits begins backward; logits that nobody computes have to run it too."""
    for wrap in ("root", "layers"):
        stock, ours = run.pair()
        patch(ours)
        wrapped, ids = WRAPS[wrap](run, ours), run.batch()["input_ids"]
        losses = []
        for model, rows in ((wrapped, ids.chunk(WORLD)[run.rank]), (stock, ids)):
            log_p = model(input_ids=rows).logits[:, :-1].log_softmax(-1)
            losses.append(-log_p.gather(-1, rows[:, 1:, None]).sum())
        (losses[0] * WORLD).backward()
        losses[1].backward()
        run.same(ours, run.summed(losses[0]), (losses[1], gradients(stock)))


ROWS = {  # by the rank that has them, with a prompt of as many tokens: what its tree is
    "trees": (5, [[9, 12, 6], [8, 10]]),
    (PATH := "a tree and a path"): (5, [[9, 12, 6], [11]]),
    "a deep tree and a flat one": (3, [[12, 12, 12, 6], [8, 10]]),
}


@case(
    {
        f"shared prefixes, {wrap}, {rows}": {"wrap": wrap, "rows": rows}
        for wrap, rows in (*itertools.product(("ddp", "layers"), ROWS), ("root", PATH))
    }
    | {
        "shared prefixes, layers, checkpointed": {
            "wrap": "layers",
            "rows": PATH,
            "checkpointed": True,
        }
    }
)
def shared_prefixes(run, wrap, rows, checkpointed=False):
    """Every rank has a tree of its own; they try the model together."""
    prompt, lengths = ROWS[rows]
    register_attention()
    stock, ours = run.pair()
    ours.set_attn_implementation("liger_multi")
    patch(ours)
    if checkpointed:
        ours.gradient_checkpointing_enable(CHECKPOINTED)
    wrapped, expected = WRAPS[wrap](run, ours), 0
    for rank, own in enumerate(lengths):
        ids = torch.randint(3, 223, (len(own), 12), generator=torch.Generator().manual_seed(rank))
        ids[:, :prompt] = ids[0, :prompt].clone()
        ids[:2, : prompt + 4] = ids[0, : prompt + 4].clone()  # a level more
        mask = torch.arange(12) < torch.tensor(own)[:, None]
        ids, mask = ids.to(run.device), mask.to(run.device)
        shortest = 2 if "deep" in rows else 12
        batch = trees.from_batch(ids, mask, prompt_lengths=[prompt] * len(own), shortest=shortest)
        if rank == run.rank:
            for _ in range(2):
                ours.zero_grad()
                loss = -batch.to_rows(trees.scores(wrapped, batch).log_probs).sum()
                (loss * WORLD).backward()
        log_p = stock(input_ids=ids, attention_mask=mask.long()).logits[:, :-1].log_softmax(-1)
        log_p = log_p.gather(-1, ids[:, 1:, None])[..., 0]
        expected = expected - log_p[(batch.rows >= 0)[:, 1:]].sum()
    expected.backward()
    run.same(ours, run.summed(loss), (expected, gradients(stock)))


EIGHT = {"smallest": 0}


@case(
    {
        "ddp in float8": {"wrap": "ddp"},
        "fsdp2 in float8": {"wrap": "layers"},
        "fsdp2 in float8 with checkpointing": {"wrap": "layers", "checkpointed": True},
        "ddp of adapters on a base in float8": {"wrap": "ddp", "adapters": True},
        "fsdp2 of adapters on a base in float8": {"wrap": "layers", "adapters": True},
    }
)
def in_float8(run, wrap, adapters=False, checkpointed=False):
    """A step of wrapped layers in FP8 is that of one process, and not that of other layers.

    The order of a sum may put a number on the other side of a rounding, which moves a gradient by a
    hundredth at most; rounding itself moves each by more.
    """
    stock = lora(run.build()) if adapters else run.build()
    if checkpointed:
        stock.gradient_checkpointing_enable(CHECKPOINTED)
    one, ours = copy.deepcopy(stock), copy.deepcopy(stock)
    for model in (one, ours):
        report = patch(model, linear_float8={**EIGHT, "frozen": adapters})
        assert report.count("linear_float8") == 14
    wrapped = WRAPS[wrap](run, ours)
    with mock.patch.object(Primitive, "call", autospec=True, side_effect=Primitive.call) as calls:
        loss = run.train(wrapped)
    expected, other = run.right(one), run.right(stock)
    torch.testing.assert_close(loss, expected[0], rtol=1e-3, atol=0)
    names = [call.args[0].op.name for call in calls.call_args_list]
    # of two layers forward and backward; under checkpointing forward is two steps
    calls_of_mlp = 0 if adapters else 2 if checkpointed else 4
    assert names.count("gated_mlp_float8") == calls_of_mlp
    actual = gradients(ours)
    assert actual.keys() == expected[1].keys() > set()
    apart = []
    for name, gradient in actual.items():
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        scale = expected[1][name].norm()
        assert (whole - expected[1][name]).norm() < 0.01 * scale, name
        apart.append((other[1][name] - expected[1][name]).norm() > 0.01 * scale)
    assert sum(apart) > len(apart) / 2


def forms(run, **sizes):
    """Trained weights, and adapters on a frozen base, each with its options of the patch."""
    yield run.build(**sizes), {"gather": True}
    yield lora(run.build(**sizes)), {"frozen": True}


def changed(run, ours, eight, order="patch shard", **options):
    """Patch and shard a model, in an order."""
    for each in order.split():
        if each == "shard":
            sharded(run, ours, **options)
        else:
            report = patch(ours, linear_float8={**EIGHT, **eight})
            assert report.count("linear_float8") == 14, report
    return ours


def coded_parts(ours):
    """This rank's parts of the weights of linear layers."""
    return {
        n: p._local_tensor
        for n, p in ours.named_parameters()
        if "proj" in n and "lora" not in n and n.endswith("weight")
    }


def same_bits(run, stock, eight, order="patch shard", autocast=False, **options):
    """Steps of a sharded model have the bits of one process, as all ranks have the same batch."""
    one, ours = copy.deepcopy(stock), copy.deepcopy(stock)
    patch(one, linear_float8={**EIGHT, "frozen": "frozen" in eight})
    changed(run, ours, eight, order, **options)
    sgd = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (one, ours)
    ]
    call, coded = Primitive.call, []

    def calls(prim, *args):
        arguments = dict(zip(prim.params, args, strict=True))
        weights = {
            n: t for n, t in arguments.items() if f"{n}_scale" in arguments and n.endswith("weight")
        }
        coded.extend(
            (prim.op.name, arguments[f"{n}_scale"] is not None)
            for n, t in weights.items()
            if t is not None and t.numel()  # a shard is rounded beside a weight of no rows
        )
        return call(prim, *args)

    for _ in range(2):
        results = []
        for model in (one, ours):
            coded.clear()
            with (
                mock.patch.object(Primitive, "call", calls),
                torch.autocast(run.device.type, torch.bfloat16, enabled=autocast),
            ):
                loss = model(**run.batch()).loss
                loss.backward()
            results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
        assert len(coded) >= 28
        assert all(held for _, held in coded), coded
        (right, expected), (loss, gradients) = results
        assert torch.equal(loss, right)
        for name, gradient in expected.items():
            if gradient is not None:
                assert torch.equal(gradients[name].full_tensor(), gradient), name
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
    return ours


@case()
def fsdp2_gathers_codes_of_trained_weights(run):
    from liger_multi.patching.float8.weight import TrainedShard

    for order in ("patch shard", "shard patch"):
        ours = same_bits(run, run.build(), {"gather": True}, order)
        assert all(type(t) is TrainedShard for t in coded_parts(ours).values())


@case()
def fsdp2_gathers_codes_of_adapters_on_a_frozen_base(run):
    """A rank holds a byte per weight of its rows, and four per row."""
    from liger_multi.patching.float8.weight import Float8Weight

    stock = lora(run.build())
    for name, part in coded_parts(same_bits(run, stock, {"frozen": True})).items():
        whole = stock.get_parameter(name)
        assert type(part) is Float8Weight
        assert part.codes.shape == (len(whole) // WORLD, whole.shape[1])
        assert part.codes.untyped_storage().nbytes() == part.codes.numel()
        assert torch.equal(part.original, whole.detach().chunk(WORLD)[run.rank].cpu())
    report = patch(sharded(run, lora(run.build())), linear_float8={**EIGHT, "frozen": True})
    reasons = {s.reason for s in report.skipped if s.op == "linear_float8" and "proj" in s.path}
    assert reasons == {"FSDP2 has sharded its weight in 16 bits or more: patch before sharding"}


@case()
def fsdp2_gathers_codes_under_checkpointing(run):
    """Backward gathers again, and finds the codes of forward."""
    for stock, eight in forms(run):
        stock.enable_input_require_grads()
        stock.gradient_checkpointing_enable(CHECKPOINTED)
        same_bits(run, stock.train(), eight)


@case()
def fsdp2_gathers_codes_of_uneven_shards(run):
    """49 rows of two ranks, and one row; weights stay gathered between forward and backward."""
    sizes = {"intermediate_size": 49, "num_key_value_heads": 1, "head_dim": 1}
    for options in ({}, {"reshard_after_forward": False}):
        for stock, eight in forms(run, **sizes):
            ours = same_bits(run, stock, eight, **options)
            rows = {len(t) for n, t in coded_parts(ours).items() if "up_proj" in n}
            assert rows == {25 - run.rank}


@case()
def fsdp2_gathers_codes_of_one_rank_and_of_replicas(run):
    """FSDP2 has code of its own for a mesh of one rank, which copies."""
    mesh = init_device_mesh(run.device.type, (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    for part in (mesh["shard"], mesh):
        run.mesh = lambda part=part: part
        for stock, eight in forms(run, intermediate_size=49):
            same_bits(run, stock, eight)
    del run.mesh


@case()
def fsdp2_gathers_codes_over_micro_batches(run):
    """Gradients are summed before they are reduced, and codes serve both micro-batches."""
    one, ours = run.pair()
    patch(one, linear_float8=EIGHT)
    changed(run, ours, {"gather": True})
    for last in (False, True):
        ours.set_requires_gradient_sync(last)
        ours.set_reshard_after_backward(last)
        for model in (one, ours):
            model(**run.batch()).loss.backward()
    for name, p in one.named_parameters():
        assert torch.equal(ours.get_parameter(name).grad.full_tensor(), p.grad), name


@case()
def fsdp2_gathers_codes_under_autocast(run):
    same_bits(run, run.build(), {"gather": True}, autocast=True)


@case(slow=True)
def fsdp2_gathers_codes_of_compiled_layers(run):
    """Blocks are compiled one by one, within what FSDP2 does around them."""
    one, ours = run.pair()
    patch(one, linear_float8=EIGHT)
    patch(ours, linear_float8={**EIGHT, "gather": True})
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager")
    sharded(run, ours)
    for _ in range(2):
        losses = [m(**run.batch()).loss for m in (one, ours)]
        run.close(*losses)
        for loss in losses:
            loss.backward()
        for name, p in one.named_parameters():
            gradient = ours.get_parameter(name).grad.full_tensor()
            assert (gradient - p.grad).norm() < 0.01 * p.grad.norm(), name
        for m in (one, ours):
            m.zero_grad()


@case()
def fsdp2_gathers_codes_of_weights_in_float32_for_steps_in_bfloat16(run):
    """Codes are rounded from what the optimizer holds, and not from its 16 bits."""
    from liger_multi.reference.float8.rows import PLAIN

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results, stock = [], run.build()
    for options in ({}, {"gather": True}):
        ours = changed(run, copy.deepcopy(stock), options, mp_policy=policy)
        ours(**run.batch()).loss.backward()
        results.append({n: p.grad.full_tensor() for n, p in ours.named_parameters()})
    for name, expected in results[0].items():
        gradient = results[1][name]
        assert gradient.dtype == expected.dtype == torch.float32
        assert torch.cosine_similarity(gradient.flatten(), expected.flatten(), 0) > 0.98, name
    layer = ours.model.layers[0]
    layer.unshard()
    weight = layer.self_attn.q_proj.weight
    wide = stock.model.layers[0].self_attn.q_proj.weight
    codes, scale = PLAIN.rows(wide.detach(), None, weight.codes.dtype)
    assert torch.equal(weight.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(weight.scale, scale)
    assert weight.dtype == torch.bfloat16


WHOLE = StateDictOptions(full_state_dict=True)


def plain_forms(run, **sizes):
    """As ``forms``, where the embedding alone is trained on the frozen base."""
    for eight in ({"gather": True}, {"frozen": True}):
        stock = run.build(**sizes).requires_grad_("gather" in eight)
        stock.model.embed_tokens.requires_grad_(True)
        yield stock, eight


def holds(ours, expected):
    """A sharded model's numbers are those of one process, in plain tensors."""
    state = ours.state_dict()
    for name, whole in expected.state_dict().items():
        assert type(state[name]._local_tensor) is torch.Tensor
        assert torch.equal(state[name].full_tensor(), whole), name


@case()
def fsdp2_with_codes_saves_and_loads_numbers(run):
    """Files hold what one process would save; what is loaded is what the next step runs with."""
    for stock, eight in plain_forms(run, intermediate_size=49):
        other = copy.deepcopy(stock)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.3)
        ours = changed(run, copy.deepcopy(stock), eight)
        file = io.BytesIO()
        torch.save(ours.state_dict(), file)
        file.seek(0)
        for t in torch.load(file, weights_only=True).values():
            assert type(t._local_tensor) is torch.Tensor
        holds(ours, stock)
        for name, results in get_model_state_dict(ours, options=WHOLE).items():
            assert torch.equal(results, stock.state_dict()[name]), name
        set_model_state_dict(ours, other.state_dict(), options=WHOLE)
        holds(ours, other)
        patch(other, linear_float8=EIGHT)
        with torch.no_grad():
            assert torch.equal(ours(**run.batch()).loss, other(**run.batch()).loss)


@case()
def fsdp2_with_codes_of_a_model_without_numbers(run):
    """Built on the meta device, patched, sharded, given room and then numbers."""
    for stock, eight in plain_forms(run):
        buffers = {n: b.clone() for n, b in stock.named_buffers()}
        ours = changed(run, copy.deepcopy(stock).to("meta"), eight)
        ours.to_empty(device=run.device)
        for name, buffer in ours.named_buffers():
            buffer.copy_(buffers[name])
        set_model_state_dict(ours, stock.state_dict(), options=WHOLE)
        holds(ours, stock)
        patch(stock, linear_float8={**EIGHT, "frozen": "frozen" in eight})
        losses = [m(**run.batch()).loss for m in (ours, stock)]
        assert torch.equal(*losses)
        losses[0].backward()


@case()
def fsdp2_with_codes_has_no_way_back(run):
    for options in ({"gather": True}, {"frozen": True}):
        ours = run.build().requires_grad_("frozen" not in options)
        changed(run, ours, options)
        kinds = [type(m) for m in ours.modules()]
        with pytest.raises(PatchError, match="unpatch before sharding"):
            unpatch(ours)
        report = patch(ours)
        reasons = {s.reason for s in report.skipped if "proj" in s.path}
        assert reasons == {"FSDP2 gathers its weight in FP8; options are fixed"}
        again = patch(ours, linear_float8={**EIGHT, **options})
        assert {e.status for e in again.entries if e.op == "linear_float8"} == {"already patched"}
        assert [type(m) for m in ours.modules()] == kinds
    ours = sharded(run, run.build())
    ours(**run.batch()).loss.backward()
    report = patch(ours, linear_float8={**EIGHT, "gather": True})
    assert report.count("linear_float8") == 0
    reasons = {s.reason for s in report.skipped if "proj" in s.path}
    assert reasons == {"FSDP2 has gathered its weight before: patch before the first step"}
    assert patch(ours, linear_float8=EIGHT).count("linear_float8") == 14
    ours(**run.batch()).loss.backward()


def converted(model):
    """A model whose decoder layers are torchao's, with a scale per tensor, and gathered in FP8."""
    from torchao import float8 as ao

    config = ao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    ao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: "proj" in name
    )
    return model


@case()
def fsdp2_of_models_converted_by_torchao(run):
    """Its own tensors are gathered by its own rules, beside our norms and activations."""
    for order in ("patch shard", "shard patch"):
        alone, ours = (converted(m) for m in run.pair(hidden_size=64, intermediate_size=128))
        sharded(run, alone)
        for each in order.split():
            sharded(run, ours) if each == "shard" else patch(ours, linear_float8=EIGHT)
        kinds = {type(t).__name__ for t in coded_parts(ours).values()}
        assert kinds == {"WeightWithDynamicFloat8CastTensor"}
        results = []
        for model in (alone, ours):
            loss = model(**run.mine(run.batch())).loss
            loss.backward()
            results.append((loss, {n: p.grad for n, p in model.named_parameters()}))
        run.close(*(loss for loss, _ in results))
        for name, expected in results[0][1].items():
            expected, gradient = expected.full_tensor(), results[1][1][name].full_tensor()
            assert (gradient - expected).norm() <= 0.01 * expected.norm(), name


@case()
def fsdp1(run):
    stock, ours = run.pair()
    patch(ours, strict=True)
    wrapped = FullyShardedDataParallel(
        ours,
        auto_wrap_policy=ModuleWrapPolicy({type(ours.model.layers[0])}),
        use_orig_params=True,
        device_id=run.device if run.device.type != "cpu" else torch.device("cpu"),
    )
    loss = run.train(wrapped)
    expected = run.right(stock)
    run.close(loss, expected[0])
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        gradients = {
            n.replace("_fsdp_wrapped_module.", ""): p.grad for n, p in wrapped.named_parameters()
        }
        run.gradients(gradients, expected[1])


# --- a model over ranks ---


@case()
def tensor_parallel_layers(run):
    """Rows and columns of attention and MLP over ranks; the batch is everybody's."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    stock, ours = run.pair(num_key_value_heads=2)
    names = {"q": 0, "k": 0, "v": 0, "o": 1}
    plan = {
        f"self_attn.{n}_proj": (ColwiseParallel, RowwiseParallel)[r]() for n, r in names.items()
    }
    plan |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
    plan["mlp.down_proj"] = RowwiseParallel()
    for layer in ours.model.layers:
        parallelize_module(layer, run.mesh(), plan)
    patch(ours)
    before = run.fused
    run.same_step(ours, stock)
    assert run.fused == before + 1


@case()
def tensor_parallel_by_transformers(run):
    """The plan of the model's own configuration, with its head over ranks."""
    import transformers

    stock = run.build(vocab_size=224)  # older transformers take no uneven shards
    folder = run.folder()
    if run.rank == 0:
        stock.save_pretrained(folder)
    dist.barrier()
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", device_mesh=run.mesh()
    ).train()
    patch(ours)
    run.same_step(ours, stock)


def gathered_attention(module, query, key, value, mask, scaling=None, **rest):
    """Causal attention of a rank's queries to the keys of all ranks."""
    from torch.distributed.nn.functional import all_gather

    keys, values = (torch.cat(all_gather(t.contiguous()), 2) for t in (key, value))
    keys, values = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (keys, values))
    own, every = query.shape[2], keys.shape[2]
    at = torch.arange(own, device=query.device) + dist.get_rank() * own
    calls = at[:, None] >= torch.arange(every, device=query.device)
    out = nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=calls, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


@case()
def context_parallel_with_shifted_labels(run):
    """Every rank has half of every sequence, and labels that were shifted before the split."""
    from transformers import AttentionInterface

    AttentionInterface.register("gathered", gathered_attention)
    stock, ours = run.pair()
    patch(ours, strict=True)
    ours.set_attn_implementation("gathered")
    whole = run.batch()
    shifted = nn.functional.pad(whole["labels"], (0, 1), value=-100)[:, 1:]
    total, half = run.count(whole["labels"]), whole["input_ids"].shape[1] // WORLD
    here = slice(run.rank * half, (run.rank + 1) * half)
    before = run.fused
    loss = ours(
        input_ids=whole["input_ids"][:, here],
        position_ids=torch.arange(2 * half, device=run.device)[None, here],
        labels=whole["labels"][:, here],
        shift_labels=shifted[:, here].contiguous(),
        num_items_in_batch=total,
        use_cache=False,
    ).loss
    loss.backward()
    assert run.fused == before + 1
    for parameter in ours.parameters():
        dist.all_reduce(parameter.grad)
    run.same(ours, run.summed(loss), run.right(stock))


@case()
def pipeline_whose_first_stage_has_no_head(run):
    stock, ours = run.pair()
    expected, batch = run.right(stock), run.batch()
    if run.rank == 0:
        stage = ours.model
        del stage.layers[1:]
        stage.norm = nn.Identity()
        assert [s.op for s in patch(stage).skipped] == ["fused_linear_cross_entropy"]
        hidden = stage(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
        dist.send(hidden.detach().contiguous(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        gradients = {f"model.{n}": p.grad for n, p in stage.named_parameters()}
    else:
        del ours.model.layers[0]
        ours.model.layers[0].self_attn.layer_idx = 0
        patch(ours, strict=True)
        hidden = torch.empty(*batch["input_ids"].shape, 32, device=run.device)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        loss = ours(inputs_embeds=hidden, labels=batch["labels"], use_cache=False).loss
        loss.backward()
        dist.send(hidden.grad, 0)
        run.close(loss, expected[0])
        gradients = {
            n.replace("layers.0.", "layers.1."): p.grad
            for n, p in ours.named_parameters()
            if p.grad is not None
        }
    run.gradients(gradients, {n: expected[1][n] for n in gradients})


@case()
def device_map(run):
    """Layers with accelerate's hooks, over the devices of the machine where it has several."""
    from accelerate import dispatch_model
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for patch_first in (True, False):
        stock, ours = run.pair()
        if patch_first:
            patch(ours, strict=True)
        if run.device.type == "cpu":
            for module in (*ours.modules(),):
                if not list(module.children()):
                    add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
        else:
            first, last = run.rank, 1 - run.rank  # ordinals, other than the current one
            places = {
                "model.embed_tokens": first,
                "model.rotary_emb": first,
                "model.layers.0": first,
            }
            places |= {"model.layers.1": last, "model.norm": last, "lm_head": last}
            dispatch_model(ours, places)
        if not patch_first:
            patch(ours)
        run.same_step(ours, stock)


# --- DeepSpeed ---


def in_engine(model, options, rate=0.5):
    """A model in DeepSpeed's engine, with SGD."""
    import deepspeed

    # its own collective in shared memory would be compiled first, for minutes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": options,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    return engine


def stepped(run, model, options):
    """Loss and parameters after a step of SGD in DeepSpeed's engine."""
    import deepspeed

    engine = in_engine(model, options)
    total = run.count(run.batch()["labels"])
    loss = engine(**run.mine(run.batch()), num_items_in_batch=total).loss
    engine.backward(loss * WORLD)
    engine.step()
    results = {}
    for name, p in engine.module.named_parameters():
        sharded = options["stage"] == 3
        with deepspeed.zero.GatheredParameters([p]) if sharded else contextlib.nullcontext():
            results[name] = p.detach().clone()
    return loss.detach().clone(), results


def alike(run, stock, ours, options):
    """Losses, and how far parameters moved; calls of the fused loss in the step of ours."""
    before = {n: p.detach().clone() for n, p in stock.named_parameters()}
    options = {"stage3_param_persistence_threshold": 0, **options}
    (expected_loss, expected), fused = stepped(run, stock, dict(options)), run.fused
    got, results = stepped(run, ours, dict(options))
    run.close(got, expected_loss)
    for name, p in results.items():
        moved = (expected[name] - before[name].to(expected[name])).abs().max()
        off = (p - expected[name]).abs().max()
        assert off <= 1e-4 * moved + 1e-6, f"{name}: {off} of {moved}"
    return run.fused - fused


@case(
    {
        "deepspeed zero 1": {"stage": 1},
        "deepspeed zero 2 offloaded": {"stage": 2, "offload": True},
        "deepspeed zero 3": {"stage": 3},
        "deepspeed zero 3 offloaded": {"stage": 3, "offload": True},
        "deepspeed zero 3 of adapters": {"stage": 3, "adapters": True},
    },
    slow=True,
)
def zero(run, stage, offload=False, adapters=False):
    stock, ours = run.pair()
    if adapters:
        stock, ours = lora(stock, FEW), lora(ours, FEW)
    patch(ours)
    options = {"stage": stage}
    if offload:
        options["offload_optimizer"] = {"device": "cpu"}
        options |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    # ZeRO-3 detaches what the head returns
    assert alike(run, stock, ours, options) == (stage < 3)


@case(slow=True)
def deepspeed_zero_3_on_nvme(run):
    """Parameters and the optimizer's state in files; what is below a megabyte a rank stays."""
    folder = run.folder()
    place = {"device": "nvme", "nvme_path": folder, "buffer_count": 4}
    options = {
        "stage": 3,
        "sub_group_size": 1 << 20,
        "offload_optimizer": place,
        "offload_param": {**place, "buffer_size": 1 << 20},
    }
    stock, ours = run.pair(vocab_size=1 << 15)
    patch(ours)
    alike(run, stock, ours, options)
    swapped = {f.parent.parent.name for f in pathlib.Path(folder).rglob("*.swp")}
    assert len(swapped) == 2, swapped  # a folder of parameters, and the optimizer's


class OnHiddenStates(nn.Module):
    """A model whose loss is computed on its hidden states and head, or on its logits."""

    def __init__(self, model, stock):
        super().__init__()
        self.model, self.stock = model, stock

    def forward(self, input_ids, labels, num_items_in_batch):
        from transformers.modeling_outputs import CausalLMOutput

        from liger_multi.losses import Head, sequence_loss

        if self.stock:
            return self.model(input_ids, labels=labels, num_items_in_batch=num_items_in_batch)
        hidden = self.model.model(input_ids).last_hidden_state[:, :-1]
        policy = Head(hidden, self.model.lm_head, chunk=5)
        loss, _ = sequence_loss(policy, labels[:, 1:], num_items=num_items_in_batch)
        return CausalLMOutput(loss=loss)


@case(slow=True)
def deepspeed_zero_3_of_hidden_states(run):
    """A loss that reaches the weight through the head's call finds it whole, and trains it."""
    stock, ours = (OnHiddenStates(m, i == 0) for i, m in enumerate(run.pair()))
    alike(run, stock, ours, {"stage": 3})


BITSANDBYTES = "deepspeed zero 3 of a base of bitsandbytes"


@case(
    {
        BITSANDBYTES: {},
        f"{BITSANDBYTES} nested, in bf16, checkpointed": {
            "storage": "bfloat16",
            "nested": True,
            "reentrant": False,
        },
        f"{BITSANDBYTES} checkpointed with reentrance": {"reentrant": True},
    },
    slow=True,
)
def zero_of_bitsandbytes(run, **options):
    """Layers run their owner's call, for which DeepSpeed gathers their codes."""
    from deepspeed.utils import safe_get_full_grad

    expected, ours = in_nf4(run, **options)
    engine = in_engine(ours, {"stage": 3, "stage3_param_persistence_threshold": 0})
    total = run.count(run.batch()["labels"])
    with keeping_codes(False):
        loss = engine(**run.mine(run.batch()), num_items_in_batch=total).loss
    sizes = {p.numel() for n, p in ours.named_parameters() if n.endswith("base_layer.weight")}
    assert sizes == {0}
    engine.backward(loss * WORLD)
    run.close(run.summed(loss), expected[0])
    parameters = engine.module.named_parameters()
    run.gradients({n: safe_get_full_grad(p) for n, p in parameters if p.requires_grad}, expected[1])
    reasons = {s.reason for s in patch(ours).skipped if s.op == "four_bits"}
    assert len(reasons) == 1
    assert "DeepSpeed" in reasons.pop()


@case(slow=True)
def deepspeed_takes_no_codes_without_storage(run):
    """Its engine moves parameters that it has weak references to, which PyTorch refuses."""
    base = run.build(hidden_size=64, intermediate_size=96)
    layer = base.model.layers[0].mlp.up_proj
    coded = ops.QuantizedWeight(*quantize_mxfp4(layer.weight), format="mxfp4", dtype=torch.float32)
    layer.weight = nn.Parameter(coded, requires_grad=False)
    with pytest.raises((RuntimeError, TypeError), match=r"swap Linear|a frozen weight in 4"):
        in_engine(lora(base, FEW), {"stage": 3})


def experts_in_4_bits(run, wrap):
    """Gradients of adapters on experts in MXFP4, alone and over ranks that see the same batch."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5}
    model = with_lora_on_experts(in_mxfp4(build("gpt_oss", **sizes)).to(run.device))
    assert patch(model, strict=True).count("fused_moe") == 2
    ids = run.batch()["input_ids"]

    model(input_ids=ids, labels=ids).loss.backward()
    alone = {n: g.clone() for n, g in gradients(model).items()}
    wrapped = wrap(model)
    for _ in range(2):  # what was gathered is filled again
        model.zero_grad()
        wrapped(input_ids=ids, labels=ids).loss.backward()
        for name, gradient in gradients(model).items():
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(gradient, alone[name], rtol=1e-4, atol=1e-6)
    return [p for n, p in model.named_parameters() if n.endswith("base_layer.gate_up_proj")]


@case()
def ddp_of_adapters_on_experts_in_4_bits(run):
    experts_in_4_bits(run, nn.parallel.DistributedDataParallel)


@case()
def fsdp2_of_adapters_on_experts_in_4_bits(run):
    """A rank holds codes of its experts: three of five, or two."""

    def wrap(model):
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    for stack in experts_in_4_bits(run, wrap):
        assert isinstance(stack._local_tensor, ops.QuantizedWeight)
        assert stack._local_tensor.codes.shape == (3 - run.rank, 192, 32)


def rank_of_cases():
    rank, meeting, device_type, path, *names = sys.argv[1:]
    backend = {"cpu": "gloo", "cuda": "nccl"}[device_type]
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, int(rank))
    if device_type != "cpu":
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=int(rank), world_size=WORLD
    )
    run, results = Run(int(rank), device), {}
    for name in names:
        try:
            CASES[name](run)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        with open(path, "w") as file:  # a later case may hang
            json.dump(results, file)
        dist.barrier()
    dist.destroy_process_group()


# --- both ranks ---

NEEDS = {w: w for w in ("deepspeed", "torchao", "bitsandbytes")} | {"adapters": "peft"}


class Ranks:
    """Two processes that run cases; what became of each is read from their files."""

    def __init__(self, folder, device_type, names):
        # what launchers say of a rank, for DeepSpeed
        environment = {
            "OMP_NUM_THREADS": "1",
            "LOCAL_WORLD_SIZE": "2",
            "WORLD_SIZE": "2",
            "DS_ACCELERATOR": device_type,
            "RANK": "RANK",
            "LOCAL_RANK": "RANK",
        }
        files = [folder / f"{rank}.json" for rank in range(2)]
        every = [
            [str(rank), str(folder / "meet"), device_type, str(file), *names]
            for rank, file in enumerate(files)
        ]
        forked = harness.accelerator() is None
        ended = processes.run(__file__, folder, every, environment, harness.PATIENCE, forked)
        self.output = "".join(text for _, text in ended)
        self.results = [json.loads(f.read_text()) if f.exists() else {} for f in files]

    def check(self, name):
        for rank, results in enumerate(self.results):
            assert name in results, f"rank {rank} did not come to it:\n{self.output[-3000:]}"
            assert not results[name], f"rank {rank}: {results[name]}"


@pytest.fixture(scope="session")
def started(tmp_path_factory, request):
    """Two ranks for the fast cases, and two for each slow one, when a test asks for them."""
    device, started_ranks = harness.selected_device(request.config), {}
    if device.type not in ("cpu", "cuda"):
        pytest.skip(f"no collectives to test on {device.type}")
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; these need two")

    def ranks(name):
        fast = [n for n in CASES if n not in SLOW]
        names = [name] if name in SLOW else [n for n in fast if not missing(n)]
        key = tuple(names)
        if key not in started_ranks:
            started_ranks[key] = Ranks(tmp_path_factory.mktemp("ranks"), device.type, names)
        return started_ranks[key]

    return ranks


def missing(name):
    """A package that a case needs and this environment lacks."""
    from importlib.util import find_spec

    return [p for word, p in NEEDS.items() if word in name and find_spec(p) is None]


BUILD = """
import sys
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("AsyncIOBuilder")
if not builder.is_compatible(verbose=False):
    sys.exit(7)
builder.load()
"""


@pytest.fixture
def files_beside_memory(request):
    """DeepSpeed's reader and writer of files, which it compiles when first used, for minutes."""
    device_type = harness.selected_device(request.config).type
    built = subprocess.run(
        [sys.executable, "-c", BUILD],
        env={**os.environ, "DS_ACCELERATOR": device_type},
        capture_output=True,
        text=True,
    )
    if built.returncode == 7:
        pytest.skip("no libaio with its headers, to compile DeepSpeed's async_io with")
    assert not built.returncode, built.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES],
)
def test_two_ranks(name, started, request):
    absent = missing(name)
    if absent:
        pytest.skip(f"{absent[0]} is not installed")
    if "nvme" in name:
        request.getfixturevalue("files_beside_memory")
    started(name).check(name)


if __name__ == "__main__":
    rank_of_cases()
