"""The cases of update_: rules with their options, and parameters with state beside a float64 twin under torch.optim."""

from __future__ import annotations

import math

import torch
from cases import BF16, CASES, F16, F32, F64, Case
from tolerances import UNSURE

import gradacc_fused as gf
from gradacc_fused.layout import math_dtype

# Large: where a gradient cancels to nearly nothing, Adam multiplies its rounding by lr / eps. A misplaced eps shows.
EPS = 0.05


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, line by line; maximizing, the gradient counts as its negative.

    A step by the sign is decided by rounding where the terms cancel: ``state["cancelled"]`` is the least that was left
    of them, as a share of the terms' absolute values. ``terms`` of a parameter: absolute values in its gradient.
    """

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                grad = -param.grad if group["maximize"] else param.grad
                state, terms = self.state[param], getattr(param, "terms", grad.abs())
                momentum, size = state.get("m", torch.zeros_like(param)), state.get("size", torch.zeros_like(param))
                direction = beta1 * momentum + (1 - beta1) * grad
                param.copy_(param - group["lr"] * (torch.sign(direction) + group["weight_decay"] * param))
                state["m"] = beta2 * momentum + (1 - beta2) * grad
                left = direction.abs() / (beta1 * size + (1 - beta1) * terms)
                state["cancelled"] = torch.fmin(left, state.get("cancelled", left))  # no terms at all: NaN
                state["size"] = beta2 * size + (1 - beta2) * terms


RULES = {
    "adamw": ("adamw", torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3, "betas": (0.7, 0.9), "eps": EPS}),
    "adamw-maximize": ("adamw", torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3, "maximize": True, "eps": EPS}),
    "adamw-small-beta": (
        "adamw",
        torch.optim.AdamW,
        {"lr": 0.05, "weight_decay": 0.0, "betas": (0.2, 0.5), "eps": EPS},
    ),
    "adam-l2": ("adam", torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": EPS}),
    "adam": ("adam", torch.optim.Adam, {"lr": 0.1, "maximize": True, "eps": EPS}),
    "sgd": ("sgd", torch.optim.SGD, {"lr": 0.2}),
    "sgd-decay": ("sgd", torch.optim.SGD, {"lr": 0.2, "weight_decay": 0.3, "maximize": True}),
    "sgd-momentum": ("sgd", torch.optim.SGD, {"lr": 0.2, "momentum": 0.8, "dampening": 0.4, "weight_decay": 0.1}),
    "sgd-nesterov": ("sgd", torch.optim.SGD, {"lr": 0.2, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "sgd-momentum-maximize": ("sgd", torch.optim.SGD, {"lr": 0.2, "momentum": 0.8, "maximize": True}),
    "lion": ("lion", PlainLion, {"lr": 0.1, "weight_decay": 0.3, "betas": (0.7, 0.9)}),
    "lion-maximize": ("lion", PlainLion, {"lr": 0.05, "betas": (0.3, 0.6), "maximize": True}),
}
UPDATE_CASES = [
    case
    for case in CASES
    if not case.name.startswith(("large", "small", "denormal", "weight-zero-nan", "absent", "eight"))
]


class Updated:
    """Parameters with state for update_, and the float64 twin under torch.optim."""

    def __init__(self, case: Case, rule: str, main_params: bool = True) -> None:
        self.rule, optimizer_class, options = RULES[rule]
        generator = torch.Generator().manual_seed(3)
        self.params = [
            entry.empty().copy_(torch.randn(entry.shape, generator=generator, dtype=F64)) for entry in case.entries
        ]
        self.twins = [torch.nn.Parameter(param.double().contiguous()) for param in self.params]
        self.twin = optimizer_class(self.twins, **options)
        maths = [math_dtype(param.dtype) for param in self.params]
        with_state = self.rule != "sgd" or options.get("momentum", 0) != 0
        zeros = [torch.zeros_like(param, dtype=dtype) for param, dtype in zip(self.params, maths, strict=True)]
        self.main_params = [
            param.to(F32) if param.dtype in (BF16, F16) else torch.empty(0) for param in self.params
        ] if main_params else []  # fmt: skip
        self.exp_avgs = [zero.clone() for zero in zeros] if with_state else []
        self.exp_avg_sqs = [zero.clone() for zero in zeros] if self.rule in ("adamw", "adam") else []
        self.steps = torch.zeros(len(self.params))
        self.hyper = gf.hyper_rows(self.twin.param_groups)
        self.group_ids = torch.zeros(len(self.params), dtype=torch.int32)
        self.touched = torch.ones(len(self.params), dtype=torch.uint8)

    def step(self, ops, grads, weights, main_grads=(), multiplier=1.0, found_inf=0.0, bound=math.inf):
        ops.update_(
            self.params, self.main_params, self.exp_avgs, self.exp_avg_sqs, self.steps, list(main_grads), grads,
            torch.tensor(weights, dtype=torch.float64), self.hyper, self.group_ids, self.touched,
            torch.tensor(multiplier, dtype=torch.float64), torch.tensor(found_inf), rule=self.rule,
            max_grad_value=bound,
        )  # fmt: skip

    def twin_step(self, grads, weights, multiplier=1.0, bound=math.inf):
        count = len(self.params)
        for i, twin in enumerate(self.twins):
            total = sum(
                grads[j * count + i].double() * weight for j, weight in enumerate(weights) if weight != 0
            )  # fmt: skip
            twin.grad = (total * multiplier).clamp(-bound, bound) * torch.ones_like(twin)
            twin.terms = multiplier * sum(grads[j * count + i].double().abs() * abs(w) for j, w in enumerate(weights))
        self.twin.step()

    def exact(self) -> list[torch.Tensor]:
        """The twin's parameters; where rounding decides (one element in ten thousand at most), ours."""
        found = []
        for i, twin in enumerate(self.twins):
            value, state = twin.detach(), self.twin.state[twin]
            if "cancelled" in state:
                mine = self.main_params[i] if self.main_params and self.main_params[i].numel() else self.params[i]
                unsure = state["cancelled"] < UNSURE[math_dtype(self.params[i].dtype)]
                assert unsure.sum() <= 1 + 1e-4 * value.numel()
                value = torch.where(unsure, mine.double(), value)
            found.append(value)
        return found

    def snapshot(self):
        lists = (self.params, self.main_params, self.exp_avgs, self.exp_avg_sqs, [self.steps])
        return [tensor.clone() for tensors in lists for tensor in tensors]
