"""Which patched modules ran in a block and called their operator."""

import re
import threading
from collections import Counter

import pytest
import torch
from torch import nn

from liger_multi.dispatch.op import Op
from liger_multi.patching import patch, patched, unpatch
from liger_multi.patching.report import Executed, serves
from tests.models import Graphs, adapters, batch, build, loss_of, transformers


def paths(entries):
    return {entry.path for entry in entries}


@pytest.fixture
def watched():
    model = build()
    return model, patch(model)


def observe(report, model, call):
    """What ran in a call."""
    with report.watch(model) as observed:
        call(model)
    return observed


def test_step_with_all_operators(watched):
    model, report = watched
    observed = observe(report, model, lambda m: loss_of(m).backward())
    assert observed.served == [e for e in report.entries if e.op != "packing"]
    assert (observed.stock, observed.idle) == ([], [])
    row = next(line for line in str(observed).splitlines() if "mlp" in line)
    assert row.split() == ["swiglu", "model.layers.*.mlp", "2", "2", "0", "0"]


def test_loss_module_serves_its_head():
    config = transformers.DistilBertConfig(
        vocab_size=64, dim=16, hidden_dim=32, n_layers=1, n_heads=2
    )
    model, ids = transformers.DistilBertForMaskedLM(config), torch.randint(0, 64, (2, 5))
    observed = observe(patch(model), model, lambda m: m(input_ids=ids, labels=ids).loss.backward())
    assert "vocab_projector" in paths(observed.served)


def test_unserved_and_idle_modules(watched):
    """A hook on an activation leaves its MLP to transformers; logits that are read need no loss."""
    model, report = watched
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *args: None)
    ids = batch()["input_ids"]
    observed = observe(report, model, lambda m: m(input_ids=ids).logits.sum().backward())
    assert paths(observed.stock) == {"lm_head", "model.layers.1.mlp"}
    assert observed.idle == []
    with report.watch(model) as observed:
        model.model.layers[0](torch.randn(1, 3, 32), position_embeddings=[torch.ones(1, 3, 8)] * 2)
    assert len(observed.served) == 4
    assert paths(observed.idle) >= {"lm_head", "model.norm", "model.layers.1.mlp"}
    assert not {path for path in paths(observed.idle) if path.startswith("model.layers.0")}


def test_loss_computed_after_the_model(watched):
    model, report = watched
    inputs = batch()
    with report.watch(model) as observed:
        logits = model(input_ids=inputs["input_ids"]).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten()).backward()
    assert observed.stock == observed.idle == []


def test_adapters_computed_together():
    """Layers of an MLP do not run; k and v were computed when q was called."""
    model = adapters(build(), ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])
    report = patch(model)
    observed = observe(report, model, lambda m: loss_of(m).backward())
    assert observed.stock == observed.idle == []
    with model.disable_adapter():
        assert not [e for e in observe(report, model, loss_of).served if e.op == "lora"]


def test_recomputed_layers_and_other_threads(watched):
    model, report = watched
    model.gradient_checkpointing_enable({"use_reentrant": True})
    loss = model(**batch()).loss
    with report.watch(model) as observed:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert {e.path for e in observed.served if e.op == "swiglu"} == {
        f"model.layers.{i}.mlp" for i in (0, 1)
    }
    assert "model.norm" in paths(observed.idle)


def test_blocks_may_overlap_and_leave_nothing_behind(watched):
    model, report = watched
    before = nn.Module._call_impl, Op.__call__
    first, second = report.watch(model), report.watch(model)
    one, other = first.__enter__(), second.__enter__()
    model.model.norm(torch.randn(2, 32))
    first.__exit__(None, None, None)
    model.model.layers[0].mlp(torch.randn(2, 32))
    second.__exit__(None, None, None)
    model(**batch())
    assert paths(one.served) == {"model.norm"}
    assert paths(other.served) == {"model.norm", "model.layers.0.mlp"}
    with pytest.raises(RuntimeError), report.watch(model) as observed:
        model.model.norm(torch.randn(2, 31))
    assert observed.seen.ran == set()
    assert (nn.Module._call_impl, Op.__call__) == before


@pytest.mark.slow
def test_compiled_models_are_not_recorded(watched):
    model, report = watched
    graphs = Graphs()
    with report.watch(model) as observed:
        loss = torch.compile(model, backend=graphs, fullgraph=True)(**batch(), use_cache=False).loss
    torch._dynamo.reset()
    torch.testing.assert_close(loss, loss_of(model), rtol=2e-5, atol=0)
    assert (graphs.count, observed.served) == (1, [])
    assert any("rms_norm" in target for target in graphs.targets)


def test_model_of_another_report(watched):
    model, report = watched
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .* got a Linear without 'lm_head'"):
        report.watch(nn.Linear(2, 2)).__enter__()
    said = "got that of models of type llama"
    with patched("llama") as of_type, pytest.raises(ValueError, match=said):
        of_type.watch(model).__enter__()
    assert observe(unpatch(model), model, loss_of).served == []


def test_a_rotation_is_no_other_operator_of_its_module():
    for op, other in (("rope", "sparse_attention"), ("sparse_attention", "rope_multimodal")):
        executed = Executed(ran={"attn"}, called={"attn": Counter({other: 1})})
        assert not serves(op, "attn", executed)
        executed.called["attn"][op] += 1
        assert serves(op, "attn", executed)


# The report of a patch: data, and a table.


def test_report_is_data_and_a_table():
    report = patch(build(), fused_linear_cross_entropy={"chunk": 8})
    head = report.entries[-1]
    assert (head.path, head.stock, head.options) == ("lm_head", "Linear", {"chunk": 8})
    text = str(report)
    assert "4 x LlamaRMSNorm" not in text
    for line in (
        r"2 x LlamaRMSNorm +rms_norm\[llama\]",
        r"2 x LlamaAttention +rope\[half\]",
        r"packing +1 x LlamaForCausalLM +a check that samples",
        r"model\.layers\.\*\.mlp",
        r"fused_linear_cross_entropy \(chunk=8\)",
    ):
        assert re.search(line, text)
    assert "has no output embedding" in str(patch(build().model))


def test_report_of_a_plain_module_has_no_operators_of_language_models():
    report = patch(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), strict=True)
    assert [e.op for e in report.entries] == ["layer_norm"]
    assert not report.skipped
    named = patch(nn.Sequential(nn.LayerNorm(8)), rope=True, fused_linear_cross_entropy=True)
    assert {s.op for s in named.skipped} == {"rope", "fused_linear_cross_entropy"}


def test_report_in_rich():
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(patch(build()))
    console.print(patch(build().model))
    text = console.export_text()
    assert "rms_norm[llama]" in text
    assert "has no output embedding" in text
