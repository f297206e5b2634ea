"""Losses over pairs and single answers: TRL's own implementation, and the papers' formulas."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from liger_multi import losses
from liger_multi.losses.preference import DPO
from tests import comparing
from tests.comparing import assert_same_loss

trl = pytest.importorskip("trl")
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
    tensors = {
        "hidden": torch.randn(rows, length + 1, width),
        "weight": torch.randn(classes, width) * 0.4,
        "bias": torch.randn(classes) * 0.3 if bias else None,
    }
    reference = [None if x is None else x + 0.3 * torch.randn_like(x) for x in tensors.values()]
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in tensors.values()]
    frozen = [None if x is None else x.to(dtype) for x in reference]
    return leaves, frozen, ids, mask


def shifted(leaves, ids, mask, chunk="auto", **options):
    """Our source and targets: position t predicts token t + 1."""
    hidden, weight, bias = leaves
    head = losses.Head(hidden[:, :-1], weight, bias, chunk=chunk, **options)
    return head, ids[:, 1:].masked_fill(~mask[:, 1:], -100)


def drawn(chunk="auto", **options):
    """Leaves of a policy, its head, targets, and the head of a reference."""
    leaves, frozen, ids, mask = batch(**options)
    return leaves, *shifted(leaves, ids, mask, chunk), shifted(frozen, ids, mask)[0]


def dpo_trainer(leaves, frozen, options, **changes):
    o = losses.DPOOptions(**options)
    model, ref = comparing.Toy(*leaves, **changes), comparing.Toy(*frozen, **changes)
    return model, comparing.trainer(
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
    comparing.require_trl()
    model, stub = dpo_trainer(leaves, frozen, options, **changes)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": mask.long(),
    }
    return trl.DPOTrainer._compute_loss(stub, model, inputs, False), comparing.logged(stub)


TYPES = {
    **{loss_type: {"loss_type": loss_type} for loss_type in DPO if loss_type not in ("exo_pair",)},
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
    expected, log = trl_dpo(leaves, frozen, ids, mask, options)
    head, target = shifted(leaves, ids, mask, chunk=7)
    reference, _ = shifted(frozen, ids, mask)
    ours, metrics = losses.dpo_loss(
        head, target, reference, metrics=("entropy", "token_accuracy", "logits"), **options
    )
    assert_same_loss(ours, expected, leaves)
    names = {
        "rewards/chosen": metrics.chosen_reward,
        "rewards/rejected": metrics.rejected_reward,
        "rewards/accuracies": metrics.accuracy,
        "rewards/margins": metrics.margin,
        "entropy": metrics.entropy,
        "mean_token_accuracy": metrics.token_accuracy,
        "logits/chosen": metrics.chosen_logit,
        "logits/rejected": metrics.rejected_logit,
    }
    names |= {"logps/chosen": metrics.chosen_log_prob, "logps/rejected": metrics.rejected_log_prob}
    for key, value in names.items():
        assert value.item() == pytest.approx(log[key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("chunk", [1, 7, 256, "auto"])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
@pytest.mark.parametrize("loss_type", ["sigmoid", "nca_pair", "ipo"])
def test_no_chunk_and_no_dtype_moves_dpo(loss_type, dtype, chunk):
    leaves, frozen, ids, mask = batch(5, 11, dtype=dtype, bias=True)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    expected, _ = trl_dpo(wide, [x.float() for x in frozen], ids, mask, {"loss_type": loss_type})
    head, target = shifted(leaves, ids, mask, chunk)
    ours, _ = losses.dpo_loss(head, target, shifted(frozen, ids, mask)[0], loss_type=loss_type)
    assert_same_loss(ours, expected, leaves, dtype, wide)


@pytest.mark.parametrize("loss_type", DPO)
def test_dpo_edges(loss_type):
    """One pair; pairs without a token in either answer."""
    smooth = {"label_smoothing": 1e-3} if loss_type == "exo_pair" else {}
    for pairs, ignored in ((1, False), (4, True)):
        leaves, frozen, ids, mask = batch(pairs, ignored_row=ignored)
        options = {"loss_type": loss_type, **smooth}
        expected, _ = trl_dpo(leaves, frozen, ids, mask, options)
        head, target = shifted(leaves, ids, mask)
        ours, _ = losses.dpo_loss(head, target, shifted(frozen, ids, mask)[0], **options)
        assert_same_loss(ours, expected, leaves)


def test_dpo_under_softcap_scale_and_temperature():
    leaves, frozen, ids, mask = batch()
    options = {"temperature": 0.7, "softcap": 3.0}
    expected, log = trl_dpo(leaves, frozen, ids, mask, {}, scale=0.6, **options)
    options["logit_scale"] = 0.6
    head, target = shifted(leaves, ids, mask, chunk=5, **options)
    reference, _ = shifted(frozen, ids, mask, **options)
    ours, metrics = losses.dpo_loss(head, target, reference, metrics=("logits",))
    assert_same_loss(ours, expected, leaves)
    assert metrics.chosen_logit.item() == pytest.approx(log["logits/chosen"], rel=1e-4)
    logits = losses.Logits(head.hidden @ leaves[1].T, 0.7, 3.0, 0.6)
    _, again = losses.dpo_loss(logits, target, reference, metrics=("logits",))
    assert again.rejected_logit.item() == pytest.approx(metrics.rejected_logit.item(), rel=1e-4)
    assert again.rejected_logit.item() == pytest.approx(log["logits/rejected"], rel=1e-4)


# --- where references and policies come from ---


def test_every_form_of_a_reference_is_the_same():
    """A second model, its logits, and log-probabilities of tokens or sequences from before."""
    _, head, target, source = drawn(bias=True)
    logits = F.linear(source.hidden, source.weight, source.bias)
    rows = losses.tokens(source, target).log_prob
    results = [
        losses.dpo_loss(head, target, reference, loss_type="hinge")[0]
        for reference in (source, logits, losses.Logits(logits), rows, rows.sum(-1))
    ]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


def test_every_form_of_a_policy_is_the_same():
    leaves, head, target, reference = drawn(bias=True)
    logits = F.linear(head.hidden, *leaves[1:])
    rows = torch.log_softmax(logits, -1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    expected, _ = losses.dpo_loss(head, target, reference)
    for policy in (logits, rows):
        assert_same_loss(losses.dpo_loss(policy, target, reference)[0], expected, leaves)


def test_no_reference_and_length_normalization():
    """Scores are then mean log-probabilities: log sigmoid of their difference."""
    leaves, head, target, _ = drawn()
    assert losses.kto_loss(head, target, GOOD, kl=0.0)[0].isfinite()
    ours, _ = losses.dpo_loss(head, target, beta=2.0, length_normalized=True)
    log_p = torch.log_softmax(head.hidden @ leaves[1].T, -1)
    rows = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target >= 0)
    mean = rows.sum(-1) / (target >= 0).sum(-1)
    assert_same_loss(ours, -F.logsigmoid(2.0 * (mean[:3] - mean[3:])).mean(), leaves)


def test_smoothed_labels_and_rpo():
    """cDPO: E over flips of the labels. RPO (arXiv:2404.19733 eq. 3): alpha * NLL a token."""
    leaves, head, target, reference = drawn()
    ours, _ = losses.dpo_loss(head, target, reference, label_smoothing=0.2, rpo_alpha=0.7)
    flipped = target.view(2, 3, -1).flip(0).flatten(0, 1)
    back = [
        losses.Head(s.hidden.view(2, 3, *s.hidden.shape[1:]).flip(0).flatten(0, 1), s.weight)
        for s in (head, reference)
    ]
    plain, _ = losses.dpo_loss(head, target, reference)
    turned, _ = losses.dpo_loss(back[0], flipped, back[1])
    nll = -(losses.tokens(head, target).log_prob[:3].sum(-1) / (target[:3] >= 0).sum(-1)).mean()
    assert_same_loss(ours, 0.8 * plain + 0.2 * turned + 0.7 * nll, leaves)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sigmod"}, "sigmoid"),
        ({"loss_type": ("sigmoid", "hinge"), "loss_weights": (1.0,)}, "each of the 2"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "no meaning"),
        ({"loss_type": "nca_pair", "divergence": "forward_kl"}, "no meaning"),
        ({"loss_type": "aot", "weighting": True}, "no meaning"),
        ({"alpha": 0.3}, "no meaning"),
        ({"discopop_tau": 0.3}, "no meaning"),
        ({"loss_type": "exo_pair"}, "exo_pair needs"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "below 0.5"),
        ({"beta": 0.0}, "beta must be above 0"),
        ({"tail": 0.5, "length_normalized": True}, "exclude"),
        ({"metrics": ("entropie",)}, "entropy"),
    ],
)
def test_options_that_do_not_fit_are_errors(options, message):
    _, head, target, reference = drawn()
    with pytest.raises(ValueError, match=message):
        losses.dpo_loss(head, target, reference, **options)


GOOD = torch.ones(6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda head, target: losses.dpo_loss(head, target, bta=1.0), TypeError, "beta"),
        (lambda head, target: losses.cpo_loss(head, target, bta=1.0), TypeError, "beta"),
        (lambda head, target: losses.dpo_loss(head, target[:3]), ValueError, r"\(2 B, T\)"),
        (
            lambda head, target: losses.dpo_loss(
                losses.tokens(head, target), target, weighting=True
            ),
            ValueError,
            "log-probabilities",
        ),
        (
            lambda head, target: losses.dpo_loss(
                losses.tokens(head, target), target, metrics=("entropy",)
            ),
            ValueError,
            "needs entropy",
        ),
        (lambda head, target: losses.kto_loss(head, target, GOOD), ValueError, "needs kl"),
        (
            lambda head, target: losses.kto_loss(
                head, target, GOOD, kl=0.0, loss_type="apo_zero_unpaired"
            ),
            ValueError,
            "does not read kl",
        ),
        (
            lambda head, target: losses.kto_loss(head, target, GOOD[:2], kl=0.0),
            ValueError,
            "desirable must have shape",
        ),
        (
            lambda head, target: losses.kto_loss(head, target, GOOD, kl=0.0, desirable_wight=2.0),
            TypeError,
            "desirable_weight",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_errors(run, error, message):
    _, head, target, _ = drawn()
    with pytest.raises(error, match=message):
        run(head, target)


# --- without a reference ---

MARGINS = {
    "sigmoid": {},
    "sigmoid-smoothed": {"label_smoothing": 0.1, "beta": 0.4},
    "sigmoid-without-nll": {"nll_weight": 0.0},
    "hinge": {"loss_type": "hinge", "nll_weight": 0.5},
    "ipo": {"loss_type": "ipo", "beta": 0.6},
    "simpo": {"loss_type": "simpo", "beta": 2.0, "gamma": 0.8, "nll_weight": 0.0},
    "simpo-smoothed": {"loss_type": "simpo", "beta": 2.0, "label_smoothing": 0.2},
    "alpha": {"loss_type": "simpo", "alpha": 0.3, "nll_weight": 0.0},
}


def pair_inputs(ids, mask):
    """Chosen and rejected answers as TRL's older trainers take them."""
    tensors = {}
    for name, half in (("chosen", 0), ("rejected", 1)):
        part, keep = ids.chunk(2)[half], mask.chunk(2)[half]
        tensors[f"{name}_input_ids"] = part
        tensors[f"{name}_labels"] = part.masked_fill(~keep, -100)
        tensors[f"{name}_attention_mask"] = torch.ones_like(part)
    return tensors


def trl_margin(module, name, leaves, ids, mask, **attributes):
    trainer = getattr(pytest.importorskip(f"trl.experimental.{module}"), name)
    model = comparing.Toy(*leaves)
    stub = comparing.trainer(
        model, is_encoder_decoder=False, padding_value=0, pad_token_id=0, **attributes
    )
    stub.concatenated_inputs = trainer.concatenated_inputs
    stub.get_batch_logps = trainer.get_batch_logps
    for method in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer, method):
            setattr(stub, method, getattr(trainer, method).__get__(stub))
    return trainer.get_batch_loss_metrics(stub, model, pair_inputs(ids, mask))


@pytest.mark.parametrize("options", MARGINS.values(), ids=MARGINS)
def test_cpo_is_trl(options):
    leaves, _, ids, mask = batch(bias=True)
    o = losses.CPOOptions(**options)
    expected, log = trl_margin(
        "cpo",
        "CPOTrainer",
        leaves,
        ids,
        mask,
        loss_type=o.loss_type,
        beta=o.beta,
        alpha=o.alpha,
        simpo_gamma=o.gamma,
        label_smoothing=o.label_smoothing,
        cpo_alpha=o.nll_weight,
    )
    head, target = shifted(leaves, ids, mask, chunk=5)
    ours, metrics = losses.cpo_loss(head, target, **options)
    assert_same_loss(ours, expected, leaves)
    assert metrics.margin.item() == pytest.approx(log["rewards/margins"], rel=1e-4)
    assert metrics.accuracy.item() == pytest.approx(log["rewards/accuracies"])


@pytest.mark.parametrize("beta", [0.1, 1.5])
def test_orpo_is_trl(beta):
    """Its likelihood term counts the prompt as well."""
    leaves, _, ids, mask = batch(bias=True)
    expected, log = trl_margin("orpo", "ORPOTrainer", leaves, ids, mask, beta=beta)
    head, target = shifted(leaves, ids, mask)
    ours, metrics = losses.cpo_loss(
        head, target, ids[:3, 1:], loss_type="orpo", beta=beta, metrics=("entropy",)
    )
    assert_same_loss(ours, expected, leaves)
    assert metrics.nll.item() == pytest.approx(log["nll_loss"], rel=1e-5)
    assert metrics.chosen_log_prob.item() == pytest.approx(log["logps/chosen"], rel=1e-5)


def test_orpo_of_answers_that_are_sure_is_finite():
    """log(1 - p) of a certain answer, and its gradient."""
    logits = torch.zeros(2, 1, 4, requires_grad=True)
    with torch.no_grad():
        logits[0, 0, 1] = 60.0
    ours, _ = losses.cpo_loss(logits * 1.0, torch.ones(2, 1, dtype=torch.int64), loss_type="orpo")
    (grad,) = torch.autograd.grad(ours, logits)
    assert grad.isfinite().all()


# --- single answers ---


def trl_kto(leaves, frozen, ids, mask, desirable, others, **options):
    comparing.require_trl()
    model, ref = comparing.Toy(*leaves), comparing.Toy(*frozen)
    other_ids, other_mask, *hidden = others
    model.others, ref.others = [(other_ids, hidden[0])], [(other_ids, hidden[1])]
    o = losses.KTOOptions(**options)
    stub = comparing.trainer(
        model,
        ref_model=ref,
        precompute_ref_logps=False,
        loss_type=o.loss_type,
        beta=o.beta,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        calculate_KL=o.loss_type == "kto",
        desirable_weight=o.desirable_weight,
        undesirable_weight=o.undesirable_weight,
    )
    stub._compute_kl_logps = trl.KTOTrainer._compute_kl_logps.__get__(stub)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": mask.long(),
        "KL_input_ids": other_ids,
        "KL_attention_mask": torch.ones_like(other_ids),
        "KL_completion_mask": other_mask.long(),
        "label": desirable,
    }
    return trl.KTOTrainer._compute_loss(stub, model, inputs, False), comparing.logged(stub)


@pytest.mark.parametrize("labels", [[1, 0, 1, 1, 0, 0], [1] * 6, [0] * 6])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.4},
        {"loss_type": "apo_zero_unpaired", "desirable_weight": 0.7},
    ],
)
def test_kto_is_trl(options, labels):
    leaves, frozen, ids, mask = batch(bias=True)
    desirable = torch.tensor(labels, dtype=torch.bool)
    other_ids, other_mask = ids.roll(1, 0).clone(), mask.roll(1, 0)
    others = (
        other_ids,
        other_mask,
        *[x[0].detach() * s for x, s in ((leaves, 0.4), (frozen, 1.3))],
    )
    expected, log = trl_kto(leaves, frozen, ids, mask, desirable, others, **options)
    head, target = shifted(leaves, ids, mask, chunk=7)
    kl = None
    if "loss_type" not in options:
        sums = []
        for (_, *head_of), hidden in zip((leaves, frozen), others[2:], strict=True):
            source, aim = shifted([hidden, *head_of], other_ids, other_mask)
            sums.append(losses.tokens(source, aim).log_prob.sum(-1))
        kl = losses.kto_divergence(*sums)
        assert kl > 0
    ours, metrics = losses.kto_loss(
        head,
        target,
        desirable,
        shifted(frozen, ids, mask)[0],
        kl,
        metrics=("entropy", "logits"),
        **options,
    )
    assert_same_loss(ours, expected, leaves)
    assert metrics.kl.item() == pytest.approx(log["kl"], rel=1e-5)
    assert metrics.entropy.item() == pytest.approx(log["entropy"], rel=1e-5)
    for key, value in (
        ("rewards/chosen", metrics.chosen_reward),
        ("rewards/rejected", metrics.rejected_reward),
        ("logps/chosen", metrics.chosen_log_prob),
        ("rewards/margins", metrics.margin),
        ("logits/chosen", metrics.chosen_logit),
        ("logits/rejected", metrics.rejected_logit),
    ):
        assert key not in log or value.item() == pytest.approx(log[key], rel=1e-5)
        assert key in log or value.isnan() or (key[:6] == "logits" and value == 0)
