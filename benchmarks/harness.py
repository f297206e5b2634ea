"""What benchmarks of layers and whole steps share: calls in turns, memory, steps, and children."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import store
from liger_multi.memory.measure import measure, peak_memory, resolve_device
from liger_multi.memory.recorder import stored

Call = Callable[[], Any]


def device_of(tiny: bool = False) -> torch.device:
    """The accelerator of this machine; the CPU without one, and for a trial."""
    return torch.device("cpu") if tiny else resolve_device()


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def limit_memory(device: torch.device, room: float | None) -> None:
    """Let this process take no more bytes of an accelerator; None is no limit."""
    if room and device.type != "cpu":
        module = torch.get_device_module(device)
        total = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(1.0, room / total))


def milliseconds(call: Call, device: torch.device) -> float:
    """The time of one call that begins and ends at an idle device."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return 1e3 * (time.perf_counter() - start)


def in_turns(
    calls: Mapping[str, Call], device: torch.device, rounds: int, warm: int = 3
) -> dict[str, float]:
    """Median milliseconds of every call, one of each in a round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warm + rounds):
        for name, call in calls.items():
            times[name].append(milliseconds(call, device))
            if number < warm:
                times[name].clear()
    return {name: statistics.median(samples) for name, samples in times.items()}


def added_bytes(call: Call, device: torch.device) -> int:
    """Bytes that a call needed at most beside what was there."""
    return peak_memory(call, device=device)[1].added_bytes


def tracked_peak(model: Any, optimizer: torch.optim.Optimizer, step: Call) -> int:
    """The peak of a step on a CPU, by tracking storages."""
    states = [t for state in optimizer.state.values() for t in state.values()]
    tensors = [t for p in model.parameters() for t in stored(p)]
    with measure("cpu", known=[*tensors, *model.buffers(), *states]) as peak:
        step()
    return peak.peak_bytes


def adamw(parameters: Any, device: torch.device, rate: float = 1e-5) -> torch.optim.Optimizer:
    """AdamW as it is fastest: fused on a GPU of NVIDIA, in a loop elsewhere."""
    options: dict[str, bool] = {"fused": True} if device.type == "cuda" else {"foreach": False}
    return torch.optim.AdamW(parameters, lr=rate, **options)  # type: ignore[arg-type]


class UnsupportedError(ValueError):
    """A peer has nothing for a model, and would leave it as it is."""


def liger(model: Any) -> Any:
    """A model that Liger-Kernel patched.

    Raises:
        UnsupportedError: It has no patch for models of this type.
    """
    peer = importlib.import_module("liger_kernel.transformers.monkey_patch")
    model_type = model.config.model_type
    if model_type not in peer.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedError(f"Liger-Kernel has no patch for {model_type!r}")
    peer._apply_liger_kernel_to_instance(model=model)
    return model


def causal(config: Any, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Any:
    """A causal model of a configuration with random weights, built on its device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.train()


def shard(model: Any, mesh: Any, half: torch.dtype | None) -> Any:
    """FSDP2 around every layer and the rest; gradients are reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train_step(model: Any, ids: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Train a step on tokens that are their own labels; returns the loss."""
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def timed_steps(
    step: Callable[[], Tensor],
    device: torch.device,
    steps: int,
    warm: int,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Seconds of every step after the first ones, the allocator's peak and the last loss.

    Args:
        step: Trains one step and returns the loss.
        device: Of the model.
        steps: That are timed.
        warm: That are not, before these.
        synchronize: Waits for other processes that take part.
    """
    module, times, loss = torch.get_device_module(device), [], torch.zeros(())
    for number in range(warm + steps):
        if number == warm and device.type != "cpu":
            module.reset_peak_memory_stats()

        def once() -> None:
            nonlocal loss
            loss = step()
            wait(device)
            synchronize()

        synchronize()
        times.append(milliseconds(once, device) / 1e3)
    peak = module.max_memory_allocated() if device.type != "cpu" else None
    return {"seconds": times[warm:], "peak_bytes": peak, "loss": loss.item()}


def spread_percent(times: Sequence[float]) -> float:
    """The distance of the fastest and the slowest, of the median."""
    return 100 * (max(times) - min(times)) / statistics.median(times)


def medians(turns: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    """The turns of :func:`timed_steps` as a row of results; a failure is a row too.

    Args:
        turns: What was measured, or why it was not.
        tokens: Of a step.
    """
    failures = [one["failure"] for one in turns if one.get("failure")]
    if failures or not turns:
        return {"failure": (failures or ["no turn"])[0]}
    times = [seconds for one in turns for seconds in one["seconds"]]
    return {
        "tokens_per_second": tokens / statistics.median(times),
        "spread_percent": spread_percent(times),
        "peak_bytes": max(one["peak_bytes"] or 0 for one in turns) or None,
        "loss": turns[0]["loss"],  # later, a compiled model is trained further
    }


def child(*command: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The last line of JSON that a module prints in a process of its own, or its failure.

    Args:
        command: What follows ``python -m``.
        environment: Variables that are set, where nobody has set them.
    """
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=store.ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**(environment or {}), **os.environ},
    )
    answers = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    if answers and (done.returncode == 0 or "failure" in answers[-1]):
        return answers[-1]  # type: ignore[no-any-return]
    lines = done.stderr.strip().splitlines() or ["the process ended without a word"]
    errors = [text for text in lines if "Error" in text and "ChildFailed" not in text]
    memory = "out of memory" in done.stderr or "OutOfMemoryError" in done.stderr
    return {"failure": "out of memory" if memory else (errors or lines)[-1][:300]}
