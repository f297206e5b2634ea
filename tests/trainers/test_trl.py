"""TRL's own trainers on tiny models, a few steps.

With a callback, and with their switch through the import names. With our losses the curves are the
same.
"""

import copy
import re
from pathlib import Path

import pytest
import torch

import liger_multi
from liger_multi import losses, ops, trees
from liger_multi.errors import PatchError
from liger_multi.integrations import (
    SharedPrefixes,
    TrainerCallback,
    share_prefixes,
    trainer as trainer_module,
)
from tests.comparing import recorded
from tests.models import (
    Calls,
    arguments,
    build,
    in_mxfp4,
    patched_ops,
    rows,
    tokenizer,
    transformers,
    with_lora_on_experts,
    with_words,
)

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    with_words(tokenizer()).save_pretrained(place)
    return place


def reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


KINDS = {
    "SFT": ("completion", {"max_length": 32}, {}),
    "DPO": ("pair", {"beta": 0.3}, {}),
    "GRPO": (
        "prompt",
        {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 4},
        {"reward_funcs": reward},
    ),
}
KINDS["RLOO"] = KINDS["GRPO"]
RUN = ("SFT", "DPO", "GRPO")


def trained(trainer, place, config, data, count=8, patched=False, **more):
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    if patched:
        liger_multi.patch(model)
    words, data = tokenizer(), rows(data, count)
    run = trainer(model, args=config, train_dataset=data, processing_class=words, **more)
    return losses_of(run), torch.cat([p.detach().flatten() for p in model.parameters()]), model


def losses_of(trainer):
    """Losses of the steps, with the same random numbers each time."""
    torch.manual_seed(5)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def assert_same(stock, ours, steps=4):
    assert len(stock[0]) == steps
    assert ours[0] == pytest.approx(stock[0], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(ours[1], stock[1], rtol=1e-4, atol=1e-6)
    assert len(set(stock[0])) > 1 or steps < 4


# --- callbacks and import names ---


def run(name, place, tmp_path, callbacks=(), **more):
    data, options, call = KINDS[name]
    config = getattr(trl, f"{name}Config")(**arguments(tmp_path, max_steps=2, **options, **more))
    trainer = getattr(trl, f"{name}Trainer")
    return trained(trainer, place, config, data, callbacks=list(callbacks), **call)


@pytest.fixture(scope="module")
def stock(saved, tmp_path_factory):
    """Runs of the trainers as they are, once each."""
    cache = {}

    def losses(name):
        if name not in cache:
            cache[name] = run(name, saved, tmp_path_factory.mktemp(name))
        return cache[name]

    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_callback(name, stock, saved, tmp_path, monkeypatch):
    expected, callback = stock(name), TrainerCallback()
    calls = Calls(monkeypatch)
    assert_same(expected, run(name, saved, tmp_path, [callback]), 2)
    assert callback.report.count("rms_norm") == 5
    assert calls["rms_norm"] >= 10
    assert calls["rope"] >= 4


@pytest.mark.parametrize("name", RUN)
def test_use_liger_kernel(name, stock, saved, tmp_path, monkeypatch, installed):
    """TRL has its own head, and turns ours off through the configuration."""
    expected = stock(name)
    calls = Calls(monkeypatch)
    options = {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}}
    with pytest.warns(FutureWarning, match="use_liger_kernel"):
        got = run(name, saved, tmp_path, **options)
    assert_same(expected, got, 2)
    assert {*patched_ops(got[2])} == {"rms_norm", "swiglu"}
    assert calls["rms_norm"] >= 10
    assert calls["rope"] == 0


# --- shared prefixes ---


@pytest.fixture
def tree_tokens(monkeypatch):
    """Tokens of every row of trees, and of the rows that it stands for."""
    note = lambda model, batch, **_: (batch.tree.tokens, int(batch.unshared()[1].sum()))  # noqa: E731
    return recorded(monkeypatch, trees, "scores", note)


@pytest.mark.parametrize("name", ["DPO", "GRPO", "RLOO"])
@pytest.mark.parametrize("way", ["callback", "mixin"])
def test_shared_prefixes(name, way, saved, tmp_path, tree_tokens, monkeypatch):
    expected = run(name, saved, tmp_path / "stock")
    assert not tree_tokens
    callbacks = [TrainerCallback(shared_prefixes=True)] if way == "callback" else []
    if way == "mixin":
        shared = type("Shared", (SharedPrefixes, getattr(trl, f"{name}Trainer")), {})
        monkeypatch.setattr(trl, f"{name}Trainer", shared)
    assert_same(expected, run(name, saved, tmp_path / "shared", callbacks), steps=2)
    assert len(tree_tokens) >= 2
    assert all(tokens < unshared for tokens, unshared in tree_tokens)


@pytest.mark.parametrize("name", ["DPO", "GRPO", "RLOO"])
def test_shared_prefixes_in_mixed_precision(name, saved, tmp_path, tree_tokens):
    """accelerate puts an autocast around the forward that TRL made."""
    expected = run(name, saved, tmp_path / "stock", bf16=True)
    ours = run(name, saved, tmp_path / "ours", [TrainerCallback(shared_prefixes=True)], bf16=True)
    assert ours[0] == pytest.approx(expected[0], abs=2e-2)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-2, atol=1e-3)
    assert len(tree_tokens) >= 2


def test_shared_prefixes_of_answers_that_are_all_truncated(
    saved, tmp_path, tree_tokens, monkeypatch
):
    """A batch without a token that counts has a loss of 0, and gradients."""
    data, defaults, call = KINDS["GRPO"]
    options = {**defaults, "mask_truncated_completions": True, "max_completion_length": 1}
    monkeypatch.setitem(KINDS, "GRPO", (data, options, call))
    expected = run("GRPO", saved, tmp_path / "stock")
    ours = run("GRPO", saved, tmp_path / "ours", [TrainerCallback(shared_prefixes=True)])
    assert_same(expected, ours, steps=2)
    assert len(tree_tokens) >= 2


def test_shared_prefixes_log_statistics_in_chunks(saved, tmp_path, tree_tokens, monkeypatch):
    """Of DPO, whose means and accuracies of logits need all classes of a token."""
    monkeypatch.setattr(trainer_module, "ROWS", 3)
    shapes = recorded(monkeypatch, trainer_module, "real_logits", lambda logits: logits.shape[:2])
    callbacks = [TrainerCallback(shared_prefixes=True)]
    assert_same(
        run("DPO", saved, tmp_path / "stock"), run("DPO", saved, tmp_path / "ours", callbacks), 2
    )
    assert max(shapes) == (1, 3)


def test_shared_prefixes_need_a_head_of_trl():
    with pytest.raises(PatchError, match="TRL gave LlamaForCausalLM no fused head"):
        share_prefixes(build())


# --- losses ---


def states(model, input_ids, attention_mask):
    """Hidden states of the positions that predict a token, through the backbone."""
    out = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    return out.last_hidden_state[:, :-1]


def scored(model, inputs, prefix=""):
    ids, mask = inputs[f"{prefix}input_ids"], inputs[f"{prefix}completion_mask"]
    hidden = states(model, ids, inputs[f"{prefix}attention_mask"])
    target = ids.masked_fill(mask == 0, -100)[:, 1:]
    return losses.Head(hidden, model.lm_head, chunk=5), target


# --- the first page ---


def test_the_first_page_runs(tmp_path, saved, monkeypatch):
    """Every block of README, where a file is at hand and a small model stands for the one named."""
    tokenizer().save_pretrained(saved)
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("one two three four\n" * 4)
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    assert [b.count("Qwen/Qwen2.5-0.5B") for b in blocks] == [1, 1, 1]
    trained = []
    for block in blocks:
        own = {}
        block = block.replace("Qwen/Qwen2.5-0.5B", str(saved))
        if not torch.accelerator.is_available():  # as the block says
            block = block.replace('= SFTConfig("out") ', '= SFTConfig("out", bf16=False) ')
        exec(compile(block, "README.md", "exec"), own)
        if "trainer" in own:
            assert own["trainer"].state.global_step > 2
            assert {"rms_norm", "swiglu"} <= {*patched_ops(own["trainer"].model)}
            trained.append(type(own["trainer"]).__name__)
    assert trained == ["Trainer", "SFTTrainer"]


# --- supervised: a subclass's compute_loss, or compute_loss_func ---


@pytest.mark.slow
@pytest.mark.parametrize("way", ["subclass", "function", "function on a patched model"])
def test_sft(tmp_path, saved, way):
    """Two micro-batches a step, whose tokens are counted together."""

    class Ours(trl.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            hidden = states(model, inputs["input_ids"], inputs["attention_mask"])
            return losses.sequence_loss(
                losses.Head(hidden, model.lm_head),
                inputs["labels"][:, 1:],
                num_items=num_items_in_batch,
            )[0]

    def function(outputs, labels, num_items_in_batch=None):
        return losses.sequence_loss(
            outputs.logits[:, :-1], labels[:, 1:], num_items=num_items_in_batch
        )[0]

    config = trl.SFTConfig(**arguments(tmp_path, gradient_accumulation_steps=2), max_length=32)
    stock = trained(trl.SFTTrainer, saved, config, "completion", 16)
    if way == "subclass":
        return assert_same(stock, trained(Ours, saved, config, "completion", 16))
    more = {"patched": "patched" in way, "compute_loss_func": function}
    with pytest.warns(FutureWarning, match="compute_loss_func"):
        return assert_same(stock, trained(trl.SFTTrainer, saved, config, "completion", 16, **more))


# --- preferences: a subclass's compute_loss ---


@pytest.mark.parametrize("name", ["sigmoid", ["sigmoid", "bco_pair", "sft"]])
def test_dpo(tmp_path, saved, name):
    class Ours(trl.DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            policy, target = scored(model, inputs)
            with torch.no_grad():
                reference, _ = scored(self.ref_model, inputs)
            return losses.dpo_loss(
                policy,
                target,
                reference,
                loss_type=name if isinstance(name, str) else tuple(name),
                loss_weights=self.args.loss_weights,
                beta=self.beta,
            )[0]

    weights = None if isinstance(name, str) else [0.8, 0.2, 1.0]
    options = {"loss_type": name, "beta": 0.3, "loss_weights": weights}
    config = trl.DPOConfig(**arguments(tmp_path), **options)
    assert_same(*(trained(cls, saved, config, "pair") for cls in (trl.DPOTrainer, Ours)))


def test_kto(tmp_path, saved):
    class Ours(trl.KTOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            policy, target = scored(model, inputs)
            with torch.no_grad():
                reference, _ = scored(self.ref_model, inputs)
                sums = [
                    losses.tokens(*scored(m, inputs, "KL_")).log_prob.sum(-1)
                    for m in (model, self.ref_model)
                ]
            return losses.kto_loss(
                policy,
                target,
                inputs["label"],
                reference,
                losses.kto_divergence(*sums),
                beta=self.beta,
                desirable_weight=1.5,
            )[0]

    config = trl.KTOConfig(**arguments(tmp_path), beta=0.3, desirable_weight=1.5)
    assert_same(*(trained(cls, saved, config, "label") for cls in (trl.KTOTrainer, Ours)))


# --- policies: a subclass's compute_loss ---


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("dapo", {"beta": 0.1, "num_iterations": 2}),
        ("grpo", {"importance_sampling_level": "sequence"}),
    ],
)
def test_grpo(tmp_path, saved, name, extra):
    class Ours(trl.GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            calls = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            length = inputs["completion_ids"].shape[1]
            hidden = states(model, ids, calls)[:, -length:]
            target = inputs["completion_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
            steps = self.current_gradient_accumulation_steps / self.args.steps_per_generation
            return losses.policy_loss(
                losses.Head(hidden, model.lm_head, chunk=5, temperature=self.temperature),
                target,
                inputs["advantages"],
                old=inputs.get("old_per_token_logps"),
                reference=inputs.get("ref_per_token_logps") if self.beta else None,
                num_items=inputs["num_items_in_batch"] * steps,
                accumulation=self.current_gradient_accumulation_steps,
                loss_type=self.loss_type,
                level=self.importance_sampling_level,
                beta=self.beta,
                correct_kl=self.args.use_bias_correction_kl and self.beta != 0,
            )[0]

    config = trl.GRPOConfig(
        **arguments(tmp_path, per_device_train_batch_size=4, learning_rate=0.1),
        loss_type=name,
        num_generations=4,
        max_completion_length=6,
        **extra,
    )
    more = {"reward_funcs": reward}
    assert_same(*(trained(c, saved, config, "prompt", **more) for c in (trl.GRPOTrainer, Ours)))


# Trainers on a base in NF4, and on gpt-oss whose experts stay in MXFP4.


def losses_of_adapters(name, model, tmp_path):
    if name == "plain":
        return plain_losses(model, tmp_path)
    data, options, call = KINDS[name]
    options = {**options, "max_steps": 3, "gradient_checkpointing": name == "SFT"}
    config = getattr(trl, f"{name}Config")(**arguments(tmp_path, **options))
    words, data = tokenizer(), rows(data, 8)
    run = getattr(trl, f"{name}Trainer")
    return losses_of(run(model, args=config, train_dataset=data, processing_class=words, **call))


def plain_losses(model, tmp_path):
    """Those of the Trainer of transformers, which saves the adapters and no codes."""
    from safetensors.torch import load_file

    words = torch.randint(3, 20, (8, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in words]
    options = transformers.TrainingArguments(**arguments(tmp_path, max_steps=3))
    trainer = transformers.Trainer(model, options, train_dataset=data)
    steps = losses_of(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert saved
    assert all("lora_" in key for key in saved)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SFT", "GRPO", "plain"])
def test_experts_in_mxfp4(name, tmp_path):
    """The losses of every step are those of the numbers, unpatched."""
    from tests.patching.test_four_bits import dense

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    coded = in_mxfp4(with_words(tokenizer(), "gpt_oss", **sizes))
    ours, stock = (with_lora_on_experts(model) for model in (coded, dense(coded)))
    assert liger_multi.patch(ours).count("fused_moe") == 2
    expected = losses_of_adapters(name, stock, tmp_path / "stock")
    assert losses_of_adapters(name, ours, tmp_path / "ours") == pytest.approx(
        expected, rel=1e-4, abs=1e-6
    )
    assert len(set(expected)) > 1
    assert len([p for p in ours.parameters() if isinstance(p, ops.QuantizedWeight)]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SFT", "GRPO", "plain"])
def test_a_base_of_bitsandbytes(name, tmp_path):
    """The losses of every step are those of bitsandbytes and PEFT, unpatched."""
    from tests.patching.test_four_bits import FORMATS, SIZES, replaced, with_lora

    base = replaced(with_words(tokenizer(), "llama", **SIZES), FORMATS["nf4 nested"])
    base.is_loaded_in_4bit = True
    stock = with_lora(base)
    ours = copy.deepcopy(stock)
    report = liger_multi.patch(ours, strict=True)
    assert report.count("four_bits") == report.count("lora") == 14
    expected = losses_of_adapters(name, stock, tmp_path / "stock")
    codes = {n: p.clone() for n, p in ours.named_parameters() if p.dtype == torch.uint8}
    assert losses_of_adapters(name, ours, tmp_path / "ours") == pytest.approx(
        expected, rel=1e-4, abs=1e-6
    )
    assert len(set(expected)) > 1
    assert len(codes) == 14
    assert all(torch.equal(p, codes[n]) for n, p in ours.named_parameters() if n in codes)
