"""TRL's own trainers on tiny models, a few steps.

With a callback, and with their switch through the import names. With our losses the curves are the
same.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import liger_multi
from liger_multi import losses, trees
from liger_multi.compat import liger_kernel as alias
from liger_multi.errors import PatchError
from liger_multi.integrations import SharedPrefixes, TrainerCallback, share_prefixes
from liger_multi.patching.swap import Patched, swapped
from tests.models import Calls, arguments, build, rows, tokenizer

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("trl")


# --- callbacks and import names ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    words, place = tokenizer(), tmp_path_factory.mktemp("model")
    ids = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    build(vocab_size=len(words), **ids).save_pretrained(place)
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


def run(name, place, tmp_path, callbacks=(), **more):
    """Losses of the steps, and the trained model."""
    import transformers

    data, options, call = KINDS[name]
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    config = getattr(trl, f"{name}Config")(**arguments(tmp_path, max_steps=2, **options, **more))
    torch.manual_seed(5)
    trained = getattr(trl, f"{name}Trainer")(
        model,
        args=config,
        train_dataset=rows(data),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        **call,
    )
    trained.train()
    losses = [row["loss"] for row in trained.state.log_history if "loss" in row]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, weights, model


@pytest.fixture(scope="module")
def stock(saved, tmp_path_factory):
    """Runs of the trainers as they are, once each."""
    cache = {}

    def losses(name):
        if name not in cache:
            cache[name] = run(name, saved, tmp_path_factory.mktemp(name))
        return cache[name]

    return losses


def assert_same(expected, got):
    assert len(expected[0]) == 2
    assert got[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-6)


def ops_of(model):
    return {swapped(m).op for m in model.modules() if isinstance(m, Patched)}


@pytest.mark.parametrize("name", KINDS)
def test_callback(name, stock, saved, tmp_path, monkeypatch):
    expected, callback = stock(name), TrainerCallback()
    calls = Calls(monkeypatch)
    got = run(name, saved, tmp_path, [callback])
    assert_same(expected, got)
    assert callback.report.count("rms_norm") == 5
    assert calls["rms_norm"] >= 10
    assert calls["rope"] >= 4


@pytest.mark.parametrize("name", KINDS)
def test_use_liger_kernel(name, stock, saved, tmp_path, monkeypatch):
    """TRL has its own head, and turns ours off through the configuration."""
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("the real package is installed")
    expected = stock(name)
    calls = Calls(monkeypatch)
    alias.install()
    try:
        with pytest.warns(FutureWarning, match="use_liger_kernel"):
            got = run(
                name, saved, tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": False}
            )
    finally:
        alias.uninstall()
    assert_same(expected, got)
    assert ops_of(got[2]) == {"rms_norm", "swiglu"}
    assert calls["rms_norm"] >= 10
    assert calls["rope"] == 0


# --- shared prefixes ---


SHARED = {
    "DPO": KINDS["DPO"],
    "GRPO": KINDS["GRPO"],
    "RLOO": KINDS["GRPO"],
}


@pytest.fixture
def tree_tokens(monkeypatch):
    """Tokens of every row of trees, and of the rows that it stands for."""
    counts, scores = [], trees.scores

    def counting(model, batch, **options):
        counts.append((batch.tree.tokens, int(batch.unshared()[1].sum())))
        return scores(model, batch, **options)

    monkeypatch.setattr(trees, "scores", counting)
    return counts


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("way", ["callback", "mixin"])
def test_shared_prefixes(name, way, saved, tmp_path, tree_tokens, monkeypatch):
    monkeypatch.setitem(KINDS, name, SHARED[name])
    expected = run(name, saved, tmp_path / "stock")
    assert not tree_tokens
    callbacks = []
    if way == "callback":
        callbacks.append(TrainerCallback(shared_prefixes=True))
    else:
        trainer = getattr(trl, f"{name}Trainer")
        shared = type("Shared", (SharedPrefixes, trainer), {})
        monkeypatch.setattr(trl, f"{name}Trainer", shared)
    got = run(name, saved, tmp_path / "shared", callbacks)
    assert_same(expected, got)
    assert len(tree_tokens) >= 2
    assert all(tokens < unshared for tokens, unshared in tree_tokens)


def test_shared_prefixes_need_a_head_of_trl():
    with pytest.raises(PatchError, match="TRL gave LlamaForCausalLM no fused head"):
        share_prefixes(build())


# --- losses ---


@pytest.fixture(scope="module")
def saved_padded(tmp_path_factory):
    """A tiny model on disk, from which trainers load references."""
    words, place = tokenizer(), tmp_path_factory.mktemp("model")
    model = build(
        "llama",
        vocab_size=len(words),
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
    )
    model.save_pretrained(place)
    return place


def model(saved_padded):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(saved_padded, dtype=torch.float32)


def curve(trainer):
    torch.manual_seed(5)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return losses, weights


def assert_same_curves(stock, ours, moved=True):
    """Losses of every step, and the weights after the last."""
    (a, x), (b, y) = stock, ours
    assert len(a) == len(b) == 4
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert len(set(a)) > 1 or not moved
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def states(model, input_ids, attention_mask):
    """Hidden states of the positions that predict a token, through the backbone."""
    out = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    return out.last_hidden_state[:, :-1]


def scored(model, inputs, prefix=""):
    """The source and targets of a padded batch."""
    ids, mask = inputs[f"{prefix}input_ids"], inputs[f"{prefix}completion_mask"]
    hidden = states(model, ids, inputs[f"{prefix}attention_mask"])
    target = ids.masked_fill(mask == 0, -100)[:, 1:]
    return losses.Head(hidden, model.lm_head, chunk=5), target


# --- the first page ---


def test_the_first_page_runs(tmp_path, saved_padded, monkeypatch):
    """Every block of README, where a file is at hand and a small model stands for the one named."""
    tokenizer().save_pretrained(saved_padded)
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("one two three four\n" * 4)
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    assert [b.count("Qwen/Qwen2.5-0.5B") for b in blocks] == [1, 2, 1]
    trained = []
    for block in blocks:
        own = {}
        block = block.replace("Qwen/Qwen2.5-0.5B", str(saved_padded))
        if not torch.accelerator.is_available():  # as the block says
            block = block.replace('= SFTConfig("out") ', '= SFTConfig("out", bf16=False) ')
        exec(compile(block, "README.md", "exec"), own)
        if "trainer" in own:
            assert own["trainer"].state.global_step > 2
            assert {"rms_norm", "swiglu"} <= ops_of(own["trainer"].model)
            trained.append(type(own["trainer"]).__name__)
    assert trained == ["Trainer", "SFTTrainer"]


# --- supervised: a subclass's compute_loss, or compute_loss_func ---


@pytest.mark.parametrize("way", ["subclass", "function", "function on a patched model"])
def test_sft(tmp_path, saved_padded, way):
    """Two micro-batches a step, whose tokens are counted together."""
    from trl import SFTConfig, SFTTrainer

    class Ours(SFTTrainer):
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

    def run(trainer, patched=False, **more):
        own = model(saved_padded)
        if patched:
            liger_multi.patch(own)
        config = SFTConfig(**arguments(tmp_path, gradient_accumulation_steps=2), max_length=32)
        return curve(
            trainer(
                own,
                config,
                train_dataset=rows("completion", 16),
                processing_class=tokenizer(),
                **more,
            )
        )

    stock = run(SFTTrainer)
    if way == "subclass":
        return assert_same_curves(stock, run(Ours))
    with pytest.warns(FutureWarning, match="compute_loss_func"):
        return assert_same_curves(
            stock, run(SFTTrainer, "patched" in way, compute_loss_func=function)
        )


# --- preferences: a subclass's compute_loss ---


@pytest.mark.parametrize("name", ["sigmoid", ["sigmoid", "bco_pair", "sft"]])
def test_dpo(tmp_path, saved_padded, name):
    from trl import DPOConfig, DPOTrainer

    class Ours(DPOTrainer):
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

    def run(trainer):
        weights = None if isinstance(name, str) else (0.8, 0.2, 1.0)
        config = DPOConfig(
            **arguments(tmp_path),
            loss_type=name,
            beta=0.3,
            loss_weights=None if weights is None else list(weights),
        )
        return curve(
            trainer(
                model(saved_padded),
                None,
                args=config,
                train_dataset=rows("pair"),
                processing_class=tokenizer(),
            )
        )

    assert_same_curves(run(DPOTrainer), run(Ours))


def test_kto(tmp_path, saved_padded):
    from trl import KTOConfig, KTOTrainer

    class Ours(KTOTrainer):
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

    def run(trainer):
        config = KTOConfig(**arguments(tmp_path), beta=0.3, desirable_weight=1.5)
        return curve(
            trainer(
                model(saved_padded),
                None,
                args=config,
                train_dataset=rows("label"),
                processing_class=tokenizer(),
            )
        )

    assert_same_curves(run(KTOTrainer), run(Ours))


# --- policies: a subclass's compute_loss ---


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("dapo", {"beta": 0.1, "num_iterations": 2}),
        ("grpo", {"importance_sampling_level": "sequence"}),
    ],
)
def test_grpo(tmp_path, saved_padded, name, extra):
    from trl import GRPOConfig, GRPOTrainer

    class Ours(GRPOTrainer):
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

    def reward(completion_ids, **_):
        return [float(sum(ids) % 7) for ids in completion_ids]

    def run(trainer):
        config = GRPOConfig(
            **arguments(tmp_path, per_device_train_batch_size=4, learning_rate=0.1),
            loss_type=name,
            num_generations=4,
            max_completion_length=6,
            **extra,
        )
        return curve(
            trainer(
                model(saved_padded),
                reward,
                args=config,
                train_dataset=rows("prompt"),
                processing_class=tokenizer(),
            )
        )

    assert_same_curves(run(GRPOTrainer), run(Ours))
