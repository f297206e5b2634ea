"""A callback for the trainers of transformers and TRL, rows over ranks, shared prefixes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from liger_multi import trees
from liger_multi.distributed import TAKES_ROWS, shard_sequence, unshard_sequence
from liger_multi.errors import PatchError
from liger_multi.patching import PatchReport, patch, real_logits, register_attention, shards
from liger_multi.patching.apply import TrainerPatch
from liger_multi.patching.attention.interface import NAME
from liger_multi.patching.options import OpChoice

# --- shared prefixes in TRL: the calls that score a trainer's answers compute every prompt once ---

# The trainers of TRL give a model a fused head, and score answers by calls of the model with
# ``fused_lm_head=True`` and labels: one call for the rows of a micro-batch.
# :func:`share_prefixes` puts a function around that forward, which computes the same output from
# the trees of the rows.

MARK = "_liger_multi_scored"
"""Attribute of the function that shares prefixes, with the forward that it stands around."""
_SERVED = {"input_ids", "attention_mask", "labels", "output_router_logits", "use_cache"}
_CLOSURE = {"temperature", "outputs", "cast_lm_head_to_fp32"}
"""What TRL's forward reads of the options of its head."""
ROWS = 256
"""Tokens whose logits exist at a time, for what is logged of them."""
_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_sum_sq_probs": lambda logits, _: (2 * logits.log_softmax(-1)).logsumexp(-1),
    "mean_logits": lambda logits, _: logits.mean(-1),
    "is_top1": lambda logits, targets: (logits.argmax(-1) == targets).float(),
}
"""Numbers of every predicted token, from its logits ``(tokens, classes)`` in fp32."""


def share_prefixes(model: nn.Module, *, shortest: int = 16) -> None:
    """Let TRL's scoring calls of a patched model compute each prompt once.

    Log-probabilities, entropies and the other outputs are those of the rows by themselves, within
    rounding. Calls with images, and rows that share nothing, run as before. Attention of the model
    is set to ours, which keeps branches apart.

    Args:
        model: The model of a ``GRPOTrainer``, ``RLOOTrainer`` or ``DPOTrainer``, patched, perhaps
            with adapters of PEFT.
        shortest: How many tokens answers have in common at least that are shared as well.

    Raises:
        PatchError: TRL gave the model no fused head, or one that computes in fp32.
        ValueError: The model cannot use our attention.
    """
    module, scored, options, autocasts = _scored(model)
    if options["cast_lm_head_to_fp32"]:
        raise PatchError("share_prefixes: cast_lm_head_to_fp32=True is not served, got it from TRL")
    register_attention()
    if module.config._attn_implementation != NAME:
        module.set_attn_implementation(NAME)

    rows = _Rows(shortest)

    @functools.wraps(scored)
    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = rows.batch(args, kwargs)
        rows.ids = None
        if batch is None:
            return scored(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for autocast in autocasts:
                stack.enter_context(autocast)
            return _output(module, batch, kwargs, options)

    setattr(forward, MARK, scored)
    setattr(forward, TAKES_ROWS, lambda *call: rows.batch(*call) is not None)
    vars(module)["forward"] = forward


def unshare_prefixes(model: nn.Module) -> None:
    """Take back what :func:`share_prefixes` did, but for the attention."""
    for module in model.modules():
        scored = getattr(vars(module).get("forward"), MARK, None)
        if scored is not None:
            vars(module)["forward"] = scored


def _scored(
    model: nn.Module,
) -> tuple[Any, Callable[..., Any], Mapping[str, Any], list[torch.autocast]]:
    """The module that TRL gave a fused head, its forward, the head's options, and autocasts.

    accelerate puts functions around the forward of a model that trains in mixed precision.
    """
    for module, forward in _forwards(model):
        autocasts: list[torch.autocast] = []
        for function in _wrapped(forward):
            variables = inspect.getclosurevars(function).nonlocals
            if variables.keys() >= _CLOSURE:
                return module, forward, variables, autocasts
            autocasts += [v for v in variables.values() if isinstance(v, torch.autocast)]
    raise PatchError(
        f"share_prefixes: TRL gave {type(model).__name__} no fused head; pass the model of a "
        "GRPOTrainer, RLOOTrainer or DPOTrainer of TRL 1.16, after the trainer was made"
    )


def _forwards(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for module in model.modules():
        forward = vars(module).get("forward")
        if forward is not None:
            yield module, getattr(forward, MARK, forward)


def _wrapped(forward: Any) -> Iterator[Any]:
    """The functions that a forward consists of, the outermost first."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        if inspect.isfunction(forward):
            yield forward
        forward = getattr(forward, "__wrapped__", None)


class _Rows:
    """The trees of a call, which hooks of ranks look for before its forward does."""

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest
        self.ids: Tensor | None = None
        self.trees: trees.Batch | None = None

    def batch(self, args: Any, kwargs: Mapping[str, Any]) -> trees.Batch | None:
        """The trees of a scoring call; None for others, and for rows that share nothing."""
        if args or not kwargs.get("fused_lm_head") or not _is_served(kwargs):
            return None
        if self.ids is not kwargs["input_ids"]:
            batch = _batch(kwargs, self.shortest)
            saves = batch.tree.tokens < int(kwargs["attention_mask"].sum())
            self.ids, self.trees = kwargs["input_ids"], batch if saves else None
        return self.trees


def _is_served(kwargs: Mapping[str, Any]) -> bool:
    names = {name for name, value in kwargs.items() if value is not None} - {"fused_lm_head"}
    tensors = [kwargs.get(n) for n in ("input_ids", "attention_mask", "labels")]
    are_rows = all(isinstance(x, Tensor) and x.ndim == 2 for x in tensors)
    return names <= _SERVED and are_rows and len(kwargs["input_ids"]) > 1


def _batch(kwargs: Mapping[str, Any], shortest: int) -> trees.Batch:
    """The rows as trees: a prompt is what stands before a row's first label."""
    mask = kwargs["attention_mask"] != 0
    answered = (kwargs["labels"] != -100).cumsum(1) > 0
    lengths = (mask & ~answered).sum(1)
    return trees.from_batch(
        kwargs["input_ids"], mask, prompt_lengths=lengths.tolist(), shortest=shortest
    )


def _output(
    module: Any, batch: trees.Batch, kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """What TRL's forward returns."""
    from trl.trainer.utils import FusedCausalLMOutput

    names, text = set(options["outputs"]), module.config.get_text_config()
    default = getattr(text, "output_router_logits", False)
    routed = bool(kwargs.get("output_router_logits", default))
    arguments: dict[str, Any] = {"output_router_logits": True} if routed else {}
    scores = trees.scores(
        functools.partial(type(module).forward, module),
        batch,
        temperature=options["temperature"],
        entropy="entropy" in names,
        **arguments,
    )
    mask = kwargs["labels"][:, 1:] != -100

    def placed(values: Tensor) -> Tensor:
        return batch.to_rows(values)[:, 1:].masked_fill(~mask, 0)

    statistics = _statistics(scores, options["temperature"], names)
    statistics_of_row = {name: placed(scores.share.whole(x)) for name, x in statistics.items()}
    if "is_top1" in statistics_of_row:
        statistics_of_row["is_top1"] = statistics_of_row["is_top1"].bool()
    log_probs = placed(scores.log_probs)
    aux_loss = scores.output.aux_loss if routed else None
    loss = -log_probs.sum() / mask.sum().clamp(min=1)
    if aux_loss is not None:
        loss = loss + getattr(text, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(
        loss=loss,
        log_probs=log_probs,
        entropy=None if scores.entropy is None else placed(scores.entropy),
        label_mask=mask,
        aux_loss=aux_loss,
        **statistics_of_row,
    )


def _statistics(scores: trees.Scores, temperature: float, names: set[str]) -> dict[str, Tensor]:
    """What TRL logs of the logits that predict a token, in chunks of these tokens."""
    chunks: list[list[Tensor]] = []
    requested = [name for name in _STATISTICS if name in names]
    share = scores.share
    for sources, targets in zip(share.sources.split(ROWS), share.targets.split(ROWS), strict=True):
        if requested:
            with torch.no_grad():
                part = (
                    real_logits(scores.output.logits[:, sources]).detach()[0] / temperature
                ).float()
                chunks.append([_STATISTICS[name](part, targets) for name in requested])
    return {n: torch.cat(parts) for n, parts in zip(requested, zip(*chunks, strict=True))}


class SharedPrefixes:
    """A mixin for trainers of TRL: policy and reference model compute each prompt once.

        class Trainer(SharedPrefixes, GRPOTrainer): ...

    Both models are patched. With the callback's ``shared_prefixes=True`` only the policy shares.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer, then patch its models."""
        super().__init__(*args, **kwargs)
        trainer: Any = self
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                module, scored, *_ = _scored(model)
                vars(module).pop("forward")  # a module with a forward of its own is not patched
                patch(model)
                vars(module)["forward"] = scored
                share_prefixes(model)


# --- rows over ranks in accelerate, the ``Trainer`` and TRL: a configuration of parallelism ---

MESH = "tp"
"""The name of ranks with the same rows in accelerate's device mesh, with DeepSpeed too."""


class SequenceParallel(ParallelismConfig):
    """Ranks that share rows, for :func:`liger_multi.distributed.shard_sequence`.

    accelerate then brings the same rows to all ranks of a group, and FSDP2 shards states over them.
    To accelerate, the Trainer and TRL these are ranks that compute the same loss of the same batch
    (``tp_size``), as is true: nothing else cuts rows or requires another attention, and
    ``num_items_in_batch`` and counts of tokens are of whole rows.

    Pass it as ``parallelism_config`` of ``TrainingArguments`` or ``Accelerator``. With
    :class:`liger_multi.integrations.TrainerCallback`, the model is sharded when training begins;
    elsewhere call ``shard_sequence(model, accelerator.torch_device_mesh["tp"])``.

    Args:
        sp_size: How many ranks share rows; or ``cp_size``, which is the same here. Without both,
            those of ``accelerate launch``.
        dp_replicate_size, dp_shard_size: As for ``ParallelismConfig``.

    Raises:
        ValueError: Tensor parallel ranks beside them, or sizes whose product is not the number of
            processes.
    """

    tp_size: int
    cp_size: int
    sp_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tp_size != 1:
            raise ValueError(f"SequenceParallel has no tensor parallel ranks, got {self.tp_size}")
        size = self.cp_size * self.sp_size
        self._sizes |= {"tp": size, "cp": 1, "sp": 1}
        self.tp_size, self.cp_size, self.sp_size = size, 1, 1
        self.cp_handler = self.sp_handler = None

    tp_enabled = property(lambda self: False)
    non_dp_dim_names = property(lambda self: [MESH])
    dp_shard_cp_dim_names = property(
        lambda self: [*(["dp_shard"] if self.dp_shard_enabled else []), MESH]
    )
    dp_cp_dim_names = property(lambda self: [*self.dp_dim_names, MESH])

    def _validate_accelerator(self, accelerator: Any) -> None:
        if self.total_size != accelerator.num_processes:
            raise ValueError(
                f"SequenceParallel: dp_replicate_size {self.dp_replicate_size} x dp_shard_size "
                f"{self.dp_shard_size} x {self.tp_size} ranks with the same rows must be the "
                f"number of processes, {accelerator.num_processes}"
            )


def spread(model: Any, args: Any) -> None:
    """Shard the model of a trainer, where its parallelism is ours."""
    state = AcceleratorState._shared_state
    config = state.get("parallelism_config")
    if not isinstance(config, SequenceParallel):
        if config is not None and (config.cp_enabled or config.sp_enabled):
            raise PatchError(
                "ranks of accelerate's ParallelismConfig cut rows before a patched model has them: "
                "pass parallelism_config=liger_multi.integrations.SequenceParallel(sp_size="
                f"{config.cp_size * config.sp_size})"
            )
        return
    for reason in _unserved(args):
        raise PatchError(f"SequenceParallel does not serve {reason}")
    register_attention()
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    mesh = state["device_mesh"][MESH]
    unspread(model)
    shard_sequence(model, mesh)
    if hasattr(model, "generate"):
        vars(model)["generate"] = _Whole(model.generate, mesh.get_group())


def _unserved(args: Any) -> Iterator[str]:
    """What in a trainer's arguments does not work on ranks that share rows."""
    if getattr(args, "use_vllm", False):
        yield "use_vllm=True: ranks would get answers of their own"
    generations = getattr(args, "num_generations", None) or 1
    if generations == 1:
        return
    uses = (args.steps_per_generation or 1) * args.num_iterations
    if uses > 1:
        yield (
            "steps_per_generation (by default gradient_accumulation_steps) times num_iterations "
            f"above 1, got {uses}: TRL's sampler would draw some prompts again and others never"
        )
    rows = args.per_device_train_batch_size
    if rows % generations:
        yield f"{rows} answers a rank, of {generations} to a prompt: ranks have whole groups"


def unspread(model: nn.Module) -> None:
    """Take back what :func:`spread` did, but for the attention."""
    unshard_sequence(model)
    generate = vars(model).get("generate")
    if isinstance(generate, _Whole):
        model.generate = generate.generate


class _Whole:
    """``generate`` on whole rows, in every rank; all have the answers of the first one.

    Ranks draw with seeds of their own, and are to train on the same answers.
    """

    def __init__(self, generate: Any, group: Any) -> None:
        functools.update_wrapper(self, generate)
        self.generate, self.group = generate, group

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with shards.suspended():
            tokens = self.generate(*args, **kwargs)
        if not isinstance(tokens, Tensor):
            raise TypeError(f"generate over ranks returns tokens, got {type(tokens).__name__}")
        shape = torch.tensor(tokens.shape, device=tokens.device)
        dist.broadcast(shape, group=self.group, group_src=0)
        result = tokens.resize_(*shape.tolist()) if tokens.shape != tuple(shape) else tokens
        dist.broadcast(result, group=self.group, group_src=0)
        return result


class TrainerCallback(transformers.TrainerCallback):
    """Patch a trainer's model, with no change to the trainer.

    The model is patched when the trainer is made, before it is moved, wrapped or compiled; a model
    of ``model_init`` when training begins. Resuming, evaluating, saving and pushing see the same
    parameters under the same names as without it. With ``parallelism_config`` a
    :class:`liger_multi.integrations.SequenceParallel`, rows are spread over ranks from the
    beginning of training on.

    Args:
        strict: Raise when anything that was asked for is skipped.
        shared_prefixes: Let the trainers of TRL that score several answers to a prompt (GRPO, RLOO,
            DPO) compute it once, from the beginning of training on; see
            :func:`liger_multi.integrations.share_prefixes`. Attention is then ours.
        unpatch_at_end: When training ends, give every module the class that it had before: the
            original one, or an earlier patch of yours.
        ops: Operators and their options, as for :func:`liger_multi.patch`.

    Raises:
        PatchError: An unknown operator or option; or, when the trainer is made, a trainer that
            patches the model itself (``use_liger_kernel=True``); or, when training begins, a
            setting that rows over ranks do not serve.
    """

    def __init__(
        self,
        *,
        strict: bool = False,
        unpatch_at_end: bool = False,
        shared_prefixes: bool = False,
        **ops: OpChoice,
    ) -> None:
        self.unpatch_at_end, self.shared_prefixes = unpatch_at_end, shared_prefixes
        self._held = TrainerPatch(strict, ops)

    @property
    def report(self) -> PatchReport | None:
        """What was replaced and what was skipped; None before a trainer has brought its model."""
        return self._held.report

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Patch the model that the trainer was given."""
        if getattr(args, "use_liger_kernel", False):
            raise PatchError(
                "use_liger_kernel=True lets the trainer patch the model too; use that (with "
                "liger_multi.compat.liger_kernel.install() for these operators) or this callback"
            )
        if model is not None:
            self._held.hold(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Patch a model that ``model_init`` made, or one that was unpatched at the last end."""
        if model is not None:
            self._held.hold(model)
        if model is not None:
            spread(model, args)
        if model is not None and self.shared_prefixes:
            share_prefixes(model)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Take the patch back, where that was asked for."""
        if self.unpatch_at_end:
            if model is not None:
                unspread(model)
                unshare_prefixes(model)
            self._held.release()
