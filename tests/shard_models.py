"""Models whose rows are spread over ranks, beside one process, for ``test_shards``."""

import copy
import importlib
import itertools
import os
import subprocess
import sys
import time
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import liger_multi
from liger_multi import losses, memory, routes, trees
from liger_multi._torch_private import top_saved_tensor_hooks
from liger_multi.distributed import shard_sequence, unshard_sequence
from liger_multi.errors import PackingError, PatchError
from liger_multi.ops import LogProbOutput
from liger_multi.patching import shards
from tests import models
from tests.sweep import cases

LOSS, GRADIENT = 1e-5, 5e-4
"""Relative difference of losses; of gradients, to the largest number of their tensor."""
NOISE = 1e-6  # of the largest gradient of a model: what is zero but for rounding


def build(name: str, **patching: Any) -> Any:
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
    liger_multi.patch(model, **patching)
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
    return float(loss), gradients_of(model)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def spread_pair(name: str, checkpointing: bool = False) -> tuple[Any, Any]:
    """A model, and its copy whose rows are spread over ranks."""
    one = build(name)
    spread = copy.deepcopy(one)
    if checkpointing:
        spread.gradient_checkpointing_enable()
        spread.train()
    return one, shard_sequence(spread)


def check(name: str, checkpointing: bool = False) -> None:
    """Compare a model on all ranks with one process."""
    one, spread = spread_pair(name, checkpointing)
    for batch in batches(one.config.get_text_config().vocab_size).values():
        compare_steps(step(one, batch), step(spread, batch))
    clone = unshard_sequence(copy.deepcopy(spread))
    assert clone.generate(batch["input_ids"][:, :5], max_new_tokens=1).shape[1] == 6
    unshard_sequence(spread)


# --- trees ---


def groves(vocabulary: int) -> dict[str, trees.Batch]:
    """Two trees whose prompts and answers cross shares, one path, and padded rows as trees."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (length,), generator=generator)

    turns = (ids(3), [ids(4), (ids(6), [ids(2), ids(3)])])
    groups = [(ids(13), [ids(5), ids(1), turns]), ([], [ids(7), ids(2)])]
    prompts = ids(9), ids(5)
    rows = [torch.cat([prompts[n > 1], ids(n + 3)]) for n in range(4)]
    padded, mask = (
        torch.nn.utils.rnn.pad_sequence(x, batch_first=True)
        for x in (rows, [torch.ones_like(row) for row in rows])
    )
    return {
        "nested": trees.pack(groups, pad_to=3),
        "a path": trees.pack([(ids(20), [ids(17)])]),
        "rows": trees.from_batch(padded, mask, prompt_lengths=[9, 9, 5, 5]),
    }


def policy(output: LogProbOutput, targets: torch.Tensor) -> torch.Tensor:
    signs = torch.tensor([1.0, -0.5, 2.0, -1.0])[: len(targets)]
    options = {"loss_type": "grpo", "entropy_weight": 0.1}
    old = torch.full_like(output.log_prob, -5.0)
    return losses.policy_loss(output, targets, signs, old=old, **options)[0]


def preference(output: LogProbOutput, targets: torch.Tensor) -> torch.Tensor:
    return losses.dpo_loss(output, targets)[0]


def scored(model: Any, batch: trees.Batch, loss_of: Any) -> torch.Tensor:
    """A loss of log-probabilities and entropies."""
    result = trees.scores(model, batch, temperature=0.7, entropy=True)
    targets, values = batch.targets[None], (result.log_probs[None], result.entropy[None])
    if batch.rows is not None:
        targets = batch.to_rows(batch.targets).masked_fill(batch.rows < 0, -100)
        values = tuple(batch.to_rows(x[0]) for x in values)
    loss = loss_of(LogProbOutput(log_prob=values[0], entropy=values[1]), targets)
    balance = getattr(result.output, "aux_loss", None)
    return loss if balance is None else loss + 0.3 * balance


def shown(model: Any, batch: trees.Batch, loss_of: Any) -> torch.Tensor:
    """A loss of the logits of all tokens."""
    with trees.shared(batch):
        logits = model(**batch.inputs).logits
    tokens = batch.tree.tokens - batch.tree.padding
    return loss_of(logits[:, :tokens], batch.inputs["input_ids"][:, :tokens])


def tree_step(model: Any, batch: trees.Batch, call: Any = scored, loss_of: Any = policy) -> Any:
    model.zero_grad()
    loss = call(model, batch, loss_of)
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def forest(name: str, checkpointing: bool = False) -> None:
    """Compare trees on all ranks with one process; every rank has the same number."""
    one, spread = spread_pair(name, checkpointing)
    forms = groves(one.config.get_text_config().vocab_size)
    calls = [(scored, policy, form) for form in forms]
    calls += [(scored, preference, "rows"), (shown, LOSSES["of each token"], "nested")]
    for call, loss_of, form in calls:
        steps = [tree_step(model, forms[form], call, loss_of) for model in (one, spread)]
        compare_steps(*steps)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, steps[1][0])
        assert of_ranks == [steps[1][0]] * len(of_ranks)
    assert shards.row() is None
    with pytest.raises(PackingError, match="with its head"), trees.shared(forms["nested"]):
        getattr(spread, spread.base_model_prefix)(**forms["nested"].inputs)
    unshard_sequence(spread)


def routed(name: str, checkpointing: bool) -> None:
    """Routes are of whole rows: what ranks record is what one process does, and so for replays."""
    one, spread = spread_pair(name, checkpointing)
    vocabulary = one.config.get_text_config().vocab_size
    rows, forests = batches(vocabulary), groves(vocabulary)
    for run, batch in [(step, b) for b in rows.values()] + [
        (tree_step, b) for b in forests.values()
    ]:
        recorded = []
        for model in (one, spread):
            with routes.record(model) as each:
                run(model, batch)
            recorded.append(each.layers)
        assert all(map(torch.equal, *recorded))
        experts = 1 + max(int(layer.max()) for layer in recorded[0])
        changed = routes.Routes([(layer + 1) % experts for layer in recorded[0]])
        steps = []
        for model in (one, spread):
            with routes.replay(model, changed):
                steps.append(run(model, batch))
        compare_steps(*steps)
        assert abs(steps[0][0] / run(one, batch)[0] - 1) > LOSS  # routes matter


def pictured(name: str) -> None:
    """Rows and trees whose prompt has images, which cross the shares."""
    pair = next(p for p in cases.registered() if p.name.startswith(f"{name}/"))
    one = cases.build(pair).eval()
    one.set_attn_implementation("liger_multi")
    liger_multi.patch(one)
    spread = shard_sequence(copy.deepcopy(one))
    whole = cases.inputs(pair, one)
    whole.pop("labels", None)
    batch = {**whole, "labels": whole["input_ids"]}
    compare_steps(step(one, batch), step(spread, batch))
    ids = whole["input_ids"]
    images = {n: v[: len(v) // len(ids)] for n, v in whole.items() if "pixel" in n or "grid" in n}
    tree = trees.pack([(ids[0].tolist(), [[11, 12, 13, 14], [21], [31, 32, 33]])])
    if "image_grid_thw" in images:  # positions have three axes
        tree.inputs["position_ids"] = tree.inputs["position_ids"].expand(3, -1, -1)
    steps = []
    for model in (one, spread):
        model.zero_grad()
        loss = -trees.scores(model, tree, **images).log_probs.mean()
        loss.backward()
        steps.append((float(loss.detach()), gradients_of(model)))
    compare_steps(*steps)


# --- losses and metrics outside of the model ---


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )


LOSSES = {
    "cross entropy": cross_entropy,
    "of the last token": lambda logits, ids: logits[:, -1].float().logsumexp(-1).mean(),
    "of all logits": lambda logits, ids: logits.float().logsumexp(-1).square().mean(),
    "of each token": lambda logits, ids: (
        -logits.log_softmax(-1).gather(-1, ids[..., None]).square().mean()
    ),
}


def outside(name: str, patching: dict[str, Any], names: Any = LOSSES) -> None:
    """A loss that a caller makes of logits sees whole rows, whose length ranks do not divide."""
    one = build(name, **patching).train()
    spread = shard_sequence(copy.deepcopy(one))
    batch = batches(one.config.get_text_config().vocab_size)
    for loss_of in (LOSSES[name] for name in names):
        for form in ("row", "packed"):
            call = {n: x for n, x in batch[form].items() if n != "labels"}
            for return_dict in (True, False):
                compare_steps(
                    *(own_step(model, call, loss_of, return_dict) for model in (one, spread))
                )
    labels = batch["row"]["labels"]
    assert spread(**batch["row"], use_cache=False).logits.shape[1] < labels.shape[1]
    for return_dict in (True, False):
        results = []
        for model in (one.eval(), spread.eval()):
            with torch.no_grad():
                output = model(**batch["row"], use_cache=False, return_dict=return_dict)
            results.append((tensors_of(output)[0], logits_of(output).argmax(-1)))
        assert torch.equal(results[0][1], results[1][1])
        assert abs(results[0][0] / results[1][0] - 1) < LOSS


def headless() -> None:
    """The layers alone, without a head: a rank's hidden states, of packed rows too."""
    one = build("LlamaForCausalLM").model
    spread = shard_sequence(copy.deepcopy(one))
    ranks = shards.Ranks(None, dist.get_world_size(), dist.get_rank())
    for batch in batches(one.config.vocab_size).values():
        call = {n: x for n, x in batch.items() if n != "labels"}
        expected = one(**call, use_cache=False).last_hidden_state
        expected = ranks.share(F.pad(expected, (0, 0, 0, -expected.shape[1] % ranks.size)), 1)
        for return_dict in (True, False):
            actual = spread(**call, use_cache=False, return_dict=return_dict)[0]
            assert actual.shape == expected.shape
            real = expected.abs().sum(-1) > 0
            if "attention_mask" not in call:
                torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-4)


def other_heads() -> None:
    """Labels of other heads are not shifted, so they are refused; logits of tokens are whole."""
    ids = batches(64)["row"]["input_ids"]
    for kind in ("TokenClassification", "SequenceClassification", "QuestionAnswering"):
        torch.manual_seed(0)
        model = getattr(transformers, f"LlamaFor{kind}")(models.build().config).eval()
        model.set_attn_implementation("liger_multi")
        liger_multi.patch(model)
        with pytest.raises(PatchError):
            shard_sequence(model)
        if kind == "TokenClassification":
            expected = model(input_ids=ids, use_cache=False).logits
            shard_sequence(model, check=False)
            actual = model(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def own_step(model: Any, call: Any, loss_of: Any, return_dict: bool) -> Any:
    model.zero_grad()
    output = model(**call, use_cache=False, return_dict=return_dict)
    loss = loss_of(logits_of(output), call["input_ids"])
    loss = loss + 0.3 * sum(x for x in tensors_of(output) if not x.ndim)  # of routers
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def tensors_of(output: Any) -> list[torch.Tensor]:
    values = output if isinstance(output, tuple) else output.to_tuple()
    return [x for x in values if isinstance(x, torch.Tensor)]


def logits_of(output: Any) -> torch.Tensor:
    return next(x for x in tensors_of(output) if x.ndim == 3)


def compare_steps(one: Any, spread: Any) -> None:
    """Loss and gradients of one process, and those of ranks."""
    (loss, expected), (actual_loss, gradients) = one, spread
    assert abs(actual_loss - loss) <= LOSS * abs(loss), (actual_loss, loss)
    scale = max(float(g.abs().max()) for g in expected.values())
    for key, gradient in expected.items():
        actual = gradients.get(key, torch.zeros_like(gradient)) / dist.get_world_size()
        dist.all_reduce(actual)
        limit = GRADIENT * float(gradient.abs().max()) + NOISE * scale
        error = float((actual - gradient).abs().max())
        assert error <= limit, (key, error, limit)


def interrupted() -> None:
    """Ctrl-C in a layer, in forward and where it is computed again, leaves nothing in force."""
    model = shard_sequence(build("LlamaForCausalLM"))
    handle = memory.offload_activations(model, min_bytes=0)
    batch = batches(model.config.vocab_size)["row"]
    loss, expected = step(model, batch)
    stop = model.model.layers[1].self_attn.o_proj.register_forward_hook(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        step(model, batch)
    stop.remove()
    assert (shards.row(), shards.ranks()) == (None, None)
    assert top_saved_tensor_hooks(True) is None
    model.gradient_checkpointing_enable()
    running = model.train()(**batch, use_cache=False).loss
    stop = model.model.layers[1].self_attn.o_proj.register_forward_hook(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        running.backward()
    stop.remove()
    assert shards.ranks() is None
    actual = step(model, batch)
    assert actual[0] == loss
    assert all(torch.equal(actual[1][n], g) for n, g in expected.items())
    handle.remove()
    unshard_sequence(model)
    assert "forward" not in vars(model.model)


# --- shares that a trainer cuts: verl ---


class Ulysses(types.ModuleType):
    """``verl.utils.ulysses``, as far as it is asked for ranks."""

    group: Any = None

    def get_ulysses_sequence_parallel_group(self) -> Any:
        return self.group

    def get_ulysses_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self.group) if self.group else 1


def ulysses() -> None:
    """Log-probabilities of a packed row that verl pads and cuts, also under checkpointing."""
    module = sys.modules.setdefault("verl.utils.ulysses", Ulysses("verl.utils.ulysses"))
    integration = importlib.import_module("liger_multi.integrations.verl")
    apply = importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance
    one = build("LlamaForCausalLM", fused_linear_cross_entropy=False)
    liger_multi.unpatch(one)
    spread, unpatched = copy.deepcopy(one), copy.deepcopy(one)
    apply(model=one, fused_linear_cross_entropy=False)
    apply(model=spread, fused_linear_cross_entropy=False, swiglu=True)
    batch = batches(one.config.vocab_size)["packed"]
    ids, places = batch["input_ids"][:, :39], batch["position_ids"][:, :39]
    ranks = shards.Ranks(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    padding = -ids.shape[1] % ranks.size
    padded = F.pad(ids, (0, padding)), torch.cat([places, torch.arange(padding)[None]], 1)
    share, own = (ranks.share(x, 1) for x in padded)
    rolled = F.pad(ids.roll(-1, 1), (0, padding))
    for checkpointing in (False, True):
        if checkpointing:
            spread.gradient_checkpointing_enable()
            spread.train()
        module.group = None
        expected = log_prob_step(one, ids, places, ids.roll(-1, 1), lambda x: x)
        assert log_prob_step(spread, ids, places, ids.roll(-1, 1), lambda x: x)[0] == expected[0]
        module.group = ranks.group
        actual = log_prob_step(
            spread,
            share,
            own,
            ranks.share(rolled, 1),
            lambda x: shards.gather(x, ranks, ranks.size)[:, : ids.shape[1]],
        )
        compare_steps(expected, actual)
    for call, error in (({"labels": share}, "no label"), ({"attention_mask": share}, "padding")):
        with pytest.raises(ValueError, match=error):
            spread(input_ids=share, position_ids=own, use_cache=False, **call)
    with pytest.raises(RuntimeError, match=r"a share of a row.* model\.use_liger=true"):
        unpatched(input_ids=share, position_ids=own, use_cache=False)
    with pytest.raises(ValueError, match="position_ids"):
        spread(input_ids=share, use_cache=False)
    assert integration.ulysses_group() is ranks.group


def log_prob_step(model: Any, ids: Any, places: Any, targets: Any, whole: Any) -> Any:
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=places, use_cache=False).logits
    log_probs = whole(logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0])
    loss = -(log_probs * torch.arange(1, log_probs.shape[1] + 1)).mean()
    loss.backward()
    return float(loss), gradients_of(model)


def compiled() -> None:
    """Layers are compiled around their mixers, for any samples; a whole model is refused."""
    one = build("LlamaForCausalLM")
    spread = shard_sequence(copy.deepcopy(one))
    for wrong in (torch.compile(spread, backend="eager"), spread):
        if wrong is spread:
            spread.model.compile(backend="eager")
        with pytest.raises(RuntimeError, match="compile its layers"):
            wrong(**batches(one.config.vocab_size)["row"], use_cache=False)
    spread.model._compiled_call_impl = None
    for layer in spread.model.layers:
        layer.compile(backend="eager")
    packed = batches(one.config.vocab_size)["packed"]
    other = {**packed, "position_ids": torch.cat([torch.arange(n) for n in (25, 15)])[None]}
    for batch in (packed, other, packed):
        compare_steps(step(one, batch), step(spread, batch))


def ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


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
    forests = groves(one.config.vocab_size)
    group = mesh["dp"].get_local_rank()
    for rows, run in (
        ([forms["row"], forms["packed"]], step),
        ([forests["nested"], forests["rows"]], tree_step),
    ):
        steps = [run(one, batch) for batch in rows]
        loss, _ = run(spread, rows[group])
        assert abs(loss - steps[group][0]) <= LOSS * abs(steps[group][0])
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


SIZES = {
    "MLP": {"intermediate_size": 4096, "head_dim": 16},
    "attention": {"intermediate_size": 64, "head_dim": 128, "num_key_value_heads": 4},
    "copied keys": {"intermediate_size": 64, "head_dim": 128, "num_key_value_heads": 1},
}


def measured() -> None:
    """The peak of a rank is what an estimate says, whichever part of a layer is the largest."""
    options = {"device": "cpu", "dtype": "float32", "optimizer": "none", "patched": True}
    ids = torch.arange(511)[None] % 200
    for form, checkpointing in itertools.product(SIZES, (False, True)):
        sizes = {"hidden_size": 64, "num_hidden_layers": 6, **SIZES[form]}
        model = models.build(tied=False, max_position_embeddings=512, **sizes).train()
        estimated = memory.estimate(
            model, 1, 511, ranks=2, checkpointing=checkpointing, **options
        ).peak_bytes
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.set_attn_implementation("liger_multi")
        liger_multi.patch(model)
        shard_sequence(model)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with memory.measure("cpu", known=[*model.parameters(), *model.buffers()]) as peak:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert abs(estimated / peak.peak_bytes - 1) < 0.01, (form, estimated, peak)


def ended(cut: bool = False) -> None:
    """A rank ends in the middle of training, or the cable between two hosts is cut.

    The others learn it, in time.
    """
    model = shard_sequence(build("LlamaForCausalLM"))
    batch = batches(model.config.vocab_size)["row"]
    step(model, batch)
    dist.barrier()
    if cut:
        subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
    elif dist.get_rank() == 1:
        print("done", flush=True)
        os._exit(0)
    said = "is late beyond the time limit" if cut else "another rank, which has ended"
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=said):
        step(model, batch)
    assert time.monotonic() - start < (1 + cut) * SECONDS + 5
    print("done", flush=True)
    os._exit(0)  # no group is left to be destroyed


SECONDS = 20  # the time limit of a group
