"""Tiny Hugging Face models for tests, and how a patched one is compared with stock.

Tiny data, tokenizers and arguments for tests with trainers.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from packaging import version
from torch import nn
from torch.utils._pytree import tree_leaves

from liger_multi.modules.arguments import cache_parameter, caches
from liger_multi.patching import patch, unpatch
from liger_multi.patching.swap import Patched, swapped
from tests.comparing import Operations, assert_same_gradients, gradients, resolution

transformers = pytest.importorskip("transformers")


def continued(model: Any, output: Any) -> dict[str, Any]:
    """The cache of an output as the argument of the next call, whatever transformers calls it."""
    return {cache_parameter(type(model).forward): next(iter(caches(dict(output.items())).values()))}


VOCABULARY = 223  # a prime, so that no other axis is mistaken for it


@dataclass(frozen=True)
class Architecture:
    """One model type, and what a patch of two layers of it is to find.

    Attributes:
        name: Prefix of the classes of configuration and model.
        counts: Modules that run an operator, by its patch key; rope stands in both layers, the head
            is one.
        rotated: Whether norms of queries and keys are computed with their rotation.
        rope: How the report calls the rotary function.
        packed: Whether gate and up are one layer.
        tied: Whether the head shares its weight with the embedding.
        config: What differs from the common configuration.
        config_name: Class of the configuration, where it has another prefix.
        fewest_layers: Layers until every kind of layer is there.
    """

    name: str
    counts: dict[str, int]
    rope: str = "half"
    rotated: bool = False
    packed: bool = False
    tied: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    config_name: str = ""
    fewest_layers: int = 1

    @property
    def every(self) -> dict[str, int]:
        """Modules by patch key, those that all architectures have included."""
        rotated = {"rms_norm_rope": 2} if self.rotated else {}
        return {**self.counts, "rope": 2, **rotated, "fused_linear_cross_entropy": 1}

    @property
    def calls(self) -> dict[str, int]:
        """Calls of operators in one forward pass with labels."""
        names = {op: f"{op}_packed" if self.packed else "gated_mlp" for op in ("swiglu", "geglu")}
        counts = {names.get(op, op): n for op, n in self.every.items()}
        if self.rotated:  # a call for queries and one for keys of each layer
            counts |= {"rms_norm": counts["rms_norm"] - 4, "rms_norm_rope": 4, "rope": 0}
        return counts


_ROUTED = {
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
_SOFTCAPPED = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 7.0, "sliding_window": 4}
ARCHITECTURES = {
    "llama": Architecture("Llama", {"rms_norm": 5, "swiglu": 2}),
    "qwen2": Architecture("Qwen2", {"rms_norm": 5, "swiglu": 2}, tied=True),
    "qwen3": Architecture("Qwen3", {"rms_norm": 9, "swiglu": 2}, rotated=True, tied=True),
    "mistral": Architecture("Mistral", {"rms_norm": 5, "swiglu": 2}),
    "gemma": Architecture("Gemma", {"rms_norm": 5, "geglu": 2}, tied=True),
    "gemma2": Architecture("Gemma2", {"rms_norm": 9, "geglu": 2}, tied=True, config=_SOFTCAPPED),
    "gemma3_text": Architecture(
        "Gemma3",
        {"rms_norm": 13, "geglu": 2},
        rotated=True,
        tied=True,
        config={**_SOFTCAPPED, "sliding_window_pattern": 2},
        config_name="Gemma3Text",
    ),
    "mixtral": Architecture(
        "Mixtral", {"rms_norm": 5, "fused_moe": 2}, config=_ROUTED | {"num_local_experts": 4}
    ),
    "phi3": Architecture(
        "Phi3",
        {"rms_norm": 5, "swiglu": 2},
        packed=True,
        config={"partial_rotary_factor": 0.5},
    ),
    "olmo2": Architecture(
        "Olmo2", {"rms_norm": 9, "swiglu": 2}, rope="half, cast back", rotated=True
    ),
    "granite": Architecture(
        "Granite",
        {"rms_norm": 5, "swiglu": 2},
        config={
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
        },
    ),
    "gpt_oss": Architecture(
        "GptOss",
        {"rms_norm": 5, "fused_moe": 2},
        rope="half, an angle a pair",
        config=_ROUTED
        | {
            "num_local_experts": 4,
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen3_moe": Architecture(
        "Qwen3Moe",
        {"rms_norm": 9, "swiglu": 1, "fused_moe": 1},
        rotated=True,
        config=_ROUTED | {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
        fewest_layers=2,
    ),
    "glm4": Architecture(
        "Glm4",
        {"rms_norm": 9, "swiglu": 2},
        rope="interleaved, angles in the first half",
        packed=True,
        config={"partial_rotary_factor": 0.5},
    ),
}
KINDS = tuple(ARCHITECTURES)
HEADLESS = {"fused_linear_cross_entropy": False}


def build(
    model_type: str = "llama",
    *,
    tied: bool | None = None,
    seed: int = 0,
    patching: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A model of two layers with random weights; norm weights are not ones.

    It is patched with the options ``patching``, or is not where None.
    """
    known = ARCHITECTURES[model_type]
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": known.tied if tied is None else tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if model_type in ("phi3", "olmo2", "qwen2", "granite"):
        del defaults["head_dim"]  # no parameter of these
    model_config = getattr(transformers, f"{known.config_name or known.name}Config")(
        **{**defaults, **known.config, **config}
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{known.name}ForCausalLM")(model_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(3)
    if patching is not None:
        patch(model, **patching)
    return model.train()


def patched_copy(stock: Any, **options: Any) -> Any:
    """An equal model, patched."""
    ours = copy.deepcopy(stock)
    patch(ours, **options)
    return ours


def assert_unpatched(ours: Any, stock: Any) -> None:
    """After ``unpatch``, all classes are those of a model that was never patched."""
    unpatch(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]


def redrawn(model: Any, std: float = 0.2) -> Any:
    """The model with larger weights: as it is made, its tokens and layers hardly see each other."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
    return model


def scaled_to_width(model: Any, noise: float = 0.1) -> Any:
    """The model with weights that keep the size of their inputs, so that its tokens matter."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(drawn * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(drawn * noise)
    return model


def pair(
    model_type: str = "llama",
    device: Any = "cpu",
    dtype: Any = torch.float32,
    *,
    patching: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Any, Any]:
    """Two equal models; the second one is patched with these options, or is not where None."""
    stock = build(model_type, **config).to(device=device, dtype=dtype)
    return stock, copy.deepcopy(stock) if patching is None else patched_copy(stock, **patching)


def batch(
    rows: int = 2, length: int = 11, device: Any = "cpu", seed: int = 1
) -> dict[str, torch.Tensor]:
    """Token ids, with labels of which the start of every row is ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 2 + row] = -100
    mask = torch.ones_like(ids)
    return {
        k: v.to(device)
        for k, v in {"input_ids": ids, "labels": labels, "attention_mask": mask}.items()
    }


def graph_batch(labels: bool = True, **arguments: Any) -> dict[str, Any]:
    """A batch for compiled models; the caches of transformers 5.0 break the graph of stock."""
    inputs: dict[str, Any] = batch(**arguments)
    if not labels:
        del inputs["labels"]
    if version.parse(transformers.__version__) < version.parse("5.1"):
        inputs["use_cache"] = False
    return inputs


def loss_of(model: Any) -> Any:
    """The loss of a batch."""
    return model(**batch()).loss


def assert_same_training(
    stock: Any, ours: Any, run: Any = loss_of, rtol: float = 2e-5
) -> tuple[Any, Any]:
    """Run both, backpropagate, and compare the loss and every gradient.

    Args:
        stock: The model that results are compared with.
        ours: The patched model.
        run: From a model to its loss; that of a batch by default.
        rtol: Allowed difference of the loss, and of gradients as :mod:`comparing` has it.
    """
    losses = []
    for model in (stock, ours):
        model.zero_grad()
        loss = run(model)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1].double(), losses[0].double(), rtol=rtol, atol=0)
    assert_same_gradients(gradients(ours), gradients(stock), rtol)
    return losses[0], losses[1]


def assert_same_compiled(stock: Any, ours: Any, inputs: Any = None, **options: Any) -> None:
    """A compiled patched model trains as an eager stock one, with one graph unless told."""
    options = {"fullgraph": True, "backend": "aot_eager", **options}
    compiled, inputs = torch.compile(ours, **options), inputs or graph_batch()
    assert_same_training(stock, ours, lambda m: (compiled if m is ours else m)(**inputs).loss)


def assert_as_exact(stock: Any, ours: Any, wide_model: Any, run: Any, run_wide: Any) -> None:
    """In low precision: loss and every gradient are as near to those of fp32 as stock's are.

    Args:
        stock: The model that rounds as it does.
        ours: The patched model.
        wide_model: An equal model in fp32.
        run: From a model to its loss.
        run_wide: The same without rounding.
    """
    errors = []
    for model, loss_of in ((stock, run), (ours, run), (wide_model, run_wide)):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        errors.append({"loss": loss.detach(), **gradients(model)})
    assert errors[0].keys() == errors[1].keys() == errors[2].keys()
    floor = resolution(errors[2].values(), torch.finfo(torch.float32).eps)
    for name, exact in errors[2].items():
        exact = exact.double()
        error, allowed = ((f[name].double() - exact).norm() for f in (errors[1], errors[0]))
        # the same number of roundings at other places: their sum may differ, not its size; nearer
        # than it resolves itself, nothing can be compared with it
        bound = 2 * allowed + 2**-7 * exact.norm() + floor * exact.numel() ** 0.5
        assert error <= bound, f"{name}: {error} > {bound}, stock {allowed}"


class Widest(Operations):
    """The most rows of any tensor whose last axis is the vocabulary, inside of operators as well.

    Attributes:
        rows: That number.
        shapes: The shapes of all results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.t.default, torch.ops.aten.transpose.int):
            return result  # the weight, turned
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.shapes.add(tuple(tensor.shape))
                if tensor.ndim and tensor.shape[-1] == VOCABULARY:
                    self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return result


class FusedCalls:
    """Counts the calls of the fused loss that patched models make."""

    def __init__(self, monkeypatch: Any) -> None:
        from liger_multi import ops

        self.count = 0
        self.keywords: list[dict[str, Any]] = []
        stock = ops.fused_linear_cross_entropy

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.keywords.append(kwargs)
            return stock(*args, **kwargs)

        monkeypatch.setattr(ops, "fused_linear_cross_entropy", counted)


def patched_ops(model: Any) -> dict[str, int]:
    """How many modules each operator replaces; options of the model's own loss are no operator."""
    ops = Counter(swapped(m).op for m in model.modules() if isinstance(m, Patched))
    return {op: n for op, n in sorted(ops.items()) if op != "loss options"}


def adapters(
    model: Any,
    targets: Any = (),
    *,
    seed: int = 3,
    std: float = 0.1,
    name: str = "default",
    **config: Any,
) -> Any:
    """The model in PEFT, with LoRA on layers of these names that adds something."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 8, "target_modules": list(targets), **config}
    return filled(peft.get_peft_model(model, peft.LoraConfig(**config), adapter_name=name), std)


def filled(model: Any, std: float = 0.1) -> Any:
    """The model with random second factors of its adapters, which begin as zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)
    return model


STACKS = ("gate_up_proj", "down_proj")
"""Of the experts of gpt-oss."""


def in_mxfp4(model: Any) -> Any:
    """A gpt-oss whose stacks of experts are codes."""
    from liger_multi.integrations.mxfp4 import quantize_mxfp4
    from liger_multi.ops import QuantizedWeight

    options = {"format": "mxfp4", "dtype": torch.float32, "transposed": True}
    for module in model.modules():
        for name in module._parameters.keys() & STACKS:
            codes = quantize_mxfp4(module._parameters[name].detach().mT)
            weight = QuantizedWeight(*codes, **options)
            module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    return model


def with_lora_on_experts(model: Any) -> Any:
    """Adapters on attention and on every expert."""
    stacks = [f"mlp.experts.{name}" for name in STACKS]
    return adapters(model, ["q_proj", "o_proj"], seed=5, std=0.05, target_parameters=stacks)


def experts_of(model: Any) -> list[Any]:
    """The layers of experts that transformers' interface serves."""
    return [m for m in model.modules() if hasattr(m, "_apply_gate")]


class Calls(Counter[str]):
    """Counts the calls of operators that patched models make: of these, or of all."""

    def __init__(self, monkeypatch: Any, names: Any = ()) -> None:
        from liger_multi import ops

        super().__init__()
        for name in names or ops.__all__:
            if callable(getattr(ops, name)) and not isinstance(getattr(ops, name), type):
                monkeypatch.setattr(ops, name, self._counted(name, getattr(ops, name)))

    def _counted(self, name: str, stock: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self[name] += 1
            return stock(*args, **kwargs)

        return counted


def counting(*names: str) -> Any:
    """A fixture that counts the calls of these operators."""

    @pytest.fixture
    def calls(monkeypatch: Any) -> Calls:
        return Calls(monkeypatch, names)

    return calls


class Graphs:
    """A compiler that runs graphs as they are and keeps what they compute, forward and backward.

    Attributes:
        count: Graphs that Dynamo made.
        single: Those that are a call of an operator of ours and nothing else.
        targets: Names of the operators.
        rows: The most rows of a result whose last axis is the vocabulary.
        traces: Where the operations stand in the source.
    """

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self.count, self.targets, self.rows, self.traces = 0, set[str](), 0, ""
        self.single = 0
        self.compile = aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.count += 1
        called = [str(n.target) for n in graph.graph.nodes if n.op.startswith("call_")]
        self.single += len(called) == 1 and called[0].startswith("liger_multi.")
        return self.compile(graph, example_inputs)

    def keep(self, graph: Any, example_inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        for node in graph.graph.nodes:
            self.targets.add(str(node.target))
            self.traces += node.stack_trace or ""
            for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
                if (
                    node.op != "placeholder"
                    and isinstance(value, torch.Tensor)
                    and value.shape[-1:] == (VOCABULARY,)
                ):
                    self.rows = max(self.rows, value.numel() // VOCABULARY)
        return make_boxed_func(graph.forward)


# --- trainers ---

WORDS = [f"w{i}" for i in range(40)]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def with_words(words, name="llama", **options):
    """A model that has the vocabulary of a tokenizer."""
    ids = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    return build(name, vocab_size=len(words), **ids, **options)


def text(generator, low, high):
    count = int(torch.randint(low, high, (1,), generator=generator))
    picked = torch.randint(len(WORDS), (count,), generator=generator)
    return "".join(f" {WORDS[i]}" for i in picked)


def rows(trainer_type, count=8):
    g = torch.Generator().manual_seed(0)
    dataset = []
    for i in range(count):
        row = {"prompt": text(g, 2, 5)}
        if trainer_type == "pair":
            row |= {"chosen": text(g, 2, 7), "rejected": text(g, 2, 7)}
        elif trainer_type in ("completion", "label"):
            row |= {"completion": text(g, 2, 7)}
        dataset.append(row | ({"label": i % 3 == 0} if trainer_type == "label" else {}))
    from datasets import Dataset

    return Dataset.from_list(dataset)


class Texts(torch.utils.data.Dataset):
    """Rows of uneven length."""

    def __init__(self, count=8):
        self.rows = []
        for i in range(count):
            row = batch(rows=1, length=14, seed=i)
            row["labels"][0, : 2 + i] = -100
            self.rows.append({k: v[0] for k, v in row.items()})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def trainer(model, directory, **arguments):
    pytest.importorskip("accelerate")
    callbacks = arguments.pop("callbacks", None)
    more = {k: arguments.pop(k) for k in ("compute_metrics", "model_init") if k in arguments}
    defaults = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 3,
        # AdamW divides a gradient by its own size: what rounding leaves of a zero becomes a step
        "optim": "sgd",
        "learning_rate": 0.1,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 4,
        "lr_scheduler_type": "constant",
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**{**defaults, **arguments}),
        train_dataset=Texts(),
        eval_dataset=Texts(4),
        callbacks=callbacks,
        **more,
    )


def arguments(tmp_path, **more):
    return {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 3,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        **more,
    }


def deepseek(**config: Any) -> Any:
    """A model with a sigmoid router, groups of experts and shared ones."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**{**sizes, **config})
    return transformers.DeepseekV3ForCausalLM(config)


# --- tiny modules that tests patch, and variants of them with another method ---


class Holder(nn.Module):
    """A model of one module and no output embedding."""

    def __init__(self, module):
        super().__init__()
        self.inner = module


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, act=None, bias=True):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(12, 16, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(16, 12, bias=bias)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    """An RMSNorm."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(12) + 0.5), 1e-6

    def forward(self, x):
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * r).to(x.dtype)


def variant(base, forward, **attributes):
    """A module of a subclass with another forward, and attributes of its own; tensors are buffers.

    ``forward`` gets the module and its arguments, and may call that of ``base``.
    """
    module = type(f"Other{base.__name__}", (base,), {"forward": forward})()
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)
    return module
