"""gpt-oss with its experts left in MXFP4: LoRA on attention and on all experts.

    python examples/gpt_oss.py --tiny

On a GPU, with a folder that `hf download openai/gpt-oss-20b --local-dir gpt-oss-20b` makes:

    python examples/gpt_oss.py --model gpt-oss-20b --dataset roneneldan/TinyStories \
        --rows 1 --length 2048 --rate 1e-4 --output adapter
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _common
import torch

import liger_multi
from liger_multi.integrations.mxfp4 import quantize_mxfp4

with _common.needs("transformers", "peft", "safetensors"):
    import transformers as hf
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    from liger_multi.integrations import load_mxfp4

STACKS = ("gate_up_proj", "down_proj")


def tiny_checkpoint(folder: str, vocabulary: int) -> None:
    """A gpt-oss of two layers in the form of OpenAI's checkpoints."""
    config = hf.GptOssConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=16, pad_token_id=0, eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    state = {}
    for name, tensor in hf.GptOssForCausalLM(config).state_dict().items():
        if name.endswith(STACKS):  # transformers has outputs last, checkpoints inputs
            codes, state[f"{name}_scales"] = quantize_mxfp4(tensor.mT)
            state[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16))
        else:
            state[name] = tensor
    save_file({n: t.contiguous() for n, t in state.items()}, f"{folder}/model.safetensors")
    Path(folder, "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")


def loaded(options: Any) -> tuple[Any, Any]:
    """Tokenizer and model."""
    if not options.tiny:
        device = torch.accelerator.current_accelerator() if options.gpu else None
        model = load_mxfp4(options.model, device=device or "cpu")
        return hf.AutoTokenizer.from_pretrained(options.model), model
    tokenizer, _ = _common.load(options)
    with tempfile.TemporaryDirectory() as folder:
        tiny_checkpoint(folder, len(tokenizer))
        return tokenizer, load_mxfp4(folder, dtype=torch.float32)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = _common.parsed(_common.parser(__doc__, model="gpt-oss-20b"), arguments)
    tokenizer, model = loaded(options)
    layers, stacks = ["q_proj", "k_proj", "v_proj", "o_proj"], [f"mlp.experts.{n}" for n in STACKS]
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=layers, target_parameters=stacks)
    model = get_peft_model(model, config)
    print(liger_multi.patch(model))
    losses = _common.adapted(options, model, _common.sequences(options, tokenizer))
    if options.output:
        model.save_pretrained(options.output)
    return losses


if __name__ == "__main__":
    main()
