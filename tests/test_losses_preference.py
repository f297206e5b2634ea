"""Losses over pairs and single answers: TRL's own implementation, and the papers' formulas."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import trl_eager

from liger_multi import losses
from liger_multi.losses.preference import DPO
from liger_multi.tolerance import excess

pytest.importorskip("trl")
HALF, WIDE = torch.bfloat16, torch.float32


def batch(pairs=3, length=7, width=16, classes=53, dtype=WIDE, bias=False, ignored_row=False):
    """Hidden states, head, ids and mask of answers with uneven lengths, behind a prompt."""
    torch.manual_seed(0)
    rows = 2 * pairs
    ids = torch.randint(classes, (rows, length + 1))
    ends = torch.randint(3, length + 2, (rows,))
    mask = (torch.arange(length + 1) >= 2) & (torch.arange(length + 1) < ends.unsqueeze(1))
    mask[:, 2] |= ~mask.any(1)
    if ignored_row:
        mask[1] = mask[pairs] = False
    made = {
        "hidden": torch.randn(rows, length + 1, width),
        "weight": torch.randn(classes, width) * 0.4,
        "bias": torch.randn(classes) * 0.3 if bias else None,
    }
    reference = [None if x is None else x + 0.3 * torch.randn_like(x) for x in made.values()]
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in made.values()]
    frozen = [None if x is None else x.to(dtype) for x in reference]
    return leaves, frozen, ids, mask


def shifted(leaves, ids, mask, chunk="auto", **options):
    """Our source and targets: position t predicts token t + 1."""
    hidden, weight, bias = leaves
    head = losses.Head(hidden[:, :-1], weight, bias, chunk=chunk, **options)
    return head, ids[:, 1:].masked_fill(~mask[:, 1:], -100)


def dpo_trainer(leaves, frozen, options, **changes):
    o = losses.DPOOptions(**options)
    model, ref = trl_eager.Toy(*leaves, **changes), trl_eager.Toy(*frozen, **changes)
    return model, trl_eager.trainer(
        model,
        ref_model=ref,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=o.discopop_tau),
        beta=o.beta,
        loss_types=list(o.types),
        loss_weights=list(o.weights),
        ld_alpha=o.tail,
        f_divergence_type=o.divergence,
        f_alpha_divergence_coef=o.alpha,
        label_smoothing=o.label_smoothing,
        use_weighting=o.weighting,
    )


def trl_dpo(leaves, frozen, ids, mask, options, **changes):
    from trl import DPOTrainer

    model, stub = dpo_trainer(leaves, frozen, options, **changes)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids),
              "completion_mask": mask.long()}  # fmt: skip
    return DPOTrainer._compute_loss(stub, model, inputs, False), trl_eager.logged(stub)


def both(ours, theirs, leaves, dtype=WIDE, wide=None):
    """Losses and gradients agree; theirs may be in fp32 on the same rounded numbers."""
    mine = [x for x in leaves if x is not None]
    right = mine if wide is None else [x for x in wide if x is not None]
    a, b = torch.autograd.grad(ours, mine), torch.autograd.grad(theirs, right)
    assert excess(ours.detach(), theirs.detach(), WIDE if dtype == WIDE else dtype) <= 1
    for x, y in zip(a, b, strict=True):
        assert excess(x, y, dtype) <= 1


TYPES = {
    **{kind: {"loss_type": kind} for kind in DPO if kind not in ("exo_pair",)},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 1e-3},
    "robust-smoothed": {"loss_type": "robust", "label_smoothing": 0.2},
    "aot-smoothed": {"loss_type": "aot", "label_smoothing": 0.1},
    "aot_unpaired-smoothed": {"loss_type": "aot_unpaired", "label_smoothing": 0.1},
    "discopop-tau": {"loss_type": "discopop", "discopop_tau": 0.5, "beta": 0.3},
    "beta": {"loss_type": "sigmoid", "beta": 0.7},
    "mixed": {
        "loss_type": ("sigmoid", "bco_pair", "sft"),
        "loss_weights": (0.8, 0.2, 1.0),
        "beta": 0.4,
    },
    "forward_kl": {"divergence": "forward_kl"},
    "js_divergence": {"divergence": "js_divergence", "loss_type": "ipo"},
    "alpha_divergence": {"divergence": "alpha_divergence", "alpha": 0.3},
    "alpha-one": {"divergence": "alpha_divergence", "alpha": 1.0},
    "tail": {"tail": 0.4},
    "tail-hinge": {"tail": 0.0, "loss_type": "hinge"},
    "weighting": {"weighting": True},
    "weighting-mixed": {"weighting": True, "loss_type": ("sigmoid", "ipo")},
}


@pytest.mark.parametrize("options", TYPES.values(), ids=TYPES)
def test_dpo_is_trl(options):
    leaves, frozen, ids, mask = batch(bias=True)
    theirs, log = trl_dpo(leaves, frozen, ids, mask, options)
    head, target = shifted(leaves, ids, mask, chunk=7)
    reference, _ = shifted(frozen, ids, mask)
    ours, metrics = losses.dpo_loss(
        head, target, reference, metrics=("entropy", "token_accuracy"), **options
    )
    both(ours, theirs, leaves)
    names = {
        "rewards/chosen": metrics.chosen_reward,
        "rewards/rejected": metrics.rejected_reward,
        "rewards/accuracies": metrics.accuracy,
        "rewards/margins": metrics.margin,
        "entropy": metrics.entropy,
        "mean_token_accuracy": metrics.token_accuracy,
    }
    names |= {"logps/chosen": metrics.chosen_log_prob, "logps/rejected": metrics.rejected_log_prob}
    for key, value in names.items():
        assert value.item() == pytest.approx(log[key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("chunk", [1, 7, 256, "auto"])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
@pytest.mark.parametrize("kind", ["sigmoid", "nca_pair", "ipo"])
def test_no_chunk_and_no_dtype_moves_dpo(kind, dtype, chunk):
    leaves, frozen, ids, mask = batch(5, 11, dtype=dtype, bias=True)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    theirs, _ = trl_dpo(wide, [x.float() for x in frozen], ids, mask, {"loss_type": kind})
    head, target = shifted(leaves, ids, mask, chunk)
    ours, _ = losses.dpo_loss(head, target, shifted(frozen, ids, mask)[0], loss_type=kind)
    both(ours, theirs, leaves, dtype, wide)


@pytest.mark.parametrize("kind", DPO)
def test_dpo_edges(kind):
    """One pair; pairs without a token in either answer."""
    smooth = {"label_smoothing": 1e-3} if kind == "exo_pair" else {}
    for pairs, ignored in ((1, False), (4, True)):
        leaves, frozen, ids, mask = batch(pairs, ignored_row=ignored)
        options = {"loss_type": kind, **smooth}
        theirs, _ = trl_dpo(leaves, frozen, ids, mask, options)
        head, target = shifted(leaves, ids, mask)
        ours, _ = losses.dpo_loss(head, target, shifted(frozen, ids, mask)[0], **options)
        both(ours, theirs, leaves)


def test_dpo_under_softcap_scale_and_temperature():
    leaves, frozen, ids, mask = batch()
    options = {"temperature": 0.7, "softcap": 3.0}
    theirs, _ = trl_dpo(leaves, frozen, ids, mask, {}, scale=0.6, **options)
    options["logit_scale"] = 0.6
    head, target = shifted(leaves, ids, mask, **options)
    ours, _ = losses.dpo_loss(head, target, shifted(frozen, ids, mask, **options)[0])
    both(ours, theirs, leaves)
