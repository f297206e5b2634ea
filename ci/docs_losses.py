"""The page of the losses: their tables of types and options, from the sources."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from typing import Any

INTRO = """\
# Losses

Losses of preferences, policies, sequences and distillation. Every loss type is a few lines of maths
on log-probabilities of tokens, in a table; the log-probabilities come from one operator,
[`fused_linear_log_prob`](ops/fused_linear_log_prob.md) (distillation: from
[`fused_linear_jsd`](ops/fused_linear_jsd.md) and its kin), which never holds rows x vocabulary, sums
in fp32, and knows the head's bias, softcap, scale and temperature.

```python
import torch
from liger_multi import losses, nn

hidden = torch.randn(4, 7, 64, requires_grad=True)  # of the positions that predict a token
head = torch.nn.Linear(64, 1000)
target = torch.randint(1000, (4, 7))  # chosen answers, then rejected ones
target[:, :2] = -100  # prompts and padding

loss, metrics = losses.dpo_loss(
    losses.Head(hidden, head), target, loss_type=("sigmoid", "sft"), loss_weights=(1.0, 0.2)
)
loss.backward()
print(metrics.margin, metrics.accuracy)

grpo = nn.PolicyLoss(loss_type="dapo", epsilon_high=0.28)
loss, metrics = grpo(losses.Head(hidden, head), target, torch.randn(4))
```

Every loss returns the number to backpropagate and a named tuple of what trainers log, without
gradients. An option that does not exist, or that the chosen loss type would not read, raises.

## Where log-probabilities come from

| Form | What it is |
|---|---|
| `losses.Head(hidden, weight, bias)` | hidden states and the weight behind them: fused |
| `losses.Head(hidden, module)` | the same through the head's own call: its hooks gather a sharded weight (FSDP, ZeRO-3), and a LoRA adapter on the head is computed and trained |
| `losses.Logits(logits)`, or a tensor with one axis more than the targets | given logits; lazy logits of a [patched](patching.md) model stay lazy and become a head |
| `ops.LogProbOutput`, or a tensor of the targets' shape | log-probabilities that exist already |

References and teachers take the same forms and get no gradient. A reference may be a second model, the
policy with its adapter off (`with model.disable_adapter(), torch.no_grad(): ...`), or log-probabilities
of tokens or of whole sequences from an earlier pass. `losses.tokens(source, target, outputs)` gives
the numbers themselves.

HEAD

A LoRA adapter becomes columns beside the weight, `h W^T + s (h A^T) B^T = [h, s h A^T] [W, B]^T`: exact,
with its dropout, at the price of a copy of the weight and of a gradient for all of its columns.
Other adapters (DoRA, quantised weights, a forward of its own) are refused with the reason: give the
loss real logits then.

## One look at the vocabulary, or two

M rows, H the width, V the vocabulary. Where a token's loss depends on nothing but its own statistics
(`sequence_loss`, `mtp_loss`, `policy_loss` with ratios of tokens, top-k distillation), one pass does it:
the logits of a chunk are overwritten by their gradient while they are there, 6 M H V operations, and
the gradients of hidden states and weight are kept until backward, as
[`fused_linear_cross_entropy`](ops/fused_linear_cross_entropy.md) keeps them. Losses of sequences and pairs
know what arrives at a token only when all tokens are known: the logits are computed again in backward,
8 M H V operations, with nothing kept but 4 bytes a row a statistic; unless `Head(keep="2GiB")` lets them
stay, which makes it 6 again. `passes="one"` insists on one pass, `passes="two"` on two; the numbers are
the same. Under `torch.compile` losses are operators in two passes and what Inductor fuses around them;
in float16 too, whose range has no room for sums that nobody has scaled yet.

`losses.token_sum(source, target, formula, columns)` does the same for a formula of your own: a function
of log_prob, entropy, lse and columns of constants, acting on every token by itself.

## Several ranks, several micro-batches

Means over the tokens of a step divide by `num_items / processes`, the numbers that trainers count; without
them the tokens are counted here, over `group` if there is one, by one collective a call, never inside
of a chunk. `policy_loss(accumulation=n)` divides what the step's count does not.
"""

TRL = """\
## In TRL's trainers

A subclass's `compute_loss` is the documented place. The tests run TRL's trainers this way, and ask for the
same losses at every step and the same weights after the last.

```python
import torch
from trl import DPOTrainer

from liger_multi import losses


class FusedDPOTrainer(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def score(model):
            hidden = model.base_model(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).last_hidden_state[:, :-1]
            return losses.Head(hidden, model.get_output_embeddings())

        target = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)[:, 1:]
        with torch.no_grad():
            reference = score(self.ref_model)
        loss, metrics = losses.dpo_loss(score(model), target, reference, beta=self.beta)
        return loss
```

Where a trainer hands logits to a function (`compute_loss_func`), give the function's logits to the loss; on a
patched model they were never computed and the loss is fused.

| Here | TRL |
|---|---|
| `dpo_loss(tail=...)` | `ld_alpha` |
| `dpo_loss(divergence=...)` | `f_divergence_type` |
| `dpo_loss(weighting=True)` | `use_weighting` |
| `cpo_loss(gamma=..., nll_weight=...)` | `simpo_gamma`, `cpo_alpha` |
| `policy_loss(level="sequence")` | `importance_sampling_level` |
| `policy_loss(correct_kl=True)` | `use_bias_correction_kl` (its default) |
| `policy_loss(ratios=...)` | `importance_sampling_ratio` of vLLM |
| `policy_loss(top_entropy=...)` | `top_entropy_quantile` |
| `policy_loss(off_policy_threshold=...)` | `off_policy_mask_threshold` |
| `distillation_loss(rest="bucket")` | `add_tail_bucket` |

Where they differ: `sigmoid` with `label_smoothing` is cDPO here and unsmoothed there; a mean over no token is
0 here and may be NaN there; the entropy of an answer without tokens likewise.
"""

FAMILIES = (
    ("Pairs against a reference", "dpo_loss", "DPOOptions", ("preference", "DPO")),
    ("Pairs without a reference", "cpo_loss", "CPOOptions", ("margins", "CPO")),
    ("Single answers", "kto_loss", "KTOOptions", ("kto", "KTO")),
    ("Policies", "policy_loss", "PolicyOptions", ("policies", "POLICY")),
    ("Sequences", "sequence_loss", "SequenceOptions", ("sequence", "SEQUENCE")),
    ("Several heads ahead", "mtp_loss", "SequenceOptions", None),
    ("Distillation", "distillation_loss", "DistillationOptions", ("distillation", "DIVERGENCES")),
)


def arguments(documented: Any) -> dict[str, str]:
    """The arguments of a docstring in Google's style, by name."""
    text = inspect.getdoc(documented) or ""
    body = re.split(r"^Args:\n", text, maxsplit=1, flags=re.MULTILINE)[1]
    body = textwrap.dedent(re.split(r"^\w+:\n", body, maxsplit=1, flags=re.MULTILINE)[0])
    found: dict[str, str] = {}
    for line in body.splitlines():
        match = re.match(r"(\w+): (.*)", line)
        if match:
            found[match[1]] = match[2]
        elif line.strip():
            found[list(found)[-1]] += f" {line.strip()}"
    return found


def rows(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    made = [header, ("---",) * len(header), *lines]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in made]


def clean(text: str) -> str:
    """Docstring text as Markdown."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda m: f"`{m[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`")


def options(kind: type) -> list[str]:
    """The table of a dataclass of options."""
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    lines = [(f"`{n}`", f"`{defaults[n]!r}`", clean(t)) for n, t in arguments(kind).items()]
    return rows(("Option", "Default", "What"), lines)


def page(note: str) -> str:
    """The text of the page."""
    losses = importlib.import_module("liger_multi.losses")
    head = arguments(losses.Head)
    table = rows(("Of a head", "What"), [(f"`{n}`", clean(t)) for n, t in head.items()])
    out = [note, "", *INTRO.replace("HEAD", "\n".join(table)).splitlines(), ""]
    for title, name, kind, place in FAMILIES:
        function = getattr(losses, name)
        text = (inspect.getdoc(function) or "").split("Args:")[0].strip()
        out += [f"## {title}", "", f"`losses.{name}`: {clean(text)}", ""]
        given = [(f"`{n}`", clean(t)) for n, t in arguments(function).items() if n != "options"]
        out += [*rows(("Argument", "What"), given), ""]
        if place is not None:
            module = importlib.import_module(f"liger_multi.losses.{place[0]}")
            types = getattr(module, place[1])
            what = "Divergence" if place[1] == "DIVERGENCES" else "Loss type"
            lines = [(f"`{n}`", formula.source) for n, formula in types.items()]
            out += [*rows((what, "Source"), lines), ""]
            out += [*options(getattr(losses, kind)), ""]
        else:
            out += ["Further options are those of `sequence_loss`.", ""]
    return "\n".join([*out, *TRL.splitlines(), ""])
