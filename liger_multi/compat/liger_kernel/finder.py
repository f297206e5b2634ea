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

# --- where every name comes from; plain data ---

HERE = "liger_multi.compat.liger_kernel"
VERSION = "0.8.5+liger.multi"
"""What is stood in for, with a local part that tells whose it is."""

FUNCTIONS = (
    "liger_cross_entropy liger_dyt liger_fused_add_rms_norm liger_fused_linear_cross_entropy "
    "liger_fused_linear_jsd liger_geglu liger_group_norm liger_jsd liger_kl_div liger_layer_norm "
    "liger_modulated_rms_norm liger_poly_norm liger_qwen2vl_mrope liger_relu_squared "
    "liger_rms_norm liger_rope liger_softmax liger_sparsemax liger_swiglu liger_tvd"
)
_ROPES = (
    "liger_rotary_pos_emb liger_rotary_pos_emb_vision liger_multimodal_rotary_pos_emb "
    "liger_llama4_text_rotary_pos_emb"
)
_LLAMA4_ROPES = (
    "apply_liger_llama4_rope_full liger_llama4_text_rotary_pos_emb "
    "liger_llama4_vision_rotary_pos_emb"
)
_NORMS = (
    "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 "
    "LigerRMSNormForGemma4 LigerRMSNormForGlm4 LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next"
)
_SWIGLU = (
    "LigerSwiGLUMLP LigerPhi3SwiGLUMLP LigerBlockSparseTop2MLP LigerFalconH1SwiGLUMLP "
    "LigerQwen3MoeSwiGLUMLP LigerHunyuanV1SwiGLUMLP LigerExperts"
)
_GEGLU = "LigerGEGLUMLP LigerGEGLUMLPForGemma4"
_PREFERENCES = "LigerFusedLinearDPOLoss LigerFusedLinearORPOLoss LigerFusedLinearCPOLoss "
CHUNKED = (
    f"{_PREFERENCES}LigerFusedLinearSimPOLoss LigerFusedLinearKTOLoss LigerFusedLinearGRPOLoss "
    "LigerFusedLinearJSDLoss LigerFusedLinearCosineSimilarityLoss"
)
_FUSED = "LigerFusedLinear"
_CHUNKED_FUNCTIONS = (
    "liger_fused_linear_orpo liger_fused_linear_dpo liger_fused_linear_jsd "
    "liger_fused_linear_cosine liger_fused_linear_cpo liger_fused_linear_simpo "
    "liger_fused_linear_kto liger_fused_linear_grpo"
)
_POLICY_FORMULAS = "k3_loss_fn get_gamma_weights sapo_loss_fn clip_coef_fn"
_CHUNKED_LOSSES = {
    "dpo": "DPO", "orpo": "ORPO", "cpo": "CPO", "simpo": "SimPO", "kto": "KTO", "jsd": "JSD",
    "cosine_similarity": "CosineSimilarity",
}  # fmt: skip
_CHUNKED_BASES = {
    "preference": "Preference", "unpaired_preference": "UnpairedPreference", "ppo": "PPO",
    "distillation": "Distillation",
}  # fmt: skip
_MODELS = "_apply_liger_kernel _apply_liger_kernel_to_instance MODEL_TYPE_TO_APPLY_LIGER_FN"
_BLOCKS = (
    "liger_attn_res liger_fused_linear_kl_div liger_fused_linear_scaled_cross_entropy_tp "
    "liger_fused_neighborhood_attention liger_mhc_coeffs liger_mhc_post_res liger_mhc_pre "
    "liger_mhc_apply liger_mhc_forward liger_multi_token_attention"
)
_NEIGHBORS = (
    "LigerFusedNeighborhoodAttention LigerFusedNeighborhoodAttentionConfig "
    "LigerFusedNeighborhoodAttentionLayer"
)
_MUSE = "LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered"
_PATCHES = (
    "_bind_method_to_module _patch_geglu_module _patch_layer_norm_module _patch_rms_norm_module "
    "_patch_swiglu_module"
)

_MEGATRON = "LigerMegatronCrossEntropy LigerMegatronRMSNorm LigerMegatronSwiGLU"
_TO_MEGATRON = "apply_liger_kernel_to_megatron"

_CHOICE = "available_impls get_impl set_impl available_backends get_backend set_backend"
_IMPLS = (
    f"{_CHOICE} BackendNotAvailableError ImplNotAvailableError LigerBackendFallbackWarning "
    "LigerImplFallbackWarning NoBackendAvailableError NoImplAvailableError all_backends all_impls "
    "clear_available_cache resolve_backend resolve_impl"
)
_NEW_IMPLS = "OpImpl register_impl register_op"
_REGISTERED = (
    "all_registered_ops declare_op_locations get_discovery_failures get_registered list_registered"
)
_CHOSEN = (
    "cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd geglu jsd kl_div "
    "layer_norm rms_norm rope softmax swiglu"
)
_UTILS = (
    "PEFT_AVAILABLE get_total_gpu_memory infer_comm_backend infer_device infer_device_arch "
    "is_npu_available is_peft_available transformers_version_dispatch"
)
_OPS_UTILS = (
    "calculate_settings compare_version device_context ensure_contiguous get_amp_custom_fwd_bwd "
    "get_npu_core_count is_hip set_large_grf_mode torch_to_triton_dtype"
)
_SETS = "IMPL_REGISTRY ImplInfo LIGER_KERNEL_IMPL_ENV register_impl select_impl"

_SUBMODULES: dict[str, tuple[str, str]] = {
    "utils": (
        "helpers",
        _UTILS,
    ),
    "ops.utils": (
        "helpers",
        _OPS_UTILS,
    ),
    "ops.configure": ("helpers", "FusedLinearCrossEntropyConfig MoEConfig configure"),
    "env_report": ("helpers", "print_env_report"),
    "triton": ("helpers", "apply_liger_triton_cache_manager"),
    "triton.monkey_patch": ("helpers", "apply_liger_triton_cache_manager"),
    "functional": ("op_functions", _CHOSEN),
    "backends": ("choosing", f"{_IMPLS} {_NEW_IMPLS}"),
    "backends.dispatch": ("choosing", f"{_IMPLS} emit_fallback_warning"),
    "backends.registry": ("choosing", f"{_NEW_IMPLS} {_REGISTERED}"),
    "backends.capability": ("choosing", "Capability PYTORCH_FALLBACK"),
    "ops.grpo_loss": ("functional", "fused_selective_log_softmax"),
    "transformers.grpo_loss": ("grpo", "triton_grpo_loss"),
    "ops.backends": ("helpers", _SETS),
    "ops.backends.registry": ("helpers", _SETS),
    "transformers.functional": ("functional", f"{FUNCTIONS} CrossEntropyOutput"),
    "transformers.rope": (
        "functional",
        "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
    ),
    "transformers.qwen2vl_mrope": ("functional", "liger_multimodal_rotary_pos_emb"),
    "transformers.llama4_rope": ("functional", _LLAMA4_ROPES),
    "transformers.rms_norm": ("modules", _NORMS),
    "transformers.fused_add_rms_norm": ("modules", "LigerFusedAddRMSNorm"),
    "transformers.modulated_rms_norm": ("modules", "LigerModulatedRMSNorm"),
    "transformers.layer_norm": ("modules", "LigerLayerNorm"),
    "transformers.group_norm": ("modules", "LigerGroupNorm"),
    "transformers.poly_norm": ("modules", "LigerPolyNorm"),
    "transformers.dyt": ("modules", "LigerDyT"),
    "transformers.softmax": ("modules", "LigerSoftmax"),
    "transformers.sparsemax": ("modules", "LigerSparsemax"),
    "transformers.relu_squared": ("modules", "LigerReLUSquared"),
    "transformers.swiglu": ("modules", _SWIGLU),
    "transformers.geglu": ("modules", _GEGLU),
    "transformers.tiled_mlp": ("modules", "LigerTiledSwiGLUMLP LigerTiledGEGLUMLP"),
    "transformers.cross_entropy": ("losses", "LigerCrossEntropyLoss"),
    "transformers.fused_linear_cross_entropy": ("losses", "LigerFusedLinearCrossEntropyLoss"),
    "transformers.fused_linear_jsd": ("losses", "LigerFusedLinearJSD"),
    "transformers.jsd": ("losses", "LigerJSD"),
    "transformers.kl_div": ("losses", "LigerKLDIVLoss"),
    "transformers.tvd": ("losses", "LigerTVDLoss"),
    "transformers.fused_ce_tvd": ("losses", "LigerFusedCETVDLoss"),
    "transformers.fused_linear_kl_div": ("losses", "LigerFusedLinearKLDivLoss"),
    "transformers.vocab_parallel_cross_entropy": ("losses", "LigerVocabParallelCrossEntropy"),
    "transformers.mlp": ("block_modules", "LigerFalconH1MLP LigerMLP"),
    "transformers.mhc": ("block_modules", "LigerMHC"),
    "transformers.multi_token_attention": ("block_modules", "LigerMultiTokenAttention"),
    "transformers.model": ("", ""),
    "transformers.model.output_classes": ("", ""),
    "transformers.model.loss_utils": (
        "losses",
        "LigerForCausalLMLoss fixed_fused_linear_cross_entropy unpack_cross_entropy_result",
    ),
    "transformers.monkey_patch": ("models", _MODELS),
    "transformers.auto_model": ("", ""),
    "transformers.trainer_integration": ("models", "_apply_liger_kernel"),
    "transformers.fsdp": ("helpers", "_FSDPForwardRedirection"),
    "megatron": ("megatron", f"{_MEGATRON} {_TO_MEGATRON}"),
    "megatron.rms_norm": ("megatron", "LigerMegatronRMSNorm"),
    "megatron.cross_entropy": ("megatron", "LigerMegatronCrossEntropy"),
    "megatron.swiglu": ("megatron", "LigerMegatronSwiGLU"),
    "megatron.monkey_patch": ("megatron", _TO_MEGATRON),
    "transformers.trainer": ("", ""),
    "transformers.trainer.orpo_trainer": ("helpers", "_FSDPForwardRedirection"),
    "chunked_loss": ("chunked", CHUNKED),
    "chunked_loss.functional": ("chunked", _CHUNKED_FUNCTIONS),
    **{
        f"chunked_loss.{module}_loss": ("chunked", f"{_FUSED}{loss}Loss {_FUSED}{loss}Function")
        for module, loss in _CHUNKED_LOSSES.items()
    },
    "chunked_loss.grpo_loss": (
        "chunked",
        f"{_FUSED}GRPOLoss {_FUSED}GRPOFunction {_POLICY_FORMULAS}",
    ),
    **{
        f"chunked_loss.fused_linear_{module}": ("chunked", f"{_FUSED}{base}Base")
        for module, base in _CHUNKED_BASES.items()
    },
}
_FUNCTION_CLASSES: dict[str, dict[str, str]] = {
    "norms": {
        "rms_norm": "LigerRMSNormFunction",
        "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
        "modulated_rms_norm": "LigerModulatedRMSNormFunction",
        "layer_norm": "LigerLayerNormFunction",
        "group_norm": "LigerGroupNormFunction",
        "poly_norm": "LigerPolyNormFunction",
        "dyt": "LigerDyTFunction",
    },
    "activations": {
        "swiglu": "LigerSiLUMulFunction LigerFusedGateUpSiLUMulFunction",
        "geglu": "LigerGELUMulFunction",
        "relu_squared": "LigerReLUSquaredFunction",
        "softmax": "LigerSoftmaxFunction",
        "sparsemax": "LigerSparsemaxFunction",
        "rope": "LigerRopeFunction",
        "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
        "llama4_rope": "LigerLlama4RopeFunction",
    },
    "losses": {
        "cross_entropy": "LigerCrossEntropyFunction",
        "jsd": "LigerJSDFunction",
        "kl_div": "LigerKLDivLossFunction",
        "tvd": "LigerTVDLossFunction",
        "fused_ce_tvd": "LigerFusedCETVDFunction",
        "vocab_parallel_cross_entropy": "LigerVocabParallelCEFunction validate_formula_and_mode",
    },
    "heads": {
        "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
        "fused_linear_jsd": "LigerFusedLinearJSDFunction",
        "fused_linear_kl_div": "LigerFusedLinearKLDivFunction",
        "fused_linear_scaled_cross_entropy": "LigerFusedLinearScaledCrossEntropyFunction "
        "LigerFusedLinearScaledCrossEntropyTPFunction",
    },
    "blocks": {
        "mlp": "LigerMLPFunction",
        "tiled_mlp": "LigerTiledMLPFunction apply_tiled_mlp",
        "fused_moe": "LigerFusedMoEFunction",
        "mhc": "LigerMHCCoeffsFunction LigerMHCPreFunction LigerMHCPostResFunction",
        "attn_res": "LigerAttnResFunction",
        "multi_token_attention": "LigerMultiTokenAttentionFunction",
        "fused_neighborhood_attention": "LigerFusedNeighborhoodAttentionFunction",
        "experimental.embedding": "LigerEmbeddingFunction",
    },
}
"""Module of :mod:`function_classes` to file of ``liger_kernel.ops`` to names; ``ops`` has all."""

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

_HALVES = "fused_linear_cross_entropy_forward fused_linear_cross_entropy_backward"
_CLASSES = "modules losses block_modules"
_TOP = [
    *((home, names) for home, names in _SUBMODULES.values() if home in _CLASSES.split()),
    ("functional", _ROPES),
    ("models", _MODELS),
]


def _sources() -> Iterator[tuple[str, str, str]]:
    """Submodule, the module here, and names of the first that the second has."""
    yield from ((path, home, names) for path, (home, names) in _SUBMODULES.items())
    yield from (("transformers", home, names) for home, names in _TOP)
    for home, files in _FUNCTION_CLASSES.items():
        for file, names in files.items():
            yield f"ops.{file}", f"function_classes.{home}", names
            yield "ops", f"function_classes.{home}", names
    for path in ("ops", "ops.fused_linear_cross_entropy"):
        yield path, "helpers", _HALVES
    yield "transformers.monkey_patch", "patches", _PATCHES
    yield "transformers.monkey_patch", "helpers", "PEFT_AVAILABLE"
    yield "transformers", "helpers", "is_transformers_available"
    for path in ("transformers.experimental", "transformers.experimental.embedding"):
        yield path, "block_modules", "LigerEmbedding"
    for path in ("transformers", "transformers.swiglu"):
        yield path, "block_modules", "LigerSwiGLUMLPForMuseGlimmer"
    for path in ("transformers", "transformers.rms_norm"):
        yield path, "block_modules", _MUSE
    yield "transformers", "functional", "liger_llama4_vision_rotary_pos_emb"
    yield "transformers.fused_neighborhood_attention", "block_modules", _NEIGHBORS
    for path in ("backends", "backends.dispatch"):
        yield path, "op_functions", "dispatch"
    yield "backends", "choosing", "Capability"
    for path in ("ops", "ops.grpo_loss"):
        yield path, "grpo", "GrpoLossFunction"
    yield "transformers.functional", "functional_blocks", _BLOCKS
    yield from ((path, "", "") for path in FORWARDS)


def _table() -> dict[str, dict[str, str]]:
    """Submodule to name to the module that has it."""
    made: dict[str, dict[str, str]] = {"": {}}
    for path, home, names in _sources():
        parts = path.split(".")
        for end in range(1, len(parts)):  # packages without names of their own
            made.setdefault(".".join(parts[:end]), {})
        made.setdefault(path, {}).update(dict.fromkeys(names.split(), home))
    return made


TREE = _table()
"""Submodule below ``liger_kernel`` to its names, each with the module here that defines it."""

DYNAMIC = {
    **dict.fromkeys(("transformers", "transformers.monkey_patch"), ("models", "")),
    **{path: ("forwards", names) for path, names in FORWARDS.items()},
    "transformers.model.output_classes": ("output_classes", ""),
}
"""Submodules that also have what ``functions(path, names)`` of a module here makes."""

_AUTO = {"AutoLigerKernelForCausalLM": "auto"}
_ORPO = {"LigerORPOTrainer": "orpo"}
_VERSIONS = dict.fromkeys(
    ("IS_TRANSFORMERS_V5_OR_LATER", "MIN_SUPPORTED_TRANSFORMERS_VERSION", "transformer_version"),
    "versions",
)
LAZY = {
    "": dict.fromkeys(_CHOICE.split(), "choosing"),
    "transformers": _AUTO,
    "transformers.auto_model": _AUTO,
    "transformers.trainer": _ORPO,
    "transformers.trainer.orpo_trainer": _ORPO,
    "transformers.monkey_patch": _VERSIONS,
}
"""Submodule to names that are looked up when they are asked for: they import transformers."""


# --- the finder ---

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
        for name, home in TREE[path].items():
            names[name] = getattr(importlib.import_module(f"{HERE}.{home}"), name)
        more = {}
        if path in DYNAMIC:
            home, made = DYNAMIC[path]
            more = importlib.import_module(f"{HERE}.{home}").functions(path, made)
            names.update(more)
        lazy = LAZY.get(path, {})
        if lazy:
            names["__getattr__"] = _looked_up(module, lazy)
        names["__all__"] = [*TREE[path], *more, *lazy]


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
        top, _, rest = fullname.partition(".")
        if top != NAME or rest not in TREE:
            return None
        package = not rest or any(other.startswith(f"{rest}.") for other in TREE)
        return ModuleSpec(fullname, _LOADER, origin=__file__, is_package=package)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        asked = getattr(context, "name", None)
        if asked is None or asked.replace("-", "_").lower() == NAME:
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
    """
    if installed():
        return
    real = sys.modules.get(NAME) or importlib.util.find_spec(NAME)
    if real is not None and not force:
        where = getattr(real, "__file__", None) or getattr(real, "origin", None)
        raise ImportError(
            f"{NAME} is installed ({where}); uninstall it (pip uninstall liger-kernel), or hide it "
            "in this process with install(force=True)"
        )
    _forget()
    sys.meta_path.insert(0, _FINDER)
    _look_again()
    if os.environ.get("LIGER_KERNEL_IMPL"):
        importlib.import_module(f"{HERE}.choosing").read_variables()


def uninstall() -> None:
    """Take the names away again, and stop patching model types that were patched through them.

    Patched models stay patched: :func:`liger_multi.unpatch` takes that back.
    """
    if not installed():
        return
    models = sys.modules.get(f"{HERE}.models")
    if models is not None:
        models.forget_types()
    choosing = sys.modules.get(f"{HERE}.choosing")
    if choosing is not None:
        choosing.set_impl(None)
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
    asked: Any = getattr(utils, "is_liger_kernel_available", None)
    if hasattr(asked, "cache_clear"):
        asked.cache_clear()
