"""QLoRA: a frozen base in NF4 (bitsandbytes), adapters by PEFT, one operator for each MLP.

    python examples/qlora.py --tiny

On a GPU:

    python examples/qlora.py --model Qwen/Qwen2.5-7B --dataset roneneldan/TinyStories \
        --rate 2e-4 --rank 16 --output adapter
"""

from collections.abc import Sequence
from typing import Any

import _common
import torch

import liger_multi

with _common.needs("transformers", "peft", "bitsandbytes"):
    import bitsandbytes as bnb
    import transformers as hf
    from peft import LoraConfig, get_peft_model

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def quantized(model: Any) -> Any:
    """The model with its linear layers in NF4, as from_pretrained loads them."""
    for parent in [m for layer in model.model.layers for m in layer.modules()]:
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear:
                narrow = bnb.nn.Linear4bit(
                    layer.in_features, layer.out_features, bias=False, quant_type="nf4"
                )
                narrow.load_state_dict(layer.state_dict())
                setattr(parent, name, narrow.to(layer.weight.device))
    model.is_loaded_in_4bit = True
    return model


def loaded(options: Any) -> tuple[Any, Any]:
    """Tokenizer and model."""
    if options.tiny:
        options.width = 64  # rows of whole blocks
        tokenizer, model = _common.load(options)
        return tokenizer, quantized(model)
    config = hf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = hf.AutoModelForCausalLM.from_pretrained(
        options.model, quantization_config=config, dtype=torch.bfloat16
    )
    return hf.AutoTokenizer.from_pretrained(options.model), model


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = _common.parser(__doc__)
    parser.add_argument("--rank", type=int, default=8)
    options = _common.parsed(parser, arguments)
    tokenizer, model = loaded(options)
    config = LoraConfig(r=options.rank, target_modules=LAYERS, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    print(liger_multi.patch(model))  # names the format, and the bytes of every layer
    losses = _common.adapted(options, model, _common.sequences(options, tokenizer))
    if options.output:
        model.save_pretrained(options.output)
    return losses


if __name__ == "__main__":
    main()
