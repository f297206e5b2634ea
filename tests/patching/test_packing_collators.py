"""Packed batches of collators that people use: as their samples, or refused with a remedy."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import functools
import itertools
import re

import pytest
import torch
from packaging import version

transformers = pytest.importorskip("transformers")

from liger_multi.errors import PackingError
from liger_multi.patching import patch
from tests.comparing import assert_same_gradients, gradients
from tests.sweep.cases import build, registered

LENGTHS = (11, 6, 9)
MODELS = (
    "BambaForCausalLM",
    "Gemma3ForCausalLM",
    "Lfm2ForCausalLM",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
)
KEPT = version.parse("5.23")
"""From here on, all hybrids hand ids of samples to their mixers."""
if version.parse(transformers.__version__) < KEPT:
    MODELS = ("Gemma3ForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM")
OPTIONS = ("return_position_ids", "return_seq_idx", "return_flash_attn_kwargs")
FORMS = {
    "+".join(n.removeprefix("return_") for n, on in zip(OPTIONS, chosen, strict=True) if on): dict(
        zip(OPTIONS, chosen, strict=True)
    )
    for chosen in itertools.product((True, False), repeat=3)
    if any(chosen)
}


@functools.cache
def _model(name):
    model = build(next(p for p in registered() if p.cls == name))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # samples of a model at its first step hardly see each other
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(drawn * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(drawn * 0.1)
    model.config.use_cache = True
    return model


def patched(name, **ops):
    model = copy.deepcopy(_model(name))
    patch(model, **ops)
    return model


def samples():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(10, 130, (n,), generator=generator).tolist() for n in LENGTHS]


def flattened(**options):
    collator = transformers.DataCollatorWithFlattening(**options)
    return collator([{"input_ids": ids, "labels": ids} for ids in samples()])


COUNT = sum(LENGTHS) - len(LENGTHS)
"""Targets: those of all tokens but the first ones."""


@functools.cache
def alone(name):
    """The loss and gradients of the samples one by one, summed."""
    model, total = patched(name), 0.0
    for ids in samples():
        inputs = torch.tensor([ids])
        loss = model(
            input_ids=inputs, labels=inputs, use_cache=False, num_items_in_batch=COUNT
        ).loss
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def assert_apart(model, name, batch):
    loss = model(**batch, num_items_in_batch=COUNT).loss
    model.zero_grad()
    loss.backward()
    expected, grads = alone(name)
    assert loss.item() == pytest.approx(expected, rel=2e-5)
    assert_same_gradients(gradients(model), grads, rtol=1e-4)


def _lengths(batch):
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    ids = [torch.full((n,), i) for i, n in enumerate(LENGTHS)]
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "seq_idx": torch.cat(ids)[None].int(),
    }


REMEDIES = {
    "use_cache=False": lambda batch: {**batch, "use_cache": False},
    "no attention_mask": lambda batch: {k: v for k, v in batch.items() if k != "attention_mask"},
    "position_ids of shape (B, T) that begin again with every sample": lambda batch: {
        **batch,
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    },
    "cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k and seq_idx": lambda batch: {
        **batch,
        **_lengths(batch),
    },
}


def trained(model, name, batch):
    """Train on a batch, as the error of its first call says where there is one."""
    try:
        assert_apart(model, name, batch)
        return []
    except PackingError as error:
        (way,) = re.findall(r"With (.*) they are kept apart", str(error))
    remedies = [text for text in REMEDIES if text in way]
    assert len(remedies) > 0, way
    for text in remedies:
        batch = REMEDIES[text](batch)
    assert_apart(model, name, batch)
    return remedies


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_the_collator_of_transformers(name, form):
    """Positions suffice, in hybrids as well; without them the error asks for them."""
    batch = flattened(**FORMS[form])
    assert batch["labels"].ne(-100).sum() == COUNT
    batch.pop("attention_mask", None)
    remedies = trained(patched(name), name, {**batch, "use_cache": False})
    place = "position_ids of shape (B, T) that begin again with every sample"
    assert remedies == ([] if FORMS[form]["return_position_ids"] else [place])


@pytest.mark.parametrize("name", MODELS)
def test_leaking_samples_are_detected(name):
    batch = flattened(return_position_ids=False, return_seq_idx=True)
    batch.pop("attention_mask", None)
    with pytest.raises(AssertionError):
        assert_apart(patched(name, packing=False), name, {**batch, "use_cache": False})


@pytest.mark.parametrize("name", MODELS)
def test_manual_loop_with_cache(name):
    remedies = trained(patched(name), name, flattened(return_position_ids=True))
    assert remedies == ["use_cache=False"]


@pytest.mark.parametrize("name", MODELS)
def test_the_collator_of_trl(name):
    trl = pytest.importorskip("trl.trainer.sft_trainer")
    collator = trl.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collator([{"input_ids": ids} for ids in samples()])
    remedies = trained(patched(name), name, {**batch, "use_cache": False})
    assert remedies == []
