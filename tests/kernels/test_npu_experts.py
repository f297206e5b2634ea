"""Experts on Ascend: which of torch_npu's operators run, within which limits, and who waits.

Results are the common suite's. Runs as tests/kernels/test_npu.py does.
"""

import importlib
import importlib.util
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("ascendnpuir") is None or importlib.util.find_spec("torch_npu") is None:
    pytest.skip("needs the environment of make test-npu", allow_module_level=True)

from torch._subclasses import FakeTensorMode

from ci.npu.simulate import READ
from liger_multi import ops
from liger_multi.backends.npu.experts import fused_moe as ours
from liger_multi.dispatch import launch
from liger_multi.dispatch.launch import device_info
from liger_multi.reference.experts import fused_moe as theirs
from liger_multi.testing import samples

contract = importlib.import_module("liger_multi.ops.fused_moe")
NPU = torch.device("npu", 0)
SORTED = "npu::npu_moe_token_permute"
UNSORTED = "npu::npu_moe_token_unpermute"
GROUPED = "npu::npu_grouped_matmul"
ADDED = "npu::npu_grouped_matmul_add_"


def moe(name, dtype, device=NPU):
    """Tensors and options of a sample."""
    sample = next(s for s in samples.of("fused_moe") if s.name == name)
    return sample.make(device, dtype), sample.options


def run_moe(simulated, tensors, options):
    """What ran in both directions, the result and the gradients."""
    before = simulated.calls.copy()
    y = ops.fused_moe(**tensors, **options)
    wanted = [t for t in tensors.values() if t.requires_grad]
    found = torch.autograd.grad(y, wanted, torch.ones_like(y))
    return simulated.calls - before, y, found


@pytest.mark.parametrize("name", ["rows", "gpt-oss", "transposed", "sentinels", "fp32-routing"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_read_nothing_back(simulated, name, dtype):
    ran, *_ = run_moe(simulated, *moe(name, dtype))
    counts = [ran[n] for n in (SORTED, UNSORTED, GROUPED, ADDED, READ)]
    assert counts == [1, 2, 4, 2, 0]


def test_reads_are_counted(simulated):
    """In fp32 no grouped GEMM makes weights' gradients: the host asks for the groups."""
    ran, *_ = run_moe(simulated, *moe("rows", torch.float32))
    assert (ran[GROUPED], ran[ADDED], ran[READ]) == (4, 0, 2)


@pytest.mark.parametrize("name", ["rows", "gpt-oss", "transposed", "sentinels", "fp32-routing"])
def test_experts_fit_the_meta_functions_one_after_another(name):
    made, options = moe(name, torch.bfloat16, "cpu")
    given = {"gate_up_bias": None, "down_bias": None, "activation": "silu", "limit": 7.0}
    given |= {"alpha": 1.702, "up_offset": 1.0, "interleaved": False, "transposed": False}
    needs = ("x", "gate_up_weight", "down_weight", "routing", "gate_up_bias", "down_bias")
    needs = {f"needs_{n}": n in made for n in needs}
    with FakeTensorMode():
        fake = {
            n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=NPU)
            for n, t in made.items()
        }
        given |= fake | options
        y, *kept = ours.forward(**given, y_dtype=torch.bfloat16, **needs)
        del given["gate_up_bias"]
        gradients = ours.backward(
            y, **given, **dict(zip(("gate_up", "order", "offsets"), kept, strict=True)), **needs
        )
        values = {"dy": y, **given, **needs}
        values |= zip(("gate_up", "order", "offsets"), kept, strict=True)
        right = contract.op.bwd.fake(*[values[name] for name in contract.op.bwd.params])
    assert y.shape == made["x"].shape
    for made, wanted in zip(gradients, right, strict=True):
        assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.parametrize("case", ["many experts", "many of a token", "strided", "a5"])
def test_experts_beyond_the_limits_are_by_the_reference(simulated, case):
    count, per = 1025 if case == "many experts" else 3, 513 if case == "many of a token" else 2
    torch.manual_seed(0)
    made = {"x": torch.randn(3, 4), "gate_up_weight": torch.randn(count, 4, 4)}
    made |= {"routing": torch.rand(3, per), "index": torch.randint(count, (3, per))}
    down, step = torch.randn(count, 4, 4), 2 if case == "strided" else 1
    chip = replace(device_info(NPU), table="a5" if case == "a5" else "a2")
    found = {}
    for device in ("cpu", NPU):
        given = {n: t.to(device) for n, t in made.items()}
        given["down_weight"] = down.to(device)[..., : 2 * step : step]
        if case != "strided":
            given["down_weight"] = given["down_weight"].contiguous()
        for t in given.values():
            t.requires_grad_(t.is_floating_point())
        with launch.simulate(chip):
            ran, *found[device] = run_moe(simulated, given, {})
        assert not any(ran[n] for n in (SORTED, UNSORTED, GROUPED, ADDED))
    torch.testing.assert_close([found[NPU][0].cpu()], [found["cpu"][0]])
    for a, b in zip(found[NPU][1], found["cpu"][1], strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_rows_of_no_expert_say_nothing_whatever_the_product_makes_of_them(simulated):
    """The last expert's product of them leaves the range of fp16, both ways."""
    torch.manual_seed(0)
    index = torch.tensor([[0, -1], [1, 5], [0, 1]], device=NPU)
    given = {"x": torch.full((3, 8), 100.0), "gate_up_weight": torch.randn(3, 8, 8) * 1e-2}
    given |= {"down_weight": torch.randn(3, 8, 4), "routing": torch.rand(3, 2)}
    given["gate_up_weight"][2], given["down_weight"][2] = 6e4, 6e4
    given = {n: t.to(NPU, torch.float16).requires_grad_() for n, t in given.items()}
    ran, y, found = run_moe(simulated, given | {"index": index}, {})
    assert ran[GROUPED] == 4
    assert y.isfinite().all()
    assert all(t.isfinite().all() for t in found)
    names = dict(zip(given, found, strict=True))
    assert names["routing"][0, 1] == names["routing"][1, 1] == 0
    assert not names["gate_up_weight"][2].any()
    assert not names["down_weight"][2].any()


def test_routing_in_fp32_weighs_rows_of_bf16_in_fp32(simulated):
    """Two experts that say the opposite leave the difference of their weights, 2 ** -9."""
    torch.manual_seed(0)
    first, down = torch.randn(1, 8, 4).repeat(2, 1, 1), torch.randn(1, 4, 4)
    given = {
        "gate_up_weight": first,
        "down_weight": torch.cat([down, -down]),
        "x": torch.ones(1, 4),
    }
    given = {n: t.to(NPU, torch.bfloat16).requires_grad_() for n, t in given.items()}
    index = torch.tensor([[0, 1]], device=NPU)
    ran, y, _ = run_moe(
        simulated, given | {"index": index, "routing": torch.tensor([[1 + 2**-9, 1.0]]).to(NPU)}, {}
    )
    wanted = ops.fused_moe(**given, index=index, routing=torch.tensor([[1.0, 0.0]]).to(NPU))
    assert ran[UNSORTED] == 2
    assert torch.equal(y, wanted * 2**-9)


def test_a_backward_follows_any_forward_of_experts():
    """Token-expert pairs of an expert come in any order, which forward leaves for backward."""
    made, _ = moe("sentinels", torch.float32)
    made = {n: t.detach() for n, t in made.items()}
    how = ("silu", 7.0, 1.702, 1.0, False, False)
    inputs = [made[n] for n in ("x", "gate_up_weight", "down_weight", "index", "routing")]
    both = (ours, theirs)
    kept = [
        m.forward(
            *inputs, made["gate_up_bias"], made["down_bias"], *how, torch.float32, *[True] * 6
        )
        for m in both
    ]
    assert not torch.equal(kept[0][2], kept[1][2])
    gradients = [
        m.backward(made["x"], *inputs, made["down_bias"], *k[1:], *how, *[True] * 6)
        for m in both for k in kept
    ]  # fmt: skip
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])
