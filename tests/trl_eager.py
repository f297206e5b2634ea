"""TRL's own losses on given hidden states: its trainers' methods as they are, on replicas."""

from collections import defaultdict
from types import SimpleNamespace

import torch

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Toy(torch.nn.Module):
    """A causal model whose hidden states are given; TRL adds its own head to it."""

    def __init__(self, hidden, weight, bias=None, temperature=1.0, softcap=None, scale=None):
        super().__init__()
        self.hidden = hidden
        self.others = []  # other inputs and what they give
        self.lm_head = torch.nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
        del self.lm_head.weight
        self.lm_head.weight = weight  # a plain leaf, so that gradients reach the test's tensors
        if bias is not None:
            del self.lm_head.bias
            self.lm_head.bias = bias
        text = SimpleNamespace(final_logit_softcapping=softcap, logit_scale=scale)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.is_gradient_checkpointing = False
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(self, temperature=temperature, outputs=OUTPUTS)

    def forward(self, *_, **__):
        return SimpleNamespace(logits=self.lm_head(self.hidden))

    def base_model(self, input_ids=None, **_):
        other = [h for ids, h in self.others if ids is input_ids]
        return SimpleNamespace(last_hidden_state=other[0] if other else self.hidden)

    def get_output_embeddings(self):
        return self.lm_head


class Accelerator:
    """One process."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def reduce(self, x, reduction="sum"):
        return x

    def pad_across_processes(self, x, **_):
        return x


def trainer(model, **attributes):
    """What a trainer's method reads of its trainer."""
    base = {
        "model": model,
        "accelerator": Accelerator(),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
    }
    return SimpleNamespace(**{**base, **attributes})


def logged(stub):
    """The metrics that a trainer logged."""
    (found,) = stub._metrics.values()
    return {key: values[-1] for key, values in found.items()}
