"""Small models of six kinds, whose steps are measured and estimated."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

BASE = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 1999,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
KINDS = {
    "dense": ("Llama", {}),
    "gqa": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "moe": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "lora": ("Llama", {}),
    "checkpointing": ("Llama", {}),
}


def config_of(kind):
    name, extra = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**BASE, **extra})
    config._attn_implementation = "sdpa"
    config.use_cache = False
    return config


def model_of(kind):
    """A model on the CPU in fp32."""
    config = config_of(kind)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if kind == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
    return model


def step_of(model, batch, sequence):
    """An optimizer and a function that trains one step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=False)
    ids = torch.randint(
        model.config.vocab_size, (batch, sequence), generator=torch.Generator().manual_seed(1)
    )

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return optimizer, step
