"""Training steps whose memory is measured and estimated: small ones for a CPU, real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from liger_multi.memory import Estimate, estimate
from liger_multi.memory.setup import DTYPES
from liger_multi.memory.sizes import config_of

_BASE: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "vocab_size": 1999, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Llama", {}),
    "gqa": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "moe": ("Mixtral", _EXPERTS),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
}
LARGE_MOE = {
    **_EXPERTS, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
    "num_local_experts": 8, "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One step. ``model`` is one of :data:`SMALL`, ``"moe-1b"`` or a published size."""

    model: str
    batch: int
    sequence: int
    dtype: str = "bfloat16"
    patched: bool = False
    checkpointing: bool = False
    lora: bool = False
    limit_gb: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.model} {self.batch} x {self.sequence}", self.dtype]
        parts += ["LoRA"] * self.lora + ["checkpointing"] * self.checkpointing
        return ", ".join([*parts, "patched" if self.patched else "stock"])

    def as_data(self) -> dict[str, Any]:
        """The case as plain data."""
        return asdict(self)

    def config(self) -> Any:
        """The configuration of its model."""
        import transformers

        if self.model in SMALL:
            family, extra = SMALL[self.model]
            config = getattr(transformers, f"{family}Config")(**{**_BASE, **extra})
        elif self.model == "moe-1b":
            config = transformers.MixtralConfig(**LARGE_MOE)
        else:
            config = config_of(self.model, self.sequence)
        config._attn_implementation, config.use_cache = "sdpa", False
        return config

    def build(self, device: torch.device | str) -> Any:
        """The model with random weights, adapted, patched and checkpointed as the case says."""
        import transformers

        torch.manual_seed(0)
        with torch.device(device):
            model: Any = transformers.AutoModelForCausalLM.from_config(
                self.config(), dtype=DTYPES[self.dtype][0]
            )
        model.tie_weights()
        if self.lora:
            import peft

            settings = peft.LoraConfig(
                r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(model, settings)
        if self.checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
            if self.lora:
                model.enable_input_require_grads()
        if self.patched:
            from liger_multi import patch

            patch(model)
        return model.train()

    def estimated(self, device_type: str) -> Estimate:
        """What is predicted for it."""
        capacity = None if self.limit_gb is None else int(self.limit_gb * 1e9)
        optimizer = "adamw_loop" if device_type == "cpu" else "adamw"
        model = self.build("meta")
        return estimate(
            model,
            self.batch,
            self.sequence,
            dtype=self.dtype,
            optimizer=optimizer,
            device=device_type,
            capacity=capacity,
        )

    def step(self, model: Any) -> tuple[torch.optim.Optimizer, Callable[[], torch.Tensor]]:
        """An optimizer and a function that trains one step and returns the loss."""
        device = next(model.parameters()).device
        trained = [p for p in model.parameters() if p.requires_grad]
        options = {"foreach": False} if device.type == "cpu" else {"fused": True}
        optimizer = torch.optim.AdamW(trained, lr=1e-5, **options)  # type: ignore[arg-type]
        generator = torch.Generator(device).manual_seed(1)
        shape = (self.batch, self.sequence)
        count = model.config.vocab_size
        ids = torch.randint(count, shape, generator=generator, device=device)
        autocast = DTYPES[self.dtype][1]
        scaler = torch.amp.GradScaler(device.type, enabled=autocast is torch.float16)

        def run() -> torch.Tensor:
            with contextlib.ExitStack() as stack:
                if autocast is not None:
                    stack.enter_context(torch.autocast(device.type, dtype=autocast))
                loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return optimizer, run


CPU = [
    Case(kind, 4, 128, "float32", patched, checkpointing, lora)
    for kind, checkpointing, lora in (
        ("dense", False, False), ("gqa", False, False), ("moe", False, False),
        ("tied", False, False), ("dense", False, True), ("dense", True, False),
    )
    for patched in (False, True)
]  # fmt: skip
T4 = 15.36
_SMALL_CARD = [
    Case("qwen2-0.5b", batch, sequence, dtype, patched, limit_gb=T4)
    for dtype in ("bfloat16", "float16-autocast", "float32")
    for batch, sequence in ((2, 128), (8, 256), (8, 512))
    for patched in (False, True)
]
_LARGE = [
    Case(model, batch, sequence, "bfloat16", patched, checkpointing, lora)
    for model, batch, sequence, checkpointing, lora in (
        ("qwen2-0.5b", 16, 2048, False, False),
        ("llama-3.2-1b", 8, 4096, False, False),
        ("qwen2.5-7b", 2, 2048, False, False),
        ("qwen2.5-7b", 2, 4096, True, False),
        ("llama-3-8b", 2, 4096, True, False),
        ("llama-3-8b", 2, 4096, False, True),
        ("moe-1b", 4, 2048, False, False),
    )
    for patched in (False, True)
]
ACCELERATOR = [*_SMALL_CARD, *_LARGE]
