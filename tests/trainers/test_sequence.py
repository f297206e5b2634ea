"""The Trainer and TRL on ranks that share rows: losses and weights are those of one process."""
# ruff: noqa: E402  (what needs trainers is imported after the skips)

import types

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("peft")
from accelerate.state import AcceleratorState

from liger_multi.errors import PatchError
from liger_multi.integrations import SequenceParallel, TrainerCallback
from liger_multi.patching import register_attention
from tests import harness, shard_trainers
from tests.models import build

BODY = """
import datetime
import sys
import torch
import torch.distributed as dist
from tests import shard_trainers

rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
torch.set_num_threads(1)
shard_trainers.check(KIND, FOLDER, **OPTIONS)
dist.destroy_process_group()
print("done")
"""


def run(kind, folder, count=2, expected=None, **options):
    torch.save(shard_trainers.train(kind, folder, **(expected or {})), folder / "one.pt")
    shard_trainers.reset()
    body = BODY.replace("RANKS", str(count)).replace("KIND", repr(kind))
    body = body.replace("FOLDER", repr(str(folder))).replace("OPTIONS", repr(options))
    harness.in_processes(folder, body, count)


@pytest.mark.parametrize("kind", ["Trainer", "Trainer, own loss", "Trainer, smoothed"])
def test_trainer(kind, tmp_path):
    """Also with a loss of the user's, metrics from logits, and the trainer's own loss of logits."""
    run(kind, tmp_path)


TRL = ["SFT", "packed SFT", "SFT of experts", "SFT of adapters", "SFT, own loss", "GRPO"]
TRL += ["GRPO of trees", "GRPO of trees by a mixin", "DPO of trees"]


FSDP = ["Trainer"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRL)
def test_trl(kind, tmp_path):
    run(kind, tmp_path)


@pytest.mark.slow
def test_two_groups_of_two_ranks(tmp_path):
    """``num_items_in_batch`` is of the rows of all groups."""
    run("Trainer", tmp_path, 4, {"gradient_accumulation_steps": 4}, groups=2)


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("Trainer, own loss", 1), *(pytest.param(k, 2, marks=pytest.mark.slow) for k in FSDP)],
)
def test_fsdp2(kind, groups, tmp_path):
    """Of accelerate, over rows and tokens together."""
    expected = {"gradient_accumulation_steps": 4} if groups > 1 and kind == "Trainer" else {}
    run(kind, tmp_path, 2 * groups, expected, groups=groups, fsdp=True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed(stage, tmp_path):
    pytest.importorskip("deepspeed")
    run("Trainer", tmp_path, stage=stage)


ARGUMENTS = {"per_device_train_batch_size": 2}
ONCE = {"steps_per_generation": 1, "num_iterations": 1}
REFUSED = [
    ({"use_vllm": True}, "use_vllm=True"),
    ({"num_generations": 4, **ONCE}, "2 answers a rank, of 4 to a prompt"),
    ({"num_generations": 2, **ONCE, "num_iterations": 3}, "above 1, got 3"),
]


@pytest.fixture
def parallel(monkeypatch):
    """What accelerate says of ranks."""

    def of(config):
        monkeypatch.setattr(AcceleratorState, "_shared_state", {"parallelism_config": config})

    return of


@pytest.mark.parametrize(("more", "reason"), REFUSED)
def test_what_ranks_do_not_serve_is_refused(more, reason, parallel):
    parallel(SequenceParallel(sp_size=2))
    arguments = types.SimpleNamespace(**{**ARGUMENTS, **more})
    with pytest.raises(PatchError, match=reason):
        TrainerCallback().on_train_begin(arguments, None, None, model=build())


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_ranks_that_cut_rows_are_refused(name, parallel):
    """Both names of accelerate; ours has the same."""
    parallel(accelerate.ParallelismConfig(**{name: 2}))
    with pytest.raises(PatchError, match=r"SequenceParallel\(sp_size=2\)"):
        TrainerCallback().on_train_begin(
            types.SimpleNamespace(**ARGUMENTS), None, None, model=build()
        )
    register_attention()
    model = build()
    model.set_attn_implementation("liger_multi")
    with pytest.raises(RuntimeError, match=r"a share of a row.*SequenceParallel\(sp_size=2\)"):
        model(input_ids=torch.arange(6)[None])  # in a loop without our callback
    config = SequenceParallel(**{name: 2}, dp_shard_size=3)
    parallel(config)
    assert model(input_ids=torch.arange(6)[None]).logits.shape[1] == 6
    assert config._get_mesh() == (("dp_shard", "tp"), (3, 2))
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "tp"]
    assert not any((config.cp_enabled, config.sp_enabled, config.tp_enabled))
    with pytest.raises(ValueError, match=r"1 x dp_shard_size 3 x 2 ranks .* processes, 4"):
        config._validate_accelerator(types.SimpleNamespace(num_processes=4))
    with pytest.raises(ValueError, match="no tensor parallel ranks, got 2"):
        SequenceParallel(tp_size=2, **{name: 2})
