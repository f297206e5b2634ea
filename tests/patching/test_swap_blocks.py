"""What ``patched`` blocks leave behind: nothing, in whatever order and thread they end."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import contextlib
import gc
import random
import threading

import pytest
import torch
from torch import nn

from tests.harness import PATIENCE

transformers = pytest.importorskip("transformers")

from liger_multi.errors import ConfigurationError, PatchError
from liger_multi.patching import modeltypes, patch, patched, unpatch
from liger_multi.patching.held import HeldPatch
from liger_multi.patching.swap import Patched, swapped
from tests.models import batch, build

FORMS = (
    {},
    {"rms_norm": False},
    {"swiglu": False, "rope": False},
    {"fused_linear_cross_entropy": {"chunk": 3}},
    {"fused_linear_cross_entropy": False, "lora": False},
)


def state(model):
    return [type(m) for m in model.modules()]


def small():
    return build("llama", num_hidden_layers=1)


def clean():
    """Whether no model type is patched, and the constructor is that of transformers."""
    stock = transformers.PreTrainedModel.post_init.__module__ == "transformers.modeling_utils"
    return not modeltypes._requests and stock and not hasattr(post_init(), "__wrapped__")


def post_init():
    return transformers.PreTrainedModel.post_init


def is_patched(model):
    return any(isinstance(m, Patched) for m in model.modules())


def enter(target, **options):
    block = patched(target, **options)
    block.__enter__()
    return block


def leave(block):
    block.__exit__(None, None, None)


# --- model types ---


def test_type_blocks_end_in_any_order():
    first = enter("llama")
    second = enter("llama", fused_linear_cross_entropy=False)
    other = enter("qwen3")
    leave(first)
    model = small()
    assert is_patched(model)
    assert type(model.lm_head) is nn.Linear  # the newest of the open blocks
    leave(second)
    assert not is_patched(small())
    assert is_patched(build("qwen3", num_hidden_layers=1))
    leave(other)
    assert clean()


def test_the_newest_request_of_a_type_acts_until_it_ends():
    first = enter("llama", fused_linear_cross_entropy=False)
    second = enter("llama")
    assert type(small().lm_head) is not nn.Linear
    leave(second)
    assert type(small().lm_head) is nn.Linear
    leave(first)
    assert clean()


def test_patch_and_unpatch_of_a_type_within_blocks():
    with patched("llama"):
        patch("llama", fused_linear_cross_entropy=False)
        assert type(small().lm_head) is nn.Linear
        with patched("llama"):
            assert type(small().lm_head) is not nn.Linear
    assert type(small().lm_head) is nn.Linear  # a patch outlasts the block
    assert is_patched(small())
    with patched("llama"):
        unpatch("llama")
        assert not is_patched(small())
        with pytest.raises(PatchError, match="'llama' is not patched"):
            unpatch("llama")
        patch("llama")
    assert is_patched(small())
    unpatch("llama")
    assert clean()


def test_refused_block_requests_nothing():
    for options, message in (({"nosuch": True}, "nosuch"), ({"strict": 1}, "strict must be")):
        with pytest.raises(PatchError, match=message), patched("llama", **options):
            pass
    with pytest.raises(PatchError, match="unknown model type"), patched("lama"):
        pass
    assert clean()


def test_types_in_threads_leave_nothing_patched():
    ready = threading.Barrier(6)
    observed, failures = [], []

    def work(index):
        try:
            generator = random.Random(index)
            for _ in range(15):
                ready.wait(60)
                model_type = generator.choice(("llama", "qwen3"))
                with patched(model_type, **generator.choice(FORMS)):
                    with contextlib.suppress(PatchError):
                        if generator.random() < 0.2:
                            patch(model_type)
                            unpatch(model_type)
                    observed.append(modeltypes.registered(model_type))
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    assert any(observed)
    assert clean()
    assert not is_patched(small())


def test_models_of_every_thread_are_built_by_the_newest_request():
    inside, done = threading.Event(), threading.Event()

    def work():
        with patched("llama"):
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    with patched("llama", fused_linear_cross_entropy=False):
        done.set()
        thread.join(PATIENCE)
        model = small()
        assert is_patched(model)
        assert type(model.lm_head) is nn.Linear
    assert clean()


# --- models ---


def test_model_blocks_end_in_any_order():
    model = small()
    before = state(model)
    first = enter(model)
    second = enter(model, rms_norm=False)
    newest = state(model)
    leave(first)
    assert state(model) == newest
    leave(second)
    assert state(model) == before


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_blocks_patches_and_parts(seed):
    """The configuration is that of the newest open block; at the end all is as it was."""
    generator = random.Random(seed)
    model = small()
    if generator.random() < 0.5:
        patch(model, **generator.choice(FORMS))
    before = state(model)
    targets = (model, model.model, model.model.layers[0].mlp, model)
    blocks = []
    for _ in range(14):
        if blocks and generator.random() < 0.45:
            leave(blocks.pop(generator.randrange(len(blocks)))[0])
        elif blocks and generator.random() < 0.3:
            generator.choice((patch, unpatch))(generator.choice(blocks)[1])
        else:
            target = generator.choice(targets)
            blocks.append((enter(target, **generator.choice(FORMS)), target))
    while blocks:
        leave(blocks.pop(generator.randrange(len(blocks)))[0])
    assert state(model) == before


def test_modules_added_and_removed_in_blocks():
    model = small()
    first = enter(model)
    stayed, model.model.norm = model.model.norm, type(small().model.norm)(32)
    second = enter(model)
    assert is_patched(model.model.norm)
    leave(first)
    assert not is_patched(stayed)
    late = type(small().model.norm)(32)
    model.model.norm, came = late, model.model.norm
    patch(model)
    leave(second)
    assert not any(map(is_patched, (model, late, came)))


def test_blocks_with_exception_or_without_end():
    model = small()
    before = state(model)
    with pytest.raises(PatchError), patched(model, nosuch=True):
        pass
    assert state(model) == before
    outer = enter(model)
    forgotten = HeldPatch(False, {"rms_norm": False})
    forgotten.hold(model)
    del forgotten
    gc.collect()
    leave(outer)
    assert state(model) == before


def test_callback_releases_in_another_order():
    model = small()
    before = state(model)
    block = enter(model, rms_norm=False)
    held = HeldPatch(False, {})
    held.hold(model)
    newest = state(model)
    leave(block)
    assert state(model) == newest
    held.release()
    assert state(model) == before


@pytest.mark.parametrize("shared", [True, False])
def test_models_in_threads(shared):
    """Two threads patch the same model or one each; results are right all the time."""
    torch.manual_seed(0)
    models = [small()] * 2 if shared else [small(), small()]
    before = [state(m) for m in models]
    inputs = batch()
    with torch.no_grad():
        expected = models[0](**inputs).loss
    failures = []

    def work(index):
        try:
            generator = random.Random(index)
            for _ in range(8):
                with patched(models[index], **generator.choice(FORMS)), torch.no_grad():
                    torch.testing.assert_close(models[index](**inputs).loss, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    assert [state(m) for m in models] == before


# --- options ---


@pytest.mark.parametrize("chunk", ["512MiB", "2KiB", "4096", "auto", 1])
@pytest.mark.parametrize("adapted", [False, True])
def test_patch_takes_chunks_of_the_operator(chunk, adapted):
    stock, ours = small(), small()
    if adapted:
        peft = pytest.importorskip("peft")
        stock, ours = (
            peft.get_peft_model(m, peft.LoraConfig(r=2, target_modules=["lm_head"]))
            for m in (stock, ours)
        )
    patch(ours, strict=True, fused_linear_cross_entropy={"chunk": chunk})
    head = ours.get_submodule("base_model.model.lm_head" if adapted else "lm_head")
    assert swapped(head).settings.fused.chunk == chunk
    losses = [m(**batch()).loss for m in (stock, ours)]
    losses[1].backward()
    torch.testing.assert_close(*losses)


NAN, INFINITY = float("nan"), float("inf")
NO_NUMBERS = (True, None, "1", [1], NAN, INFINITY, torch.ones(()))
NO_BOOLEANS = (1, 0, None, "yes", torch.ones(()))
BAD = {
    "chunk": (0, -1, True, None, 1.5, NAN, "", "auto ", "512 parrots", "-1MiB", "0MiB", [4]),
    "accumulate": (None, "float32", torch.int32, torch.float8_e5m2, float, True, 32),
    "compact": NO_BOOLEANS,
    "validate": NO_BOOLEANS,
    "z_loss": (*NO_NUMBERS, -0.1),
    "materialize_bytes": (*NO_NUMBERS, -1, 1.0),
    "backend": (True, 1, ["reference"], torch.ones(())),
}


@pytest.mark.parametrize("option", BAD)
def test_invalid_option_values(option):
    for value in BAD[option]:
        for target in (small(), "llama"):
            with pytest.raises(PatchError, match=f"fused_linear_cross_entropy: {option} must be"):
                patch(target, fused_linear_cross_entropy={option: value})
    assert clean()


def test_other_bad_arguments():
    model = small()
    for options in ({"swiglu": {"whole": 1}}, {"rms_norm": 1}, {"rms_norm": None}):
        with pytest.raises(PatchError, match="must be"):
            patch(model, **options)
    for strict in (1, None, "yes"):
        with pytest.raises(PatchError, match="strict must be True or False"):
            HeldPatch(strict, {})
    with pytest.raises(ConfigurationError, match="nosuch"):
        patch(model, rms_norm="nosuch")
    assert not is_patched(model)
