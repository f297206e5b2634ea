"""TRL's own trainers with a callback, and with their switch through the import names."""

import importlib.util

import pytest
import torch

from liger_multi.compat import liger_kernel as alias
from liger_multi.integrations import TrainerCallback
from liger_multi.patching.replace.swap import Patched, swapped
from tests.models import Calls, build
from tests.trainers import arguments, rows, tokenizer

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")


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


def run(kind, place, tmp_path, callbacks=(), **more):
    """Losses of the steps, and the trained model."""
    import transformers

    data, options, beside = KINDS[kind]
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    config = getattr(trl, f"{kind}Config")(**arguments(tmp_path, max_steps=2, **options, **more))
    torch.manual_seed(5)
    made = getattr(trl, f"{kind}Trainer")(
        model, args=config, train_dataset=rows(data), processing_class=tokenizer(),
        callbacks=list(callbacks), **beside,
    )  # fmt: skip
    made.train()
    found = [row["loss"] for row in made.state.log_history if "loss" in row]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return found, weights, model


@pytest.fixture(scope="module")
def stock(saved, tmp_path_factory):
    """Runs of the trainers as they are, once each."""
    made = {}

    def found(kind):
        if kind not in made:
            made[kind] = run(kind, saved, tmp_path_factory.mktemp(kind))
        return made[kind]

    return found


def assert_same(wanted, got):
    assert len(wanted[0]) == 2
    assert got[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-6)


def ops_of(model):
    return {swapped(m).op for m in model.modules() if isinstance(m, Patched)}


@pytest.mark.parametrize("kind", KINDS)
def test_callback(kind, stock, saved, tmp_path, monkeypatch):
    wanted, callback = stock(kind), TrainerCallback()
    calls = Calls(monkeypatch)
    got = run(kind, saved, tmp_path, [callback])
    assert_same(wanted, got)
    assert callback.report.count("rms_norm") == 5
    assert calls["rms_norm"] >= 10
    assert calls["rope"] >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_use_liger_kernel(kind, stock, saved, tmp_path, monkeypatch):
    """TRL has its own head, and turns ours off through the configuration."""
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("the real package is installed")
    wanted = stock(kind)
    calls = Calls(monkeypatch)
    alias.install()
    try:
        with pytest.warns(FutureWarning, match="use_liger_kernel"):
            got = run(
                kind, saved, tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": False}
            )
    finally:
        alias.uninstall()
    assert_same(wanted, got)
    assert ops_of(got[2]) == {"rms_norm", "swiglu"}
    assert calls["rms_norm"] >= 10
    assert calls["rope"] == 0
