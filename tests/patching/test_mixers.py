"""Hybrid models: mixers that call operators, and rows of several samples.

Parameters are drawn again: with those of a new model, a sample barely sees the one before it.
"""

import copy
import functools
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from packaging import version

import liger_multi
from liger_multi import ops
from liger_multi.errors import PackingError
from liger_multi.modules.arguments import cache_parameter, caches
from liger_multi.patching.mixers import (
    SERVED as SERVED_BY,
    STILL,
    FusedMixer,
    PerToken,
    differs,
    gates,
    scan,
    sizes_of,
    windowed,
)
from liger_multi.patching.options import MIXER_OPS
from liger_multi.patching.packing import hybrids
from liger_multi.patching.packing.samples import (
    has_samples,
    sample_ids,
    visible_tokens,
)
from liger_multi.patching.packing.tree import tree_of_roots
from tests.comparing import assert_same_gradients, gradients
from tests.models import (
    Calls,
    adapters,
    assert_same_training,
    continued,
    patched_copy,
    transformers,
)
from tests.sweep import cases
from tests.sweep.packing import results

SCAN, CHANNELS = {"causal_conv1d", "ssd_scan"}, {"causal_conv1d", "selective_scan"}
SERVED = {
    "bailing_hybrid": {"causal_conv1d", "kimi_delta_attention"},
    "bamba": SCAN,
    "falcon_h1": SCAN,
    "kimi_linear": {"causal_conv1d", "kimi_delta_attention"},
    "lfm2_moe": {"gated_short_conv"},
    "lfm3": {"gated_short_conv"},
    "mamba2": SCAN,
    "nemotron_h": SCAN,
    "olmo_hybrid": {"causal_conv1d", "gated_delta_rule"},
    "qwen3_5_moe_text": {"causal_conv1d", "gated_delta_rule"},
    "qwen3_5_text": {"causal_conv1d", "gated_delta_rule"},
    "qwen3_next": {"causal_conv1d", "gated_delta_rule"},
    "qwen4_exp_text": {"causal_conv1d", "gated_delta_rule"},
    "zamba2": SCAN,
}
REFUSING = {
    "falcon_mamba": (CHANNELS, ""),
    "granitemoehybrid": (SCAN, "the attention of GraniteMoeHybridModel"),
    "inkling_text": ({"causal_conv1d"}, ""),
    "jamba": (CHANNELS, "mamba_selective_scan"),
    "mamba": (CHANNELS, ""),
    "zamba": (CHANNELS, "mamba_selective_scan"),
}
"""Types whose patched mixers see all tokens of a row: operators, and what the error names."""
DELTA = ("gated_delta_rule", "kimi_delta_attention")
ROUNDING = {"zamba2": 2e-3, "xlstm": 2e-3}
"""Relative to the largest number. Unpatched, zamba2 has 5e-5 in fp32 against fp64, bamba 1e-6."""
LENGTHS = (17, 1, 23)
NO_NAME = object()
KEPT = version.parse("5.23")  # from here on, all types of SERVED hand ids to their mixers


def test_unsupported_sizes_are_reported(monkeypatch):
    """The operator is patched all the same. On a device without kernels there is nothing to say."""
    from liger_multi.dispatch import explain
    from liger_multi.dispatch.resolve import Candidate

    asked = []

    def refused(args):
        asked.append([tuple(t.shape) for t in args[:3]])
        return "takes keys of up to 4 elements (registers), got 8"

    def candidates(prim, *_):
        kernel = Candidate("cuda", print, None, refused if prim.op.name in DELTA else None)
        return [kernel, Candidate("reference", print, None)]

    stock, _ = built("qwen3_5_text")
    quiet = liger_multi.patch(copy.deepcopy(stock))
    monkeypatch.setattr(explain, "candidates", candidates)
    said = liger_multi.patch(stock, strict=True)
    assert quiet.count("gated_delta_rule") == said.count("gated_delta_rule") > 0
    lines = {s.reason for s in said.skipped} - {s.reason for s in quiet.skipped}
    why = "takes keys of up to 4 elements (registers), got 8"
    assert lines == {f"patched, but runs by the chunked PyTorch reference: cuda {why}"}
    mixer = next(m for m in stock.modules() if hasattr(m, "head_k_dim"))
    keys = (1, 1, mixer.num_k_heads, mixer.head_k_dim)
    assert asked[0] == [keys, keys, (1, 1, mixer.num_v_heads, mixer.head_v_dim)]


@functools.lru_cache(maxsize=40)
def _built(model_type):
    pair = cases.of_type(model_type, ("ForCausalLM", "LMHeadModel"))
    config = cases.configuration(pair)
    if model_type in LAYERS:  # which caches of this transformers know
        config.layer_types = LAYERS[model_type]
    stock = getattr(transformers, pair.cls)(config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if parameter.ndim > 1 or "norm" not in name:
                parameter.normal_(std=0.5 if parameter.ndim < 2 else 0.2)
    return stock


def built(model_type):
    """A stock model of a type with other parameters, and a patched copy."""
    try:
        stock = _built(model_type)
    except ValueError as error:
        if "tie_weights_keys" not in str(error):
            raise
        # 5.0 ties the blocks of zamba2 to those of its first layer, which has none
        pytest.skip(f"this transformers does not make the model: {str(error)[:100]}")
    stock = copy.deepcopy(stock).train()
    return stock, patched_copy(stock)


def built_of_functions(model_type):
    """The same, for tests of mixers that call functions over all tokens."""
    stock, model = built(model_type)
    if by_package(stock):
        pytest.skip("mixers of this transformers call no function that an operator stands for")
    return stock, model


def by_package(model):
    """Whether mixers have a convolution over rows only where the causal-conv1d package is."""
    files = {sys.modules[type(m).__module__] for m in model.modules()}
    return any(getattr(file, "causal_conv1d_fn", NO_NAME) is None for file in files)


def packed(lengths=LENGTHS, seed=0):
    """Samples, a row of them all, and the ways to say where they begin."""
    torch.manual_seed(seed)
    samples = [torch.randint(10, 60, (1, n)) for n in lengths]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    hints = {
        "position_ids": {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]},
        "seq_idx": {"seq_idx": torch.arange(len(lengths)).repeat_interleave(ends.diff())[None]},
        "cu_seq_lens": {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
    }
    for form in ("seq_idx", "cu_seq_lens"):  # attention goes by positions
        hints[form] |= hints["position_ids"]
    hints["seq_idx"]["seq_idx"] = hints["seq_idx"]["seq_idx"].to(torch.int32)
    return samples, torch.cat(samples, 1), hints


def assert_kept_apart(model, run=None, lengths=LENGTHS, seed=0):
    """What ``run``, or the model, gives for a row of samples is what the model gives for each."""
    samples, row, hints = packed(lengths, seed)
    with torch.no_grad():
        apart = torch.cat([model(input_ids=s, use_cache=False)[0] for s in samples], 1)
        run = model if run is None else run
        together = run(input_ids=row, use_cache=False, **hints["position_ids"])[0]
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", SERVED)
def test_equal_to_unpatched(model_type, monkeypatch):
    stock, model = built(model_type)
    ids = torch.randint(10, 60, (2, 70))
    calls, rtol = Calls(monkeypatch), ROUNDING.get(model_type, 1e-4)
    for mode in (True, False):
        stock.train(mode)
        model.train(mode)
        assert_same_training(stock, model, lambda m: m(input_ids=ids, labels=ids).loss, rtol=rtol)
    if by_package(stock):  # as in transformers 5.0: there is no function to serve
        assert not calls["causal_conv1d"]
        return
    assert all(calls[op] >= 2 for op in SERVED[model_type])
    mixing = SERVED[model_type] - {"causal_conv1d", "gated_short_conv"}
    sizes = [sizes_of(op, m) for op in mixing for m in model.modules() if isinstance(m, FusedMixer)]
    assert not mixing or any(sizes), "the report knows what kernels will be asked for"


@pytest.mark.parametrize("model_type", ["lfm2_moe", "lfm3"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_convolution_between_gates_is_one_operator(model_type, padded, monkeypatch):
    """Without a cache. With one, and with a hook on the convolution, its parts run."""
    stock, model = built_of_functions(model_type)
    ids, mask = torch.randint(10, 60, (2, 30)), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :7] = 0 if padded else 1
    hooked, calls = copy.deepcopy(model), Calls(monkeypatch)
    for mixer in (m for m in hooked.modules() if isinstance(m, FusedMixer)):
        mixer.conv.register_forward_hook(lambda *_: None)
    for m, cached, op in (
        (model, False, "gated_short_conv"),
        (model, True, "causal_conv1d"),
        (hooked, False, "causal_conv1d"),
    ):
        calls.clear()
        inputs = {"labels": ids, "attention_mask": mask, "use_cache": cached}
        run = lambda one, inputs=inputs: one(input_ids=ids, **inputs).loss  # noqa: E731
        assert_same_training(stock, m, run, rtol=1e-4)
        assert {name for name in ("causal_conv1d", "gated_short_conv") if calls[name]} == {op}


def test_extended_gated_convolution_keeps_its_parts(monkeypatch):
    """Another function of a class that looks alike, and a key that is off."""
    stock, _ = built("lfm3")
    mixers_of = [m for m in stock.modules() if hasattr(m, "conv_kernel_size")]
    assert mixers_of
    assert all(gates(m) for m in mixers_of)
    module_class = type(mixers_of[0])

    class More(module_class):
        def forward(self, hidden_states, past_key_values=None, attention_mask=None, **kwargs):
            return super().forward(hidden_states, past_key_values, attention_mask, **kwargs) * 2

    more = copy.deepcopy(mixers_of[0])
    more.__class__ = More
    assert not gates(more)
    wide = copy.deepcopy(mixers_of[0])
    wide.conv.dilation = (2,)
    assert not gates(wide)
    model = copy.deepcopy(stock)
    assert not liger_multi.patch(model, gated_short_conv=False).count("gated_short_conv")
    calls = Calls(monkeypatch)
    model(input_ids=torch.randint(10, 60, (1, 9)), use_cache=False)
    assert calls["causal_conv1d"]
    assert not calls["gated_short_conv"]


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "nemotron_h", "lfm3"])
def test_gradients_of_a_part_after_a_cache(model_type):
    """The cache is written over before backward. Types of delta rules raise there unpatched too."""
    stock, model = built(model_type)
    ids = torch.randint(10, 60, (2, 29))

    def gradients_of(model):
        first = model(input_ids=ids[:, :17], use_cache=True)
        if not caches(dict(first.items())):  # 5.0: a cache of bamba is made by generate alone
            pytest.skip("this transformers returns no cache where none was handed over")
        model(input_ids=ids[:, 17:], **continued(model, first)).logits.square().mean().backward()
        return gradients(model)

    assert_same_gradients(gradients_of(model), gradients_of(stock))


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "lfm3"])
def test_under_autocast(model_type):
    stock, model = built(model_type)
    ids = torch.randint(10, 60, (2, 40))
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = (m(input_ids=ids, labels=ids).loss for m in (model, stock))
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    got.backward()
    assert all(torch.isfinite(g).all() for g in gradients(model).values())


@pytest.mark.parametrize("form", ["position_ids", "seq_idx", "cu_seq_lens"])
@pytest.mark.parametrize("model_type", SERVED)
def test_samples_of_a_row_do_not_see_each_other(model_type, form):
    stock, model = built(model_type)
    if isinstance(model, hybrids.SeparateModel) and version.parse(transformers.__version__) < KEPT:
        pytest.skip(
            "this transformers hands no ids to the mixers of this type, and rows are refused"
        )
    samples, row, hints = packed()
    if by_package(stock):  # mixers that are left unpatched do not keep samples apart
        without = (NotImplementedError, UserWarning)  # of bamba, which takes ids with packages only
        with pytest.raises((PackingError, *without) if form == "seq_idx" else PackingError):
            model(input_ids=row, use_cache=False, **hints[form])
        return
    apart, expected = results(model, [{"input_ids": s} for s in samples])
    together, actual = results(model, [{"input_ids": row, **hints[form]}])
    rtol = ROUNDING.get(model_type, 1e-4)
    torch.testing.assert_close(together, apart, rtol=rtol, atol=rtol)
    assert_same_gradients(actual, expected, rtol=rtol)
    if form == "position_ids":  # what the patch is for
        leaked = stock(input_ids=row, use_cache=False, **hints[form]).logits
        assert (leaked - apart).abs().max() > 0.1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h", "lfm3"])
def test_samples_stay_apart_when_layers_run_again(model_type, reentrant):
    _, model = built_of_functions(model_type)
    _, row, hints = packed()
    results = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            options = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model(input_ids=row, labels=row, use_cache=False, **hints["position_ids"]).loss.backward()
        results.append({name: g.clone() for name, g in gradients(model).items()})
    assert_same_gradients(results[1], results[0])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["lfm3", "bamba"])
def test_a_compiled_model_keeps_samples_apart(model_type):
    _, model = built_of_functions(model_type)
    assert_kept_apart(model, torch.compile(model, backend="aot_eager", fullgraph=True))


def test_threads_with_other_samples():
    _, model = built_of_functions("qwen3_next")
    with ThreadPoolExecutor(3) as pool:
        lengths = [(5 + seed, 30 - seed) for seed in range(3)]
        list(pool.map(assert_kept_apart, [model] * 3, [None] * 3, lengths, range(3)))


@pytest.mark.parametrize("model_type", REFUSING)
def test_mixed_samples_raise(model_type, monkeypatch):
    operators, named = REFUSING[model_type]
    stock, model = built_of_functions(model_type)
    _, row, hints = packed()
    said = rf"(?s)(?=.*{named}).*got rows of several samples, which it would mix"
    for form in hints:
        with pytest.raises(ValueError, match=said):
            model(input_ids=row, use_cache=False, **hints[form])
    alone = {"position_ids": torch.arange(row.shape[1])[None], "use_cache": False}
    calls = Calls(monkeypatch)
    for mode in ("train", "eval"):
        got, expected = (getattr(m, mode)()(input_ids=row, **alone).logits for m in (model, stock))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert all(calls[op] >= 2 for op in operators)


def test_backbone_without_head_keeps_samples_apart():
    """Mamba2ForCausalLM hands it nothing by itself."""
    stock, _ = built_of_functions("mamba2")
    liger_multi.patch(stock.backbone)
    assert_kept_apart(stock.backbone)


def test_head_without_keywords_passes_ids():
    """In threads, compiled, and where a forward does more than read its module."""
    stock, model = built_of_functions("mamba2")
    assert any(isinstance(m, hybrids.IdPassingModel) for m in model.modules())
    torch._dynamo.reset()
    assert_kept_apart(model, torch.compile(model, backend="eager", fullgraph=True))
    _, row, hints = packed()
    with torch.no_grad():
        hidden = model(input_ids=row, use_cache=False, output_hidden_states=True, labels=row)
    assert len(hidden.hidden_states) == stock.config.num_hidden_layers + 1

    class Writing(type(stock)):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            self.rows = len(input_ids)
            return self.backbone(input_ids, attention_mask=attention_mask)

    stock.__class__ = Writing
    liger_multi.patch(stock)
    with pytest.raises(ValueError, match="nothing keeps them apart in Writing"):
        stock(input_ids=row, **hints["position_ids"])


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "lfm2_moe"])
def test_adapters(model_type):
    names = {"qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj"]}
    stock = adapters(built(model_type)[0], names.get(model_type, ["in_proj", "out_proj"]))
    model = patched_copy(stock)
    ids = torch.randint(10, 60, (2, 40))
    assert_same_training(stock, model, lambda m: m(input_ids=ids, labels=ids).loss, rtol=1e-4)
    assert any("lora_A" in name for name in gradients(model))


def test_optional_packages_are_not_called(monkeypatch):
    """With mamba-ssm installed, a mixer would run by one function of it, which mixes samples."""
    modeling = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    names = [n for n in SERVED_BY if hasattr(modeling, n)]
    if getattr(modeling, "causal_conv1d_fn", None) is None:
        pytest.skip("mixers of this transformers call no function that an operator stands for")

    def installed(name):
        body = inspect.unwrap(getattr(modeling, name))

        @functools.wraps(body)
        def package(*args, **kwargs):
            raise AssertionError(f"{name} was called")

        return package

    for name in names:
        monkeypatch.setattr(modeling, name, installed(name))
    stock, model = built("bamba")
    with pytest.raises(AssertionError, match="mamba2_split_conv1d_scan_combined was called"):
        stock.train()(input_ids=packed()[1], use_cache=False)
    for mode in ("train", "eval"):
        assert_kept_apart(getattr(model, mode)())


def test_other_functions_are_left():
    """Also where what comes out is the same, so that outputs alone do not tell it."""

    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        return hidden_states

    assert "computes something else" in differs("causal_conv1d_fn", causal_conv1d_fn)
    assert "cannot be probed" in differs("torch_chunk_gated_delta_rule", lambda x: x)
    for model_type, name in (
        ("qwen3_next", "causal_conv1d_fn"),
        ("qwen3_next", "torch_chunk_gated_delta_rule"),
        ("bamba", "mamba2_chunk_scan"),
        ("mamba", "mamba_selective_scan"),
    ):
        own = getattr(sys.modules[type(built_of_functions(model_type)[0]).__module__], name)

        @functools.wraps(own)
        def stopped(x, *args, own=own, **kwargs):
            return own(x.detach(), *args, **kwargs)

        del stopped.__wrapped__
        assert differs(name, own) is None
        assert differs(name, stopped) == f"{name} computes something else than {SERVED_BY[name]}"


def test_helper_replaced_after_the_patch(monkeypatch):
    """The delta rule of this file is decorated, and normalizes by a function of its file."""
    stock, model = built("qwen3_next")
    file = sys.modules[type(stock).__module__]
    own = file.l2norm
    monkeypatch.setattr(file, "l2norm", lambda x, **options: 0.5 * own(x, **options))
    inputs = {"use_cache": False, "labels": torch.randint(3, 60, (2, 11))}
    run = lambda m: m(input_ids=inputs["labels"], **inputs).loss  # noqa: E731
    assert_same_training(stock, model, run, rtol=1e-4)


def test_padding_is_no_sample():
    _, model = built_of_functions("jamba")
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(input_ids=torch.randint(10, 60, (2, 9)), attention_mask=mask, position_ids=positions)


@pytest.mark.parametrize("off", ["causal_conv1d", "gated_delta_rule"])
def test_partly_served_mixer_raises(off):
    stock, model = built_of_functions("qwen3_next")
    liger_multi.patch(model, **{off: False})
    _, row, hints = packed()
    with pytest.raises(ValueError, match="nothing keeps them apart in"):
        model(input_ids=row, use_cache=False, **hints["position_ids"])
    got, expected = (m(input_ids=row).logits for m in (model, stock))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_unpatched_again_and_off():
    stock, model = built_of_functions("qwen3_next")
    for undo in (
        lambda: liger_multi.unpatch(model),
        lambda: liger_multi.patch(model, **dict.fromkeys(MIXER_OPS, False)),
    ):
        report = str(liger_multi.patch(model))
        assert "causal_conv1d + gated_delta_rule" in report
        assert "ids of samples" in report
        assert any(isinstance(m, hybrids.PackedModel) for m in model.modules())
        undo()
        for mine, theirs in zip(model.modules(), stock.modules(), strict=True):
            if isinstance(theirs, type(stock.model)) or "Delta" in type(theirs).__name__:
                assert type(mine) is type(theirs)
                assert vars(mine).keys() == vars(theirs).keys()


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, None),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])}, [[0, 0, 0, 1, 1, 2]]),
        ({"position_ids": torch.tensor([[4, 5, 0, 1]])}, [[0, 0, 1, 1]]),
        (
            {"position_ids": torch.tensor([[[0, 1, 0]], [[9, 9, 9]], [[9, 9, 9]], [[9, 9, 9]]])},
            [[0, 0, 1]],
        ),
        (
            {"position_ids": torch.tensor([[[0, 1, 1, 0]], [[0, 1, 1, 0]], [[0, 1, 2, 0]]])},
            [[1, 1, 1, 2]],
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 2, 5])}, [[1, 1, 3, 3, 3]]),
        ({"seq_idx": torch.tensor([[7, 7, 3]])}, [[7, 7, 3]]),
    ],
)
def test_ids_of_samples(inputs, expected):
    actual = sample_ids({"input_ids": torch.zeros(1, 5), **inputs})
    assert (None if actual is None else actual.tolist()) == expected


class Layer(torch.nn.Module):
    """One with children that are called in several ways."""

    def forward(self, x, **kwargs):
        """Call them."""
        for block in self.blocks[:2]:
            x = block(x, **kwargs)
        for part in self.parts:
            x = part(x)
        x = self.either(self.either(x, **kwargs))
        x = self.half(self.half(x, **kwargs), mask=None)
        return self.other(self.mixer(mixes(x, **kwargs), mask=None, **kwargs))


def mixes(x, **kwargs):
    return x


@pytest.mark.parametrize(
    ("name", "hands_on"),
    [
        ("blocks", True),
        ("mixer", True),
        ("either", True),
        ("mixes", True),
        ("other", False),
        ("parts", False),
        ("half", False),
        ("absent", False),
    ],
)
def test_keyword_arguments_are_read_from_source(name, hands_on):
    assert hybrids._hands_on(Layer.forward, name) is hands_on


def test_rule_with_repeated_keys_is_recognized():
    """transformers 5.17 has such a rule."""
    from liger_multi.testing.samples import call

    def rule(query, key, value, g, beta, **options):
        if key.shape[2] != value.shape[2]:
            raise RuntimeError("sizes do not match")
        options["qk_l2norm"] = options.pop("use_qk_l2norm_in_kernel")
        return call("gated_delta_rule", query, key, value, g, beta, **options)

    assert differs("torch_chunk_gated_delta_rule", rule) is None


def test_gated_convolution_reading_more_runs_unpatched(monkeypatch):
    """A helper of the modeling file that is replaced after the patch takes effect at once."""
    lfm2 = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    unpatched, model = built("lfm2")
    samples, *_ = packed()
    rows = torch.cat([samples[0], samples[0]])
    mask = torch.ones_like(rows)
    mask[0, :2] = 0
    before = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
    stock = lfm2.apply_mask_to_padding_states
    monkeypatch.setattr(lfm2, "apply_mask_to_padding_states", lambda x, mask: 2 * stock(x, mask))
    after = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
    same = unpatched(input_ids=rows, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(after, same)
    assert not torch.allclose(after, before, atol=1e-3)


# Hybrid models with padding anywhere in a row: patched equals unpatched, by every way to call
# one.
#
# Mixers of an unpatched model see a hidden token in their own way: it is 0 for them, and a state
# decays over it. So the unpatched model is what counts, for hidden tokens as well.


TYPES = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "glm5_next", "granitemoehybrid"),
    *("inkling_text", "inkling2", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
    "zaya",
)
"""Types with a recurrence or a convolution over tokens."""


LAYERS = {
    "granitemoehybrid": ["linear_attention", "full_attention"],
    **dict.fromkeys(("zamba", "zamba2"), ["linear_attention", "hybrid"] * 2),
}
ROWS, TOKENS = 3, 14


def pair(model_type):
    return [model.eval() for model in built(model_type)]


def holes(seed, rows=ROWS, tokens=TOKENS):
    """Ids, and a mask that hides tokens anywhere: in front, at the end and within, of some rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 60, (rows, tokens), generator=generator)
    mask = (torch.rand(rows, tokens, generator=generator) > 0.3).long()
    mask[0] = 1
    mask[-1, : tokens // 3] = 0
    mask[:, -1] = 1
    return ids, mask


def positions_of(form, mask):
    """Positions as generation makes them, those of all tokens, or none."""
    if form == "visible":
        return {"position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)}
    if form == "all":
        return {"position_ids": torch.arange(mask.shape[1]).expand(len(mask), -1)}
    return {}


def by_unpatched(run, model):
    """What the unpatched model gives; skips where it cannot run this way."""
    try:
        return run(model)
    except Exception as error:  # of any kind: what it cannot do, nobody has to
        pytest.skip(f"unpatched it does not run: {type(error).__name__}: {error}"[:200])


def assert_close(model_type, got, expected):
    limit = ROUNDING.get(model_type, 2e-4) * max(1.0, float(expected.abs().nan_to_num().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=limit, equal_nan=True)


def each(function):
    """Fast types always, all types in slow runs."""
    fast = ("qwen3_5_text", "bamba", "granitemoehybrid", "jamba", "lfm2", "mamba2")
    marked = [t if t in fast else pytest.param(t, marks=pytest.mark.slow) for t in TYPES]
    return pytest.mark.parametrize("model_type", marked)(function)


@each
@pytest.mark.parametrize("form", ["visible", "all", "none"])
def test_forward_and_backward(model_type, form):
    """Of several rows, and of one: until transformers 5.17, mixers did not mask in such a batch."""
    unpatched, patched = pair(model_type)

    def run(model, seed, mode, rows):
        ids, mask = (part[rows] for part in holes(seed))
        labels = ids.masked_fill(mask == 0, -100)
        model.train(mode).zero_grad()
        inputs = {"attention_mask": mask, "labels": labels, **positions_of(form, mask)}
        output = model(input_ids=ids, use_cache=False, **inputs)
        output.loss.backward()
        return output.logits.detach(), gradients(model)

    for call in ((0, False, slice(None)), (1, True, slice(None)), (2, False, slice(1, 2))):
        expected = by_unpatched(lambda m: run(m, *call), unpatched)  # noqa: B023
        got = run(patched, *call)
        assert_close(model_type, got[0], expected[0])
        rtol = 1e-3
        if model_type in ROUNDING:  # rounding alone moves it further
            moved = run(shaken(unpatched), *call)[1]
            rtol = 4 * max(relative(x, expected[1][n]) for n, x in moved.items())
        assert_same_gradients(got[1], expected[1], rtol=rtol)


def shaken(model):
    """A copy whose weights are each one rounding off."""
    model = copy.deepcopy(model)
    signs = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            sign = torch.randint(2, weight.shape, generator=signs) * 2 - 1
            weight.mul_(1 + sign * torch.finfo(weight.dtype).eps)
    return model


def relative(x, other):
    """The largest difference over the largest number."""
    return float((x - other).abs().max() / other.abs().max())


WAYS = {
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 5},
    "dynamic": {},
    "offloaded": {"cache_implementation": "offloaded"},
    "assisted": {"prompt_lookup_num_tokens": 2},
    "sampled": {"num_return_sequences": 2, "num_beams": 2},
}


SLOW_WAYS = [pytest.param(way, marks=pytest.mark.slow) for way in list(WAYS)[2:]]


@each
@pytest.mark.parametrize("way", ["static", "chunked", *SLOW_WAYS])
def test_generate(model_type, way):
    unpatched, patched = pair(model_type)
    rows = 1 if way == "assisted" else ROWS
    for seed in (3, 4):
        ids, mask = holes(seed)
        inputs = {"attention_mask": mask[-rows:], "max_new_tokens": 4, "do_sample": False}

        def run(model, ids=ids, inputs=inputs):
            torch.manual_seed(0)
            return model.generate(
                ids[-rows:],
                **inputs,
                **WAYS[way],
                use_cache=True,
                output_logits=True,
                return_dict_in_generate=True,
            )

        expected, got = by_unpatched(run, unpatched), run(patched)
        assert torch.equal(got.sequences, expected.sequences)
        for a, b in zip(got.logits or (), expected.logits or (), strict=True):
            assert_close(model_type, a, b)


@each
@pytest.mark.parametrize("form", ["visible", pytest.param("none", marks=pytest.mark.slow)])
def test_later_turns_with_a_cache(model_type, form):
    """Padding in every turn: a mask is longer than the tokens of a later one."""
    unpatched, patched = pair(model_type)

    @torch.no_grad()
    def run(model):
        masks, cache, outputs = torch.zeros(ROWS, 0, dtype=torch.long), {}, []
        for seed in (5, 6, 7):
            ids, mask = holes(seed)
            masks = torch.cat([masks, mask], 1)
            hints = {n: p[:, -TOKENS:] for n, p in positions_of(form, masks).items()}
            output = model(input_ids=ids, attention_mask=masks, use_cache=True, **hints, **cache)
            cache = continued(model, output)
            outputs.append(output.logits.detach())
        return torch.cat(outputs, 1)

    expected = by_unpatched(run, unpatched)
    assert_close(model_type, run(patched), expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tokens", "kinds of layers"])
@pytest.mark.parametrize("model_type", ["granitemoehybrid", "qwen3_5_text"])
def test_compiled(model_type, form):
    """As compiled generation calls a model: with a static cache, and masks by kinds of layers.

    Nobody waits for the device within a graph, so what it asserts has to hold for padding.
    """
    from transformers.masking_utils import create_masks_for_generate

    unpatched, patched = pair(model_type)
    ids, mask = holes(8)
    inputs = positions_of("visible", mask)
    compiled = torch.compile(patched, backend="eager", dynamic=False)

    @torch.no_grad()
    def run(model):
        cache = transformers.StaticCache(config=unpatched.config, max_cache_len=20)
        masks = mask
        if form != "tokens":
            embeds = unpatched.get_input_embeddings()(ids)
            taken = {cache_parameter(create_masks_for_generate): cache, **inputs}
            masks = create_masks_for_generate(unpatched.config, embeds, mask, **taken)
        name = cache_parameter(type(unpatched).forward)
        return model(input_ids=ids, attention_mask=masks, **inputs, **{name: cache}).logits

    expected = by_unpatched(run, unpatched)
    assert_close(model_type, run(compiled), expected)


# --- which tokens are visible, and which sample they belong to ---

HIDDEN = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0]])


def keys(mask, before=0, after=0):
    """A mask ``(B, 1, T, S)`` as transformers makes it: causal, without hidden keys."""
    batch, tokens = mask.shape
    whole = torch.cat([torch.ones(batch, before), mask, torch.zeros(batch, after)], 1).bool()
    causal = torch.ones(tokens, before + tokens + after, dtype=torch.bool).tril(before)
    return whole[:, None, None] & causal


MASKS = {
    "of tokens": HIDDEN,
    "with a cache": torch.cat([1 - HIDDEN, HIDDEN], 1),
    "bool": HIDDEN.bool(),
    "of keys": keys(HIDDEN),
    "of keys, with a cache": keys(HIDDEN, 4),
    "of keys, in a static cache": keys(HIDDEN, 2, 5),
    "to be added": torch.zeros(2, 1, 6, 6).masked_fill(~keys(HIDDEN), torch.finfo().min),
    "to be added, not the least number": torch.zeros(2, 1, 6, 6).masked_fill(~keys(HIDDEN), -1e4),
    "beside a bias": torch.zeros(2, 1, 6, 6).masked_fill(~keys(HIDDEN), -1e9)
    - 50.0 * (torch.arange(6)[:, None] - torch.arange(6)).abs(),
    "by kinds of layers": {"full_attention": keys(HIDDEN, 2, 5), "linear_attention": None},
    "both": {"full_attention": None, "linear_attention": HIDDEN},
}


@pytest.mark.parametrize("form", MASKS)
def test_hidden_tokens_of_a_mask(form):
    assert torch.equal(visible_tokens(MASKS[form], 6), HIDDEN.bool())


@pytest.mark.parametrize("before", [0, 3])
def test_hidden_tokens_of_other_masks(before):
    """Of our attention, which has ranges, and of flex attention, which has a function."""
    from liger_multi.patching.attention.interface import KeyMask, one_range

    observed = keys(HIDDEN, before)
    ranges = one_range(torch.where(observed.any(-1, keepdim=True), observed, False)[:, 0])[0]
    if not before:  # a row of two runs has four numbers
        ranges = torch.cat([torch.zeros_like(ranges), ranges], -1)
    shape = tuple(observed.shape)
    tails = HIDDEN[1:]  # one run of keys a query, which ranges can say
    mask = KeyMask((1, *shape[1:]), ranges=ranges[1:].int())
    assert torch.equal(visible_tokens(mask, 6), tails.bool())
    assert torch.equal(visible_tokens(KeyMask(shape, dense=observed), 6), HIDDEN.bool())
    assert visible_tokens(KeyMask(shape, causal=True), 6) is None

    class BlockMask:
        kv_num_blocks, seq_lengths = torch.zeros(2, 1, 1), (6, 6 + before)

        @staticmethod
        def mask_mod(batch, head, query, key):
            return observed[batch, 0, query, key]

    assert torch.equal(visible_tokens(BlockMask(), 6), HIDDEN.bool())


@pytest.mark.parametrize(
    ("positions", "mask", "ids", "many"),
    [
        # one sample: padding in front, at the end, within; positions that count it or do not
        ([1, 1, 0, 1, 2, 3], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], False),
        ([0, 1, 2, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], False),
        ([0, 1, 1, 1, 2, 3], [1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], False),
        ([0, 1, 2, 3, 4, 5], [1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], False),
        # two samples, beside each other and with padding between them
        ([0, 1, 2, 0, 1, 2], [1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], True),
        ([0, 1, 0, 0, 1, 2], [1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], True),
        ([1, 1, 0, 0, 1, 2], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], True),
        ([0, 1, 7, 8, 9, 9], [1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], False),
        ([0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], False),
    ],
)
def test_positions_tell_samples_apart_among_visible_tokens(positions, mask, ids, many):
    rows = torch.zeros(1, 6)
    inputs = {"position_ids": torch.tensor([positions]), "attention_mask": torch.tensor([mask])}
    assert sample_ids({"input_ids": rows, **inputs}).tolist() == [ids]
    assert has_samples({"input_ids": rows, **inputs}) is many
    axes = inputs["position_ids"].expand(3, -1, -1)  # of images
    actual = sample_ids({"input_ids": rows, **inputs, "position_ids": axes})
    assert actual.tolist() == [ids if 7 not in positions else [0] * 6]


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    "positions", [[1, 0, 1, 1, 1, 2], [0, 0, 1, 1, 1, 2], [5, 0, 1, 5, 5, 2], [0, 1, 2, 3, 4, 5]]
)
def test_hidden_tokens_that_see_themselves_begin_no_sample(positions, before):
    """Such a mask has no row of nothing but hidden keys; it is of one sample, or of two."""
    itself = torch.eye(6, 6 + before, dtype=torch.bool).roll(before, 1)
    mask = keys(HIDDEN[:1], before) | itself
    inputs = {"input_ids": torch.zeros(1, 6), "position_ids": torch.tensor([positions])}
    for form in (mask, {"full_attention": mask}, torch.where(mask, 0.0, -torch.inf)):
        assert not sample_ids({**inputs, "attention_mask": form}).any()
        assert not has_samples({**inputs, "attention_mask": form})
    apart = torch.block_diag(*torch.ones(2, 3, 3)).bool().tril()[None, None]
    two = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "attention_mask": apart}
    assert sample_ids({**inputs, **two}).tolist() == [[0, 0, 0, 1, 1, 1]]
    assert has_samples({**inputs, **two})


def test_ids_of_hidden_tokens_are_not_read():
    mask = torch.tensor([[0, 1, 0, 1, 1, 0]])
    inputs = {"seq_idx": torch.tensor([[5, 3, 9, 3, 4, 0]]), "attention_mask": mask}
    assert sample_ids({"input_ids": torch.zeros(1, 6), **inputs}).tolist() == [[0, 0, 0, 0, 1, 1]]


# Recurrences and convolutions over a row of trees, in fp64: every path as if it were alone.


TREES = {
    "a path": [(9, [])],
    "flat": [(7, [(5, []), (1, []), (5, [])])],
    "ragged": [(9, [(3, [(20, []), (1, [(2, []), (70, [])])]), (1, []), (6, [])]), (2, [(3, [])])],
    "one token": [(1, [(1, [(1, []), (1, [])]), (1, [])])],
}


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def state_of(function, with_state):
    """A call of an operator from a state, as :func:`scan` makes it."""

    def run(rows, state, output_state):
        if output_state:
            return with_state(*rows, initial_state=state)
        return function(*rows, initial_state=state), None

    return run


def delta_rule(count):
    inputs = [draw(1, count, 2, 8, seed=n) for n in range(3)]
    gates = [-draw(1, count, 2, seed=3).abs(), draw(1, count, 2, seed=4).sigmoid()]
    options = {"qk_l2norm": True}

    def call(name):
        return lambda *rows, **kwargs: getattr(ops, name)(*rows, **kwargs, **options)

    run = state_of(call("gated_delta_rule"), call("gated_delta_rule_with_state"))
    return [*inputs, *gates], [0.0] * 5, run


def heads_scan(count, limits=(0.0, float("inf"))):
    x, dt = draw(1, count, 4, 6, seed=0), draw(1, count, 4, seed=1)
    b, c = draw(1, count, 2, 8, seed=2), draw(1, count, 2, 8, seed=3)
    options = {"dt_bias": draw(4, seed=4), "dt_softplus": True, "dt_limit": limits}
    a = -draw(4, seed=5).abs()

    def call(name):
        return lambda x, dt, b, c, **kwargs: getattr(ops, name)(x, dt, a, b, c, **kwargs, **options)

    run = state_of(call("ssd_scan"), call("ssd_scan_with_state"))
    return [x, dt, b, c], [0.0, STILL, 0.0, 0.0], run


def limited_scan(count):
    return heads_scan(count, (0.1, 2.0))


def channels_scan(count):
    u, dt = draw(1, count, 6, seed=0), draw(1, count, 6, seed=1)
    b, c = draw(1, count, 4, seed=2), draw(1, count, 4, seed=3)
    a, bias = -draw(6, 4, seed=4).abs(), draw(6, seed=5)

    def call(name):
        def run(u, dt, b, c, **kwargs):
            options = {"delta_bias": bias, "delta_softplus": True}
            return getattr(ops, name)(u, dt, a, b, c, **kwargs, **options)

        return run

    run = state_of(call("selective_scan"), call("selective_scan_with_state"))
    return [u, dt, b, c], [0.0, STILL, 0.0, 0.0], run


def assert_paths(tree, leaves, together, alone):
    """Results and gradients along every path, each segment counted once."""
    expected = torch.zeros_like(together)
    parts = []
    for segment, length in enumerate(tree.lengths):
        parts.append(alone(torch.tensor(tree.path(segment)))[:, -length:])
    expected = torch.cat([*parts, alone(torch.arange(tree.tokens - tree.padding, tree.tokens))], 1)
    torch.testing.assert_close(together, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(together, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        rtol=1e-9,
        atol=1e-10,
    )


@pytest.mark.parametrize("roots", TREES.values(), ids=TREES)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("recurrence", [delta_rule, heads_scan, limited_scan, channels_scan])
def test_recurrences(recurrence, roots, padding):
    count = tree_of_roots(roots)[0].tokens + padding
    tree, _ = tree_of_roots(roots, count)
    inputs, fillings, run = recurrence(count)
    tokens = [PerToken(x, filling) for x, filling in zip(inputs, fillings, strict=True)]
    together = scan(tree, tokens, run, equal=recurrence is limited_scan)
    leaves = [x for x in inputs if x.is_leaf]
    assert_paths(
        tree, leaves, together, lambda path: run([x[:, path] for x in inputs], None, False)[0]
    )


@pytest.mark.parametrize("roots", TREES.values(), ids=TREES)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolutions(roots, width):
    count = tree_of_roots(roots)[0].tokens + 3
    tree, _ = tree_of_roots(roots, count)
    x, weight = draw(1, count, 5, seed=0), draw(5, width, seed=1)

    def convolve(rows, ids=None):
        return ops.causal_conv1d(rows, weight, activation="silu", seq_idx=ids)

    together = windowed(tree, x, width - 1, convolve)
    assert_paths(tree, [x, weight], together, lambda path: convolve(x[:, path]))


def test_ranges_of_a_tree():
    tree, _ = tree_of_roots(TREES["ragged"])
    place = torch.arange(tree.longest)
    window = torch.stack([(place - 4).clamp(min=0), place + 1], -1)
    ranges, positions = tree.ranges(window)[0], tree.positions(place.device)[0]
    for segment, start in enumerate(tree.starts):
        path = tree.path(segment)
        for own in range(start, start + tree.lengths[segment]):
            visible = {k for a, b in ranges[own].view(-1, 2).tolist() for k in range(a, b)}
            at = path.index(own)
            assert positions[own] == at
            assert visible == set(path[max(0, at - 4) : at + 1])
