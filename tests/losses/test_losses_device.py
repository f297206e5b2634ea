"""Every loss on the device under test, and on interpreted kernels, against fp64 on a CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import liger_multi
from liger_multi import losses
from liger_multi.dispatch.op import inline_ops
from liger_multi.testing.tolerance import excess
from tests import harness

OPS = ("fused_linear_log_prob", "token_log_prob", "fused_linear_cross_entropy",
       "fused_linear_jsd", "jsd")  # fmt: skip


@pytest.fixture(autouse=True)
def kernels(request):
    """Interpreted kernels are bound by name; elsewhere the device chooses."""
    if harness.interpreted() and "triton" in harness.selected_backends(request.config):
        with liger_multi.use(**{key: ["triton", "reference"] for key in OPS}):
            yield
    else:
        yield


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
}  # fmt: skip


def given(kind, device):
    """Hidden states, weight and bias of a student, and everything else, on a device."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape, size=1.0):
        return (torch.randn(shape, generator=g) * size).to(device, kind)

    leaves = [draw(4, 6, 16).requires_grad_(), draw(70, 16, size=0.4).requires_grad_(),
              draw(70, size=0.3).requires_grad_()]  # fmt: skip
    target = torch.randint(70, (4, 6), generator=g)
    target[torch.rand((4, 6), generator=g) < 0.3] = -100
    teacher = [draw(4, 6, 24), draw(70, 24, size=0.4)]
    top = torch.log_softmax(teacher[0].double() @ teacher[1].double().T, -1).topk(5)
    wide = torch.float64 if kind == torch.float64 else torch.float32
    beside = {
        "before": draw(4, size=3.0).to(wide) - 20, "old": draw(4, 6).to(wide) - 4,
        "good": DESIRABLE.to(device), "advantages": ADVANTAGES.to(device, wide),
        "teacher": losses.Head(*teacher), "few": losses.TopK(top.indices, top.values.to(wide)),
    }  # fmt: skip
    return leaves, target.to(device), beside


class Widest(TorchDispatchMode):
    """The largest tensor that an operation makes, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return made


@pytest.mark.parametrize("name", LOSSES)
def test_never_rows_by_vocabulary(device, name):
    """48 rows and 70 classes in chunks of 5: nothing is larger than weight, or a chunk."""
    leaves, target, beside = given(torch.float32, device)
    leaves[0] = leaves[0].detach().repeat(1, 2, 1).requires_grad_()
    target, beside["old"] = target.repeat(1, 2), beside["old"].repeat(1, 2)
    teacher, few = beside["teacher"], beside["few"]
    beside["teacher"] = losses.Head(teacher.hidden.repeat(1, 2, 1), teacher.weight)
    beside["few"] = losses.TopK(few.ids.repeat(1, 2, 1), few.log_prob.repeat(1, 2, 1))
    with inline_ops(), Widest() as seen:
        loss, _ = LOSSES[name](losses.Head(*leaves, chunk=5), target, beside)
        torch.autograd.grad(loss, leaves)
    assert seen.elements <= max(70 * 24, 48 * 24)  # the teacher's weight and hidden states
    assert seen.elements < 48 * 70


@pytest.mark.parametrize("source", ["head", "kept", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradients(device, name, dtype, source):
    leaves, target, beside = given(dtype, device)
    wide = [x.detach().double().cpu().requires_grad_() for x in leaves]
    _, _, exact = given(torch.float64, "cpu")
    for key in ("before", "old"):
        exact[key] = beside[key].double().cpu()
    teacher = beside["teacher"]
    exact["teacher"] = losses.Head(teacher.hidden.double().cpu(), teacher.weight.double().cpu())
    exact["few"] = losses.TopK(beside["few"].ids.cpu(), beside["few"].log_prob.double().cpu())
    right, _ = LOSSES[name](losses.Head(*wide), target.cpu(), exact)
    if source == "logits":
        if dtype != torch.float32:
            pytest.skip("logits would be rounded before the loss sees them")
        policy = torch.nn.functional.linear(*leaves)
        if "teacher" in beside and name in ("jsd", "cosine"):
            beside["teacher"] = teacher.hidden @ teacher.weight.T
    else:
        policy = losses.Head(*leaves, chunk=5, keep="1MiB" if source == "kept" else 0)
    ours, metrics = LOSSES[name](policy, target, beside)
    assert ours.dtype == torch.float32
    assert excess(ours.detach().cpu(), right.detach(), dtype) <= 1
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(right, wide),
                    strict=True):  # fmt: skip
        assert excess(a.cpu(), b, dtype) <= 1
    assert all(not m.requires_grad for m in metrics if isinstance(m, torch.Tensor))
