"""How losses reach a head, and what they give on the device under test.

A head's own call, its adapters, lazy logits of patched models, shards. Every loss on the device
under test, and on interpreted kernels, against fp64 on a CPU.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import liger_multi
from liger_multi import losses, ops
from liger_multi.testing.tolerance import excess
from tests import harness, processes
from tests.comparing import (
    Operations,
    assert_equal,
    assert_same_gradients,
    assert_same_loss,
    gradients,
)
from tests.models import batch, build

# --- heads ---

HALF, WIDE = torch.bfloat16, torch.float32


def data(width=16, classes=37, rows=3, length=6):
    torch.manual_seed(0)
    hidden = torch.randn(rows, length, width, requires_grad=True)
    target = torch.randint(classes, (rows, length))
    target[torch.rand(target.shape) < 0.2] = -100
    return hidden, target


def real(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("passes", ["one", "two"])
def test_a_head_is_called_so_that_hooks_gather_its_weight(passes):
    """As ZeRO-3 does: without the hooks there is no weight."""
    hidden, target = data()
    head = torch.nn.Linear(16, 37)
    whole, calls = head.weight, []
    shard = torch.nn.Parameter(torch.empty(0))
    head.weight = shard

    def gather(module, args):
        calls.append("gather")
        module.weight = whole

    def free(module, args, out):
        calls.append("free")
        module.weight = shard

    head.register_forward_pre_hook(gather)
    head.register_forward_hook(free)
    ours, _ = losses.sequence_loss(losses.Head(hidden, head), target, passes=passes)
    assert calls == ["gather", "free"]
    assert "forward" not in vars(head)
    leaves = [hidden, whole, head.bias]
    assert_same_loss(ours, real(F.linear(hidden, whole, head.bias), target), leaves)
    with pytest.raises(ValueError, match="ZeRO-3"):
        losses.sequence_loss(losses.Head(hidden, head.weight, head.bias), target)


def adapted(dropout=0.0, dtype=WIDE, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(16, 37)

        def forward(self, x):
            return self.lm_head(x)

    config = peft.LoraConfig(
        r=3, lora_alpha=7, lora_dropout=dropout, target_modules=["lm_head"], **options
    )
    model = peft.get_peft_model(Model().to(dtype), config)
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.3)
    return model, model.base_model.model.lm_head


@pytest.mark.parametrize("chunk", [1, 7, "auto"])
@pytest.mark.parametrize("passes", ["one", "two"])
def test_a_lora_adapter_on_the_head_is_computed_and_trained(passes, chunk):
    model, head = adapted()
    hidden, target = data()
    ours, _ = losses.sequence_loss(
        losses.Head(hidden, head, chunk=chunk), target, passes=passes, metrics=("entropy",)
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2
    assert_same_loss(ours, real(model(hidden), target), [hidden, *trained])


def test_several_adapters_dropout_and_scaling():
    """Dropout draws from the same numbers as PEFT's own forward."""
    peft = pytest.importorskip("peft")
    model, head = adapted(0.4)
    other = peft.LoraConfig(r=2, lora_alpha=1, target_modules=["lm_head"], use_rslora=True)
    model.add_adapter("other", other)
    torch.nn.init.normal_(head.lora_B["other"].weight)
    model.base_model.set_adapter(["default", "other"])
    hidden, target = data()
    results = []
    for loss in (
        lambda: losses.sequence_loss(losses.Head(hidden, head), target)[0],
        lambda: real(model(hidden), target),
    ):
        torch.manual_seed(3)
        results.append(loss())
    assert_same_loss(*results, [hidden, *[p for p in model.parameters() if p.requires_grad]])


def test_a_disabled_or_merged_adapter():
    model, head = adapted()
    hidden, target = data()
    with model.disable_adapter():
        ours, _ = losses.sequence_loss(losses.Head(hidden, head), target)
        assert_same_loss(ours, real(model(hidden), target), [hidden])
    model.merge_adapter()
    ours, _ = losses.sequence_loss(losses.Head(hidden, head), target)
    assert_same_loss(ours, real(model(hidden), target), [hidden])


def test_a_reference_is_the_policy_with_its_adapter_off():
    model, head = adapted()
    hidden, target = data(rows=4)
    with model.disable_adapter(), torch.no_grad():
        before = losses.tokens(losses.Head(hidden, head), target).log_prob.sum(-1)
    ours, _ = losses.dpo_loss(losses.Head(hidden, head), target, before)
    base, policy = (
        F.log_softmax(x, -1).gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target >= 0)
        for x in (head.base_layer(hidden), model(hidden))
    )
    ratio = (policy - base.detach()).sum(-1)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert_same_loss(ours, -F.logsigmoid(0.1 * (ratio[:2] - ratio[2:])).mean(), [hidden, *trained])


def test_copies_that_train_whole():
    """modules_to_save: the active copy, or the original while adapters are off."""
    peft = pytest.importorskip("peft")
    hidden, target = data()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.lm_head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 37)

        def forward(self, x):
            return self.lm_head(self.body(x))

    config = peft.LoraConfig(target_modules=["body"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(Model(), config)
    head = model.base_model.model.lm_head
    torch.nn.init.normal_(head.modules_to_save["default"].weight)
    ours, _ = losses.sequence_loss(losses.Head(hidden, head), target)
    assert_same_loss(
        ours, real(head(hidden), target), [hidden, head.modules_to_save["default"].weight]
    )
    with model.disable_adapter():
        ours, _ = losses.sequence_loss(losses.Head(hidden, head), target)
        assert_same_loss(ours, real(head(hidden), target), [hidden])


def test_heads_that_are_refused_with_the_reason():
    hidden, target = data()
    _, dora = adapted(use_dora=True)

    class Own(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    replaced = torch.nn.Linear(16, 37)
    replaced.forward = lambda x: x
    refused = {
        "no plain LoRA": dora,
        "forward of its own": Own(16, 37),
        "replaced the forward": replaced,
        "not a linear layer": torch.nn.Identity(),
    }
    for message, head in refused.items():
        with pytest.raises(TypeError, match=message):
            losses.sequence_loss(losses.Head(hidden, head), target)
    with pytest.raises(ValueError, match="own bias"):
        losses.tokens(losses.Head(hidden, torch.nn.Linear(16, 37), torch.zeros(37)), target)


# --- patched models ---


@pytest.mark.parametrize("loss_type", ["llama", "gemma2"])
@pytest.mark.parametrize("passes", ["one", "two"])
def test_lazy_logits_of_a_patched_model_stay_lazy(loss_type, passes):
    """Softcap and scale of the model included; the trainer's slices too."""
    stock = build(loss_type)
    ours = copy.deepcopy(stock)
    liger_multi.patch(ours)
    inputs = batch()
    target = inputs.pop("labels")[:, 1:]
    results = []
    for model in (stock, ours):
        logits = model(**inputs).logits[:, :-1]
        options = {"passes": passes} if model is ours else {"passes": "two"}
        if model is ours:
            assert losses.sources.as_source("x", logits, target).__class__ is losses.Head
        loss, _ = losses.sequence_loss(
            losses.Logits(logits, temperature=0.7), target, z_loss=1e-3, **options
        )
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    (expected_loss, expected), (got, grads) = results
    torch.testing.assert_close(got, expected_loss, rtol=2e-4, atol=2e-6)
    assert_same_gradients(grads, expected, rtol=1e-4)


def test_the_head_of_a_patched_model_runs_jobs():
    stock = build("llama")
    patched = copy.deepcopy(stock)
    liger_multi.patch(patched)
    head = patched.lm_head
    hidden, target = data(stock.config.hidden_size, stock.config.vocab_size)
    ours, _ = losses.sequence_loss(losses.Head(hidden, head), target)
    assert_same_loss(ours, real(stock.lm_head(hidden), target), [hidden])


# --- compiled, and on several ranks ---


@pytest.mark.parametrize("name", ["policy", "dpo", "sequence"])
def test_losses_compile_whole(name):
    """Under a compiler the loss is operators in two passes and what fuses around them."""
    hidden, target = data(rows=4)
    weight = torch.randn(37, 16, requires_grad=True)
    advantages, old = torch.randn(4), torch.randn(target.shape)

    def loss(hidden, weight):
        head = losses.Head(hidden, weight)
        if name == "policy":
            return losses.policy_loss(head, target, advantages, old=old)[0]
        if name == "dpo":
            return losses.dpo_loss(head, target)[0]
        return losses.sequence_loss(head, target)[0]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same_loss(compiled(hidden, weight), loss(hidden, weight), [hidden, weight])


def _rank(rank, meeting, results):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 37)
    hidden, target = data(rows=4)
    target[2:, 2:] = -100  # the ranks have different numbers of tokens
    advantages, old = torch.randn(4), torch.randn(target.shape)
    whole, _ = losses.policy_loss(
        losses.Head(hidden, head.weight, head.bias), target, advantages, old=old, loss_type="dapo"
    )
    expected = torch.autograd.grad(whole, (head.weight, head.bias))
    fully_shard(head, mesh=init_device_mesh("cpu", (2,)))
    mine = slice(2 * rank, 2 * rank + 2)
    for passes in ("one", "two"):
        head.zero_grad()
        loss, _ = losses.policy_loss(
            losses.Head(hidden[mine], head),
            target[mine],
            advantages[mine],
            old=old[mine],
            loss_type="dapo",
            group=dist.group.WORLD,
            passes=passes,
        )
        loss.backward()
        gradients = [p.grad.full_tensor() for p in (head.weight, head.bias)]
        results.put([float((a - b).abs().max()) for a, b in zip(gradients, expected, strict=True)])
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_heads_and_counts_of_all_ranks(tmp_path):
    """FSDP2 on two ranks: the gradient is that of one rank with all answers."""
    context = processes.forks() if harness.accelerator() is None else mp.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(r, tmp_path / "meeting", results)) for r in range(2)
    ]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join(harness.PATIENCE)
    assert [p.exitcode for p in ranks] == [0, 0]
    for _ in range(4):
        assert max(results.get()) < 1e-6


def test_counts_are_reduced_once_a_call(monkeypatch):
    """Never inside of a chunk, and only where a loss divides by what all ranks have."""
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group=None: calls.append(x))
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    hidden, target = data(rows=4)
    head = losses.Head(hidden, torch.randn(37, 16), chunk=1)
    for loss_type, expected in (("dapo", 1), ("cispo", 1), ("grpo", 0)):
        calls.clear()
        losses.policy_loss(head, target, torch.randn(4), group=object(), loss_type=loss_type)
        assert len(calls) == expected


def test_log_prob_output_is_what_the_operator_gives():
    hidden, target = data()
    weight = torch.randn(37, 16)
    tokens = losses.tokens(losses.Head(hidden, weight), target, ops.LogProbOutput._fields)
    assert_equal(tokens, ops.fused_linear_log_prob(hidden, weight, target))


# --- devices ---

OPS = (
    "fused_linear_log_prob",
    "token_log_prob",
    "fused_linear_cross_entropy",
    "fused_linear_jsd",
    "jsd",
)


kernels = harness.interpreted_kernels(*OPS, autouse=False)


ADVANTAGES = torch.tensor([0.7, -1.2, 0.4, -0.3])
DESIRABLE = torch.tensor([True, False, False, True])
LOSSES = {
    "dpo": lambda s, t, x: losses.dpo_loss(s, t, x["before"], loss_type=("sigmoid", "sft")),
    "dpo-weighting": lambda s, t, x: losses.dpo_loss(s, t, x["before"], weighting=True),
    "simpo": lambda s, t, x: losses.cpo_loss(s, t, loss_type="simpo"),
    "orpo": lambda s, t, x: losses.cpo_loss(s, t, loss_type="orpo"),
    "kto": lambda s, t, x: losses.kto_loss(s, t, x["good"], x["before"], 0.1),
    "grpo": lambda s, t, x: losses.policy_loss(
        s, t, x["advantages"], old=x["old"], reference=x["old"], beta=0.1, entropy_weight=0.1
    ),
    "gspo": lambda s, t, x: losses.policy_loss(
        s, t, x["advantages"], old=x["old"], loss_type="gspo"
    ),
    "dft": lambda s, t, x: losses.sequence_loss(s, t, loss_type="dft", z_loss=1e-3),
    "jsd": lambda s, t, x: losses.distillation_loss(s, x["teacher"], t, hard_weight=0.5),
    "cosine": lambda s, t, x: losses.distillation_loss(s, x["teacher"], t, divergence="cosine"),
    "few": lambda s, t, x: losses.distillation_loss(s, x["few"], t, rest="bucket"),
}


def loss_inputs(loss_type, device):
    """Hidden states, weight and bias of a student, and everything else, on a device."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape, size=1.0):
        return (torch.randn(shape, generator=g) * size).to(device, loss_type)

    leaves = [
        draw(4, 6, 16).requires_grad_(),
        draw(70, 16, size=0.4).requires_grad_(),
        draw(70, size=0.3).requires_grad_(),
    ]
    target = torch.randint(70, (4, 6), generator=g)
    target[torch.rand((4, 6), generator=g) < 0.3] = -100
    teacher = [draw(4, 6, 24), draw(70, 24, size=0.4)]
    top = torch.log_softmax(teacher[0].double() @ teacher[1].double().T, -1).topk(5)
    wide = torch.float64 if loss_type == torch.float64 else torch.float32
    extra = {
        "before": draw(4, size=3.0).to(wide) - 20,
        "old": draw(4, 6).to(wide) - 4,
        "good": DESIRABLE.to(device),
        "advantages": ADVANTAGES.to(device, wide),
        "teacher": losses.Head(*teacher),
        "few": losses.TopK(top.indices, top.values.to(wide)),
    }
    return leaves, target.to(device), extra


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", LOSSES)
def test_never_rows_by_vocabulary(device, name):
    """48 rows and 70 classes in chunks of 5: nothing is larger than weight, or a chunk."""
    leaves, target, extra = loss_inputs(torch.float32, device)
    leaves[0] = leaves[0].detach().repeat(1, 2, 1).requires_grad_()
    target, extra["old"] = target.repeat(1, 2), extra["old"].repeat(1, 2)
    teacher, few = extra["teacher"], extra["few"]
    extra["teacher"] = losses.Head(teacher.hidden.repeat(1, 2, 1), teacher.weight)
    extra["few"] = losses.TopK(few.ids.repeat(1, 2, 1), few.log_prob.repeat(1, 2, 1))
    with Operations() as operations:
        loss, _ = LOSSES[name](losses.Head(*leaves, chunk=5), target, extra)
        torch.autograd.grad(loss, leaves)
    # the teacher's weight and hidden states
    most = max(70 * 24, 48 * 24)
    assert max(t.numel() for t in operations.tensors()) <= most < 48 * 70


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("source", ["head", "kept", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradients(device, name, dtype, source):
    leaves, target, extra = loss_inputs(dtype, device)
    wide = [x.detach().double().cpu().requires_grad_() for x in leaves]
    _, _, exact = loss_inputs(torch.float64, "cpu")
    for key in ("before", "old"):
        exact[key] = extra[key].double().cpu()
    teacher = extra["teacher"]
    exact["teacher"] = losses.Head(teacher.hidden.double().cpu(), teacher.weight.double().cpu())
    exact["few"] = losses.TopK(extra["few"].ids.cpu(), extra["few"].log_prob.double().cpu())
    expected, _ = LOSSES[name](losses.Head(*wide), target.cpu(), exact)
    if source == "logits":
        if dtype != torch.float32:
            pytest.skip("logits would be rounded before the loss sees them")
        policy = torch.nn.functional.linear(*leaves)
        if "teacher" in extra and name in ("jsd", "cosine"):
            extra["teacher"] = teacher.hidden @ teacher.weight.T
    else:
        policy = losses.Head(*leaves, chunk=5, keep="1MiB" if source == "kept" else 0)
    ours, metrics = LOSSES[name](policy, target, extra)
    assert ours.dtype == torch.float32
    assert excess(ours.detach().cpu(), expected.detach(), dtype) <= 1
    for a, b in zip(
        torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, wide), strict=True
    ):
        assert excess(a.cpu(), b, dtype) <= 1
    assert all(not m.requires_grad for m in metrics if isinstance(m, torch.Tensor))
