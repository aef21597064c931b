"""The cases of update_: rules with their options, and parameters with state beside a float64 twin under torch.optim."""

from __future__ import annotations

import math

import torch
from cases import BF16, CASES, F16, F32, F64, Case

import gradacc_fused as gf
from gradacc_fused.layout import math_dtype

# Large: where a gradient cancels to nearly nothing, Adam multiplies its rounding by lr / eps. A misplaced eps shows.
EPS = 0.05
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
        self.exp_avg_sqs = [zero.clone() for zero in zeros] if self.rule != "sgd" else []
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
        self.twin.step()

    def snapshot(self):
        lists = (self.params, self.main_params, self.exp_avgs, self.exp_avg_sqs, [self.steps])
        return [tensor.clone() for tensors in lists for tensor in tensors]
