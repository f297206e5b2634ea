"""Cases of whole models: what their forward takes and returns once they are patched.

Everything that the function of a type patches runs: norms, rotary embeddings, MLPs and the loss.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ci.liger.precision import drawn

CLASSES = 37
SIZES = {
    "vocab_size": CLASSES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0,
    "attn_implementation": "eager",
}  # fmt: skip
TYPES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {}, "gemma2": {}, "phi3": {}, "olmo2": {}, "mixtral": {
        "num_local_experts": 4, "output_router_logits": True,
    },
}  # fmt: skip
Case = tuple[str, Callable[[], dict[str, Any]]]


def _model(kind: str) -> nn.Module:
    """A model with the same weights in every process."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    here = torch.get_default_device()
    with torch.device("cpu"):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**SIZES, **TYPES[kind])
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.to(here)


def _patched(kind: str) -> nn.Module:
    model = _model(kind)
    home: Any = importlib.import_module("liger_kernel.transformers")
    getattr(home, f"apply_liger_kernel_to_{kind}")(model=model)
    return model


def _assigned(kind: str) -> nn.Module:
    """A model with a forward of ``liger_kernel.transformers.model``."""
    model: Any = _model(kind)
    home: Any = importlib.import_module(f"liger_kernel.transformers.model.{kind}")
    model.forward = MethodType(home.lce_forward, model)
    return model  # type: ignore[no-any-return]


def _labels() -> tuple[Tensor, Tensor]:
    ids = drawn(torch.randint, CLASSES, (2, 9), generator=torch.Generator("cpu").manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = labels[1, 7] = -100
    return ids, labels


def _trained(made: Callable[[], Any], training: bool, options: dict[str, Any]) -> dict[str, Any]:
    """A forward and a backward; the logits, which are lazy here, are not compared."""
    model, (ids, labels) = made().train(training), _labels()
    given = {"labels": labels, **options}
    if given.pop("shifted", False):
        shift = nn.functional.pad(given.pop("labels"), (0, 1), value=-100)[:, 1:].contiguous()
        given["shift_labels"] = shift
    if given.pop("weighted", False):
        source = torch.Generator("cpu").manual_seed(2)
        given["ce_weight"] = drawn(torch.rand, CLASSES, generator=source) + 0.5
    found = model(ids, **given)
    found.loss.backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return {
        "class": type(found).__name__, "loss": found.loss, "aux": getattr(found, "aux_loss", None),
        "accuracy": found.token_accuracy, "predicted": found.predicted_tokens,
        **{f"gradient of {name}": gradient for name, gradient in named.items()},
    }  # fmt: skip


OPTIONS: tuple[dict[str, Any], ...] = (
    {"label_smoothing": 0.1}, {"lse_square_scale": 0.01}, {"use_token_scaling": True},
    {"weighted": True}, {"final_logit_softcapping": 0.5}, {"accum_dtype": torch.float32},
    {"num_items_in_batch": 7}, {"num_items_in_batch": 7, "use_token_scaling": True},
    {"shifted": True}, {"return_token_accuracy": True},
    {"return_token_accuracy": True, "return_predicted_tokens": True, "label_smoothing": 0.1},
)  # fmt: skip


def models() -> Iterator[Case]:
    """Models of some types, and the options of one of them."""
    for kind in TYPES:
        yield f"model {kind}", functools.partial(_trained, functools.partial(_patched, kind), True,
                                                 {"return_token_accuracy": True})  # fmt: skip
    for made in (_patched, _assigned):
        for o in OPTIONS:
            name = " ".join([f"model {made.__name__[1:]}", *(f"{k}={v}" for k, v in o.items())])
            yield name, functools.partial(_trained, functools.partial(made, "llama"), True, o)
    for skip in (None, True, False):
        o = {"label_smoothing": 0.1, "return_token_accuracy": True, "skip_logits": skip}
        llama = functools.partial(_patched, "llama")
        yield f"model evaluated, skip_logits={skip}", functools.partial(_trained, llama, False, o)


GROUPS = {"models": models}
