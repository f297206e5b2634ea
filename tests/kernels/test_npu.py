"""The levels of Ascend that are not the common suite; ``make test-npu`` runs them.

Needs the environment that ci/npu/environment.py builds, and ``-p ci.npu.simulate``. Of experts,
whose results are the common suite's: which of torch_npu's operators run, within which limits, and
who waits.
"""

import copy
import importlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

if importlib.util.find_spec("ascendnpuir") is None or importlib.util.find_spec("torch_npu") is None:
    pytest.skip("needs the environment of make test-npu", allow_module_level=True)

from torch._subclasses import FakeTensorMode

import liger_multi
from ci.npu import blocks, launches, levels, lowering
from ci.npu.fused import REFERENCES
from ci.npu.lowering import CHIPS, LARGEST_GRID
from ci.npu.simulate import READ
from liger_multi import ops, trees
from liger_multi.backends.npu.experts import fused_moe as ours
from liger_multi.backends.npu.linear_attention import causal_conv1d, chunks, gated_short_conv
from liger_multi.dispatch import launch as launch_config
from liger_multi.dispatch.launch import device_info
from liger_multi.dispatch.registry import backends, operators
from liger_multi.errors import BackendUnavailableError
from liger_multi.patching import register_attention
from liger_multi.reference.experts import fused_moe as theirs
from liger_multi.testing import samples
from liger_multi.testing.checks import compare

NPU = torch.device("npu", 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
compiled = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process")


@compiled
def test_every_form_is_listed_as_todays_sources_have_it():
    """First of all, since it takes longest: other processes run the rest meanwhile."""
    for chip, dtype_name in itertools.product(CHIPS, DTYPES):
        assert_listed(chip, dtype_name, listed(chip))


# --- 16 bits, of which the shares of the common suite take few samples ---

WITH_SEGMENTS = {
    "gated_delta_rule": "documents",
    "kimi_delta_attention": "documents",
    "ssd_scan": "packed",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("op", WITH_SEGMENTS)
def test_batched_matmuls_in_16_bits(op, dtype):
    compare(op, next(s for s in samples.of(op) if s.name == WITH_SEGMENTS[op]), dtype, NPU, "npu")


# --- level 1: schemas and meta functions ---


def test_every_call_has_a_probe_and_a_reference():
    assert levels.used() == set(levels.CALLS)
    assert levels.used() <= set(REFERENCES)


@pytest.mark.parametrize("name", levels.CALLS)
def test_calls_fit_the_live_schema(name):
    args, shapes = levels.CALLS[name]
    results = getattr(torch.ops.npu, name)(*args, **levels.OPTIONS.get(name, {}))
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    assert [tuple(t.shape) for t in results] == shapes
    assert all(t.is_meta for t in results)


@pytest.mark.parametrize("name", ["npu_gemma_rms_norm", "npu_gelu_mul", "npu_clipped_swiglu"])
def test_operators_that_lose_gradients_are_not_used(name):
    assert name not in levels.used()


# --- level 2: gradients on fake NPU tensors ---


@pytest.mark.parametrize("op", operators())
def test_every_parameter_gets_its_gradient(op):
    small = [s for s in samples.of(op) if s.size == "small" and not s.options.get("inplace")]
    for sample in small[:4]:
        tensors = sample.make("cpu", torch.float32)
        with FakeTensorMode() as mode:
            fake = {
                n: torch.empty_strided(
                    t.shape, t.stride(), dtype=t.dtype, device=NPU
                ).requires_grad_(t.requires_grad)
                for n, t in tensors.items()
            }
            actual = samples.call(op, **fake, **sample.options)
            parts = [actual] if isinstance(actual, torch.Tensor) else list(actual)
            outs = [p for p in parts if isinstance(p, torch.Tensor) and p.requires_grad]
            assert outs, sample.name
            assert all(p.device.type == "npu" for p in outs)
            torch.autograd.backward(outs, [torch.empty_like(p) for p in outs])
        assert mode is not None
        for name, tensor in fake.items():
            if tensor.requires_grad:
                assert tensor.grad is not None, f"{sample.name}: no gradient of {name}"
                assert tensor.grad.shape == tensor.shape
                assert tensor.grad.dtype == tensor.dtype


# --- level 3: what the backend says of the device, and a model ---


def test_the_device_is_known():
    info = device_info(NPU)
    assert (info.arch, info.cores, info.shared_bytes, info.table) == (
        "Ascend910B3",
        40,
        196608,
        "a2",
    )


def test_the_device_is_known_to_the_first_thread():
    """Without the thread that enqueues operators, which may set the device first, and may not."""
    code = """
import torch, torch_npu
torch.ones(1).to("npu")
assert torch.npu.get_device_limit(0)["vector_core_num"] == 40
"""
    environment = {**os.environ, "TASK_QUEUE_ENABLE": "0"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)


def test_doctor_names_the_chip():
    facts = backends()["npu"].describe()
    assert (facts["chip"], facts["vector cores"]) == ("Ascend910B3", "40")
    assert facts["unified buffer"] == "192 KiB"
    assert facts["torch_npu"].startswith("2.13")


def test_float64_and_wide_weights_fall_back():
    x = torch.randn(4, 8, dtype=torch.float64).to(NPU)
    with pytest.raises(BackendUnavailableError, match="fp64"), liger_multi.use(rms_norm="npu"):
        ops.rms_norm(x)


@pytest.mark.parametrize(
    ("dtype", "weight", "offset", "fused"),
    [
        (torch.bfloat16, torch.bfloat16, 0.0, True),
        (torch.float32, torch.float32, 1.0, True),
        (torch.bfloat16, torch.bfloat16, 1.0, False),
        (torch.bfloat16, torch.float32, 0.0, False),
    ],
)
def test_limits_of_the_fused_norm(simulated, dtype, weight, offset, fused):
    x = torch.randn(4, 64, dtype=dtype).to(NPU).requires_grad_()
    w = torch.randn(64, dtype=weight).to(NPU).requires_grad_()
    before = simulated.calls.copy()
    ops.rms_norm(x, w, offset=offset).sum().backward()
    ran = simulated.calls - before
    assert bool(ran["npu::npu_rms_norm"]) is fused
    assert bool(ran["npu::npu_rms_norm_backward"]) is fused
    assert x.grad is not None
    assert w.grad is not None


@compiled
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("width", "rotary", "angles", "path"),
    [
        (64, 64, torch.bfloat16, "fused"),
        (64, 64, torch.float32, "kernel"),
        (64, 32, torch.bfloat16, "kernel"),
        (512, 512, torch.float32, "kernel"),
        (514, 514, torch.float32, "reference"),
    ],
)
def test_limits_of_the_fused_rotation(simulated, style, width, rotary, angles, path):
    q, k = (torch.randn(2, 3, 5, width).to(NPU, torch.bfloat16).requires_grad_() for _ in "qk")
    cos, sin = (torch.randn(1, 5, rotary).to(NPU, angles) for _ in range(2))
    before, launched = simulated.calls.copy(), lowering.launched["_rope_kernel"]
    q_out, k_out = ops.rope(q, k, cos, sin, style=style)
    (q_out.sum() + k_out.sum()).backward()
    ran, launched = simulated.calls - before, lowering.launched["_rope_kernel"] - launched
    assert ran["npu::npu_rotary_mul"] == (4 if path == "fused" else 0)
    assert launched == (4 if path == "kernel" else 0)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotations_of_more_heads_than_a_tile_holds(style):
    tensors = [torch.randn(2, heads, 3, 260) for heads in (19, 2)]
    tensors += [torch.randn(1, 3, 256) for _ in "cs"]
    actual = []
    for device, dtype in ((NPU, torch.float32), ("cpu", torch.float64)):
        q, k, cos, sin = (t.to(device, dtype) for t in tensors)
        q.requires_grad_()
        out, _ = ops.rope(q, k, cos, sin, style=style)
        (out * out.detach().cos()).sum().backward()
        actual.append([out.detach().cpu().double(), q.grad.cpu().double()])
    torch.testing.assert_close(*actual, rtol=1.3e-6, atol=1e-5)


@compiled
@pytest.mark.parametrize(("name", "ran"), [("llama", "rms_norm"), ("mixtral", "grouped_matmul")])
def test_a_patched_model_trains_as_on_the_cpu(simulated, name, ran):
    pytest.importorskip("transformers")
    from tests.models import batch, build

    losses, before = {}, simulated.calls.copy()
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = build(name).to(device)
        model.set_attn_implementation("eager")
        assert liger_multi.patch(model, strict=True) is not None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        torch.manual_seed(1)
        inputs = {n: t.to(device) for n, t in batch(device=torch.device("cpu")).items()}
        actual = []
        for _ in range(3):
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            actual.append(float(loss.detach()))
        losses[device] = actual
    assert losses["npu"][-1] < losses["npu"][0]
    torch.testing.assert_close(losses["npu"], losses["cpu"], rtol=2e-4, atol=0)
    assert (simulated.calls - before)[f"npu::npu_{ran}"]


TREES = ("llama", "gemma2", "gpt_oss", "mixtral", "qwen3_next", "lfm2", "bamba")
"""Plain attention; windows and softcaps; sinks; routers; and three recurrences."""


@compiled
@pytest.mark.parametrize("name", TREES)
def test_shared_prefixes_are_those_of_the_cpu(name):
    """Log-probabilities, entropies, the loss of routers and every gradient of two trees."""
    pytest.importorskip("transformers")
    from tests.comparing import assert_same_gradients, gradients
    from tests.patching import test_trees as cases

    register_attention()
    model = cases.hybrid(name) if name in TREES[-3:] else cases.served(name)
    batch = trees.pack(cases.below(cases.NESTED + cases.PAIR), pad_to=16)
    actual = []
    for device in (torch.device("cpu"), NPU):
        ours = copy.deepcopy(model).to(device)
        scores = trees.scores(ours, batch.to(device), entropy=True)
        values = [scores.log_probs, scores.entropy, getattr(scores.output, "aux_loss", None)]
        values = [value.cpu() for value in values if value is not None]
        sum((value * cases.weights_like(value)).sum() for value in values).backward()
        grads = {name: grad.cpu() for name, grad in gradients(ours).items()}
        actual.append(([value.detach() for value in values], grads))
    torch.testing.assert_close(actual[1][0], actual[0][0], rtol=2e-5, atol=2e-5)
    assert_same_gradients(actual[1][1], actual[0][1], rtol=5e-4)


@compiled
def test_other_branches_do_not_move_by_a_bit():
    pytest.importorskip("transformers")
    from tests.patching import test_trees as cases

    register_attention()
    cases.assert_no_other_branch_moves(cases.served("gemma2").to(NPU), NPU)


# --- level 5: the vendor's compiler ---

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def listed(chip):
    """What ci/npu/forms has of a chip: for every form its kernel, type, block and verdict."""
    lines = (blocks.HERE / "forms" / f"{chip}.txt").read_text().splitlines()
    rows = [line.split(maxsplit=4) for line in lines if line[0] != "#"]
    return {
        key: (name, dtype_name, int(block), said) for name, dtype_name, block, key, said in rows
    }


def assert_listed(chip, dtype_name, known):
    forms = blocks.launches_of(CHIPS[chip], DTYPES[dtype_name])
    assert set(blocks.by_kernel(forms.values())) == set(blocks.NAMES)
    for launch in forms.values():
        said = known.get(launch.key[:16])
        assert said, f"{launch}: run python -m ci.npu.blocks {chip}"
        size = lowering.KINDS[blocks.TYPES[launch.size]]
        assert said[:3] == (blocks.key(launch), size, launch.constants["BLOCK"])
        taken = re.match(rf"(\d+) of {CHIPS[chip].buffer} bytes  ", said[3])
        assert taken, f"{launch}: {said}"
        assert 0 < int(taken[1]) <= CHIPS[chip].buffer
        assert launch.grid[0] <= CHIPS[chip].cores <= LARGEST_GRID


@pytest.mark.parametrize("chip", CHIPS)
def test_every_block_is_from_a_finished_search(chip):
    table = yaml.safe_load(
        (blocks.FOLDER / f"{'a5' if CHIPS[chip].a5 else 'a2'}.yaml").read_text()
    )["entries"]
    assert set(table) == set(blocks.NAMES)
    for name, entries in table.items():
        for entry in entries:
            (size, _), block = entry["when"]["bytes"], entry["config"]["block"]
            assert entry["source"].startswith("finished search, "), entry
            assert chip in entry["source"]
            # one more step was refused, or there is none
            dtype_name = lowering.KINDS[blocks.TYPES[size]]
            more = [
                s
                for n, k, b, s in listed(chip).values()
                if (n, k, b) == (name, dtype_name, 2 * block)
            ]
            refused = [s for s in more if not re.match(r"\d+ of \d+ bytes  ", s)]
            assert refused or block == max(blocks.SIZES), (name, entry, more)


@compiled
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_kernels_compile_as_listed(request, chip, dtype_name):
    """The form of every kernel that takes the most room; ``--slow-npu``: every form."""
    known, grouped = (
        listed(chip),
        blocks.by_kernel(blocks.launches_of(CHIPS[chip], DTYPES[dtype_name]).values()),
    )
    every = request.config.getoption("--slow-npu")
    for launch in [x for same in grouped.values() for x in (same if every else same[:1])]:
        verdict = lowering.compile_by_vendor(launch, CHIPS[chip])
        assert blocks.fits(verdict), verdict
        assert blocks.why(verdict) == known[launch.key[:16]][3].partition("  ")[0]


@compiled
def test_a_block_that_is_too_large_is_refused():
    chip = CHIPS["Ascend910B3"]
    forms = blocks.launches_of(chip, torch.float32, 32768)
    launch = next(x for x in forms.values() if x.name == "_pair_sums_kernel")
    assert "overflow" in lowering.compile_by_vendor(launch, chip).error


# --- the table of paths ---


@pytest.mark.parametrize("op", blocks.OPERATORS)
def test_samples_of_a_level_start_kernels(op):
    assert blocks.forms_of(op, CHIPS["Ascend910B3"], torch.float32)


# --- experts ---

contract = importlib.import_module("liger_multi.ops.fused_moe")
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
    leaves = [t for t in tensors.values() if t.requires_grad]
    gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
    return simulated.calls - before, y, gradients


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
    tensors, options = moe(name, torch.bfloat16, "cpu")
    inputs = {"gate_up_bias": None, "down_bias": None, "activation": "silu", "limit": 7.0}
    inputs |= {"alpha": 1.702, "up_offset": 1.0, "interleaved": False, "transposed": False}
    needs = ("x", "gate_up_weight", "down_weight", "routing", "gate_up_bias", "down_bias")
    needs = {f"needs_{n}": n in tensors for n in needs}
    with FakeTensorMode():
        fake = {
            n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=NPU)
            for n, t in tensors.items()
        }
        inputs |= fake | options
        y, *kept = ours.forward(**inputs, y_dtype=torch.bfloat16, **needs)
        del inputs["gate_up_bias"]
        gradients = ours.backward(
            y, **inputs, **dict(zip(("gate_up", "order", "offsets"), kept, strict=True)), **needs
        )
        values = {"dy": y, **inputs, **needs}
        values |= zip(("gate_up", "order", "offsets"), kept, strict=True)
        right = contract.op.bwd.fake(*[values[name] for name in contract.op.bwd.params])
    assert y.shape == tensors["x"].shape
    for actual, expected in zip(gradients, right, strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("case", ["many experts", "many of a token", "strided", "a5"])
def test_experts_beyond_the_limits_are_by_the_reference(simulated, case):
    count, per = 1025 if case == "many experts" else 3, 513 if case == "many of a token" else 2
    torch.manual_seed(0)
    tensors = {"x": torch.randn(3, 4), "gate_up_weight": torch.randn(count, 4, 4)}
    tensors |= {"routing": torch.rand(3, per), "index": torch.randint(count, (3, per))}
    down, step = torch.randn(count, 4, 4), 2 if case == "strided" else 1
    chip = replace(device_info(NPU), table="a5" if case == "a5" else "a2")
    actual = {}
    for device in ("cpu", NPU):
        inputs = {n: t.to(device) for n, t in tensors.items()}
        inputs["down_weight"] = down.to(device)[..., : 2 * step : step]
        if case != "strided":
            inputs["down_weight"] = inputs["down_weight"].contiguous()
        for t in inputs.values():
            t.requires_grad_(t.is_floating_point())
        with launch_config.simulate(chip):
            ran, *actual[device] = run_moe(simulated, inputs, {})
        assert not any(ran[n] for n in (SORTED, UNSORTED, GROUPED, ADDED))
    torch.testing.assert_close([actual[NPU][0].cpu()], [actual["cpu"][0]])
    torch.testing.assert_close([a.cpu() for a in actual[NPU][1]], [*actual["cpu"][1]])


def test_rows_of_no_expert_change_no_result(simulated):
    """The last expert's product of them leaves the range of fp16, both ways."""
    index = torch.tensor([[0, -1], [1, 5], [0, 1]], device=NPU)
    inputs = {"x": torch.full((3, 8), 100.0), "gate_up_weight": torch.randn(3, 8, 8) * 1e-2}
    inputs |= {"down_weight": torch.randn(3, 8, 4), "routing": torch.rand(3, 2)}
    inputs["gate_up_weight"][2], inputs["down_weight"][2] = 6e4, 6e4
    inputs = {n: t.to(NPU, torch.float16).requires_grad_() for n, t in inputs.items()}
    ran, y, actual = run_moe(simulated, inputs | {"index": index}, {})
    assert ran[GROUPED] == 4
    assert y.isfinite().all()
    assert all(t.isfinite().all() for t in actual)
    names = dict(zip(inputs, actual, strict=True))
    assert names["routing"][0, 1] == names["routing"][1, 1] == 0
    assert not names["gate_up_weight"][2].any()
    assert not names["down_weight"][2].any()


def test_routing_in_fp32_weighs_rows_of_bf16_in_fp32(simulated):
    """Two experts of opposite outputs leave the difference of their weights, 2 ** -9."""
    first, down = torch.randn(1, 8, 4).repeat(2, 1, 1), torch.randn(1, 4, 4)
    inputs = {
        "gate_up_weight": first,
        "down_weight": torch.cat([down, -down]),
        "x": torch.ones(1, 4),
    }
    inputs = {n: t.to(NPU, torch.bfloat16).requires_grad_() for n, t in inputs.items()}
    index = torch.tensor([[0, 1]], device=NPU)
    ran, y, _ = run_moe(
        simulated,
        inputs | {"index": index, "routing": torch.tensor([[1 + 2**-9, 1.0]]).to(NPU)},
        {},
    )
    expected = ops.fused_moe(**inputs, index=index, routing=torch.tensor([[1.0, 0.0]]).to(NPU))
    assert ran[UNSORTED] == 2
    assert torch.equal(y, expected * 2**-9)


def test_a_backward_follows_any_forward_of_experts():
    """Token-expert pairs of an expert come in any order, which forward leaves for backward."""
    tensors, _ = moe("sentinels", torch.float32)
    tensors = {n: t.detach() for n, t in tensors.items()}
    how = ("silu", 7.0, 1.702, 1.0, False, False)
    inputs = [tensors[n] for n in ("x", "gate_up_weight", "down_weight", "index", "routing")]
    both = (ours, theirs)
    kept = [
        m.forward(
            *inputs, tensors["gate_up_bias"], tensors["down_bias"], *how, torch.float32, *[True] * 6
        )
        for m in both
    ]
    assert not torch.equal(kept[0][2], kept[1][2])
    gradients = [
        m.backward(tensors["x"], *inputs, tensors["down_bias"], *k[1:], *how, *[True] * 6)
        for m in both
        for k in kept
    ]
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])


# --- hybrid models ---

BATCHED = ("ssd_scan", "gated_delta_rule", "kimi_delta_attention")
KEYS, VALUES = {"q": 4, "k": 4, "v": 6}, {"x": (4, 6), "B": (2, 8), "C": (2, 8)}


def hybrid(op, length, batch=2):
    """Tensors in fp64 of an operator of chunks, and options."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(batch, length, *shape, generator=draw, dtype=torch.float64)

    ids = torch.arange(length).square() // 4000  # segments that become shorter
    if op == "ssd_scan":
        tensors = {n: drawn(*shape) for n, shape in VALUES.items()}
        tensors |= {"dt": drawn(4), "A": -drawn(4)[0, 0].abs(), "D": drawn(4)[0, 0]}
        tensors |= {"initial_state": drawn(4, 6, 8)[:, 0]}
        return tensors, {"seq_idx": ids.expand(batch, -1), "dt_softplus": True}
    kimi = op == "kimi_delta_attention"
    tensors = {n: drawn(2 if n in "qk" and not kimi else 4, size) for n, size in KEYS.items()}
    gates = (4, 4) if kimi else (4,)
    tensors |= {"g": -drawn(*gates).abs() * 3, "beta": drawn(4).sigmoid() * 2}
    tensors |= {"initial_state": drawn(4, 4, 6)[:, 0]}
    return tensors, {"documents": ids.expand(batch, -1), "qk_l2norm": True}


def both_ways(op, device, dtype, tensors, options):
    """Results and gradients."""
    inputs = {n: t.to(device, dtype).requires_grad_() for n, t in tensors.items()}
    more = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in options.items()}
    outputs = samples.call(op, **inputs, **more, output_final_state=True)
    torch.autograd.backward(outputs, [torch.ones_like(t) / 8 for t in outputs])
    return [t.detach().cpu().double() for t in (*outputs, *(t.grad for t in inputs.values()))]


@pytest.mark.parametrize("budget", [1, 2**17, 2**30])
@pytest.mark.parametrize("op", BATCHED)
def test_blocks_and_spans_change_no_result(monkeypatch, op, budget):
    monkeypatch.setattr(chunks, "BUDGET", budget)
    tensors, options = hybrid(op, 330)
    with liger_multi.use(**{op: "npu"}):
        actual = both_ways(op, NPU, torch.float32, tensors, options)
    for got, expected in zip(actual, both_ways(op, "cpu", torch.float64, tensors, options)):
        assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_memory_of_blocks_and_spans():
    for rows, length in ((1, 1), (64, 8192), (3, 131072), (4096, 64), (100000, 64)):
        many, parts = chunks.spans(length, 64, rows, 750_000)
        assert 1 <= many <= rows
        assert (parts[0].start, parts[-1].stop) == (0, length)
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
        assert many * 750_000 * -(-parts[0].stop // 64) <= chunks.BUDGET
        assert len(parts) <= 2 + (length / 64) ** 0.5 * 1.5


@pytest.mark.parametrize("case", ["drawn", "repeated keys", "strong"])
def test_inverses_by_doubling(case):
    """Repeated keys with beta = 2 have an inverse of entries of 2, and powers of 1e18."""
    lower = torch.randn(2, 3, 64, 64, dtype=torch.float64).tril(-1) / 8
    if case == "repeated keys":
        lower = torch.full_like(lower, 2.0).tril(-1)
    if case == "strong":
        lower = lower * torch.logspace(0, -30, 64, dtype=torch.float64)
    expected = torch.linalg.inv(lower + torch.eye(64, dtype=torch.float64))
    triangle = torch.ones(64, 64, dtype=torch.bool, device=NPU).tril()
    actual = chunks.Batched.invert(lower.float().to(NPU), triangle).cpu().double()
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("op", launches.HYBRIDS)
def test_launches_of_hybrids_by_torch_npu(op):
    """No operator falls back to the CPU, and launches do not depend on the batch."""
    small, large = (launches.run(op, "npu", 128, batch) for batch in (2, 3))
    for way, count in small.items():
        assert count.launches == large[way].launches
        for name in (n for n in count.launches if "_kernel" not in n):
            keys = ("PrivateUse1", "CompositeExplicitAutograd")
            assert any(torch._C._dispatch_has_kernel_for_dispatch_key(name, k) for k in keys), name


@pytest.mark.parametrize("op", BATCHED)
def test_a_chunk_more_is_a_launch_more_in_each_pass_over_states(op):
    few, many = (launches.run(op, "npu", 64 * count) for count in (3, 7))
    more = {way: many[way].launches.total() - few[way].launches.total() for way in few}
    assert more == {"forward": 4, "backward": 8}


@pytest.mark.parametrize(("op", "counts"), [("causal_conv1d", 1), ("gated_short_conv", 1)])
def test_convolutions_are_one_kernel_in_each_direction(op, counts):
    for count in launches.run(op, "npu", 256).values():
        assert sum(n for name, n in count.launches.items() if "_kernel" in name) == counts


@pytest.mark.parametrize(
    ("op", "tensors"),
    [
        ("causal_conv1d", {"x": (1, 9, 4), "weight": (4, 5)}),
        ("gated_short_conv", {"x": (1, 9, 12), "weight": (4, 5)}),
        (
            "selective_scan",
            {"u": (1, 2, 3), "delta": (1, 2, 3), "A": (3, 129), "B": (1, 2, 129), "C": (1, 2, 129)},
        ),
    ],
)
def test_what_kernels_of_hybrids_refuse_runs_by_the_reference(op, tensors):
    inputs = {n: torch.randn(shape, device=NPU) for n, shape in tensors.items()}
    with pytest.raises(BackendUnavailableError, match="takes"), liger_multi.use(**{op: "npu"}):
        getattr(ops, op)(**inputs)
    actual = getattr(ops, op)(**inputs).cpu()
    torch.testing.assert_close(actual, getattr(ops, op)(**{n: t.cpu() for n, t in inputs.items()}))


def test_convolutions_past_32_bits_are_refused():
    rows = torch.empty(1, 2**18, 8192, device="meta")
    weight = torch.empty(8192, 4, device="meta")
    for op in (causal_conv1d, gated_short_conv):
        assert "2^31" in op.supports(rows, weight)
        assert op.supports(rows[:, 1:], weight) is None
