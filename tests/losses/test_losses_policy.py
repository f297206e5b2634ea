"""Policy losses: TRL's own implementation, one pass and two, ranks, and the papers' formulas."""

import contextlib
import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from liger_multi import losses
from liger_multi.dispatch.op import inline_ops
from liger_multi.losses import one_pass
from liger_multi.losses.policy import POLICY
from liger_multi.testing.tolerance import excess
from tests import comparing
from tests.comparing import assert_equal, assert_same_loss, assert_within

pytest.importorskip("trl")
HALF, WIDE = torch.bfloat16, torch.float32


class Batch:
    """Answers with uneven lengths, one of them empty, and all that a loss may read."""

    def __init__(self, rows=4, length=9, width=16, classes=53, dtype=WIDE, bias=True, empty=True):
        torch.manual_seed(0)
        tensors = [
            torch.randn(rows, length, width),
            torch.randn(classes, width) * 0.4,
            torch.randn(classes) * 0.3 if bias else None,
        ]
        self.leaves = [None if x is None else x.to(dtype).requires_grad_() for x in tensors]
        self.ids = torch.randint(classes, (rows, length))
        lengths = torch.randint(1, length + 1, (rows,))
        lengths[0] = length
        if empty and rows > 1:
            lengths[-1] = 0
        self.mask = torch.arange(length) < lengths.unsqueeze(1)
        self.target = self.ids.masked_fill(~self.mask, -100)
        with torch.no_grad():
            own = losses.tokens(self.head(), self.target).log_prob
        self.old = own + 0.4 * torch.randn_like(own) * self.mask
        self.reference = own + 0.4 * torch.randn_like(own) * self.mask
        self.ratios = torch.where(self.mask, torch.rand_like(own) + 0.5, 1.0)
        self.sampled = torch.where(torch.rand_like(own) < 0.1, torch.nan, self.old + 0.1)
        self.advantages = torch.randn(rows)
        self.tools = (torch.rand(rows, length) > 0.2).long()

    def head(self, chunk="auto", leaves=None, **options):
        return losses.Head(*(leaves or self.leaves), chunk=chunk, **options)

    def wide(self):
        return [None if x is None else x.detach().float().requires_grad_() for x in self.leaves]


OPTIONS = {
    "epsilon_low": "epsilon_low",
    "epsilon_high": "epsilon_high",
    "beta": "beta",
    "top_entropy": "top_entropy_quantile",
    "off_policy_threshold": "off_policy_mask_threshold",
    "max_length": "max_completion_length",
    "entropy_weight": "entropy_coef",
}
ARGS = (
    "delta",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


def trl_policy(b, options, leaves=None, temperature=1.0, accumulation=1, columns=()):
    """TRL's loss; the reference and the sampler's numbers are in its inputs."""
    comparing.require_trl()
    from trl import GRPOTrainer

    o = losses.PolicyOptions(**options)
    leaves = leaves or b.leaves
    model = comparing.Toy(*leaves, temperature=temperature)
    stub = comparing.trainer(
        model,
        **{trl_name: getattr(o, name) for name, trl_name in OPTIONS.items()},
        loss_type="grpo" if o.loss_type == "gspo" else o.loss_type,
        importance_sampling_level="sequence" if o.sequence_level else "token",
        current_gradient_accumulation_steps=accumulation,
        use_vllm="ratios" in columns,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=o.entropy_weight != 0,
        use_adaptive_entropy=False,
        args=SimpleNamespace(
            **{key: getattr(o, key) for key in ARGS},
            use_bias_correction_kl=o.correct_kl,
            steps_per_generation=accumulation,
        ),
    )
    for name in ("get_gamma_weights", "get_off_policy_mask"):
        setattr(stub, name, getattr(GRPOTrainer, name))
    stub.get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask.__get__(stub)

    def score(model, ids, mask, keep, compute_entropy=True, **_):
        # the head scores position t + 1 with the state at t; ours are aligned already
        model.hidden = torch.nn.functional.pad(leaves[0], (0, 0, 0, 1))
        labels = torch.nn.functional.pad(b.target, (1, 0), value=-100)
        out = model(input_ids=None, labels=labels, fused_lm_head=True)
        return out.log_probs, out.entropy, None

    stub._get_per_token_logps_and_entropies = score
    inputs = {
        "prompt_ids": b.ids[:, :0],
        "prompt_mask": b.mask[:, :0].long(),
        "completion_ids": b.ids,
        "completion_mask": b.mask.long(),
        "advantages": b.advantages,
        "num_items_in_batch": b.mask.sum() * 1.0,
        "ref_per_token_logps": b.reference,
    }
    names = {
        "old": "old_per_token_logps",
        "ratios": "importance_sampling_ratio",
        "sampled": "sampling_per_token_logps",
        "tools": "tool_mask",
    }
    inputs |= {names[key]: getattr(b, key) for key in columns}
    return GRPOTrainer._compute_loss(stub, model, inputs), comparing.logged(stub)


def ours_policy(b, options, columns=(), head=None, **call):
    results = {"token_mask" if k == "tools" else k: getattr(b, k) for k in columns}
    if losses.PolicyOptions(**options).beta:
        results["reference"] = b.reference
    return losses.policy_loss(
        b.head(chunk=7) if head is None else head,
        b.target,
        b.advantages,
        **results,
        **call,
        **options,
    )


KINDS = {
    loss_type: {"loss_type": loss_type, **({"max_length": 9} if loss_type == "dr_grpo" else {})}
    for loss_type in POLICY
}
CASES = {
    **KINDS,
    "clip-higher": {"loss_type": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.28},
    "two-sided": {"epsilon_high": 0.3, "delta": 1.1},
    "kl": {"beta": 0.3},
    "kl-corrected": {"beta": 0.3, "correct_kl": True},
    "kl-sequence": {"beta": 0.3, "loss_type": "gspo", "correct_kl": True},
    "kl-vespo": {"beta": 0.3, "loss_type": "vespo"},
    "entropy": {"entropy_weight": 0.2},
    "entropy-dapo": {"entropy_weight": 0.2, "loss_type": "dapo", "beta": 0.1},
    "top-entropy": {"top_entropy": 0.3},
    "top-entropy-bonus": {"top_entropy": 0.4, "entropy_weight": 0.2, "beta": 0.2},
    "off-policy": {"off_policy_threshold": 0.05},
    "sapo-temperatures": {
        "loss_type": "sapo",
        "sapo_temperature_pos": 0.7,
        "sapo_temperature_neg": 2.0,
    },
    "luspo-tokens": {"loss_type": "luspo", "level": "token"},
    "bnpo-sequence": {"loss_type": "bnpo", "level": "sequence"},
    "cispo-5": {"loss_type": "cispo", "epsilon_high": 1.3},
    "vespo-shape": {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 3.0},
}
GIVEN = {"on-policy": (), "old": ("old",), "sampler": ("old", "ratios"), "tools": ("old", "tools")}
CALLS = [
    *itertools.product(CASES.values(), GIVEN.values()),
    (CASES["off-policy"], ("old", "sampled")),  # without scores for some tokens
]


@pytest.mark.parametrize(("options", "columns"), CALLS, ids=str)
def test_policy_is_trl(options, columns):
    b = Batch()
    if "tools" in columns and "loss_type" not in options:
        columns = (*columns, "ratios")
    expected, log = trl_policy(b, options, columns=columns)
    count = b.mask.sum() * 1.0
    ours, metrics = ours_policy(b, options, columns, num_items=count)
    assert_same_loss(ours, expected, b.leaves)
    names = {
        "kl": metrics.kl,
        "entropy": metrics.entropy,
        "policy_loss": metrics.policy_loss,
        "clip_ratio/low_mean": metrics.clip_low,
        "clip_ratio/high_mean": metrics.clip_high,
        "clip_ratio/region_mean": metrics.clip_region,
        "clip_ratio/low_min": metrics.clip_low_min,
        "clip_ratio/high_max": metrics.clip_high_max,
        "cispo_clip_ratio": metrics.clip_high,
    }
    sequences = losses.PolicyOptions(**options).sequence_level
    for key, value in names.items():
        if key in log and not (sequences and key.startswith(("clip", "kl"))):
            assert value.item() == pytest.approx(log[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("chunk", [1, 7, 256, "auto"])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
@pytest.mark.parametrize("passes", ["one", "two"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "sapo"])
def test_no_chunk_no_dtype_and_no_pass_moves_the_loss(loss_type, passes, dtype, chunk):
    b = Batch(6, 13, dtype=dtype)
    options = {"loss_type": loss_type, "beta": 0.1, "entropy_weight": 0.1}
    wide = b.wide()
    expected, _ = trl_policy(b, options, wide, columns=("old",))
    ours, _ = ours_policy(
        b, {**options, "passes": passes}, ("old",), b.head(chunk), num_items=b.mask.sum() * 1.0
    )
    assert_same_loss(ours, expected, b.leaves, dtype, wide)


@pytest.mark.parametrize("loss_type", POLICY)
def test_policy_edges(loss_type):
    """One answer; nothing but empty answers, whose gradient is zero and connected."""
    for rows, empty in ((1, False), (3, True)):
        b = Batch(rows, empty=empty)
        if empty:
            b.mask = b.mask & False
            b.target = b.ids.masked_fill(~b.mask, -100)
        expected, _ = trl_policy(b, KINDS[loss_type], columns=("old",))
        ours, _ = ours_policy(b, KINDS[loss_type], ("old",), num_items=b.mask.sum() * 1.0)
        assert_same_loss(ours, expected, b.leaves)


@contextlib.contextmanager
def narrow():
    torch.set_default_dtype(HALF)
    try:
        yield
    finally:
        torch.set_default_dtype(WIDE)


def kto(b):
    desirable = b.mask[:, 2]
    return losses.kto_loss(
        b.head(), b.target, desirable, kl=0.3, desirable_weight=1.3, undesirable_weight=0.7
    )


def sequence(b):
    return losses.sequence_loss(b.head(), b.target, reduction="sequence")


RUNS = {name: functools.partial(ours_policy, options=o) for name, o in CASES.items()}


@pytest.mark.parametrize("run", [kto, sequence, *RUNS.values()], ids=["kto", "sequence", *RUNS])
def test_policy_loss_ignores_default_dtype(run):
    """Scripts set it to 16 bits for their models; lengths and factors would be rounded to it."""
    b = Batch()
    expected, expected_metrics = run(b)
    with narrow():
        ours, metrics = run(b)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    torch.testing.assert_close(metrics, expected_metrics, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "luspo"])
def test_accumulation_and_temperature(loss_type):
    """What trainers divide by; dapo's count spans the step already."""
    b = Batch()
    options = {"loss_type": loss_type, "entropy_weight": 0.1}
    expected, _ = trl_policy(b, options, temperature=0.7, accumulation=3, columns=("old",))
    count = b.mask.sum() * 1.0
    ours, _ = ours_policy(
        b, options, ("old",), b.head(temperature=0.7), num_items=count, accumulation=3
    )
    assert_same_loss(ours, expected, b.leaves)


def test_advantages_of_tokens():
    b = Batch()
    b.advantages = torch.randn(b.ids.shape)
    expected, _ = trl_policy(b, {}, columns=("old",))
    assert_same_loss(ours_policy(b, {}, ("old",))[0], expected, b.leaves)


@pytest.mark.parametrize("loss_type", POLICY)
def test_given_logits_and_given_log_probs(loss_type):
    b = Batch()
    options = {**KINDS[loss_type], "beta": 0.1}
    expected, _ = trl_policy(b, options, columns=("old",))
    count = b.mask.sum() * 1.0
    logits = torch.nn.functional.linear(*b.leaves)
    assert_same_loss(
        ours_policy(b, options, ("old",), logits, num_items=count)[0], expected, b.leaves
    )
    tokens = losses.tokens(b.head(), b.target, ("log_prob", "entropy"))
    expected, _ = trl_policy(b, options, columns=("old",))
    assert_same_loss(
        ours_policy(b, options, ("old",), tokens, num_items=count)[0], expected, b.leaves
    )


# --- one pass ---


@pytest.mark.parametrize(("passes", "products"), [("one", 3), ("two", 4)])
def test_one_pass_multiplies_three_times(passes, products):
    """6 M H V operations, and 8 with two passes, in whatever chunks."""
    b = Batch(5, 11, empty=False)
    with inline_ops(), FlopCounterMode(display=False) as flops:
        ours, _ = ours_policy(b, {"passes": passes}, ("old",))
        torch.autograd.grad(ours, b.leaves)
    rows = int(b.mask.sum())
    assert flops.get_total_flops() == 2 * rows * 16 * 53 * products


def rows_of_logits(count, dtype=WIDE):
    return count * 53 * dtype.itemsize


@pytest.mark.parametrize(
    ("keep", "kept"), [("1MiB", 99), (rows_of_logits(12), 12), (rows_of_logits(2), 0), (0, 0)]
)
def test_kept_logits_are_computed_once(keep, kept):
    """For losses that look at more than a token; above the budget they are computed again."""
    b = Batch(5, 11, empty=False)
    expected, _ = trl_policy(b, {"loss_type": "gspo", "beta": 0.1}, columns=("old",))
    with inline_ops(), FlopCounterMode(display=False) as flops:
        ours, _ = ours_policy(b, {"loss_type": "gspo", "beta": 0.1}, ("old",), b.head(keep=keep))
        first = torch.autograd.grad(ours, b.leaves, retain_graph=True)
    rows = int(b.mask.sum())
    assert rows > 24
    assert flops.get_total_flops() == 2 * 16 * 53 * (3 * rows + max(0, rows - kept))
    # of a second backward, which has no logits any more
    assert_equal(first, torch.autograd.grad(ours, b.leaves, retain_graph=True))
    assert_same_loss(ours, expected, b.leaves)


@pytest.mark.parametrize("kept", [99, 12])
@pytest.mark.parametrize("dtype", [WIDE, HALF, torch.float16])
def test_kept_logits_are_exact(dtype, kept):
    b = Batch(6, 13, dtype=dtype)
    options = {"loss_type": "gspo", "beta": 0.1, "entropy_weight": 0.1}
    wide = b.wide()
    expected, _ = trl_policy(b, options, wide, columns=("old",))
    ours, _ = ours_policy(b, options, ("old",), b.head(7, keep=rows_of_logits(kept, dtype)))
    assert_same_loss(ours, expected, b.leaves, dtype, wide)


def test_one_pass_is_refused_where_tokens_look_at_others():
    b = Batch()
    for options in ({"loss_type": "gspo"}, {"top_entropy": 0.5}, {"loss_type": "vespo"}):
        with pytest.raises(ValueError, match="one pass needs"):
            ours_policy(b, {**options, "passes": "one"})
    with pytest.raises(ValueError, match=r"losses\.Head"):
        ours_policy(b, {"passes": "one"}, head=torch.nn.functional.linear(*b.leaves))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_frozen_parts_get_no_gradient(frozen):
    b = Batch()
    for i in frozen:
        b.leaves[i] = b.leaves[i].detach()
    free = [x for x in b.leaves if x.requires_grad]
    results = []
    for passes in ("auto", "two"):
        ours, _ = ours_policy(b, {"passes": passes}, ("old",))
        assert ours.requires_grad == bool(free)
        results.append(torch.autograd.grad(ours, free) if free else ())
    assert_within(*results, dtype=WIDE)


def test_one_pass_twice_backward_scales_and_no_double_backward():
    b = Batch()
    ours, _ = ours_policy(b, {"passes": "one"}, ("old",))
    first = torch.autograd.grad(ours, b.leaves, torch.tensor(2.0), retain_graph=True)
    second = torch.autograd.grad(3 * ours, b.leaves, retain_graph=True)
    torch.testing.assert_close([1.5 * x for x in first], [*second])
    (once,) = torch.autograd.grad(ours, b.leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="has first derivatives only"):
        once.sum().backward()


def test_one_pass_in_fp16_falls_back_with_a_message():
    b = Batch(dtype=torch.float16)
    with pytest.raises(ValueError, match="float16"):
        ours_policy(b, {"passes": "one"}, ("old",))
    ours, _ = ours_policy(b, {}, ("old",))
    assert all(g.isfinite().all() for g in torch.autograd.grad(ours, b.leaves))


def test_one_pass_under_autocast():
    b = Batch()
    with torch.autocast("cpu", torch.bfloat16):
        results = [ours_policy(b, {"passes": passes}, ("old",))[0] for passes in ("one", "two")]
    for x, y in zip(*[torch.autograd.grad(loss, b.leaves) for loss in results], strict=True):
        assert x.dtype == WIDE
        assert excess(x, y, HALF) <= 1


def test_constants_do_not_ask_for_gradients():
    b = Batch()
    b.old.requires_grad_()
    with pytest.raises(ValueError, match=r"old\.detach"):
        ours_policy(b, {}, ("old",))


def test_any_formula_in_one_pass():
    """Of log-probabilities, entropies and normalizers at once."""
    b = Batch()

    def formula(tokens, c):
        return c["w"] * (tokens.log_prob.sin() + tokens.entropy * tokens.lse.cos())

    columns, names = {"w": torch.rand(b.ids.shape)}, ("log_prob", "entropy", "lse")
    one, two = (
        one_pass.token_sum(b.head(4), b.target, formula, columns, names, passes=passes)[0]
        for passes in ("one", "two")
    )
    assert_same_loss(one, two, b.leaves)


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "gpo"}, "grpo"),
        ({"loss_type": "sapo", "epsilon_low": 0.1}, "no meaning"),
        ({"loss_type": "cispo", "delta": 2.0}, "no meaning"),
        ({"vespo_k_pos": 1.0}, "no meaning"),
        ({"max_length": 9}, "no meaning"),
        ({"loss_type": "dr_grpo"}, "needs max_length"),
        ({"loss_type": "vespo", "level": "sequence"}, "no meaning"),
        ({"correct_kl": True}, "no meaning"),
        ({"top_entropy": 1.5}, r"in \[0, 1\]"),
        ({"passes": "three"}, "two"),
        ({"level": "word"}, "sequence"),
    ],
)
def test_options_that_do_not_fit_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        ours_policy(Batch(), options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (lambda b: {"beta": 0.1}, ValueError, "beta needs a reference"),
        (lambda b: {"reference": b.reference}, ValueError, "no effect"),
        (lambda b: {"sampled": b.sampled}, ValueError, "off_policy_threshold only"),
        (lambda b: {"epsilon_lo": 0.1}, TypeError, "epsilon_low"),
        (lambda b: {"ratios": torch.rand(2, 2)}, ValueError, "ratios must have the shape"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(options, error, message):
    b = Batch()
    with pytest.raises(ValueError, match="advantages must have the shape"):
        losses.policy_loss(b.head(), b.target, b.advantages[:2])
    with pytest.raises(error, match=message):
        losses.policy_loss(b.head(), b.target, b.advantages, **options(b))
