"""Roll-outs with a cache, and the log-probabilities of the same tokens in a training step."""

import torch
import torch.nn.functional as F

from liger_multi import ops
from liger_multi.modules.arguments import cache_parameter
from liger_multi.patching import patch, real_logits, register_attention
from tests.models import VOCABULARY, build, transformers

MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 24},
    "mixtral": {"output_router_logits": False},
}
"""A plain model, norms of queries and keys, windows and softcaps, experts."""


def model(model_type, dtype=torch.float32, **config):
    """A patched model in evaluation mode; call it where rows must be independent."""
    register_attention()
    policy = build(model_type, max_position_embeddings=512, **MODELS.get(model_type, {}), **config)
    policy.set_attn_implementation("liger_multi")
    patch(policy.to(dtype).eval(), strict=True)
    return policy


def prompt(length, rows=1, seed=1):
    """Token ids ``(rows, length)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def log_prob(logits, ids):
    """Log-probabilities of tokens, of all rows one after another."""
    return ops.token_log_prob(real_logits(logits).flatten(0, 1), ids.flatten()).log_prob


def roll_out(policy, ids, count, *, greedy=True, chunk=None, mask=None, cache=None):
    """Sequences whose last tokens are decoded one by one, and the log-probabilities of these."""
    name, generator = cache_parameter(type(policy).forward), torch.Generator().manual_seed(0)
    cache = transformers.DynamicCache(config=policy.config) if cache is None else cache
    parts, past, old, arguments = list(ids.split(chunk or ids.shape[1], 1)), 0, [], {}
    with torch.no_grad():
        while len(old) < count:
            part = parts.pop(0)
            past += part.shape[1]
            if mask is not None:
                mask = F.pad(mask, (0, max(0, past - mask.shape[1])), value=1)
                arguments["attention_mask"] = mask[:, :past]
                places = (mask.cumsum(-1) - 1).clamp_min(0)
                arguments["position_ids"] = places[:, past - part.shape[1] : past]
            logits = policy(part, **{name: cache}, **arguments).logits
            if parts:
                continue
            last = real_logits(logits)[:, -1:]
            p = torch.softmax(last[:, 0].float(), -1)
            token = p.argmax(-1, True) if greedy else torch.multinomial(p, 1, generator=generator)
            old.append(log_prob(last, token))
            ids = torch.cat([ids, token], 1)
            parts.append(token)
    return ids, torch.stack(old, 1)


def train(policy, ids, count, **arguments):
    """Log-probabilities of the last tokens of whole sequences, with gradients."""
    logits = policy(ids[:, :-1], use_cache=False, **arguments).logits
    new = log_prob(logits, ids[:, 1:]).view(len(ids), -1)[:, -count:]
    new.sum().backward()
    return new.detach()


def all_ones(new, old):
    """Whether every ratio of probabilities is exactly 1."""
    return bool(((new - old).exp() == 1).all())
