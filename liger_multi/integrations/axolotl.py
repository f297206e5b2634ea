"""A plugin for axolotl: ``plugins: [liger_multi.integrations.axolotl.LigerMultiPlugin]``.

Without the key ``liger_multi`` it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from liger_multi.errors import PatchError
from liger_multi.patching import patch

_ADAPTERS = {"lora_mlp_kernel": "swiglu", "lora_qkv_kernel": "lora", "lora_o_kernel": "lora"}


class LigerMultiArgs(BaseModel):
    """The key in axolotl's configuration.

    Attributes:
        liger_multi: True, or operators and their options, as for :func:`liger_multi.patch`.
    """

    liger_multi: bool | dict[str, Any] | None = None


class LigerMultiPlugin(BasePlugin):
    """Patch the model when it is loaded, before adapters are added."""

    def get_input_args(self) -> str:
        """Where the configuration's key is declared."""
        return f"{__name__}.LigerMultiArgs"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Patch.

        Raises:
            PatchError: An unknown operator or option, or keys that would replace the same modules.
        """
        setting = cfg.get("liger_multi")
        if not setting:
            return
        options = _plain(setting) if isinstance(setting, Mapping) else {}
        conflicts = [*_conflicts(cfg, options)]
        if conflicts:
            raise PatchError(
                f"liger_multi stands beside {', '.join(conflicts)}, which replaces the same "
                "modules; leave one of them out"
            )
        patch(model, **options)


def _plain(value: Any) -> Any:
    """Mappings of the configuration as dicts."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _conflicts(cfg: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are on and replace what the options replace."""
    for name in cfg:
        if name.startswith("liger_") and name != "liger_multi" and cfg[name]:
            yield f"{name}: {cfg[name]}"
    for name, op in _ADAPTERS.items():
        if cfg.get(name) and options.get(op) is not False:
            yield f"{name}: true"
    if cfg.get("cut_cross_entropy") and options.get("fused_linear_cross_entropy") is not False:
        yield "cut_cross_entropy: true"
