"""TRL's real trainers, tiny models, a few steps: with our losses the curves are the same."""

import pytest
import torch

import liger_multi
from liger_multi import losses
from tests.models import build
from tests.trainers import arguments, rows, tokenizer

pytest.importorskip("trl")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model on disk, from which trainers load references."""
    words, place = tokenizer(), tmp_path_factory.mktemp("model")
    made = build("llama", vocab_size=len(words), pad_token_id=words.pad_token_id,
                 eos_token_id=words.eos_token_id)  # fmt: skip
    made.save_pretrained(place)
    return place


def model(saved):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)


def curve(trainer):
    torch.manual_seed(5)
    trainer.train()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return found, weights


def assert_same(stock, ours, moved=True):
    """Losses of every step, and the weights after the last."""
    (a, x), (b, y) = stock, ours
    assert len(a) == len(b) == 4
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert len(set(a)) > 1 or not moved
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def states(model, input_ids, attention_mask):
    """Hidden states of the positions that predict a token, through the backbone."""
    made = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    return made.last_hidden_state[:, :-1]


def scored(model, inputs, prefix=""):
    """The source and targets of a padded batch."""
    ids, mask = inputs[f"{prefix}input_ids"], inputs[f"{prefix}completion_mask"]
    hidden = states(model, ids, inputs[f"{prefix}attention_mask"])
    target = ids.masked_fill(mask == 0, -100)[:, 1:]
    return losses.Head(hidden, model.lm_head, chunk=5), target


# --- supervised: a subclass's compute_loss, or compute_loss_func ---


@pytest.mark.parametrize("way", ["subclass", "function", "function on a patched model"])
def test_sft(tmp_path, saved, way):
    """Two micro-batches a step, whose tokens are counted together."""
    from trl import SFTConfig, SFTTrainer

    class Ours(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            hidden = states(model, inputs["input_ids"], inputs["attention_mask"])
            return losses.sequence_loss(
                losses.Head(hidden, model.lm_head), inputs["labels"][:, 1:],
                num_items=num_items_in_batch,
            )[0]  # fmt: skip

    def function(outputs, labels, num_items_in_batch=None):
        return losses.sequence_loss(
            outputs.logits[:, :-1], labels[:, 1:], num_items=num_items_in_batch
        )[0]

    def run(trainer, patched=False, **more):
        own = model(saved)
        if patched:
            liger_multi.patch(own)
        config = SFTConfig(**arguments(tmp_path, gradient_accumulation_steps=2), max_length=32)
        return curve(
            trainer(
                own, config, train_dataset=rows("completion", 16), processing_class=tokenizer(),
                **more,
            )
        )  # fmt: skip

    stock = run(SFTTrainer)
    if way == "subclass":
        return assert_same(stock, run(Ours))
    with pytest.warns(FutureWarning, match="compute_loss_func"):
        return assert_same(stock, run(SFTTrainer, "patched" in way, compute_loss_func=function))


# --- preferences: a subclass's compute_loss ---


@pytest.mark.parametrize("kind", ["sigmoid", ["sigmoid", "bco_pair", "sft"]])
def test_dpo(tmp_path, saved, kind):
    from trl import DPOConfig, DPOTrainer

    class Ours(DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            policy, target = scored(model, inputs)
            with torch.no_grad():
                reference, _ = scored(self.ref_model, inputs)
            return losses.dpo_loss(
                policy, target, reference, loss_type=kind if isinstance(kind, str) else tuple(kind),
                loss_weights=self.args.loss_weights, beta=self.beta,
            )[0]  # fmt: skip

    def run(trainer):
        weights = None if isinstance(kind, str) else (0.8, 0.2, 1.0)
        config = DPOConfig(
            **arguments(tmp_path), loss_type=kind, beta=0.3,
            loss_weights=None if weights is None else list(weights),
        )  # fmt: skip
        return curve(
            trainer(model(saved), None, args=config, train_dataset=rows("pair"),
                    processing_class=tokenizer())
        )  # fmt: skip

    assert_same(run(DPOTrainer), run(Ours))


def test_kto(tmp_path, saved):
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
                policy, target, inputs["label"], reference, losses.kto_divergence(*sums),
                beta=self.beta, desirable_weight=1.5,
            )[0]  # fmt: skip

    def run(trainer):
        config = KTOConfig(**arguments(tmp_path), beta=0.3, desirable_weight=1.5)
        return curve(trainer(model(saved), None, args=config, train_dataset=rows("label"),
                             processing_class=tokenizer()))  # fmt: skip

    assert_same(run(KTOTrainer), run(Ours))


# --- policies: a subclass's compute_loss ---


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("dapo", {"beta": 0.1, "num_iterations": 2}),
        ("grpo", {"importance_sampling_level": "sequence"}),
    ],
)
def test_grpo(tmp_path, saved, kind, extra):
    from trl import GRPOConfig, GRPOTrainer

    class Ours(GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            length = inputs["completion_ids"].shape[1]
            hidden = states(model, ids, seen)[:, -length:]
            target = inputs["completion_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
            steps = self.current_gradient_accumulation_steps / self.args.steps_per_generation
            return losses.policy_loss(
                losses.Head(hidden, model.lm_head, chunk=5, temperature=self.temperature),
                target, inputs["advantages"], old=inputs.get("old_per_token_logps"),
                reference=inputs.get("ref_per_token_logps") if self.beta else None,
                num_items=inputs["num_items_in_batch"] * steps,
                accumulation=self.current_gradient_accumulation_steps,
                loss_type=self.loss_type, level=self.importance_sampling_level, beta=self.beta,
                correct_kl=self.args.use_bias_correction_kl and self.beta != 0,
            )[0]  # fmt: skip

    def reward(completion_ids, **_):
        return [float(sum(ids) % 7) for ids in completion_ids]

    def run(trainer):
        config = GRPOConfig(
            **arguments(tmp_path, per_device_train_batch_size=4, learning_rate=0.1),
            loss_type=kind, num_generations=4, max_completion_length=6, **extra,
        )  # fmt: skip
        return curve(trainer(model(saved), reward, args=config, train_dataset=rows("prompt"),
                             processing_class=tokenizer()))  # fmt: skip

    assert_same(run(GRPOTrainer), run(Ours))
