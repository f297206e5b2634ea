"""Apply a plan to a model in this process, and undo it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from liger_multi.memory.offload import Offload, offload_activations
from liger_multi.memory.planning.result import Settings
from liger_multi.memory.recompute import apply_recompute
from liger_multi.ops.linear_float8 import SMALLEST
from liger_multi.patcher import patcher


def layers_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Path and list of a model's layers: the list of modules of one class with most parameters.

    Raises:
        ValueError: The model has no such list.
    """
    best: tuple[str, nn.ModuleList | None] = ("", None)
    size = 0
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(m) for m in module}) == 1:
            count = sum(p.numel() for p in module.parameters())
            if count > size:
                best, size = (path, module), count
    if best[1] is None:
        raise ValueError(
            f"{type(model).__name__} has no list of layers of one class, which plans are made for"
        )
    return best[0], best[1]


class _Inner(nn.Module):
    """An MLP's own ``forward``, as a module that shares its parameters and has none of its own."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.__dict__["owner"] = mlp  # not a submodule: its state belongs to its own place

    def forward(self, x: Tensor) -> Tensor:
        """Call the forward of the MLP's class."""
        owner: Any = self.__dict__["owner"]
        return type(owner).forward(owner, x)  # type: ignore[no-any-return]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of the MLP."""
        owner: nn.Module = self.__dict__["owner"]
        return owner.parameters(recurse)


class _TiledForward:
    """Replaces an MLP's ``forward``. It is a plain attribute, so that copies of a model copy it."""

    def __init__(self, mlp: nn.Module, tiles: int) -> None:
        from liger_multi.nn.mlp import TiledMLP

        self.tiled = TiledMLP(_Inner(mlp), tiles)
        self.mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        """Run the MLP on some tokens at a time."""
        self.tiled.train(self.mlp.training)
        return self.tiled(x)  # type: ignore[no-any-return]


class Applied:
    """What :func:`apply` did; :meth:`undo`, or the end of ``with``, takes it back exactly.

    Attributes:
        settings: The settings that were applied.
        done: The steps in words, in order.
        offload: Handle of offloaded activations.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.done: list[str] = []
        self._undo = contextlib.ExitStack()
        self.offload: Offload | None = None

    def undo(self) -> None:
        """Restore the model. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        return "; ".join(self.done) or "nothing to apply"

    def add(self, description: str, undo: Any) -> None:
        """Record a step and the function that undoes it."""
        self.done.append(description)
        self._undo.callback(undo)


def apply(plan: Any, model: nn.Module) -> Applied:
    """Apply to a model what a plan decides and this process can do.

    Patching, the chunk of the loss, layers in FP8, recompute policies, tiled MLPs, offloaded
    activations and the attention implementation are applied. Shards, other precisions, accumulation
    and the optimizer are the training loop's: the files of :meth:`TrainingPlan.write` are for it.

    Args:
        plan: A :class:`TrainingPlan`, :class:`Candidate` or :class:`Settings`.
        model: A Hugging Face model; its parameters, buffers and names are left alone.

    Returns:
        A handle, also a context manager.

    Raises:
        TypeError: ``plan`` is none of these.
        ValueError: The plan does not fit the model, which is left unchanged.
    """
    chosen = getattr(plan, "best", plan)
    settings = getattr(chosen, "settings", chosen)
    if not isinstance(settings, Settings):
        raise TypeError(f"expected a Plan, a Candidate or Settings, got {type(plan).__name__}")
    return prepare(model, settings)


def prepare(model: Any, settings: Settings, simulated: bool = False) -> Applied:
    """:func:`apply`, also for a model of shapes."""
    applied = Applied(settings)
    try:
        _attention(applied, model, settings, simulated)
        if settings.patched:
            _patch(applied, model, settings, simulated)
        if settings.tiles > 1:
            _tile(applied, model, settings)
        _recompute(applied, model, settings, simulated)
    except BaseException:
        applied.undo()
        raise
    return applied


def _attention(applied: Applied, model: Any, settings: Settings, simulated: bool) -> None:
    current = getattr(getattr(model, "config", None), "_attn_implementation", None)
    # ours materializes nothing quadratic either, and serves models that have no SDPA
    equivalent = (None, settings.attention, *["liger_multi"] * (settings.attention == "sdpa"))
    if simulated or current in equivalent:
        return
    model.set_attn_implementation(settings.attention)
    applied.add(
        f"attention {settings.attention} instead of {current}",
        lambda: model.set_attn_implementation(current),
    )


def _patch(applied: Applied, model: Any, settings: Settings, simulated: bool) -> None:
    if not simulated and any(hasattr(m, "_liger_multi_swap") for m in model.modules()):
        applied.done.append("patched before")
        return
    options: dict[str, Any] = {}
    if settings.chunk is not None:
        options["fused_linear_cross_entropy"] = {"chunk": settings.chunk}
    if settings.precision == "fp8":
        options["linear_float8"] = float8_of(model)
    report = patcher().patch(model, **options)
    applied.add(f"patched {report.target}", lambda: patcher().unpatch(model))


def float8_of(model: nn.Module) -> dict[str, Any] | bool:
    """The patch option ``linear_float8``: weights of a frozen base are stored in FP8.

    A model has a frozen base if no wide weight of its layers is trained.
    """
    _, layers = layers_of(model)
    wide = [p for p in layers.parameters() if p.ndim == 2 and p.numel() >= SMALLEST]
    return True if any(p.requires_grad for p in wide) else {"frozen": True}


def in_float8(model: nn.Module) -> None:
    """Patch only the wide linear layers of a model on the meta device."""
    patcher().patch(model, linear_float8=float8_of(model))


def mlps_of(model: nn.Module) -> list[nn.Module]:
    """The MLP of every layer: the child with most parameters that is called ``mlp`` or the like.

    Those of experts are left out, and of transformers' Conv1D: it needs rows without gaps, which
    a tile of several sequences has.
    """
    mlps = []
    for layer in layers_of(model)[1]:
        for name in ("mlp", "feed_forward", "ffn", "feedforward"):
            child = getattr(layer, name, None)
            if isinstance(child, nn.Module) and not any(
                isinstance(m, nn.ModuleList)
                or "expert" in type(m).__name__.lower()
                or type(m).__name__ == "Conv1D"
                for m in child.modules()
            ):
                mlps.append(child)
                break
    return mlps


def _tile(applied: Applied, model: nn.Module, settings: Settings) -> None:
    mlps = mlps_of(model)
    if not mlps:
        raise ValueError(f"{type(model).__name__} has no MLP that could run in tiles")
    replaced = [type(m).__name__ for m in mlps if "forward" in m.__dict__]
    if replaced:
        raise ValueError(f"the forward of {replaced[0]} was replaced already; undo that first")
    for mlp in mlps:
        mlp.__dict__["forward"] = _TiledForward(mlp, settings.tiles)

    def undo() -> None:
        for mlp in mlps:
            mlp.__dict__.pop("forward", None)

    applied.add(f"MLPs of {len(mlps)} layers in {settings.tiles} tiles", undo)


def _recompute(applied: Applied, model: nn.Module, settings: Settings, simulated: bool) -> None:
    if settings.layers and settings.recompute != "none":
        handle = apply_recompute(model, settings.recompute, layers=settings.layers)
        applied.add(f"recompute {handle}", handle.remove)
    if settings.offload_activations:
        # copies in flight are counted separately: they do not grow with the layers
        options: dict[str, Any] = {"in_flight_bytes": 0} if simulated else {}
        applied.offload = offload_activations(model, **options)
        applied.add("activations on the host", applied.offload.remove)
