"""A model and text that need no download, so that every example runs on a laptop in seconds."""

import random

WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "and",
    "so",
    "on",
    "we",
    "count",
    "again",
]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(words):
    """A llama of two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=words.pad_token_id,
            eos_token_id=words.eos_token_id,
        )
    )


def loaded(name):
    """Tokenizer and model by name, or the tiny ones without a name."""
    if not name:
        words = tokenizer()
        return words, model(words)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(
        name, dtype="auto"
    )


def sentences(count, seed=0):
    """Sentences whose words follow one another, so that there is something to learn."""
    draw = random.Random(seed)
    starts = [draw.randrange(len(WORDS)) for _ in range(count)]
    return [" ".join(WORDS[(at + i) % len(WORDS)] for i in range(12)) for at in starts]
