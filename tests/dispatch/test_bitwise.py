"""The switch ``deterministic``: how it is set, what it refuses, and which bits it keeps."""

import _thread
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import liger_multi
from liger_multi import ops
from liger_multi.dispatch import bitwise, resolve
from liger_multi.dispatch.config import forget, parse_deterministic
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import module
from liger_multi.dispatch.resolve import mode_in_force
from liger_multi.errors import BackendUnavailableError, ConfigurationError, ContractError
from liger_multi.reference.common import strict
from liger_multi.reference.norms import rms_norm
from liger_multi.testing import bitwise as checks, samples
from liger_multi.testing.checks import call, outputs
from tests.comparing import recorded


@pytest.fixture
def torch_strict():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def head(rows, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 64, generator=generator).to(dtype)
    weight = torch.randn(97, 64, generator=generator).to(dtype) * 0.2
    return hidden, weight, torch.randint(97, (rows,), generator=generator)


# --- how it is set ---


@pytest.mark.parametrize(
    ("value", "mode"), [(True, "deterministic"), (False, ""), ("rows", "rows")]
)
def test_the_same_by_call_block_and_file(tmp_path, monkeypatch, value, mode):
    liger_multi.configure({"deterministic": value})
    assert mode_in_force() == mode
    liger_multi.configure(None)
    with liger_multi.use(deterministic=value):
        assert mode_in_force() == mode
        with liger_multi.use(rms_norm="reference"):
            assert mode_in_force() == mode
    assert mode_in_force() == ""
    file = tmp_path / "override.yaml"
    file.write_text(f"deterministic: {str(value).lower() if value != 'rows' else value}\n")
    liger_multi.configure(str(file))
    assert mode_in_force() == mode


@pytest.mark.parametrize("value", ["row", 1, "true", ["rows"]])
def test_other_values_are_refused(value):
    with pytest.raises(ConfigurationError, match="must be true, false or 'rows', got"):
        parse_deterministic(value, "a test")
    with pytest.raises(ConfigurationError):
        liger_multi.configure({"deterministic": value})
    assert mode_in_force() == ""


def test_pytorch_s_own_switch_is_followed(torch_strict):
    assert mode_in_force() == "deterministic"
    with liger_multi.use(deterministic=False):
        assert mode_in_force() == ""
    liger_multi.configure({"deterministic": "rows"})
    assert mode_in_force() == "rows"


# --- what it refuses ---


def test_unpromised_property_error_message(monkeypatch):
    why = {"rows": "its sums are split by the batch"}
    weak = bitwise.bitwise(bitwise.promise("repeat recompute", because=why), "x y", 1)
    monkeypatch.setattr(OPS["softmax"], "bitwise", weak)
    x = torch.randn(2, 7)
    forget()
    with (
        liger_multi.use(deterministic="rows"),
        pytest.raises(BackendUnavailableError, match="softmax forward") as raised,
    ):
        ops.softmax(x)
    assert "does not promise 'rows' (" in str(raised.value)
    assert "use(deterministic=True)" in str(raised.value)
    with liger_multi.use(deterministic=True):
        ops.softmax(x)
    forget()


def test_a_backend_without_repeat_is_passed_over(monkeypatch):
    prim = OPS["rms_norm"].fwd
    weak = bitwise.bitwise(bitwise.promise("recompute", because={"repeat": "atomics"}), "x y", 1)
    monkeypatch.setattr(OPS["rms_norm"], "bitwise", weak)
    assert "does not promise 'repeat' (atomics)" in bitwise.refusal(
        "reference", prim, "deterministic"
    )
    assert bitwise.refusal("reference", prim, "") is None


def test_an_fp8_head_has_no_independent_rows():
    hidden, weight, target = head(8)
    liger_multi.configure({"head_gemms": "float8", "deterministic": "rows"})
    with pytest.raises(ValueError, match="one scale serves a chunk"):
        ops.fused_linear_cross_entropy(hidden, weight, target)


@pytest.mark.parametrize("name", ["repeats", "Rows", ""])
def test_an_unknown_property_is_refused(name):
    if name:
        with pytest.raises(ContractError, match="property"):
            bitwise.promise(name)
    with pytest.raises(ContractError, match="reference"):
        bitwise.bitwise(bitwise.PER_ROW, "x", reference=name)


# --- which bits it keeps ---


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_log_probs_of_packed_batch(chunk):
    hidden, weight, target = head(41)
    lengths = [1, 17, 2, 21]
    options = {} if chunk is None else {"chunk": chunk}
    with liger_multi.use(deterministic="rows"):
        packed = ops.fused_linear_log_prob(hidden, weight, target, **options)
        alone = [
            ops.fused_linear_log_prob(h, weight, t)
            for h, t in zip(hidden.split(lengths), target.split(lengths), strict=True)
        ]
    assert checks.same_bits(packed.log_prob, torch.cat([each.log_prob for each in alone]))


@pytest.mark.parametrize("by", [(67,), (2, 67), (2, 1, 67), (2, 9, 67)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modulated_tokens_do_not_see_each_other(monkeypatch, by, dtype):
    """The norm runs for every row in its own memory; the modulation is elementwise."""
    note = lambda x, *_: (x.shape, x.storage_offset(), x.stride())  # noqa: E731
    alone = recorded(monkeypatch, rms_norm, "forward", note)
    generator = torch.Generator().manual_seed(0)
    x, scale, shift = (
        torch.randn(size, generator=generator).to(dtype) for size in ((2, 67, 9), by, by)
    )
    x = x.mT
    with liger_multi.use(deterministic="rows"):
        batch = ops.modulated_rms_norm(x, scale, shift)
        assert alone == 18 * [((1, 67), 0, (67, 1))]
        for token in (0, 7, 8):
            at = slice(token, token + 1)
            modulation = (t[:, at] if t.shape == x.shape else t for t in (scale, shift))
            assert checks.same_bits(batch[:, at], ops.modulated_rms_norm(x[:, at], *modulation))


def test_every_operator_runs_under_rows_on_a_cpu():
    """Inputs are not overwritten there: in-place operators have no independent rows."""
    refused = [n for n in OPS if bitwise.refusal("reference", OPS[n].fwd, "rows")]
    assert all(OPS[name].inplace for name in refused)


IN_THE_LIBRARY_S_ORDER = {f"aten::{n}" for n in ("sum", "mean", "mm", "bmm", "addmm")}


@pytest.mark.parametrize("name", [n for n in OPS if OPS[n].bitwise.reference == "exact"])
def test_an_exact_reference_adds_in_an_order_of_its_own(name):
    """On a GPU the order of the library follows the number of rows."""
    axis = OPS[name].bitwise.axis
    for sample in (s for s in samples.of(name) if s.elements < 2**14):
        tensors = sample.make("cpu", torch.float32)
        leaves = [t for n, t in tensors.items() if t.requires_grad and axis(n) is not None]
        result, _ = outputs(call(name, tensors, sample.options, **{name: "reference"}))
        upstream = [torch.ones_like(t) for t in result.values()]
        if leaves:
            with torch.autograd.profiler.profile() as run:
                torch.autograd.grad([*result.values()], leaves, upstream, allow_unused=True)
            names = {event.name for event in run.function_events}
            assert not names & IN_THE_LIBRARY_S_ORDER, sample.name


def test_promises_of_every_operator():
    for name, op in OPS.items():
        for prim in op.primitives:
            promises = getattr(op.bitwise, prim.direction)
            assert {"repeat", "recompute"} <= promises.under("deterministic"), name
            missing = {"rows", "cards"} - promises.always
            stated = set(promises.because) | promises.rows | promises.deterministic
            assert missing <= stated, (name, missing)


@pytest.mark.parametrize("promise", ["repeat", "rows"])
def test_broken_promise_message(monkeypatch, promise):
    """The checks of the common suite fail where a promise is broken."""
    sample = next(s for s in samples.of("softmax") if s.elements > 100)
    calls = checks.calls_of("softmax", sample, torch.float32, torch.device("cpu"), "reference")
    count = iter(range(1, 100))

    class Broken(checks.Call):
        def run(self, mode, args=None):
            result = super().run(mode, args)
            if promise == "repeat":
                return (result[0] + next(count) * 2.0**-20, *result[1:])
            return (result[0] + result[0].shape[0] * 2.0**-20, *result[1:])

    broken = Broken(calls[0].prim, calls[0].args, calls[0].order)
    checks.CHECKS[promise](calls[0], "rows")
    with pytest.raises(AssertionError, match=f"promises '{promise}'"):
        checks.CHECKS[promise](broken, "rows")


def test_inplace_loss_under_rows():
    logits = torch.randn(5, 11, requires_grad=True)
    target = torch.tensor([1, 2, -100, 4, 5])
    with liger_multi.use(deterministic="rows"):
        result = call(
            "cross_entropy_inplace", {"logits": logits, "target": target}, {"inplace": True}
        )
    torch.testing.assert_close(result, torch.nn.functional.cross_entropy(logits, target))


def test_attention_rows_with_padding_and_packing():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 23, 16, generator=generator) for _ in range(3))
    ends = torch.arange(1, 24, dtype=torch.int32)
    ranges = torch.stack([torch.where(ends <= 9, 0, 9).int(), ends], -1)[None]
    with liger_multi.use(deterministic="rows"):
        both = OPS["attention"](q, k, v, None, ranges, False, 0.25, 0.0)
        first = OPS["attention"](*(t[:, :, :9] for t in (q, k, v)), None, None, True, 0.25, 0.0)
        second = OPS["attention"](*(t[:, :, 9:] for t in (q, k, v)), None, None, True, 0.25, 0.0)
    assert checks.same_bits(both[:, :, :9], first)
    assert checks.same_bits(both[:, :, 9:], second)


def _switches():
    cudnn, deterministic = torch.backends.cudnn, torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        cudnn.deterministic,
        cudnn.benchmark,
    )


@contextlib.contextmanager
def _entered_by_a_thread(context):
    """Another thread enters the context before this block, and leaves it after the block."""
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with context:
            inside.set()
            leave.wait(30)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(stay)
        assert inside.wait(30)
        yield
        leave.set()
        other.result()


@pytest.mark.parametrize("held_threads", [strict._attention, strict._convolutions])
def test_threads_leave_the_process_as_it_was(held_threads):
    """The second thread took the first one's setting for the caller's, and restored that."""
    before = _switches()
    with contextlib.ExitStack() as other:
        with held_threads:
            other.enter_context(_entered_by_a_thread(held_threads))
            changed = _switches()
        assert _switches() == changed != before
    assert _switches() == before
    with pytest.raises(RuntimeError, match="stop"), held_threads, held_threads:
        raise RuntimeError("stop")
    assert _switches() == before


def test_operators_leave_the_process_as_it_was():
    before = _switches()
    scores = torch.randn(1, 2, 8, 8, requires_grad=True)
    for setting in (False, True, "rows"):
        with liger_multi.use(deterministic=setting):
            ops.multi_token_attention(scores, torch.randn(2, 2, 3, 3), padding=1).sum().backward()
        assert _switches() == before


# --- where tensors lie ---

BUFFER = torch.arange(0.0, 4096.0)
PLACED = {  # rows of 64, 67 and 72 elements, and whether they are copied
    "whole": (BUFFER[:512].view(8, 64), False),
    "some rows": (BUFFER[:512].view(8, 64)[3:5], False),
    "odd rows": (BUFFER[:536].view(8, 67), False),
    "odd rows from the fifth": (BUFFER[:536].view(8, 67)[4:], False),
    "odd rows from the second": (BUFFER[:536].view(8, 67)[1:], True),
    "from the second element": (BUFFER[1:513].view(8, 64), True),
    "from the fifth": (BUFFER[4:516].view(8, 64), False),
    "gaps": (BUFFER[:640].view(8, 80)[:, :64], False),
    "odd gaps": (BUFFER[:536].view(8, 67)[:, :64], True),
    "a row with an odd gap": (BUFFER[:536].view(8, 67)[4:5, :64], True),
    "expanded": (BUFFER[:64].expand(8, 64), False),
    "gaps of half a step": (BUFFER[:576].view(8, 72)[:, :64], True),
    "rows of half a step": (BUFFER[:576].view(8, 72), False),
    "rows of half a step with gaps": (BUFFER[:640].view(8, 80)[:, :72], True),
    "their last ones": (BUFFER[:1152].view(4, 4, 72)[:, -1], True),
    "with gaps of half a step": (BUFFER[:704].view(8, 88)[:, :72], False),
    "nothing": (BUFFER[:0].view(0, 64), False),
}


@pytest.mark.parametrize("name", PLACED)
def test_kernel_rows_are_16_byte_aligned(monkeypatch, name):
    """The order of a row's sum would depend on its address, as the width of loads does."""
    x, is_copied = PLACED[name]
    weight, observed = BUFFER[1 : 1 + x.shape[1]], []

    def kernel(*args):
        observed.extend(args[:2])
        return ops_forward(*args)

    prim = OPS["rms_norm"].fwd
    ops_forward = module("reference", "rms_norm").forward
    result = resolve._strictly("cuda", prim, kernel, "rows")(x, weight, 1e-6, 0.0, "llama")
    assert (observed[0] is not x) == is_copied
    assert all(t.data_ptr() % 16 == 0 for t in observed)
    assert checks.same_bits(tuple(observed), (x, weight))
    assert checks.same_bits(result, ops_forward(x, weight, 1e-6, 0.0, "llama"))
    assert resolve._strictly("cuda", prim, lambda *args: args[0], "deterministic")(x) is x


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "geglu", "gated_rms_norm", "softmax"])
def test_a_row_alone_has_its_bits_in_every_layout(name):
    """A row of one axis or more, with gaps or without, alone or in a batch."""
    x = torch.randn(257, 9, generator=torch.Generator().manual_seed(0))
    weight = x[:, 0].contiguous()
    run = {
        "rms_norm": lambda x: ops.rms_norm(x, weight),
        "swiglu": lambda x: ops.swiglu(x, x),
        "geglu": lambda x: ops.geglu(x, x),
        "gated_rms_norm": lambda x: ops.gated_rms_norm(x, x, weight),
        "softmax": ops.softmax,
    }[name]
    with liger_multi.use(deterministic="rows"):
        every = run(x.t())
        for i in range(9):
            row = x[:, i]
            for layout in (row, row.contiguous(), x.t()[None, i : i + 1], row.expand(3, 257)):
                assert checks.same_bits(run(layout).reshape(-1, 257)[-1], every[i])


def test_inplace_kernel_with_unaligned_rows():
    logits = torch.arange(1.0, 51.0)[1:].view(7, 7)
    original = logits.clone()

    def kernel(logits, *rest):
        assert logits.data_ptr() % 16 == 0
        return logits.neg_().sum(1)

    prim = OPS["cross_entropy_inplace"].fwd
    rest = [None] * (len(prim.params) - 1)
    resolve._strictly("cuda", prim, kernel, "rows")(logits, *rest)
    assert torch.equal(logits, -original)


# --- compiled ---


def _counted():
    """A compiler backend that runs graphs as they are, and the list of its graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return graphs, backend


CALLS = {
    "swiglu": lambda x: ops.swiglu(x, x),
    "relu_squared": ops.relu_squared,
    "gated_mlp": lambda x: ops.gated_mlp(x, *WEIGHTS),
    "linear": lambda x: ops.linear(x, WEIGHTS[0]),
    "rms_norm": lambda x: ops.rms_norm(x, WEIGHTS[0][0]),
}
SWIGLU = torch.ops.liger_multi.swiglu.default
WEIGHTS = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def _compiled_swiglu():
    """The graphs of a compiled function that was called, itself and its input."""
    graphs, backend = _counted()
    compiled, x = (
        torch.compile(CALLS["swiglu"], backend=backend, fullgraph=True),
        torch.randn(4, 16),
    )
    compiled(x)
    return graphs, compiled, x


@pytest.mark.parametrize("settings", ["use", "configure", "file"])
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_of_another_setting_is_compiled_again(monkeypatch, tmp_path, name, settings):
    """Compiled before, called under "rows": the rows of a batch have the bits of each alone."""
    graphs, backend = _counted()
    compiled = torch.compile(CALLS[name], backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    x = torch.randn(33, 16, generator=torch.Generator().manual_seed(4))
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x)
    before = len(graphs)
    with _rows_said(settings, monkeypatch, tmp_path):
        batch = compiled(x)
        alone = torch.cat([compiled(x[i : i + 1]) for i in range(len(x))])
        for _ in range(3):
            compiled(x)
        during = len(graphs)
        assert checks.same_bits(batch, CALLS[name](x))
        assert checks.same_bits(batch, alone)
    compiled(x)
    assert len(graphs) == during  # the first graph serves again
    if name != "rms_norm":  # which is opaque: its function is chosen at every call
        assert any(f"liger_multi::{name}_forward" in _targets(g) for g in graphs[before:])
        assert f"liger_multi::{name}_forward" not in _targets(graphs[0])


def _targets(graph):
    return {getattr(node.target, "name", str)() for node in graph.graph.nodes}


@contextlib.contextmanager
def _rows_said(how, monkeypatch, tmp_path):
    if how == "use":
        with liger_multi.use(deterministic="rows"):
            yield
        return
    if how == "file":
        (tmp_path / "rows.yaml").write_text("deterministic: rows\n")
        monkeypatch.setenv("LIGER_MULTI_CONFIG", str(tmp_path / "rows.yaml"))
    liger_multi.configure({"deterministic": "rows"} if how == "configure" else None)
    yield
    monkeypatch.delenv("LIGER_MULTI_CONFIG", raising=False)
    liger_multi.configure(None)


def test_the_setting_of_another_thread_recompiles_nothing():
    """Guards read the setting of the calling thread."""
    graphs, compiled, x = _compiled_swiglu()
    with _entered_by_a_thread(liger_multi.use(deterministic="rows")):
        compiled(x)
    assert len(graphs) == 1


def test_autograd_threads_take_callers_graph():
    """Autograd recomputes checkpointed layers in threads that Python did not start."""
    graphs, compiled, x = _compiled_swiglu()
    done = threading.Event()

    def again():
        compiled(x)
        done.set()

    with liger_multi.use(deterministic="rows"):
        compiled(x)
        _thread.start_new_thread(again, ())
        assert done.wait(60)
    assert [_is_traced(g) for g in graphs] == [True, False, False]  # threads of both kinds


def _is_traced(graph):
    return graph.graph.find_nodes(op="call_function", target=SWIGLU)[0].args[-2]


def test_pytorch_s_switch_recompiles(torch_strict):
    graphs, compiled, x = _compiled_swiglu()
    with liger_multi.use(deterministic=False):
        compiled(x)
    torch.use_deterministic_algorithms(False)
    compiled(x)
    assert [_is_traced(g) for g in graphs] == [False, True, True]
