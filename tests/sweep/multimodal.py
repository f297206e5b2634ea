"""What models take beside text: pictures, video and sound, so that every tower of a model runs.

A row of ``MAKERS`` says what a model type takes, and what its configuration needs beside the small
numbers of :mod:`tests.sweep.cases`. How many placeholders a text has, the model says itself: it is
asked for the features of its inputs, of which every row is one token.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PATCH, SIDE, GRID = 8, 32, 4
"""Pixels of a patch and of a picture, and patches of a side."""
WIDTH = 64
Normal = Callable[..., Tensor]
Batch = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A tensor of random numbers.

    Attributes:
        sizes: Its axes; a name is an attribute of the configuration, with a factor behind a star.
        part: The configuration within the model's that names are attributes of.
        fill: A number in place of random ones.
    """

    sizes: tuple[int | str, ...]
    part: str = ""
    fill: float | int | bool | None = None

    def draw(self, config: Any, normal: Normal) -> Tensor:
        """The tensor for a model."""
        inner = within(config, self.part)
        sizes = [size if isinstance(size, int) else _size(inner, size) for size in self.sizes]
        return torch.full(sizes, self.fill) if self.fill is not None else normal(*sizes)


def _size(config: Any, text: str) -> int:
    """``"4*hop_length"``: numbers and attributes, multiplied."""
    result = 1
    for factor in text.split("*"):
        name, _, power = factor.partition("^")
        value = int(name) if name.isdigit() else getattr(config, name)
        result *= value ** int(power or 1)
    return result


def within(config: Any, path: str) -> Any:
    """A configuration within another by its dotted path."""
    for name in path.split(".") if path else ():
        config = getattr(config, name)
    return config


@dataclass(frozen=True)
class Maker:
    """The inputs of a model type.

    Attributes:
        inputs: By name a :class:`Shape`, a list of which a tensor is made, or another value.
        placed: Kinds of inputs whose features replace placeholders; the model is asked for them.
        config: Attributes by their dotted path in the configuration.
        tokens: Placeholders a sample by kind, where the model cannot be asked.
        without: Names of the batch that the class does not take.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    placed: tuple[str, ...] = ("image",)
    config: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def set(self, config: Any) -> None:
        """Change a small configuration."""
        for path, value in self.config.items():
            at, _, name = path.rpartition(".")
            setattr(within(config, at), name, value)

    def add(self, model: Any, batch: Batch, normal: Normal) -> Batch:
        """A batch of text with everything else that the model takes."""
        config = model.config
        verdict = {name: _tensor_of(value, config, normal) for name, value in self.inputs.items()}
        counts = {modality: _rows(model, modality, verdict, self) // 2 for modality in self.placed}
        batch = {**_placed(model, batch, counts), **verdict}
        return {name: x for name, x in batch.items() if name not in self.without}


# --- forms of inputs that several types share ---


def pictures(*sizes: int, name: str = "pixel_values") -> dict[str, Any]:
    """Whole pictures."""
    return {name: Shape(sizes or (2, 3, SIDE, SIDE))}


def patches(width: str, part: str = "vision_config", video: bool = True) -> dict[str, Any]:
    """Pictures of 4 x 4 patches in one row after another, and as many videos of a frame."""
    grid = [[1, GRID, GRID]] * 2
    shapes = {"pixel_values": Shape((2 * GRID**2, width), part), "image_grid_thw": grid}
    if video:
        shapes |= {
            "pixel_values_videos": Shape((2 * GRID**2, width), part),
            "video_grid_thw": grid,
        }
    return shapes


_QWEN = patches("3*temporal_patch_size*patch_size^2")
_PICTURES = patches("3*temporal_patch_size*patch_size^2", video=False)
_TILES = {"pixel_values": Shape((2, 3, 3, SIDE, SIDE)), "image_sizes": [[30, 60]] * 2}
_FILMED = {**_TILES, "pixel_values_videos": Shape((2, 4, 3, SIDE, SIDE))}
_PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32]]}
_BOTH = ("image", "video")
_ALL = (*_BOTH, "audio")
_LONG = "2*max_source_positions"
_SPOKEN = ("input_ids", "attention_mask")


def nested(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a configuration within another."""
    return {f"{part}.{name}": value for name, value in values.items()}


def sound(*sizes: int | str, mask: str = "input_features_mask") -> dict[str, Any]:
    """Spectra with their bands before their frames, of which none are padding."""
    return {
        "input_features": Shape((2, "num_mel_bins", *sizes), "audio_config"),
        mask: Shape((2, *sizes), "audio_config", fill=1),
    }


_SQUARE = patches("3*patch_size^2")
_HEARD = {
    **_QWEN,
    **sound(48, mask="feature_attention_mask"),
    "video_second_per_grid": [1.0, 1.0],
}


_PLACES = [[[i // GRID, i % GRID] for i in range(GRID**2)]] * 2
_SAM = {
    "image_size": 64,
    "window_size": 4,
    "global_attn_indexes": [1],
    "output_channels": 16,
    "downsample_channels": [16, WIDTH],
}
_WAVES = {
    "input_values": Shape((2, 1, 24)),  # four samples a token
    "padding_mask": Shape((2, 24), fill=True),
    "sample": False,
}
_TOKENIZER = {"downsampling_ratios": [2, 2], "depths": [1] * 3, "num_filters": 4}


class Schedule:
    """The noise of a diffusion loss by time step, whose variance and the signal's add up to one."""

    alpha_t = torch.linspace(0.9, 0.1, 10)
    sigma_t = (1 - alpha_t**2).sqrt()

    def add_noise(self, clean: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The noisy signal of every row at its time step."""
        signal, spread = (x.to(clean)[timesteps, None] for x in (self.alpha_t, self.sigma_t))
        return signal * clean + spread * noise


def _families(table: Mapping[str, Maker]) -> dict[str, Maker]:
    """Types by the rows that several of them share."""
    return {one: maker for types, maker in table.items() for one in types.split()}


MAKERS: dict[str, Maker] = _families(
    {
        "qwen2_vl qwen3_5 qwen3_5_moe qwen4_exp lfm3_vl": Maker(_QWEN, _BOTH),
        "hunyuan_vl": Maker(patches("3*patch_size^2", video=False)),
        "qwen3_vl qwen3_vl_moe cohere_compass cosmos3_omni": Maker(
            _QWEN, _BOTH, {"vision_config.deepstack_visual_indexes": [0, 1]}
        ),
        "qwen2_5_vl exaone4_5 hyperclovax_vision_v2": Maker(
            _QWEN, _BOTH, {"vision_config.window_size": 32}
        ),
        # pictures and videos share a placeholder
        "glm4v glm4v_moe glm46v glmga glm_ocr glm5_next": Maker(_PICTURES),
        "video_llama_3": Maker(
            {
                **patches("3*patch_size^2"),
                "image_merge_sizes": [2, 2],
                "video_merge_sizes": [2, 2],
                "video_compression_mask": Shape((8,), fill=True),
            },
            _BOTH,
        ),
        "ernie4_5_vl_moe": Maker(
            {
                **patches("3*patch_size^2"),
                "pixel_values_videos": Shape((4 * GRID**2, "3*patch_size^2"), "vision_config"),
                "video_grid_thw": [[2, GRID, GRID]] * 2,
            },
            _BOTH,
            {"vision_config.temporal_merge_size": 2},
        ),
        "paddleocr_vl kimi_k25": Maker(
            {
                "pixel_values": Shape((2 * GRID**2, 3, PATCH, PATCH)),
                "image_grid_thw": [[1, GRID, GRID]] * 2,
            }
        ),
        "minicpm_ocr minicpmv4_6 minicpmv4_7": Maker(
            {
                "pixel_values": Shape((1, 3, PATCH, 2 * GRID**2 * PATCH)),
                "target_sizes": [[GRID, GRID]] * 2,
            },
            config={"image_token_id": 207, "video_token_id": 206, "insert_layer_id": 0},
        ),
        "lfm2_vl": Maker(
            {
                "pixel_values": Shape((2, GRID**2, 3 * PATCH**2)),
                "spatial_shapes": [[GRID, GRID]] * 2,
                "pixel_attention_mask": [[1] * GRID**2] * 2,
            }
        ),
        "llava": Maker(pictures(), config={"vision_feature_layer": -1}),
        "aya_vision cohere2_vision internvl qianfan_ocr paligemma janus deepseek_vl ovis2": Maker(
            pictures()
        ),
        "got_ocr2 pp_chart2table": Maker(
            pictures(), config=nested("vision_config", {"global_attn_indexes": [1]})
        ),
        "florence2": Maker(pictures()),
        "vipllava": Maker(pictures(), config={"vision_feature_layers": [-2, -1]}),
        "aria": Maker(pictures(), config={"projector_patch_to_query_dict": {16: 4}}),
        "gemma3 shieldgemma2": Maker(pictures(), config={"mm_tokens_per_image": 4}),
        "idefics2 idefics3 smolvlm": Maker(pictures(2, 1, 3, SIDE, SIDE)),
        "mistral3 lighton_ocr mistral_large4": Maker(
            {**pictures(), "image_sizes": [[SIDE, SIDE]] * 2}
        ),
        "llama4": Maker(
            pictures(),
            config=nested(
                "vision_config",
                {
                    "intermediate_size": 4 * WIDTH,
                    "projector_input_dim": WIDTH,
                    "projector_output_dim": WIDTH,
                    "vision_output_dim": WIDTH,
                },
            ),
            tokens={"image": 4},
        ),
        "llava_next": Maker(_TILES, config=_PINPOINTS),
        # older transformers return the features of a video without what is added to them
        "llava_next_video": Maker(_FILMED, _BOTH, _PINPOINTS, tokens={"video": 16}),
        "llava_onevision": Maker(_FILMED, _BOTH, _PINPOINTS, tokens={"video": 17}),
        "deepseek_vl_hybrid": Maker(
            {
                **pictures(),
                "high_res_pixel_values": Shape((2, 3, SIDE, SIDE)),
            },
            config={"high_res_vision_config.global_attn_indexes": [0]},
        ),
        "step3p7": Maker(pictures(2, 3, 64, 64)),
        "mllama": Maker(
            {
                "pixel_values": Shape((2, 1, 4, 3, SIDE, SIDE)),
                "aspect_ratio_ids": [[6]] * 2,
                "aspect_ratio_mask": [[[1] * 4]] * 2,
                "cross_attention_mask": Shape((2, 12, 1, 4), fill=1),
            },
            (),
            {
                "vision_config.intermediate_layers_indices": [0, 1],
                "vision_config.vision_output_dim": 3 * WIDTH,
                "text_config.cross_attention_layers": [1],
            },
        ),
        "inkling2": Maker(
            {
                "pixel_values": Shape((8, 16, 16, 3)),
                "image_grid_thw": [[1, 2, 2]] * 2,
            }
        ),
        "cosmos3_edge": Maker(
            _SQUARE,
            _BOTH,
            {
                "image_token_id": 207,
                "video_token_id": 206,
                "vision_start_token_id": 205,
                "vision_end_token_id": 204,
            },
        ),
        "minimax_m3_vl": Maker(_QWEN, _BOTH, {"merged_hidden_size": 4 * WIDTH}),
        "muse_glimmer": Maker(
            patches("3*patch_temporal*patch_size^2"), _BOTH, {"out_hidden_size": 4 * WIDTH}
        ),
        "muse_spark": Maker(
            {
                **patches("3*patch_temporal*patch_size^2"),
                "input_values": Shape((2, 192)),
                "input_values_mask": Shape((2, 192), fill=1),
            },
            _ALL,
            {
                "out_hidden_size": 4 * WIDTH,
                "audio_config.patch_sizes": [4, 2, 2, 2],
                "audio_config.hidden_sizes": [16, 16, 32, WIDTH],
                "audio_config.depths": [1] * 4,
            },
        ),
        "dots3_note": Maker(
            {
                **_SQUARE,
                "input_features": Shape((2, 16, 64)),
                "chunk_sample_lengths": Shape((2,), fill=64 * 160),
            },
            _ALL,
            {
                "audio_config.feature_size": 16,
                "audio_config.conv_output_size": 16 * 8,
                "audio_config.adapter_input_size": WIDTH,
            },
        ),
        "qwen2_5_omni_thinker": Maker(
            _HEARD,
            _ALL,
            {
                "vision_config.window_size": 32,
                "vision_config.fullatt_block_indexes": [1],
                "audio_config.n_window": 8,
                "audio_config.num_mel_bins": 16,
                "vision_end_token_id": 202,
            },
        ),
        "qwen3_omni_moe_thinker": Maker(
            _HEARD,
            _ALL,
            {
                "vision_config.num_position_embeddings": GRID**2,
                "vision_config.deepstack_visual_indexes": [0, 1],
                "audio_config.num_mel_bins": 16,
                "vision_end_token_id": 202,
                "audio_end_token_id": 201,
            },
        ),
        "molmo2": Maker(
            {
                "pixel_values": Shape((2, GRID**2, 3 * PATCH**2)),
                "image_token_pooling": [
                    [0, 1, 4, 5],
                    [2, 3, 6, 7],
                    [8, 9, 12, 13],
                    [10, 11, 14, 15],
                ]
                * 2,
                "image_grids": [[2, 2, 0, 0]] * 2,
                "image_num_crops": [1, 1],
            },
            config={
                "vision_config.num_position_embeddings": GRID**2,
                "adapter_config.vision_feature_layer": [-1, -2],
            },
        ),
        "nemotron_h_omni": Maker(
            {
                "pixel_values": Shape((2 * GRID**2, 3 * PATCH**2)),
                "image_grid_hw": [[GRID, GRID]] * 2,
            },
            config={
                "image_token_id": 207,
                "vision_config.patch_dim": 3 * PATCH**2,
                "vision_config.video_patch_dim": 6 * PATCH**2,
            },
        ),
        "gemma4": Maker(
            {
                "pixel_values": Shape((2, GRID**2, 3 * PATCH**2), fill=0.5),
                "image_position_ids": _PLACES,
            }
        ),
        "granite_docling": Maker(
            {
                "pixel_values": Shape((2, 2, 3, SIDE, SIDE)),
                "pixel_attention_mask": Shape((2, 2), fill=True),
                "tile_fine_mask": Shape((2,), fill=True),  # of two connectors the larger
                "router_labels": Shape((2,), fill=1.0),
            },
            config={
                "vision_config.deepstack_visual_indexes": [0, 1],
                "density_router_hidden_size": 16,
            },
        ),
        "deepseek_ocr2": Maker(
            pictures(2, 3, 64, 64), config=nested("vision_config.sam_config", _SAM)
        ),
        "unlimited_ocr": Maker(
            {
                **pictures(2, 3, 64, 64),
                **pictures(2, 3, 64, 64, name="pixel_values_local"),
                "num_local_patches": (1, 1),
                "patches_grid": ((1, 1), (1, 1)),
            },
            config=nested("vision_config.sam_config", _SAM),
        ),
        "phi4_multimodal/Phi4MultimodalForCausalLM": Maker(
            {
                "image_pixel_values": Shape((2, 2, 3, SIDE, SIDE)),  # whole, and its one crop
                "image_sizes": [[SIDE, SIDE]] * 2,
                "image_attention_mask": Shape((2, 2, GRID, GRID), fill=1.0),
                "audio_input_features": Shape((2, 32, 16)),
                "audio_embed_sizes": [4, 4],
                "audio_attention_mask": Shape((2, 32), fill=True),
            },
            ("image", "audio"),
            {
                "image_token_id": 207,
                "audio_token_id": 206,
                **nested("vision_config", {"image_token_id": 207, "feature_layer": -1}),
                **nested(
                    "audio_config",
                    {
                        "audio_token_id": 206,
                        "input_size": 16,
                        "nemo_conv_channels": 8,
                        "nemo_final_size": 2,
                        "ext_pw_out_channel": WIDTH,
                        "depthwise_separable_out_channel": WIDTH,
                    },
                ),
            },
            tokens={"image": 13, "audio": 4},
        ),
        "gemma4_unified": Maker(
            {
                "pixel_values": Shape((2, GRID**2, 12 * PATCH**2)),
                "image_position_ids": _PLACES,
                "pixel_values_videos": Shape((2, GRID**2, 12 * PATCH**2)),
                "video_position_ids": _PLACES,
                "num_frames_per_video": [1, 1],
                "input_features": Shape((2, 5, 16)),
                "input_features_mask": Shape((2, 5), fill=True),
            },
            _ALL,
        ),
        # its tower cannot be made small by its sizes: timm is told to, beside a finer grid
        "gemma3n": Maker(
            {
                **pictures(2, 3, 64, 64),
                "input_features": Shape((2, 64, 128)),
                "input_features_mask": Shape((2, 64), fill=True),
            },
            ("image", "audio"),
            {
                "vision_soft_tokens_per_image": 16,
                "audio_soft_tokens_per_image": 6,
                "image_token_id": 206,
                "audio_token_id": 209,
                **nested(
                    "vision_config",
                    {
                        "model_args": {"channel_multiplier": 0.1, "msfa_output_resolution": 4},
                        "hidden_size": 2048,
                        "vocab_offset": 205,
                        "vocab_size": 2,
                    },
                ),
                **nested("audio_config", {"vocab_offset": 207, "vocab_size": 4}),
            },
            tokens={"audio": 6},
        ),
        "emu3": Maker(
            {**pictures(2, 3, 16, 16), "image_sizes": [[16, 16]] * 2},
            config={
                "vq_config.codebook_size": 8,
                "vq_config.hidden_size": 32,
                "vocabulary_map": {
                    "<image>": 200,
                    "<|extra_200|>": 201,
                    **{f"<|visual token {code:06d}|>": 190 + code for code in range(8)},
                },
                "image_token_id": 200,
            },
        ),
        "vibevoice_asr": Maker(
            _WAVES,
            ("audio",),
            {
                **nested("acoustic_tokenizer_encoder_config", _TOKENIZER),
                **nested("semantic_tokenizer_encoder_config", _TOKENIZER),
            },
        ),
        "vibevoice": Maker(
            {
                **_WAVES,
                "acoustic_loss_mask": [[False] * 2 + [True] * 6 + [False] * 10] * 2,
                "noise_scheduler": Schedule(),
            },
            ("audio",),
            {**nested("audio_config", _TOKENIZER), **nested("semantic_model_config", _TOKENIZER)},
        ),
        "granite4_vision": Maker(
            {"pixel_values": Shape((2, 3, 3, SIDE, SIDE)), "image_sizes": [[32, 64]] * 2},
            config={
                **_PINPOINTS,
                "deepstack_layer_map": [[-1, 0]],
                "spatial_target_layers": [0, 0, 1, 1],
            },
            tokens={"image": 14},
        ),
        "t5gemma2": Maker(
            pictures(),
            config={
                "encoder.mm_tokens_per_image": 4,
                "encoder.image_token_index": 210,
                "image_token_index": 210,
            },
            tokens={"image": 4},
        ),
        "video_llava": Maker(
            {
                **pictures(name="pixel_values_images"),
                "pixel_values_videos": Shape((2, 8, 3, SIDE, SIDE)),
            },
            _BOTH,
            {"vision_feature_layer": -1},
        ),
        "chameleon": Maker(
            pictures(),
            config={
                "vq_config.num_embeddings": 4,
                "vq_config.base_channels": 32,
                "vocabulary_map": {
                    "<image>": 200,
                    **{f"IMGIMG{code}Z": 201 + i for i, code in enumerate("ABCD")},
                },
                "image_token_id": 200,
            },
            tokens={"image": 4},
        ),
        "fuyu/FuyuForCausalLM": Maker(
            {"image_patches": Shape((2, 4, 3 * PATCH**2))}, tokens={"image": 4}
        ),
        "inkling_mm_model": Maker(
            {
                "pixel_values": Shape((6, 2, PATCH, PATCH, 3)),
                "audio_input_ids": Shape((2, 5, "n_mel_bins"), "audio_config", fill=3),
            },
            ("image", "audio"),
        ),
        "modernvbert ultravbert": Maker(pictures(2, 1, 3, SIDE, SIDE)),
        "fast_vlm": Maker(pictures(2, 3, 64, 64), config={"vision_config.hidden_size": 3072}),
        "perception_lm": Maker(
            pictures(2, 1, 3, SIDE, SIDE),
            config=nested(
                "vision_config",
                {
                    "architecture": "vit_pe_core_large_patch14_336",
                    "model_args": {
                        "embed_dim": WIDTH,
                        "depth": 2,
                        "num_heads": 4,
                        "img_size": (SIDE, SIDE),
                        "patch_size": PATCH,
                        "global_pool": "",
                    },
                },
            ),
        ),
        "udop": Maker({**pictures(), "bbox": Shape((2, 12, 4), fill=0.5)}, ()),
        "evolla": Maker(
            {
                "protein_input_ids": [[5, 6, 7, 8, 9, 10]] * 2,
                "protein_attention_mask": [[1] * 6] * 2,
            },
            (),
        ),
        "granite_speech granite_speech_plus": Maker(
            {"input_features": Shape((2, 30, 16))},
            ("audio",),
            {
                "encoder_config.input_dim": 16,
                "encoder_config.context_size": 8,
                "window_size": 15,
            },
        ),
        "musicflamingo": Maker(
            sound(_LONG),
            ("audio",),
            {
                "audio_config.max_source_positions": 16,
                "audio_start_token_id": 209,
                "audio_end_token_id": 208,
            },
            tokens={"audio": 8},
        ),
        "moss_transcribe_diarize": Maker(
            {**sound(_LONG), "padding_mask": Shape((2, 5120), fill=1)},
            ("audio",),
            {"audio_config.max_source_positions": 16},
            tokens={"audio": 4},
        ),
        "nemo_speechlm": Maker(
            {
                "input_features": Shape((2, 64, "num_mel_bins"), "audio_config.asr_config"),
                "input_features_mask": Shape((2, 64), fill=1),
            },
            ("audio",),
        ),
        "qwen3_asr": Maker(sound(200), ("audio",)),
        "fun_asr_nano": Maker(
            {
                "input_features": Shape((2, 12, "num_mel_bins*num_stacked_frames"), "audio_config"),
                "input_features_mask": Shape((2, 12), fill=1),
            },
            ("audio",),
        ),
        "moonshine": Maker(
            {"input_values": Shape((2, 8000))},
            (),
            {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
            without=_SPOKEN,
        ),
        "speech-encoder-decoder": Maker({"input_values": Shape((2, 8000))}, (), without=_SPOKEN),
        "qwen2_audio": Maker(
            sound(_LONG, mask="feature_attention_mask"),
            ("audio",),
            {"audio_config.max_source_positions": 16},
            tokens={"audio": 8},
        ),
        "audioflamingo3": Maker(
            sound(_LONG),
            ("audio",),
            {"audio_config.max_source_positions": 16},
        ),
        "voxtral": Maker(
            {"input_features": Shape((2, "num_mel_bins", _LONG), "audio_config")},
            ("audio",),
            {
                "audio_config.max_source_positions": 16,
                "audio_config.intermediate_size": 4 * WIDTH,
                "audio_token_id": 207,
            },
        ),
        "glmasr": Maker(
            {
                "input_features": Shape((2, "num_mel_bins", 64), "audio_config"),
                "input_features_mask": [[1] * 64] * 2,
            },
            ("audio",),
            {"audio_config.intermediate_size": 4 * WIDTH},
        ),
        "whisper": Maker(
            {"input_features": Shape((2, "num_mel_bins", _LONG))},
            (),
            {"max_source_positions": 16},
            without=_SPOKEN,
        ),
        "speech_to_text": Maker(
            {"input_features": Shape((2, 64, "input_feat_per_channel"))},
            (),
            {"conv_channels": 32},
            without=_SPOKEN,
        ),
        "speecht5": Maker({"input_values": Shape((2, 8000))}, (), without=_SPOKEN),
        "pop2piano": Maker({"input_features": Shape((2, 16, "d_model"))}, (), without=_SPOKEN),
        "seamless_m4t/SeamlessM4TForSpeechToText seamless_m4t_v2/SeamlessM4Tv2ForSpeechToText": (
            Maker(
                {"input_features": Shape((2, 64, "feature_projection_input_dim"))},
                (),
                without=_SPOKEN,
            )
        ),
        "canary cohere_asr": Maker(
            {"input_features": Shape((2, 64, "num_mel_bins"), "encoder_config")},
            (),
            without=_SPOKEN,
        ),
    }
)
"""By type, or by pair where classes of a type take different inputs."""


def for_pair(pair: Any) -> Maker | None:
    """The maker of a pair by its name, or by its type unless it is a language model alone."""
    alone = pair.cls.endswith("ForCausalLM")
    return MAKERS.get(pair.name, None if alone else MAKERS.get(pair.type))


# --- a batch ---

TOKENS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
AROUND = {
    **dict.fromkeys(("image", "video"), ("vision_start_token_id", "vision_end_token_id")),
    "audio": ("audio_start_token_id", "audio_end_token_id"),
}
ROLES = {"image": 1, "video": 2, "audio": 3}
"""Names in configurations of placeholders and of what stands around them; their types."""


def _tensor_of(value: Any, config: Any, normal: Normal) -> Any:
    if isinstance(value, Shape):
        return value.draw(config, normal)
    return torch.tensor(value) if isinstance(value, list) else value


def _rows(model: Any, modality: str, verdict: Batch, maker: Maker) -> int:
    """How many features a model makes of the inputs of a kind, in both samples together."""
    if modality in maker.tokens:
        return 2 * maker.tokens[modality]
    name = f"get_{modality}_features"
    # the outer model may only pass on what it gets
    ask = getattr(getattr(model, "model", model), name, None) or getattr(model, name)
    known = inspect.signature(ask).parameters
    with torch.no_grad():
        features = ask(**{k: v for k, v in verdict.items() if k in known})
    if not isinstance(features, (Tensor, list, tuple)):
        pooled = features.pooler_output
        features = features.last_hidden_state if pooled is None else pooled
    return sum(x.numel() // x.shape[-1] for x in _tensors(features))


def _tensors(value: Any) -> Iterable[Tensor]:
    return [value] if isinstance(value, Tensor) else [x for one in value for x in _tensors(one)]


def _placed(model: Any, batch: Batch, counts: Mapping[str, int]) -> Batch:
    """The batch with placeholders before its text, which no label asks for."""
    config, ids, labels = model.config, batch["input_ids"], batch["labels"]
    columns, roles = [], []
    for modality, count in counts.items():
        around = [getattr(config, name, None) for name in AROUND[modality]]
        row = [around[0], *[token(config, modality)] * count, around[1]]
        row = [one for one in row if one is not None]
        columns += row
        roles += [ROLES[modality] if one == token(config, modality) else 0 for one in row]
    ahead = torch.tensor(columns, dtype=torch.long).expand(2, -1)
    none = torch.full_like(ahead, -100)
    verdict = {
        **batch,
        "input_ids": torch.cat([ids[:, :2], ahead, ids[:, 2:]], 1),
        "labels": torch.cat([labels[:, :2], none, labels[:, 2:]], 1),
    }
    verdict["attention_mask"] = torch.ones_like(verdict["input_ids"])
    takes = inspect.signature(model.forward).parameters
    types = torch.zeros_like(verdict["input_ids"])
    types[:, 2 : 2 + len(roles)] = torch.tensor(roles)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in takes or name in batch:
            verdict[name] = types
    return verdict


def token(config: Any, modality: str) -> int:
    """The id of a placeholder."""
    return next(
        token_id for n in TOKENS[modality] if (token_id := getattr(config, n, None)) is not None
    )


# --- what a batch has ---

KINDS = {
    "image": r"pixel_values(?!_video)|^image_|flattened_patches|patch",
    "video": r"video",
    "audio": r"input_features|input_values|audio|encoder_inputs_embeds",
    "protein": r"protein",
}
"""Kinds of inputs, as transformers calls them, by names of tensors."""


def modalities(batch: Batch) -> list[str]:
    """The kinds of inputs that a batch has, text among them."""
    names = [
        modality
        for modality, pattern in KINDS.items()
        if any(re.search(pattern, n) and isinstance(x, Tensor) for n, x in batch.items())
    ]
    return [*(["text"] if "input_ids" in batch or "decoder_input_ids" in batch else []), *names]
