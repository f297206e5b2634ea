"""Benchmarks of whole models: runs, turns, the time that they take, and parts of a step."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import configs, models, parts, store, turns
from benchmarks.configs import MODELS, SETS, VARIANTS, Run
from benchmarks.tables import models as pages
from benchmarks.traces import Span

ROOT = Path(__file__).parents[2]
transformers = pytest.importorskip("transformers")
TINY = {
    "qwen3.5-tiny": (
        "Qwen3_5",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "vocab_size": 256,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss-tiny": (
        "GptOss",
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "vocab_size": 256,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2.5-vl-tiny": (
        "Qwen2_5_VL",
        {
            "vocab_size": 256,
            "image_token_id": 255,
            "tie_word_embeddings": True,
            "text_config": {
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 256,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [4, 6, 6],
                },
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "depth": 2,
                "num_heads": 2,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
            },
        },
    ),
}


# --- runs and variants ---


def test_runs_of_whole_models_are_named():
    run = Run.parse("llama-3-8b:2x4096+checkpointing")
    assert (run.model, run.batch, run.tokens, run.checkpointing) == ("llama-3-8b", 2, 4096, True)
    assert str(run) == "llama-3-8b:2x4096+checkpointing"
    for wrong in ("llama:2x8", "tiny:2", "tiny:2x8+fast"):
        with pytest.raises(ValueError, match="got"):
            Run.parse(wrong)
    text = models.line(run, "ours", {"failure": "out of memory"}, {})
    assert text.endswith("out of memory")


def test_sets_name_known_runs_and_variants(monkeypatch):
    for chosen in SETS.values():
        assert [str(Run.parse(text)) for text in chosen.runs] == list(chosen.runs)
        assert set(chosen.variants) <= set(VARIANTS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    planned, options = models.parse(["table"])
    assert [str(run) for run in planned] == list(SETS["table"].runs)
    for run, variants in planned.items():
        assert variants == [
            *("stock", "ours", "ours+float8"),  # no Liger-Kernel
            *["ours+keep_attention", "ours+choose_within"] * run.checkpointing,
            *["ours+attention"] * ("gpt-oss" in run.model),
        ]
    assert options.parts
    assert options.seconds == configs.SECONDS
    planned, options = models.parse(["readme", "--seconds", "9", "--variants", "ours+attention"])
    assert list(planned.values()) == [["ours+attention"]] * len(SETS["readme"].runs), "asked for"
    assert (options.parts, options.seconds) == (False, 9.0)
    assert models.parse(["tiny:2x32"])[1].seconds is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tiny:2"], "a run is MODEL"),
        (["tiny:2x32", "--variants", "theirs"], "unknown variant 'theirs'"),
        (["tiny:2x32", "--parts", "--cards", "2"], "--parts traces one card"),
        (["tiny:2x32", "--rounds", "0"], "--rounds must be positive, got 0"),
        (["tiny:2x32", "--seconds", "-1"], "--seconds must be positive, got -1.0"),
        (["tiny:2x32", "--variants", "ours+keep_attention"], "tiny:2x32 has none of the variants"),
    ],
)
def test_command_line_errors(arguments, error, capsys):
    with pytest.raises(SystemExit):
        models.parse(arguments)
    assert error in capsys.readouterr().err


def test_a_peer_without_a_patch_is_a_row_with_the_reason(monkeypatch):
    """Liger-Kernel itself only logs, and the row would be that of the unpatched model."""
    peer = ModuleType("liger_kernel.transformers.monkey_patch")
    peer.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": None}
    packages = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    peer._apply_liger_kernel_to_instance = lambda model: None
    for module in (*packages, peer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    run = Run.parse("tiny:1x16")
    failure = turns.Training(run, "liger", None).turn(1)["failure"]
    assert failure == "not supported: Liger-Kernel has no patch for 'llama'"
    assert pages.number({"failure": failure}, "tokens") == "not supported"
    peer.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] = None
    assert "failure" not in turns.Training(run, "liger", None).turn(1)


def test_policies_replace_the_checkpointing_of_the_model():
    run = Run.parse("tiny:2x32+checkpointing")
    device, losses = torch.device("cpu"), []
    ids = torch.arange(64).reshape(2, 32)
    for variant in ("ours", *configs.CHECKPOINTED):
        model = VARIANTS[variant](configs.build(run, device), run)
        checkpointed = [layer.gradient_checkpointing for layer in model.model.layers]
        assert checkpointed == [variant == "ours"] * 2
        wrapped = [type(vars(layer).get("forward")).__name__ for layer in model.model.layers]
        assert (wrapped == ["_Recomputed"] * 2) == (variant != "ours")
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    assert losses[0] == losses[1] == losses[2]


# --- turns ---


def test_models_are_measured_in_turns(monkeypatch):
    run = Run.parse("tiny:2x16")
    training = turns.Training(run, "ours", None)
    report = training.turn(2, traced=1)
    assert len(report["seconds"]) == 2
    assert report["parts"]["span_ms"] > 0
    assert set(report["spent"]) == {"build", "steps", "trace"}
    assert training.model is None, "the next process has the memory"
    monkeypatch.setitem(VARIANTS, "stock+compile", lambda model, run: model)
    compiled = turns.Training(run, "stock+compile", None)
    assert compiled.turn(0)["seconds"] == []
    torch.manual_seed(0)
    fresh = configs.build(run, compiled.device)
    for compiled_weight, eager_weight in zip(
        compiled.model.parameters(), fresh.parameters(), strict=True
    ):
        assert torch.equal(compiled_weight, eager_weight), "compiling trains nothing"
    monkeypatch.setitem(VARIANTS, "liger", lambda model, run: 1 / 0)
    assert "division by zero" in turns.Training(run, "liger", None).turn(1)["failure"]


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("variant", ["stock", "ours", "ours+float8", "ours+attention"])
def test_families_of_the_table_train(model, variant, monkeypatch):
    family = TINY[model][0]
    config, _ = configs.NAMES.get(family, (f"{family}Config", ""))
    if not hasattr(transformers, config):
        pytest.skip(f"this transformers has no {config}")
    monkeypatch.setitem(MODELS, model, TINY[model])
    tokens = 320 if "vl" in model else 32  # a picture is 256 tokens
    run = Run.parse(f"{model}:1x{tokens}")
    report = turns.Training(run, variant, None).turn(1, traced=1)
    assert "failure" not in report
    assert "failure" not in report["parts"]
    assert report["loss"] == pytest.approx(5.545, abs=0.5), "ln(256)"


def test_what_was_timed_stays_where_the_trace_fails(monkeypatch):
    monkeypatch.setattr(turns, "trace_steps", lambda *_: 1 / 0)
    report = turns.Training(Run.parse("tiny:1x16"), "stock", None).turn(1, traced=1)
    assert report["parts"] == {"failure": "ZeroDivisionError: division by zero"}
    assert len(report["seconds"]) == 1


class Recorder(turns.Turns):
    """Notes what is asked of it, and takes seconds of a clock that does not run."""

    def __init__(self, variant, clock, messages=None, seconds=5.0):
        super().__init__(Run.parse("tiny:1x16"), variant)
        self.clock, self.seconds = clock, seconds
        self.messages = [] if messages is None else messages

    def ask(self, steps, traced=0):
        self.messages.append(f"ask {self.variant} {steps} {traced}")

    def answer(self):
        self.messages.append(f"answer {self.variant}")
        return {}

    def turn(self, steps, traced=0):
        self.messages.append(f"{self.variant} {steps} {traced}")
        self.clock.now += self.seconds
        self.turns.append({"turn": self.seconds})


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock.now)
    return clock


def test_compiling_models_measured_in_turns(clock):
    messages = []
    workers = [
        Recorder(name, clock, messages) for name in ("ours", "ours+compile", "stock+compile")
    ]
    pace = turns.Pace(2, None, 3)
    pace.begin(workers)
    rounds = turns.in_turns(workers, 3, 2, pace)
    assert [next(rounds) for _ in workers] == workers
    together = ["ask ours+compile 0 0", "ask stock+compile 0 0"]
    together += ["answer ours+compile", "answer stock+compile"]
    assert messages == [*together, "ours 3 0", "ours+compile 3 0", "stock+compile 3 0"]
    assert list(rounds) == workers[::-1]
    last = ["stock+compile 3 2", "ours+compile 3 2", "ours 3 2"]
    assert messages[-3:] == last, "the last turn is traced"


def test_further_turns_compile_nothing():
    worker = turns.Turns(Run.parse("tiny:1x16"), "ours")
    worker.turns = [{"turn": 20.0, "seconds": [0.5] * 4, "spent": {"build": 2.0, "steps": 16.0}}]
    assert worker.next_turn == 20 - 16 + 7 * 0.5
    worker.turns.append({"turn": 3.0, "seconds": [0.5]})
    assert worker.next_turn == 3, "of cards, which start processes in every turn"


def measured_rounds(clock, seconds, spent, rounds=3):
    """How many rounds each of some runs gets, by the seconds of its turns."""
    runs = [[Recorder(name, clock, seconds=one) for name in ("stock", "ours")] for one in spent]
    pace = turns.Pace(rounds, seconds, 2 * len(runs))
    for workers in runs:
        pace.begin(workers)
        list(turns.in_turns(workers, 4, 2, pace))
        for worker in workers:
            traced = [text.endswith(" 2") for text in worker.messages]
            assert traced == [*[False] * (len(traced) - 1), True], "once, in the last turn"
    return [len(workers[-1].turns) for workers in runs]


@pytest.mark.parametrize(
    ("seconds", "spent", "expected"),
    [
        (None, [5, 5], [3, 3]),
        (60, [5, 5], [3, 3]),
        (50, [5, 5, 5], [1, 1, 2]),  # what runs leave of their shares is that of later ones
        (130, [5, 5, 20], [3, 3, 1]),
        (300, [50, 1, 1], [1, 3, 3]),
        (1, [5, 5], [1, 1]),  # a first round is always taken
    ],
)
def test_rounds_fit_the_time(clock, seconds, spent, expected):
    assert measured_rounds(clock, seconds, spent) == expected
    elapsed = clock.now - 100
    assert seconds in (None, 1) or elapsed <= seconds


def test_turns_before_the_last_round_was_known_are_traced_again(clock):
    workers = [Recorder(name, clock) for name in ("stock", "ours")]
    pace = turns.Pace(3, 12, 2)
    pace.begin(workers)
    order = [one.variant for one in turns.in_turns(workers, 4, 2, pace)]
    assert order == ["stock", "ours", "stock"]
    assert workers[0].messages == ["stock 4 0", "stock 4 2"]


def test_a_run_is_measured_and_kept(tmp_path, capsys):
    """Processes of their own, rows of both kinds, and a variant that fails beside them."""
    file = tmp_path / "out.json"
    arguments = ["tiny:1x16+checkpointing", "--variants", "stock,ours+keep_attention,liger"]
    code = models.main([*arguments, "--rounds", "1", "--steps", "1", "--parts", "--out", str(file)])
    assert code == 0, "only our failures are failures"
    whole, traced = store.load(file)
    assert (whole["kind"], traced["kind"]) == ("models", "step-parts")
    rows = {row["variant"]: row for row in whole["rows"]}
    assert list(rows) == ["stock", "ours+keep_attention", "liger"]
    assert rows["stock"]["turns"] == 1
    assert {"failure", "tokens_per_second"} & rows["liger"].keys()
    for row in traced["rows"][:2]:
        filled = sum(row["kernels_ms"].values()) + row["idle_ms"]
        assert filled == pytest.approx(row["span_ms"], rel=0.01), "one thread: nothing overlaps"
    text = capsys.readouterr().out
    assert "3 variants of 1 runs took" in text
    assert "beyond GEMMs and attention" in text


# --- parts ---

FAMILIES = {
    "activations": {parts.ACTIVATION},
    "adapters": {parts.OTHER},
    "attention": {parts.ATTENTION},
    "common": {parts.GEMMS, parts.NORMS},
    "cross_entropy": {parts.LOSS, parts.FLOAT8},
    "divergences": {parts.LOSS},
    "embedding": {parts.OTHER},
    "experts": {parts.EXPERTS, parts.ROUTING, parts.ACTIVATION},
    "float8": {parts.FLOAT8},
    "linear_attention": {parts.RECURRENCES},
    "norms": {parts.NORMS},
    "quantized": {parts.OTHER},
    "residuals": {parts.ADDS},
    "rope": {parts.ROTATION, parts.NORMS},
}
KERNEL = re.compile(r"@triton\.jit[^\n]*\n(?:#.*\n)*def (\w+_kernel)\b")


def test_our_kernels_have_the_part_of_their_family():
    visited = set()
    for path in (ROOT / "backends" / "triton").rglob("*.py"):
        for name in KERNEL.findall(path.read_text(encoding="utf-8")):
            visited.add(path.parent.name)
            assert parts.part_of(name) in FAMILIES[path.parent.name], name
    assert visited == set(FAMILIES)


def test_kernels_of_kept_traces_have_the_part_that_their_lines_name():
    """Notes of traces: ``attention  64.667 ms in  16.0 (  4042.9 us): name``."""
    named = {"gemm": parts.GEMMS, "attention": parts.ATTENTION, "optimizer": parts.OPTIMIZER}
    lines = [
        match.groups()
        for run in store.read("notes")
        if run["name"] == "step-kernels"
        for match in map(re.compile(r" +(\w+) .* us\): (.*)").fullmatch, run["rows"])
        if match
    ]
    assert len(lines) > 40
    for part, kernel in lines:
        if part in named:
            assert parts.part_of(kernel) == named[part], kernel
        else:
            assert parts.part_of(kernel) not in (parts.ATTENTION, parts.OPTIMIZER), kernel


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        # Liger-Kernel 0.8.5
        ("liger_cross_entropy_kernel", parts.LOSS),
        ("element_mul_kernel", parts.LOSS),
        ("_block_rms_norm_forward_kernel", parts.NORMS),
        ("_geglu_tanh_forward_kernel", parts.ACTIVATION),
        ("_swiglu_backward_kernel", parts.ACTIVATION),
        ("_swiglu_from_pre_act_kernel", parts.ACTIVATION),
        ("_triton_qwen2vl_mrope", parts.ROTATION),
        ("_triton_rope", parts.ROTATION),
        ("_fused_up_proj_swiglu_kernel", parts.EXPERTS),
        ("_moe_bwd_dX_expanded_kernel", parts.EXPERTS),
        ("_moe_router_scatter_kernel", parts.ROUTING),
        ("_token_gather_weighted_sum_kernel", parts.ROUTING),
        # fla-core 0.6.0
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", parts.RECURRENCES),
        ("chunk_local_cumsum_scalar_kernel", parts.RECURRENCES),
        ("recompute_w_u_fwd_kernel", parts.RECURRENCES),
        ("prepare_wy_repr_bwd_kernel", parts.RECURRENCES),
        ("merge_16x16_to_64x64_inverse_kernel", parts.RECURRENCES),
        ("l2norm_fwd_kernel", parts.NORMS),
        ("layer_norm_gated_fwd_kernel", parts.NORMS),
        ("causal_conv1d_fwd_kernel", parts.RECURRENCES),
        # PyTorch and its libraries
        (
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits",
            "attention",
        ),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", parts.ATTENTION),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", parts.ATTENTION),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float>", parts.ATTENTION),
        ("void at::native::cunn_SoftMaxForward<8, LogSoftMaxForwardEpilogue>", parts.LOSS),
        ("void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda", parts.LOSS),
        ("void cutlass::device_kernel<GemmUniversal<GroupProblemShape<>>>", parts.EXPERTS),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x", parts.GEMMS),
        ("nvjet_sm90_qqtst_128x256_128x5_1x2_h_bz_coopA_TNT", parts.GEMMS),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_bf16", parts.GEMMS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", parts.GEMMS),
        (
            "void at::native::elementwise_kernel<128, silu_kernel(at::TensorIterator)>",
            "gated activation",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", parts.ADDS),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy", parts.ELEMENTWISE),
        ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2>", parts.ROUTING),
        ("Memset (Device)", parts.ELEMENTWISE),
        ("Memcpy DtoD (Device -> Device)", parts.ELEMENTWISE),
        ("a kernel of nobody", parts.OTHER),
    ],
)
def test_parts_of_kernels_of_others(kernel, part):
    assert parts.part_of(kernel) == part


def test_parts_of_a_trace():
    trace = [
        Span("before", 0, 5),
        Span("void at::cuda::spin_kernel(long)", 5, 100_000),
        Span("nvjet_sm90", 101_000, 104_000),
        Span("_rms_norm_forward_kernel", 103_000, 106_000),  # overlaps
        Span("nvjet_sm90", 107_000, 108_000),
        Span("who", 108_000, 110_000),
    ]
    found = parts.parts(trace, 2)
    assert found["span_ms"] == 5
    assert found["idle_ms"] == 1, "behind the first kernel, and before the third"
    assert found["kernels_ms"] == {parts.GEMMS: 2, parts.NORMS: 1.5, parts.OTHER: 1}
    assert found["others"] == {"who": 1}
    assert parts.parts(trace[2:], 2)["span_ms"] == 4.5, "without a head start"
    assert parts.parts(trace[:2], 2) == {"failure": "the trace has no kernel"}
    assert parts.parts([], 2) == {"failure": "the trace has no kernel"}


def rows_of(name, *, fla=False, **fields):
    row = {"tokens_per_second": 2e3, "peak_bytes": 2**30, "spread_percent": 1.0, "turns": 2}
    mark = {"fla": True} if fla else {}
    return {"run": "qwen3.5-0.8b:4x2048", "variant": name, **row, **mark, **fields}


def run_of(kind, rows):
    head = {"kind": kind, "date": "2026-01-01T00:00:00+00:00", "commit": "abc", "steps": 4}
    versions = {"torch": "2.11.0", "fla-core": "0.6.0"}
    device = {"name": "NVIDIA H200"}
    return {**head, "device": device, "versions": versions, "limit_gb": None, "rows": rows}


def test_tables_of_a_card(monkeypatch):
    failed = {
        "run": "qwen3.5-0.8b:4x2048",
        "variant": "liger",
        "failure": "not supported: no patch",
    }
    whole = run_of(
        "models",
        [rows_of("stock", fla=True), failed, rows_of("ours"), rows_of("ours+float8")],
    )
    part = {"step_ms": 11.0, "span_ms": 10.0, "idle_ms": 0.5, "others": {}}
    times = {parts.GEMMS: 4.0, parts.ATTENTION: 1.5, parts.NORMS: 3.0, parts.OTHER: 1.0}
    row = {"run": "qwen3.5-0.8b:4x2048", "variant": "ours", **part, "kernels_ms": times}
    traced = run_of("step-parts", [row, {**row, "variant": "stock"}])
    runs = {"models": [whole], "step-parts": [traced]}
    monkeypatch.setattr(store, "read", lambda kind, *_: json.loads(json.dumps(runs[kind])))
    text = pages.whole_models()
    assert "fla-core 0.6.0. Medians of 4 steps in each of 2 turns.\n" in text
    head, _, line = (
        [cell.strip() for cell in one.split("|")[1:-1]] for one in text.splitlines()[-3:]
    )
    cells = dict(zip(head, line, strict=True))
    assert cells["run"] == "Qwen3.5-0.8B, 4 x 2048 tokens, fla-core"
    assert cells["Liger-Kernel, tokens/s"] == "not supported"
    assert cells["ours, FP8, tokens/s"] == "2.0k"
    assert "ours, `keep_attention`, GiB" not in cells, "no row has it"
    head, _, line, _ = (
        [cell.strip() for cell in one.split("|")[1:-1]]
        for one in pages.step_parts().splitlines()[-4:]
    )
    cells = dict(zip(head, line, strict=True))
    assert (cells["GEMMs, attention"], cells["gap"]) == ("5.50", "4.50")
    gap = sum(float(cells[name]) for name in pages.GAP if name in cells)
    assert gap == pytest.approx(float(cells["gap"]))
    assert parts.LOSS not in cells, "no variant has it"
