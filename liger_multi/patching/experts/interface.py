"""``experts_implementation="liger_multi"``: the experts operator in transformers' own interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from liger_multi.errors import ConfigurationError
from liger_multi.patching.evidence.signature import holds, watched_code
from liger_multi.patching.experts.find import experts_kind
from liger_multi.patching.experts.fused import ExpertsKind, apply_experts, is_probed_call
from liger_multi.patching.swap import unpatched_class

NAME = "liger_multi"


_known: dict[type, list[tuple[ExpertsKind, Callable[[], bool]]]] = {}
"""What the probe found for instances of a class, and whether the class is as it was then."""


def _kind_at_a_call(module: nn.Module) -> ExpertsKind | str:
    """As :func:`experts_kind`, which would take ten times as long as the rest of a call."""
    own = unpatched_class(module)
    bias = module._parameters.get("down_proj_bias") is not None
    known = _known.get(own, [])
    for spec, unchanged in known:
        if spec.bias == bias and unchanged() and holds(module, spec.signature):
            return spec
    verdict = experts_kind(module)
    if isinstance(verdict, ExpertsKind):
        kept = [entry for entry in known if entry[0] != verdict and entry[1]()]
        _known[own] = [*kept, (verdict, watched_code(own, verdict.signature))]
    return verdict


def implementation(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What ``experts_implementation`` calls; gates of other kinds go to the grouped GEMMs."""
    spec = _kind_at_a_call(module)
    if isinstance(spec, ExpertsKind) and is_probed_call(module, spec, hidden_states):
        return apply_experts(module, spec, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import grouped_mm_experts_forward

    output = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return cast(Tensor, output)


def register_experts(name: str = NAME) -> None:
    """Make ``experts_implementation=name`` this library's operator, for all models.

    Models that do not ask for the name are not affected. Registering twice is registering once.

    Raises:
        ConfigurationError: Somebody else has registered the name, or models of this transformers
            take its own names only (before 5.7); ``patch`` works there.
    """
    from packaging.version import parse
    from transformers import __version__
    from transformers.integrations.moe import ExpertsInterface

    if parse(__version__) < parse("5.7"):
        raise ConfigurationError(
            f"register_experts needs transformers >= 5.7, this is {__version__}, whose models take "
            "no names but its own; patch(model) runs the same operator"
        )
    there = ExpertsInterface._global_mapping.get(name)
    if there is not None and there is not implementation:
        raise ConfigurationError(
            f"register_experts: transformers has another {name!r}, {there!r}; register under a "
            "name of your own"
        )
    ExpertsInterface.register(name, implementation)


def unregister_experts(name: str = NAME) -> None:
    """Take ``name`` out of transformers again; models that still ask for it fail with its name."""
    from transformers.integrations.moe import ExpertsInterface

    if ExpertsInterface._global_mapping.get(name) is implementation:
        del ExpertsInterface._global_mapping[name]
