"""Other packages, measured where they are installed. None is a dependency.

Each runs its own optimizer step or its own wrappers around torch's; gradients arrive as everywhere else, and what
autograd would add in place is added by the same operator here.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from gradacc_fused.floor import Floor, stock
from gradacc_fused.report.paths import MAX_NORM, Measured, Path, Stock, copies

WEIGHT_DECAY = 1e-2  # torch's AdamW default; theirs differ


class DeepSpeedCPUAdam(Stock):
    """The stock loop with DeepSpeed's CPU Adam on the fp32 main params."""

    name = "deepspeed_cpu_adam"

    def make_optimizer(self) -> Any:
        module = importlib.import_module("deepspeed.ops.adam")
        return module.DeepSpeedCPUAdam(self.stepped, lr=self.lr, weight_decay=WEIGHT_DECAY, adamw_mode=True)


class Optimi(Stock):
    """The stock loop with optimi's AdamW (foreach) on the fp32 main params."""

    name = "optimi"

    def make_optimizer(self) -> Any:
        module = importlib.import_module("optimi")
        return module.AdamW(
            self.stepped, lr=self.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY, foreach=True
        )

    def floor_of(self, dtype: torch.dtype) -> Floor | None:
        return None


class Framework(Stock):
    """fp32 parameters and gradients under a framework's wrappers, as mixed precision by autocast has them."""

    def __init__(self, params: list[torch.Tensor], k: int, lr: float = 1e-3, rule: str = "adamw") -> None:
        super().__init__(copies(params, torch.float32), k, lr, rule)
        self.model = torch.nn.Module()
        for i, param in enumerate(self.params):
            self.model.register_parameter(f"p{i}", param)
        self.wrap()

    def wrap(self) -> None:
        """Hand model and optimizer to the framework."""
        raise NotImplementedError

    def floor_of(self, dtype: torch.dtype) -> Floor | None:
        return stock(self.k, torch.float32, torch.float32, self.rule)


class Accelerate(Framework):
    """Accelerate's ``accumulate`` context, its clip and its wrapped optimizer."""

    name = "accelerate"

    def wrap(self) -> None:
        accelerate = importlib.import_module("accelerate")
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=self.k)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def micro_step(self, micro_step: int, measured: Measured) -> None:
        with measured("window"), self.accelerator.accumulate(self.model):
            self.accumulate(micro_step, self.take())
            if self.accelerator.sync_gradients != (micro_step == self.k - 1):
                raise RuntimeError("Accelerate closes its windows elsewhere: the bench expects k micro-batches in each")
            if self.accelerator.sync_gradients:
                for stepped, total in zip(self.stepped, self.sums, strict=True):
                    stepped.grad = total
                self.accelerator.clip_grad_norm_(self.stepped, MAX_NORM)
            self.optimizer.step()  # does nothing before the boundary
            self.optimizer.zero_grad()


class Fabric(Framework):
    """Lightning Fabric's wrapped optimizer and its clip."""

    name = "fabric"

    def wrap(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fabric = importlib.import_module("lightning.fabric")
            self.fabric = fabric.Fabric(accelerator="cpu", devices=1)
            self.fabric.launch()
            self.model, self.optimizer = self.fabric.setup(self.model, self.optimizer)

    def clip(self) -> None:
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=MAX_NORM)


MODULES = {
    "deepspeed_cpu_adam": (DeepSpeedCPUAdam, "deepspeed.ops.adam"),
    "accelerate": (Accelerate, "accelerate"),
    "fabric": (Fabric, "lightning.fabric"),
    "optimi": (Optimi, "optimi"),
}


@cache
def missing(name: str) -> str | None:
    """Why a peer cannot run here; None where it can. Builds what it builds at first use, on one element."""
    make, module = MODULES[name]
    try:
        importlib.import_module(module)
        make([torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))], 1)
    except Exception as error:  # whatever a package raises where it cannot run is its reason
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return None


PEERS: dict[str, tuple[Callable[[list[torch.Tensor], int], Path], Callable[[], str | None]]] = {
    name: (make, partial(missing, name)) for name, (make, _) in MODULES.items()
}
