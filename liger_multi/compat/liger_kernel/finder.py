"""``import liger_kernel`` without such a package: a finder on ``sys.meta_path``."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = "liger_multi.compat.liger_kernel"
VERSION = "0.8.5+liger.multi"
"""What is stood in for, with a local part that tells whose it is."""
NAME = "liger_kernel"


_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {VERSION}\n"
    "Summary: import names of Liger-Kernel, served by liger_multi\n",
    "top_level.txt": f"{NAME}\n",
}


class _Metadata(Distribution):
    """What ``importlib.metadata`` knows of the replica; no file of it is on disk."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Loader(Loader):
    """Fills a module with names from this package."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__.partition(".")[2]
        module.__doc__ = "Replica of liger_multi; see liger_multi.compat.liger_kernel."
        names = vars(module)
        names["__file__"], names["logger"] = __file__, logging.getLogger(module.__name__)
        if not path:
            names["__version__"] = VERSION
        for name in TREE[path]:  # a function of a module's name goes before the module
            if path and f"{path}.{name}" in TREE:
                importlib.import_module(f"{module.__name__}.{name}")
        for name, module_name in TREE[path].items():
            names[name] = getattr(importlib.import_module(f"{HERE}.{module_name}"), name)
        generated = {}
        if path in DYNAMIC:
            module_name, contents = DYNAMIC[path]
            generated = importlib.import_module(f"{HERE}.{module_name}").functions(path, contents)
            names.update(generated)
        lazy = LAZY.get(path, {})
        if lazy:
            names["__getattr__"] = _looked_up(module, lazy)
        names["__all__"] = [*TREE[path], *generated, *lazy]


def _looked_up(module: ModuleType, lazy: dict[str, str]) -> Callable[[str], Any]:
    """The module's ``__getattr__``; the package itself also finds its submodules."""
    path = module.__name__.partition(".")[2]

    def get(name: str) -> Any:
        if not path and name in TREE:
            return importlib.import_module(f"{NAME}.{name}")
        if name not in lazy:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{HERE}.{lazy[name]}"), name)
        vars(module)[name] = value
        return value

    return get


class _Finder(MetaPathFinder):
    """Finds the tree, and what ``importlib.metadata`` says of it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, submodule = fullname.partition(".")
        if top != NAME or submodule not in TREE:
            return None
        package = not submodule or any(
            path_of_child.startswith(f"{submodule}.") for path_of_child in TREE
        )
        return ModuleSpec(fullname, _LOADER, origin=__file__, is_package=package)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        name = getattr(context, "name", None)
        if name is None or name.replace("-", "_").lower() == NAME:
            yield _Metadata()


_LOADER = _Loader()
_FINDER = _Finder()


def installed() -> bool:
    """Whether ``import liger_kernel`` gets this library's names now."""
    return _FINDER in sys.meta_path


def install(*, force: bool = False) -> None:
    """Serve ``import liger_kernel`` and its submodules in this process, from now on.

    ``LIGER_KERNEL_IMPL`` is read: ``pytorch`` configures the reference, and a name of Liger-Kernel
    that this library has no backend for warns.

    Args:
        force: Also where the real package is installed, which is then hidden until
            :func:`uninstall`; objects that somebody imported of it before stay what they are.

    Raises:
        ImportError: The real package is installed, or imported already, and ``force`` is False.
        ImplNotAvailableError: ``LIGER_KERNEL_IMPL`` under ``LIGER_KERNEL_STRICT=1`` is such a name.
    """
    if installed():
        return
    real_package = sys.modules.get(NAME) or importlib.util.find_spec(NAME)
    if real_package is not None and not force:
        location = getattr(real_package, "__file__", None) or getattr(real_package, "origin", None)
        raise ImportError(
            f"{NAME} is installed ({location}); uninstall it (pip uninstall liger-kernel), or hide "
            "it in this process with install(force=True)"
        )
    if os.environ.get("LIGER_KERNEL_IMPL"):
        importlib.import_module(f"{HERE}.op_functions").read_variables()
    _forget()
    sys.meta_path.insert(0, _FINDER)
    _look_again()


def uninstall() -> None:
    """Take the names away again, and stop patching model types that were patched through them.

    Patched models stay patched: :func:`liger_multi.unpatch` takes that back.
    """
    if not installed():
        return
    models = sys.modules.get(f"{HERE}.models")
    if models is not None:
        models.forget_types()
    op_functions = sys.modules.get(f"{HERE}.op_functions")
    if op_functions is not None:
        op_functions.set_impl(None)
    megatron = sys.modules.get(f"{HERE}.megatron")
    if megatron is not None:
        megatron.restore()
    sys.meta_path.remove(_FINDER)
    _forget()
    _look_again()


def _forget() -> None:
    for name in [n for n in sys.modules if n == NAME or n.startswith(f"{NAME}.")]:
        del sys.modules[name]


def _look_again() -> None:
    """Let transformers ask again whether the package is there."""
    importlib.invalidate_caches()
    utils = sys.modules.get("transformers.utils.import_utils")
    function: Any = getattr(utils, "is_liger_kernel_available", None)
    if hasattr(function, "cache_clear"):
        function.cache_clear()


# --- the table of names ---


_CHOICE = "available_impls get_impl set_impl available_backends get_backend set_backend"
_IMPLS = (
    f"{_CHOICE} BackendNotAvailableError ImplNotAvailableError LigerBackendFallbackWarning "
    "LigerImplFallbackWarning NoBackendAvailableError NoImplAvailableError all_backends all_impls "
    "clear_available_cache resolve_backend resolve_impl"
)
_NEW_IMPLS = "OpImpl register_impl register_op"
_MODELS = "_apply_liger_kernel _apply_liger_kernel_to_instance MODEL_TYPE_TO_APPLY_LIGER_FN"
_ROPES = (
    "liger_rotary_pos_emb liger_rotary_pos_emb_vision liger_multimodal_rotary_pos_emb "
    "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb"
)

HOMES: dict[str, dict[str, str]] = {
    "modules": {
        "transformers.rms_norm": (
            "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 "
            "LigerRMSNormForGemma4 LigerRMSNormForGlm4 LigerRMSNormForOlmo2 "
            "LigerRMSNormForQwen3Next LigerRMSNormForMuseGlimmer "
            "LigerRMSNormForMuseGlimmerTextCentered"
        ),
        "transformers.fused_add_rms_norm": "LigerFusedAddRMSNorm",
        "transformers.modulated_rms_norm": "LigerModulatedRMSNorm",
        "transformers.layer_norm": "LigerLayerNorm",
        "transformers.group_norm": "LigerGroupNorm",
        "transformers.poly_norm": "LigerPolyNorm",
        "transformers.dyt": "LigerDyT",
        "transformers.softmax": "LigerSoftmax",
        "transformers.sparsemax": "LigerSparsemax",
        "transformers.relu_squared": "LigerReLUSquared",
        "transformers.swiglu": (
            "LigerSwiGLUMLP LigerPhi3SwiGLUMLP LigerBlockSparseTop2MLP LigerFalconH1SwiGLUMLP "
            "LigerQwen3MoeSwiGLUMLP LigerHunyuanV1SwiGLUMLP LigerExperts "
            "LigerSwiGLUMLPForMuseGlimmer"
        ),
        "transformers.geglu": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
        "transformers.tiled_mlp": "LigerTiledSwiGLUMLP LigerTiledGEGLUMLP",
        "transformers.mlp": "LigerFalconH1MLP LigerMLP",
        "transformers.mhc": "LigerMHC",
        "transformers.multi_token_attention": "LigerMultiTokenAttention",
        "transformers.fused_neighborhood_attention": (
            "LigerFusedNeighborhoodAttention LigerFusedNeighborhoodAttentionConfig "
            "LigerFusedNeighborhoodAttentionLayer"
        ),
        "transformers.experimental": "LigerEmbedding",
        "transformers.experimental.embedding": "LigerEmbedding",
        "transformers.cross_entropy": "LigerCrossEntropyLoss",
        "transformers.fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyLoss",
        "transformers.fused_linear_jsd": "LigerFusedLinearJSD",
        "transformers.jsd": "LigerJSD",
        "transformers.kl_div": "LigerKLDIVLoss",
        "transformers.tvd": "LigerTVDLoss",
        "transformers.fused_ce_tvd": "LigerFusedCETVDLoss",
        "transformers.fused_linear_kl_div": "LigerFusedLinearKLDivLoss",
        "transformers.vocab_parallel_cross_entropy": "LigerVocabParallelCrossEntropy",
        "transformers.model.loss_utils": "LigerForCausalLMLoss fixed_fused_linear_cross_entropy",
    },
    "signatures": {
        "transformers.functional": "CrossEntropyOutput",
        "transformers.model.loss_utils": "unpack_cross_entropy_result",
    },
    "functional": {
        "transformers.functional": (
            "liger_attn_res liger_cross_entropy liger_dyt liger_fused_add_rms_norm "
            "liger_fused_linear_cross_entropy liger_fused_linear_jsd liger_fused_linear_kl_div "
            "liger_fused_linear_scaled_cross_entropy_tp liger_fused_neighborhood_attention "
            "liger_geglu liger_group_norm liger_jsd liger_kl_div liger_layer_norm liger_mhc_apply "
            "liger_mhc_coeffs liger_mhc_forward liger_mhc_post_res liger_mhc_pre "
            "liger_modulated_rms_norm liger_multi_token_attention liger_poly_norm "
            "liger_qwen2vl_mrope liger_relu_squared liger_rms_norm liger_rope liger_softmax "
            "liger_sparsemax liger_swiglu liger_tvd"
        ),
        "transformers": _ROPES,
        "transformers.rope": (
            "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision"
        ),
        "transformers.qwen2vl_mrope": "liger_multimodal_rotary_pos_emb",
        "transformers.llama4_rope": (
            "apply_liger_llama4_rope_full liger_llama4_text_rotary_pos_emb "
            "liger_llama4_vision_rotary_pos_emb"
        ),
        "ops.grpo_loss": "fused_selective_log_softmax",
    },
    "op_functions": {
        "functional": (
            "cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd geglu "
            "jsd kl_div layer_norm rms_norm rope softmax swiglu"
        ),
        "backends": f"dispatch {_IMPLS} {_NEW_IMPLS} Capability",
        "backends.dispatch": f"dispatch {_IMPLS} emit_fallback_warning",
        "backends.registry": (
            f"{_NEW_IMPLS} all_registered_ops declare_op_locations get_discovery_failures "
            "get_registered list_registered"
        ),
        "backends.capability": "Capability PYTORCH_FALLBACK",
        "ops": "apply_tiled_mlp",
        "ops.tiled_mlp": "apply_tiled_mlp",
        "ops.vocab_parallel_cross_entropy": "validate_formula_and_mode",
    },
    "preference": {
        "chunked_loss": (
            "LigerFusedLinearDPOLoss LigerFusedLinearORPOLoss LigerFusedLinearCPOLoss "
            "LigerFusedLinearSimPOLoss LigerFusedLinearKTOLoss LigerFusedLinearJSDLoss "
            "LigerFusedLinearCosineSimilarityLoss"
        ),
        "chunked_loss.cosine_similarity_loss": (
            "LigerFusedLinearCosineSimilarityLoss LigerFusedLinearCosineSimilarityFunction"
        ),
        "chunked_loss.grpo_loss": "LigerFusedLinearGRPOFunction",
        **{
            f"chunked_loss.{name.lower()}_loss": (
                f"LigerFusedLinear{name}Loss LigerFusedLinear{name}Function"
            )
            for name in ("DPO", "ORPO", "CPO", "SimPO", "KTO", "JSD")
        },
        "chunked_loss.functional": (
            "liger_fused_linear_orpo liger_fused_linear_dpo liger_fused_linear_jsd "
            "liger_fused_linear_cosine liger_fused_linear_cpo liger_fused_linear_simpo "
            "liger_fused_linear_kto liger_fused_linear_grpo"
        ),
    },
    "policy": {
        "ops": "GrpoLossFunction",
        "ops.grpo_loss": "GrpoLossFunction",
        "transformers.grpo_loss": "triton_grpo_loss _reduce_grpo_loss",
        "chunked_loss": "LigerFusedLinearGRPOLoss",
        "chunked_loss.grpo_loss": (
            "LigerFusedLinearGRPOLoss k3_loss_fn get_gamma_weights sapo_loss_fn clip_coef_fn"
        ),
    },
    "bases": {
        "chunked_loss.fused_linear_preference": "LigerFusedLinearPreferenceBase",
        "chunked_loss.fused_linear_unpaired_preference": "LigerFusedLinearUnpairedPreferenceBase",
        "chunked_loss.fused_linear_ppo": "LigerFusedLinearPPOBase",
        "chunked_loss.fused_linear_distillation": "LigerFusedLinearDistillationBase",
    },
    "models": {
        "transformers": _MODELS,
        "transformers.monkey_patch": _MODELS,
        "transformers.trainer_integration": "_apply_liger_kernel",
    },
    "model_forward": {
        "transformers.monkey_patch": (
            "_bind_method_to_module _patch_geglu_module _patch_layer_norm_module "
            "_patch_rms_norm_module _patch_swiglu_module"
        ),
    },
    "megatron": {
        "megatron": (
            "LigerMegatronCrossEntropy LigerMegatronRMSNorm LigerMegatronSwiGLU "
            "apply_liger_kernel_to_megatron"
        ),
        "megatron.rms_norm": "LigerMegatronRMSNorm",
        "megatron.cross_entropy": "LigerMegatronCrossEntropy",
        "megatron.swiglu": "LigerMegatronSwiGLU",
        "megatron.monkey_patch": "apply_liger_kernel_to_megatron",
    },
    "helpers": {
        "utils": (
            "PEFT_AVAILABLE get_total_gpu_memory infer_comm_backend infer_device "
            "infer_device_arch is_npu_available is_peft_available transformers_version_dispatch "
            "_infer_nvidia_arch _infer_amd_arch _infer_xpu_arch _infer_npu_arch"
        ),
        "ops.utils": (
            "calculate_settings compare_version ensure_contiguous is_hip torch_to_triton_dtype"
        ),
        "ops.backends": "IMPL_REGISTRY",
        "ops.backends.registry": "IMPL_REGISTRY",
        "env_report": "print_env_report",
        "triton": "apply_liger_triton_cache_manager",
        "triton.monkey_patch": "apply_liger_triton_cache_manager",
        "transformers": "is_transformers_available",
        "transformers.monkey_patch": "PEFT_AVAILABLE",
        "transformers.fsdp": "_FSDPForwardRedirection",
        "transformers.trainer.orpo_trainer": "_FSDPForwardRedirection",
    },
    "": dict.fromkeys(
        ("transformers.auto_model", "transformers.model.output_classes", "transformers.trainer"), ""
    ),
}
"""Module here to submodule of ``liger_kernel`` to the names that it has of that module."""

OF_OPS = (
    "rms_norm:RMSNorm fused_add_rms_norm:FusedAddRMSNorm modulated_rms_norm:ModulatedRMSNorm "
    "layer_norm:LayerNorm group_norm:GroupNorm poly_norm:PolyNorm dyt:DyT swiglu:SiLUMul "
    "swiglu:FusedGateUpSiLUMul geglu:GELUMul relu_squared:ReLUSquared softmax:Softmax "
    "sparsemax:Sparsemax rope:Rope qwen2vl_mrope:Qwen2VLMRope llama4_rope:Llama4Rope "
    "cross_entropy:CrossEntropy jsd:JSD kl_div:KLDivLoss tvd:TVDLoss fused_ce_tvd:FusedCETVD "
    "vocab_parallel_cross_entropy:VocabParallelCE "
    "fused_linear_cross_entropy:FusedLinearCrossEntropy fused_linear_jsd:FusedLinearJSD "
    "fused_linear_kl_div:FusedLinearKLDiv "
    "fused_linear_scaled_cross_entropy:FusedLinearScaledCrossEntropy "
    "fused_linear_scaled_cross_entropy:FusedLinearScaledCrossEntropyTP mlp:MLP tiled_mlp:TiledMLP "
    "fused_moe:FusedMoE mhc:MHCCoeffs mhc:MHCPre mhc:MHCPostRes attn_res:AttnRes "
    "multi_token_attention:MultiTokenAttention "
    "fused_neighborhood_attention:FusedNeighborhoodAttention experimental.embedding:Embedding"
)
"""File of ``liger_kernel.ops`` and its class, without ``Liger`` and ``Function``."""

EXPORTED = "modules"
"""What submodules of ``transformers`` have of this module here, ``transformers`` has too."""

_CAUSAL = (
    "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 glm4 glm4v glm4v_moe "
    "gpt_oss hunyuan_v1 internvl llama llama4 llava ministral mistral mixtral mllama muse_glimmer "
    "nemotron olmo2 olmo3 paligemma phi3 qwen2 qwen2_5_vl qwen2_vl qwen3 qwen3_moe qwen3_next "
    "qwen3_vl qwen3_vl_moe smollm3 smolvlm"
)
FORWARDS = {
    f"transformers.model.{file}": names
    for file, names in {
        **dict.fromkeys(_CAUSAL.split(), "lce_forward"),
        **dict.fromkeys(("llama", "smollm3"), "lce_forward lce_maybe_trainable_lm_head"),
        "pixtral": "",
        **dict.fromkeys(("gemma3", "gemma4"), "causal_forward multimodal_forward"),
        "qwen3_5": "lce_forward lce_forward_for_multimodal",
        "qwen3_5_moe": "lce_forward lce_forward_conditional_generation",
    }.items()
}
"""Submodule of a model to the names of its forwards."""


def _sources() -> Iterator[tuple[str, str, str]]:
    """Submodule, the module here, and names of the first that the second has."""
    modules = {path for paths in HOMES.values() for path in paths}
    for module_name, paths in HOMES.items():
        for path, names in paths.items():
            yield path, module_name, names
            if module_name == EXPORTED:
                yield "transformers", module_name, names
    for file, _, name in (entry.partition(":") for entry in OF_OPS.split()):
        for path in (f"ops.{file}", "ops", f"transformers.{file}"):
            if not path.startswith("transformers.") or path in modules:
                yield path, "op_functions", f"Liger{name}Function"
    yield from ((path, "", "") for path in FORWARDS)


def _table() -> dict[str, dict[str, str]]:
    """Submodule to name to the module that has it."""
    table: dict[str, dict[str, str]] = {"": {}}
    for path, module_name, names in _sources():
        parts = path.split(".")
        for end in range(1, len(parts)):  # packages without names of their own
            table.setdefault(".".join(parts[:end]), {})
        table.setdefault(path, {}).update(dict.fromkeys(names.split(), module_name))
    return table


TREE = _table()
"""Submodule below ``liger_kernel`` to its names, each with the module here that defines it."""

DYNAMIC = {
    **dict.fromkeys(("transformers", "transformers.monkey_patch"), ("models", "")),
    **{path: ("model_forward", names) for path, names in FORWARDS.items()},
    "transformers.model.output_classes": ("signatures", ""),
}
"""Submodules that also have what ``functions(path, names)`` of a module here makes."""

_AUTO = {"AutoLigerKernelForCausalLM": "models"}
_ORPO = {"LigerORPOTrainer": "models"}
_VERSIONS = "IS_TRANSFORMERS_V5_OR_LATER MIN_SUPPORTED_TRANSFORMERS_VERSION transformer_version"
LAZY = {
    "": dict.fromkeys(_CHOICE.split(), "op_functions"),
    "transformers": _AUTO,
    "transformers.auto_model": _AUTO,
    "transformers.trainer": _ORPO,
    "transformers.trainer.orpo_trainer": _ORPO,
    "transformers.monkey_patch": dict.fromkeys(_VERSIONS.split(), "models"),
}
"""Submodule to names that are looked up when they are asked for: they import transformers."""
