"""Why the alias stays different from liger-kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One difference.

    Attributes:
        cases: Pattern of ``group: name`` of the cases.
        keys: Pattern of the results that may differ there; all others agree.
        why: What holds here.
    """

    cases: str
    keys: str
    why: str


GRADIENTS = r"gradient \d"
REASONS = (
    Reason(
        r"grpo(_loss)? .*loss_type=luspo(?!.*whole)", rf"loss|output 0|{GRADIENTS}|with a|aux",
        "LUSPO of Liger-Kernel sums over padding too, and padding gets a gradient of the KL term. "
        "Here padding is masked. Without padding the values agree.",
    ),
    Reason(
        r"triton_grpo_loss .*(loss_type=luspo.*reduce=True|whole.*luspo)|slope .*luspo.*token",
        rf"{GRADIENTS}|with a|is the gradient",
        "The gradient of Liger-Kernel's LUSPO of logits by tokens is not the derivative of its "
        "value, by finite differences. Values agree, and the gradient here is the derivative.",
    ),
    Reason(
        r"vespo(?!.*whole).*given=.*ratios|given=[^ ]*ratios(?![^ ]*whole).*vespo",
        rf"loss|output 0|{GRADIENTS}|with a",
        "VESPO of Liger-Kernel multiplies the sampler's ratios of padding into the weight of an "
        "answer. Here padding is masked. Without padding they agree.",
    ),
    Reason(
        r"grpo delta=1.1", r"aux \d",
        "The share of clipped tokens counts ratios after `delta` has bounded them, as TRL does. "
        "Liger-Kernel counts them before, which differs where `delta` is below "
        "`1 + epsilon_high`. Loss and gradients agree.",
    ),
    Reason(
        r"(triton_grpo_loss|slope) .*delta=1.1", rf"{GRADIENTS}|with a|is the gradient|output 2",
        "With `delta` below `1 + eps_high`, the gradient of Liger-Kernel's GRPO of logits is not "
        "the derivative of its value, by finite differences. Values agree, and the gradient here "
        "is the derivative.",
    ),
    Reason(
        r"rope of complex numbers, angles of a batch", rf"output \d|{GRADIENTS}",
        "Every row of a batch is turned by its own angles. Liger-Kernel takes those of the first "
        "row for all.",
    ),
    Reason(
        r"teacher classes=", ".",
        "Of two vocabularies the common classes are compared. Liger-Kernel pads the student's "
        "logits with zeros, which takes part in the softmax, and raises where the teacher has "
        "fewer classes.",
    ),
    Reason(
        r"cosinesimilarity temperature=\S+ beta=0.0 weight_hard_loss=0.0", "error",
        "A loss whose factors are all 0 is refused.",
    ),
    Reason(
        r": (jsd|cosinesimilarity|functional (jsd|cosine)|base of distillation)",
        r"aux with a gradient",
        "The soft and the hard term that are returned beside the loss have no gradient. Values and "
        "the loss's gradients agree.",
    ),
    Reason(
        r"cross_entropy .*return_|triton_grpo_loss", r"with a gradient",
        "What is returned beside the loss (z-loss, accuracy, divergence, clipping) is detached. In "
        "Liger-Kernel it hangs in the graph, and its backward leaves it out.",
    ),
    Reason(
        r"scaled_cross_entropy .*return_entropy=True", r"output 1",
        "The entropy is fp32. Liger-Kernel's form without CuTe rounds it to the input's dtype.",
    ),
    Reason(
        r": scaled_cross_entropy ", r"error",
        "Runs on Hopper as anywhere. Liger-Kernel's form for Hopper needs the CuTe DSL.",
    ),
    Reason(
        r": (fused_moe|mhc coefficients|neighborhood_attention|model mixtral)",
        rf"output \d|{GRADIENTS}|gradient of",
        "In fp32, products are exact: a GPU and a CPU give the same here. Kernels of Liger-Kernel "
        "round their inputs to TF32 on a GPU, Triton's default for `tl.dot`.",
    ),
    Reason(
        r"multi_token_attention sparse=True", r"error",
        "16 bits are served. Liger-Kernel takes fp32 only.",
    ),
    Reason(
        r"choosing: softmax impl=(cutile|pytorch)", r"error",
        "`pytorch` is the reference, which every operator has. What has no backend here, such as "
        "`cutile`, warns and falls back, and raises with `LIGER_KERNEL_STRICT=1`.",
    ),
    Reason(
        r"norms(, fp16)?: dyt", r"error",
        "Runs on a CPU. Liger-Kernel needs to know the processors of a GPU.",
    ),
)  # fmt: skip
"""The first that fits counts."""

KEPT = {
    "Gradients of the modulated RMSNorm in bf16": "summed in fp32. Liger-Kernel rounds between "
    "steps.",
    "Targets outside of the vocabulary": "raise an error that is both IndexError and "
    "AssertionError; not in a graph that is compiled or captured, where such a row has a NaN loss.",
    '`casting_mode="none"`': "statistics are fp32, as in `llama`. Liger-Kernel takes the dtype of "
    "the input.",
    "Memory of cross entropy": "`LigerCrossEntropyLoss` and `liger_cross_entropy` write nothing "
    "over the logits, because trainers read them after the loss. "
    "`LigerCrossEntropyFunction.apply` may, where an operation made the logits.",
    "bf16 logits in distillation": "softmax in fp32. Liger-Kernel computes it in bf16.",
    "Overwritten inputs": "`swiglu`, `geglu` and `rope` write nothing over their inputs, so that a "
    "tensor can be used twice.",
    "`logits` of a training step with labels": "[lazy](logits.md), and there. Liger-Kernel returns "
    "None unless `skip_logits=False`.",
    "`LigerLayerNorm(bias=True)`, `LigerGroupNorm(bias=True)`": "the bias starts at zero. "
    "Liger-Kernel draws it at random.",
    "3-D logits": "accepted by cross entropy and JSD. An odd number of rows is refused in losses "
    "of pairs.",
    "KTO with `kl` of shape (B,)": "one number per answer. Liger-Kernel broadcasts it over the "
    "chunk.",
    "Averages over an answer without tokens": "0. Liger-Kernel returns NaN.",
    "Strides of the results of `rope`": "those of the inputs.",
    "A missing reference": "raises ValueError with the missing arguments, also where Liger-Kernel "
    "fails inside.",
    "`chunk_forward` of the base classes, logits in a loss of pairs": "not served: logits of all "
    "rows are never held.",
    "A subclass of `LigerFusedLinearDPOFunction` and the like with a loss of its own": "raises "
    "TypeError when the class is made. Derive from the base class.",
}
"""Differences that the cases do not cover, with what holds here."""
