"""The callbacks of the Trainer and of Lightning: an unmodified trainer trains the same model."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import gc
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from liger_multi import integrations, patch
from liger_multi.errors import PatchError
from liger_multi.integrations import TrainerCallback
from liger_multi.patching.swap import Patched
from tests.models import Texts, build, pair, trainer

# Three steps of 0.1 by SGD, with gradients that are equal to 1e-5 (comparing.py).
TRAINED = {"rtol": 1e-4, "atol": 4e-6}


def curve(hf_trainer, **more):
    hf_trainer.train(**more)
    return [entry["loss"] for entry in hf_trainer.state.log_history if "loss" in entry]


def patched_modules(model):
    return [path for path, m in model.named_modules() if isinstance(m, Patched)]


@pytest.mark.slow
def test_loss_curve_is_that_of_the_stock_trainer(tmp_path, fused, caplog):
    stock, ours = pair()
    callback = TrainerCallback(rms_norm="reference", fused_linear_cross_entropy={"chunk": 5})
    expected = curve(trainer(stock, tmp_path))
    assert fused.count == 0
    with caplog.at_level(logging.INFO, "liger_multi"):
        got = curve(trainer(ours, tmp_path, callbacks=[callback]))
    assert got == pytest.approx(expected, rel=1e-5)
    assert len(set(got)) == len(got) == 3
    assert {call["chunk"] for call in fused.keywords} == {5}
    assert callback.report.count("rms_norm") == 5
    assert [r.message for r in caplog.records] == [str(callback.report)]
    assert patched_modules(ours), "the patch outlives the training unless told otherwise"
    torch.testing.assert_close([*ours.parameters()], [*stock.parameters()], **TRAINED)


def test_a_model_outlives_its_trainer_patched(tmp_path):
    model = build()
    trainer(model, tmp_path, callbacks=[TrainerCallback()])
    gc.collect()
    assert patched_modules(model)


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True], ids=["stock before", "patched before"])
def test_unpatch_at_end_brings_the_very_same_classes_back(tmp_path, before):
    model = build()
    if before:
        patch(model, swiglu=False, fused_linear_cross_entropy={"z_loss": 1e-4})
    classes = [type(m) for m in model.modules()]
    callback = TrainerCallback(unpatch_at_end=True)
    hf_trainer = trainer(model, tmp_path, callbacks=[callback], max_steps=1)
    for _ in range(2):  # a second training patches again
        assert hf_trainer.callback_handler.callbacks
        hf_trainer.train()
        assert [type(m) for m in model.modules()] == classes
    assert callback.report.count("swiglu") == 2


@pytest.mark.slow
def test_a_model_of_model_init_is_patched_too(tmp_path, fused):
    hf_trainer = []

    def model_init():
        hf_trainer.append(build())
        return hf_trainer[-1]

    stock = curve(trainer(None, tmp_path, model_init=model_init, max_steps=2))
    assert fused.count == 0
    got = curve(
        trainer(None, tmp_path, model_init=model_init, callbacks=[TrainerCallback()], max_steps=2)
    )
    assert got == pytest.approx(stock, rel=1e-5)
    assert fused.count == 2
    assert patched_modules(hf_trainer[-1])


@pytest.mark.slow
def test_evaluation_before_and_after_training(tmp_path, fused):
    stock, ours = pair()
    results = []
    for model, callbacks in ((stock, []), (ours, [TrainerCallback()])):
        hf_trainer = trainer(model, tmp_path, callbacks=callbacks, max_steps=2)
        first = hf_trainer.evaluate()
        hf_trainer.train()
        results.append([first["eval_loss"], hf_trainer.evaluate()["eval_loss"]])
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[1][0] != results[1][1]
    assert fused.count > 2, "evaluation is fused too"


def test_resume_and_what_is_saved(tmp_path):
    """A checkpoint of a patched model continues a stock training, and the other way round."""
    stock, ours = pair()
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    expected = curve(trainer(stock, tmp_path / "stock", **options))
    curve(trainer(ours, tmp_path / "ours", callbacks=[TrainerCallback()], **options))
    for place, callbacks in (("ours", []), ("stock", [TrainerCallback()])):
        checkpoint = str(tmp_path / place / "checkpoint-2")
        again = trainer(build(seed=9), tmp_path / "again", callbacks=callbacks, **options)
        got = curve(again, resume_from_checkpoint=checkpoint)
        assert got == pytest.approx(expected, rel=1e-4)
    saved = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / place / "checkpoint-3")
        for place in ("stock", "ours")
    ]
    assert [type(m) for m in saved[0].modules()] == [type(m) for m in saved[1].modules()]
    assert saved[1].config.architectures == ["LlamaForCausalLM"]
    torch.testing.assert_close(*(dict(m.named_parameters()) for m in saved), **TRAINED)


@pytest.mark.slow
def test_gradient_checkpointing_and_accumulation(tmp_path, fused):
    options = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "max_steps": 2}
    curves = [
        curve(trainer(model, tmp_path, callbacks=callbacks, **options))
        for model, callbacks in zip(pair(), ([], [TrainerCallback()]), strict=True)
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert fused.count == 4


@pytest.mark.parametrize(
    ("options", "arguments", "text"),
    [
        ({}, {"use_liger_kernel": True}, "use_liger_kernel=True lets the trainer patch"),
        ({"rms_nrom": True}, {}, r"rms_nrom.*rms_norm"),
        ({"strict": True, "geglu": True}, {}, "geglu"),
    ],
)
def test_what_a_callback_refuses(options, arguments, text, tmp_path):
    looks = getattr(transformers.trainer, "is_liger_kernel_available", None)
    if arguments and looks is not None and not looks():
        pytest.skip("this transformers looks for liger-kernel before callbacks start")
    with pytest.raises(PatchError, match=text):
        trainer(build(), tmp_path, callbacks=[TrainerCallback(**options)], **arguments)


def test_a_copied_callback_has_patched_nothing(tmp_path):
    model, callback = build(), TrainerCallback(swiglu=False, unpatch_at_end=True)
    trainer(model, tmp_path, callbacks=[callback])
    other = copy.deepcopy(callback)
    assert other.report is None
    trainer(build(), tmp_path, callbacks=[other], max_steps=1).train()
    assert patched_modules(model)
    assert other.report.count("swiglu") == 0
    assert other.report.count("rms_norm") == 5


@pytest.fixture
def fresh_accelerator():
    """What an accelerator was told first holds for the process, unless it forgets."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_needs_no_callback(fresh_accelerator):
    """The accelerator's loop, with its mixed precision and its accumulation."""
    from accelerate import Accelerator

    curves = []
    for model in pair():
        if curves:
            patch(model)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(Texts(4), batch_size=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        curves.append([])
        for inputs in loader:
            with accelerator.accumulate(wrapped):
                loss = wrapped(**inputs).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            curves[-1].append(loss.item())
    np.testing.assert_allclose(curves[1], curves[0], rtol=2e-2)
    assert len(set(curves[1])) == 4


# --- Lightning ---

ROOT = Path(__file__).parents[2]
PACKAGES = ("lightning==2.6.6", "lightning-utilities", "torchmetrics")
CODE = """
import copy, sys, warnings
warnings.simplefilter("ignore")
import lightning as L
import torch
from tests.models import build
from tests.models import Texts
from liger_multi.integrations import LightningCallback
from liger_multi.patching.swap import Patched


class Module(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model, self.losses, self.scores = model, [], []

    def training_step(self, inputs, index):
        loss = self.model(**inputs).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, inputs, index):
        self.scores.append(self.model(**inputs).loss.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(model, *callbacks):
    module = Module(model)
    loader = torch.utils.data.DataLoader(Texts(4), batch_size=2)
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )
    trainer.fit(module, loader, loader)
    return module


def patched(model):
    return sum(isinstance(m, Patched) for m in model.modules())


stock, ours = build(), build()
callback = LightningCallback(unpatch_at_end=True, fused_linear_cross_entropy={"chunk": 5})
wanted, got = run(stock), run(ours, callback)
assert len(wanted.losses) == 4 and len(wanted.scores) >= 4
for a, b in zip(wanted.losses + wanted.scores, got.losses + got.scores, strict=True):
    assert abs(a - b) < 1e-5 * a, (a, b)
assert callback.report.count("rms_norm") == 5
assert callback.report.count("fused_linear_cross_entropy") == 1
assert patched(ours) == 0
run(ours, LightningCallback())
assert patched(ours) == 11
print("same")
"""


@pytest.mark.slow
def test_lightning_trains_as_before(tmp_path):
    place = tmp_path / "packages"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT), str(ROOT / "tests")]
    if not importlib.util.find_spec("lightning"):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        install = subprocess.run([*pip, str(place), *PACKAGES], capture_output=True, text=True)
        if install.returncode:
            pytest.skip(f"Lightning cannot be installed here: {install.stderr.strip()[-200:]}")
        paths.append(str(place))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("same")


def test_without_lightning_the_reason_is_an_import_error():
    """Nothing else of the package needs it."""
    if importlib.util.find_spec("lightning") or importlib.util.find_spec("pytorch_lightning"):
        pytest.skip("Lightning is installed")
    with pytest.raises(ModuleNotFoundError, match="lightning"):
        _ = integrations.LightningCallback
    assert integrations.TrainerCallback.__name__ == "TrainerCallback"
