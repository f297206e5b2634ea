"""Invalid arguments: every public function and class names them and says what it takes.

A loop over all signatures puts invalid values into one argument at a time. The result is a
``TypeError`` or ``ValueError`` with the names of the function and of the argument.
"""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from liger_multi import losses, nn, ops
from liger_multi.testing import samples

NAN, INFINITY = float("nan"), float("inf")
HUGE = 10**5000
OPERATORS = {n: f for n in ops.__all__ if inspect.isfunction(f := getattr(ops, n))}

TENSORS = (
    ("a number", lambda: 1.0),
    ("a truth value", lambda: True),
    ("NaN", lambda: NAN),
    ("a word", lambda: "reference"),
    ("a list", lambda: [1.0, 2.0]),
    ("an array", lambda: numpy.ones((2, 3), dtype="float32")),
    ("an object", object),
)
"""Values that are no tensors."""
OTHERS = (
    ("a tensor", lambda: torch.ones(())),
    ("an integer tensor", lambda: torch.ones((), dtype=torch.int64)),
    ("a long tensor", lambda: torch.ones(3)),
    ("an array", lambda: numpy.ones((2, 3))),
    ("a list", lambda: [None]),
    ("a mapping", dict),
    ("an object", object),
)
"""Values that no option takes."""
VALUES_BY_TYPE: dict[str, tuple[Any, ...]] = {
    "float": (True, "1.0", "", NAN, -INFINITY, INFINITY, 1j, HUGE, -HUGE),
    "bool": ("yes", 1, 0, 1.0, NAN),
    "int": (True, 1.5, "1", NAN, INFINITY, 2**64, HUGE),
    "dtype": ("float32", 1, True, torch.int32, torch.complex64, float),
    "str": ("nosuch", "", 1, True, NAN, b"mean"),
    "names": ("x", 1, ("nosuch",), (1,), (None,)),
    "Float8Rows": (True, 1, "x", (1, 2), NAN),
    "LoRA": (True, 1, "x", (1,), (1, 2), (None, None), NAN),
    "sizes": ("12", 1, (1.5, 2), (True, True), ("1", "1")),
    "chunk": (True, 0, -1, 1.5, "", "512 parrots", "0MiB", NAN, HUGE),
    "window": (True, 1.5, "1", (1,), (1, 2, 3), (1.5, 1), (True, 1), NAN),
    "interval": (
        True,
        1.5,
        "01",
        (0.0,),
        (0.0, 1.0, 2.0),
        (1.0, 0.5),
        (NAN, 1.0),
        (0.0, NAN),
        (True, 1.0),
        ("0", "1"),
        (INFINITY, INFINITY),
        (0.0, 1j),
    ),
}
RANGES: dict[str, tuple[Any, ...]] = {
    "eps": (-1e-6, -1),
    "rms_eps": (-1e-6,),
    "label_smoothing": (-0.1, 1.1),
    "z_loss": (-1e-4,),
    "softcap": (0.0, -1.0),
    "temperature": (0.0, -1.0),
    "beta": (-0.1,),
    "limit": (0.0, -1.0),
}
"""Numbers past the end of what an option may be."""
MEANT = {
    ("limit", "inf"),  # a clamp at infinity is none
    ("freqs", "complex"),  # of rope_complex
    ("normalized_shape", "1"),  # one axis needs no sequence
    ("zeros", "floats"),  # of int4
}
"""Values that an argument takes, as an exception from the rule."""


def type_of(parameter: inspect.Parameter) -> tuple[str, bool]:
    """The name of an argument's type, and whether it may be None."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    optional = "None" in text or "Optional" in text
    if "Tensor" in text:
        return "Tensor", optional
    compound = {
        "int | str": "chunk",
        "tuple[str, ...]": "names",
        "Sequence[int]": "sizes",
        "tuple[int, int]": "window",
        "tuple[float, float]": "interval",
    }
    match = next((type_name for part, type_name in compound.items() if part in text), None)
    plain = text.removesuffix(" | None").rsplit(".", 1)[-1]
    assert match or plain in VALUES_BY_TYPE, f"{parameter.name}: what type is {text}?"
    return match or plain, optional


def values(parameter: inspect.Parameter) -> Iterator[tuple[str, Any]]:
    """Values that an argument cannot have, under a name."""
    type_name, optional = type_of(parameter)
    if type_name == "Tensor":
        yield from ((word, make()) for word, make in TENSORS)
    else:
        yield from ((word, make()) for word, make in OTHERS)
        candidates = (*VALUES_BY_TYPE[type_name], *RANGES.get(parameter.name, ()))
        words = (
            (f"{value!r:.40}" if value not in (HUGE, -HUGE) else "huge", value)
            for value in candidates
        )
        yield from (pair for pair in words if (parameter.name, pair[0]) not in MEANT)
    if not optional and parameter.default is not None:
        yield "None", None


def contract(op: str) -> str:
    """The operator that a function calls, whose name messages have."""
    return OPERATORS[op].__module__.rpartition(".")[2]


def parameters(op: str) -> Iterator[tuple[str, str, inspect.Parameter]]:
    """Arguments by their names in samples and in messages, and the parts of adapters."""
    for name, parameter in inspect.signature(OPERATORS[op]).parameters.items():
        yield name, name, parameter
        if name.endswith("_lora"):
            for part, of in inspect.signature(ops.LoRA).parameters.items():
                yield f"{name.removesuffix('_lora')}_{part}", f"{name}.{part}", of


def accepted(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of a sample that the function has."""
    arguments = samples.with_tuples(samples.adapted(contract(op)), arguments)
    return {n: v for n, v in arguments.items() if n in inspect.signature(OPERATORS[op]).parameters}


def small(op: str, name: str) -> samples.Sample:
    """A small sample with an argument, or without where none has it."""
    every = [s for s in samples.of(contract(op)) if s.size == "small"]
    return next((s for s in every if name in s.tensors or name in s.options), every[0])


def refusals(call: Any, title: str, name: str, candidates: Iterator[tuple[str, Any]]) -> list[str]:
    """Invalid values of one argument that a function takes, or refuses without the names."""
    wrong = []
    for word, value in candidates:
        try:
            call(value)
        except (TypeError, ValueError) as error:
            message = str(error)
            if name not in message or not any(t in message for t in title.split("|")):
                wrong.append(f"{name} = {word}: {type(error).__name__}: {message:.200}")
            elif "unexpected keyword" in message or len(message) > 700:
                wrong.append(f"{name} = {word}: {message:.900}")
        except Exception as error:
            wrong.append(f"{name} = {word}: {type(error).__name__}: {error!s:.200}")
        else:
            wrong.append(f"{name} = {word} was accepted")
    return wrong


@pytest.mark.parametrize("op", OPERATORS)
def test_operators_refuse_invalid_arguments(op):
    function, wrong = OPERATORS[op], []
    for name, title, parameter in parameters(op):
        sample = small(op, name)

        def call(value, name=name, sample=sample):
            kwargs = {**sample.make("cpu", torch.float32), **sample.options, name: value}
            return function(**accepted(op, kwargs))

        wrong += refusals(call, contract(op), title, values(parameter))
    assert not wrong, "\n".join(wrong)


def other_tensors(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that cannot stand in the place of another one."""
    plain = x.detach()
    yield "complex", plain.to(torch.complex64)
    yield "truth values", plain.bool()
    yield "on another device", plain.to("meta")
    if plain.is_floating_point():
        yield "integers", plain.to(torch.int64)
    else:
        yield "floats", plain.float()


@pytest.mark.parametrize("op", OPERATORS)
def test_operators_refuse_other_dtypes_and_devices(op):
    function, wrong = OPERATORS[op], []
    for name, title, parameter in parameters(op):
        sample = small(op, name)
        if type_of(parameter)[0] != "Tensor" or name not in sample.tensors:
            continue
        tensors = sample.make("cpu", torch.float32)

        def call(value, name=name, sample=sample, tensors=tensors):
            return function(**accepted(op, {**tensors, **sample.options, name: value}))

        alone = sum(n in sample.tensors for n in inspect.signature(function).parameters) == 1
        candidates = (
            (word, x)
            for word, x in other_tensors(tensors[name])
            if not (alone and "device" in word) and (name, word) not in MEANT
        )
        # a device differs between two tensors, of which a message names either
        wrong += [
            w
            for w in refusals(call, contract(op), title, candidates)
            if "on one device, got" not in w
        ]
    assert not wrong, "\n".join(wrong)


def other_shapes(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of other shapes."""
    plain = x.detach()
    yield "no axis", plain.new_ones(())
    yield "one more axis", plain[None].expand(2, *plain.shape)
    yield "one more axis of three", plain[..., None].expand(*plain.shape, 3)
    if plain.ndim:
        yield "a longer last axis", torch.cat([plain, plain[..., :1]], -1)
        yield "a longer first axis", torch.cat([plain, plain[:1]])
        yield "no elements", plain[..., :0]
        yield "one axis less", plain.new_zeros(plain.shape[1:])


@pytest.mark.parametrize("op", OPERATORS)
def test_operators_take_or_refuse_other_shapes(op):
    """A shape either gives results or raises with the name of the operator."""
    function, wrong = OPERATORS[op], []
    for name, _, parameter in parameters(op):
        sample = small(op, name)
        if type_of(parameter)[0] != "Tensor" or name not in sample.tensors:
            continue
        for word, value in other_shapes(sample.make("cpu", torch.float32)[name]):
            kwargs = {**sample.make("cpu", torch.float32), **sample.options, name: value}
            try:
                function(**accepted(op, kwargs))
            except (TypeError, ValueError) as error:
                if not str(error).startswith(contract(op)):
                    wrong.append(f"{name} of {word}: {type(error).__name__}: {error!s:.200}")
            except IndexError as error:
                if "is out of range" not in str(error):  # a target, of no classes
                    wrong.append(f"{name} of {word}: {error!s:.200}")
            except Exception as error:
                wrong.append(f"{name} of {word}: {type(error).__name__}: {error!s:.200}")
    assert not wrong, "\n".join(wrong)


# --- modules ---

_CONFIG = types.SimpleNamespace(hidden_size=16, intermediate_size=40, hidden_act="silu")
CONSTRUCTORS: dict[str, dict[str, Any]] = {
    "RMSNorm": {"hidden_size": 16},
    "GemmaRMSNorm": {"dim": 16},
    "FusedAddRMSNorm": {"hidden_size": 16},
    "GatedRMSNorm": {"hidden_size": 16},
    "ModulatedRMSNorm": {"hidden_size": 16},
    "LayerNorm": {"normalized_shape": 16},
    "GroupNorm": {"num_groups": 4, "num_channels": 16},
    "DyT": {"hidden_size": 16},
    "Embedding": {"num_embeddings": 11, "embedding_dim": 16},
    "TiledMLP": {"mlp": torch.nn.Linear(4, 4)},
    "SwiGLUMLP": {"config": _CONFIG},
    "ClampedSwiGLUMLP": {"config": _CONFIG},
    "PackedSwiGLUMLP": {"config": _CONFIG},
    "GEGLUMLP": {"config": types.SimpleNamespace(**{**vars(_CONFIG), "hidden_act": "gelu"})},
    "Experts": {"config": types.SimpleNamespace(**vars(_CONFIG), num_experts=3)},
    "HyperConnection": {
        "config": types.SimpleNamespace(
            hidden_size=16, hc_mult=2, hc_sinkhorn_iters=3, hc_eps=1e-3, rms_norm_eps=1e-5
        )
    },
}
FACTORY = ("device", "dtype")
"""Arguments that PyTorch checks."""


@pytest.mark.parametrize("name", nn.__all__)
def test_modules_refuse_invalid_arguments(name):
    module_class, wrong = getattr(nn, name), []
    kwargs = CONSTRUCTORS.get(name, {})
    module_class(**kwargs)
    for argument, parameter in inspect.signature(module_class).parameters.items():
        if argument in FACTORY or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue

        def call(value, argument=argument):
            return module_class(**{**kwargs, argument: value})

        bad = values(parameter)
        if argument in ("config", "mlp"):
            bad = ((word, make()) for word, make in (*TENSORS, ("None", lambda: None)))
        wrong += refusals(call, name, argument, bad)
    assert not wrong, "\n".join(wrong)


# --- losses ---


def ids(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape) % 11


def log_probs(*shape):
    return -torch.rand(shape)


LOSSES = {
    "cpo_loss": (
        "CPO",
        lambda: {"policy": log_probs(4, 5), "target": ids(4, 5), "nll_target": ids(2, 5)},
    ),
    "dpo_loss": (
        "DPO",
        lambda: {"policy": log_probs(4, 5), "target": ids(4, 5), "reference": log_probs(4)},
    ),
    "kto_loss": (
        "KTO",
        lambda: {
            "policy": log_probs(3, 5),
            "target": ids(3, 5),
            "kl": 0.1,
            "desirable": torch.tensor([True, False, True]),
        },
    ),
    "policy_loss": (
        "Policy",
        lambda: {
            "policy": torch.randn(3, 5, 11),
            "target": ids(3, 5),
            "advantages": torch.randn(3),
            "loss_type": "dapo",
        },
    ),
    "sequence_loss": ("Sequence", lambda: {"policy": log_probs(3, 5), "target": ids(3, 5)}),
    "mtp_loss": ("MTP|Sequence", lambda: {"heads": [log_probs(3, 5)] * 2, "target": ids(3, 5)}),
    "distillation_loss": (
        "Distillation",
        lambda: {
            "student": torch.randn(3, 5, 11),
            "teacher": torch.randn(3, 5, 11),
            "target": ids(3, 5),
        },
    ),
    "tokens": (
        "tokens|token_log_prob",
        lambda: {"source": torch.randn(3, 5, 11), "target": ids(3, 5)},
    ),
    "kto_divergence": ("KTO", lambda: {"policy": log_probs(3), "reference": log_probs(3)}),
    "Head": ("Head", lambda: {"hidden": torch.randn(3, 5, 16), "weight": torch.randn(11, 16)}),
    "Logits": ("Logits", lambda: {"logits": torch.randn(3, 5, 11)}),
    "TopK": ("TopK", lambda: {"ids": ids(3, 5, 2), "log_prob": log_probs(3, 5, 2)}),
    "DPOOptions": ("DPO", dict),
    "CPOOptions": ("CPO", dict),
    "KTOOptions": ("KTO", dict),
    "PolicyOptions": ("Policy", dict),
    "SequenceOptions": ("Sequence", dict),
    "DistillationOptions": ("Distillation", dict),
}
"""How a loss calls itself in messages, and the arguments of a call that works."""
SKIPPED = ("group", "name", "role")  # a process group, and words for messages


def of_loss(parameter: inspect.Parameter) -> Iterator[tuple[str, Any]]:
    """Values that an argument of a loss cannot have."""
    annotation = str(parameter.annotation)
    every = [(word, make()) for word, make in TENSORS]
    if parameter.name in ("heads", "loss_type", "loss_weights"):
        return iter([(w, v) for w, v in every if w not in ("a list",)])
    if "Source" in annotation or "Teacher" in annotation or "Callable" in annotation:
        return iter([(word, value) for word, value in every if not callable(value)])
    if "float" in annotation and "Tensor" in annotation:  # kl and num_items
        return iter([(word, value) for word, value in every if word != "a number"])
    if parameter.name == "keep":
        return iter([("half", 1.5), ("less than none", -1), ("a word", "1 parrot"), ("none", None)])
    return values(parameter)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_refuse_invalid_arguments(name):
    function, wrong = getattr(losses, name), []
    title, make = LOSSES[name]
    function(**make())
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument in SKIPPED or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue

        def call(value, argument=argument):
            return function(**{**make(), argument: value})

        wrong += refusals(call, title, argument, of_loss(parameter))
    assert not wrong, "\n".join(wrong)


def test_every_loss_is_covered():
    known = {
        n for n in losses.__all__ if not n.endswith("Metrics") and n not in ("Source", "Teacher")
    }
    assert known - LOSSES.keys() == {"segments_of", "token_sum"}  # of one tensor; of a formula
