"""Where every name of the ``liger_kernel`` tree comes from; plain data."""

from __future__ import annotations

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
_MODELS = "_apply_liger_kernel _apply_liger_kernel_to_instance MODEL_TYPE_TO_APPLY_LIGER_FN"
_AUTO = "AutoLigerKernelForCausalLM"

_FILES: dict[str, tuple[str, str]] = {
    "utils": ("helpers", "PEFT_AVAILABLE infer_device is_npu_available is_peft_available"),
    "ops": ("", ""),
    "ops.utils": (
        "helpers",
        "calculate_settings compare_version ensure_contiguous torch_to_triton_dtype",
    ),
    "ops.fused_linear_cross_entropy": (
        "helpers",
        "fused_linear_cross_entropy_forward fused_linear_cross_entropy_backward",
    ),
    "ops.grpo_loss": ("functional", "fused_selective_log_softmax"),
    "ops.backends": ("", ""),
    "ops.backends.registry": ("helpers", "IMPL_REGISTRY"),
    "transformers.functional": ("functional", f"{FUNCTIONS} CrossEntropyOutput"),
    "transformers.rope": ("functional", "liger_rotary_pos_emb liger_rotary_pos_emb_vision"),
    "transformers.qwen2vl_mrope": ("functional", "liger_multimodal_rotary_pos_emb"),
    "transformers.llama4_rope": ("functional", "liger_llama4_text_rotary_pos_emb"),
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
    "transformers.model": ("", ""),
    "transformers.model.loss_utils": ("losses", "LigerForCausalLMLoss"),
    "transformers.monkey_patch": ("models", _MODELS),
    "transformers.auto_model": ("models", _AUTO),
    "transformers.fsdp": ("helpers", "_FSDPForwardRedirection"),
    "transformers.trainer": ("", ""),
    "transformers.trainer.orpo_trainer": ("helpers", "_FSDPForwardRedirection"),
    "chunked_loss": ("chunked", CHUNKED),
    "chunked_loss.dpo_loss": ("chunked", "LigerFusedLinearDPOLoss"),
    "chunked_loss.orpo_loss": ("chunked", "LigerFusedLinearORPOLoss"),
    "chunked_loss.cpo_loss": ("chunked", "LigerFusedLinearCPOLoss"),
    "chunked_loss.simpo_loss": ("chunked", "LigerFusedLinearSimPOLoss"),
    "chunked_loss.kto_loss": ("chunked", "LigerFusedLinearKTOLoss"),
    "chunked_loss.grpo_loss": ("chunked", "LigerFusedLinearGRPOLoss"),
    "chunked_loss.jsd_loss": ("chunked", "LigerFusedLinearJSDLoss"),
    "chunked_loss.fused_linear_distillation": ("chunked", "LigerFusedLinearDistillationBase"),
}
_CLASSES = "modules losses"
_TOP = [
    *((home, names) for home, names in _FILES.values() if home in _CLASSES.split()),
    ("functional", _ROPES),
    ("models", f"{_MODELS} {_AUTO}"),
]


def _table() -> dict[str, dict[str, str]]:
    """Submodule to name to the module that has it."""
    made = {path: dict.fromkeys(names.split(), home) for path, (home, names) in _FILES.items()}
    made[""] = {}
    made["transformers"] = {name: home for home, names in _TOP for name in names.split()}
    return made


TREE = _table()
"""Submodule below ``liger_kernel`` to its names, each with the module here that defines it."""

DYNAMIC = {"transformers": "models", "transformers.monkey_patch": "models"}
"""Submodules that also have the functions ``apply_liger_kernel_to_<model>`` of a module here."""
