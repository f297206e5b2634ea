"""The callback for Lightning, in a process of its own that has Lightning."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    from liger_multi import integrations

    with pytest.raises(ModuleNotFoundError, match="lightning"):
        _ = integrations.LightningCallback
    assert integrations.TrainerCallback.__name__ == "TrainerCallback"
