"""Schemas and fakes of the ops; the only file that spells ``torch.ops``.

Every op is defined here, in Python, so that it exists with nothing compiled: the reference is registered for all
devices (backends/reference.py), and C++ adds the CPU implementations (csrc/cpu). Mutating ops return nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import checks

NAMESPACE = "gradacc_fused"

SCHEMAS = {
    "accumulate_": (
        "(Tensor(a!)[] main_grads, Tensor[] grads, Tensor weights, Tensor(b!) partials, Tensor(c!) found_inf, *, "
        "bool overwrite, bool store, float norm_type) -> ()"
    ),
    "norm_": "(Tensor[] main_grads, Tensor(a!) partials, Tensor(b!) found_inf, *, float norm_type) -> ()",
    "clip_": (
        "(Tensor partials, Tensor counts, Tensor loss_scale, Tensor(a!) total_norm, Tensor(b!) clip_coef, "
        "Tensor(c!) multiplier, Tensor(d!) weight_sum, *, float norm_type, float max_norm) -> ()"
    ),
    "update_": (
        "(Tensor(a!)[] params, Tensor(b!)[] main_params, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
        "Tensor(e!) steps, Tensor[] main_grads, Tensor[] grads, Tensor weights, Tensor hyper, Tensor group_ids, "
        "Tensor touched, Tensor multiplier, Tensor found_inf, *, str rule, float max_grad_value) -> ()"
    ),
}

_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)


def register_reference(name: str, function: Callable[..., None]) -> None:
    """Make ``function`` what op ``name`` runs where no compiled implementation is registered."""
    _library.impl(name, function, "CompositeExplicitAutograd")


def op(name: str) -> Any:
    """The overload of op ``name``: what Python calls, and what ``torch.library.opcheck`` takes."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


@torch.library.register_fake(f"{NAMESPACE}::accumulate_")
def _(main_grads, grads, weights, partials, found_inf, *, overwrite, store, norm_type):
    checks.check_accumulate(
        "accumulate_", main_grads, grads, weights, partials, found_inf, overwrite, store, norm_type
    )  # fmt: skip


@torch.library.register_fake(f"{NAMESPACE}::norm_")
def _(main_grads, partials, found_inf, *, norm_type):
    checks.check_norm(main_grads, partials, found_inf, norm_type)


@torch.library.register_fake(f"{NAMESPACE}::clip_")
def _(partials, counts, loss_scale, total_norm, clip_coef, multiplier, weight_sum, *, norm_type, max_norm):
    cells = {
        "loss_scale": loss_scale, "total_norm": total_norm, "clip_coef": clip_coef, "multiplier": multiplier,
        "weight_sum": weight_sum,
    }  # fmt: skip
    checks.check_clip(partials, counts, cells, norm_type, max_norm)


@torch.library.register_fake(f"{NAMESPACE}::update_")
def _(
    params, main_params, exp_avgs, exp_avg_sqs, steps, main_grads, grads, weights, hyper, group_ids, touched,
    multiplier, found_inf, *, rule, max_grad_value,
):  # fmt: skip
    checks.check_update(
        params, main_params, exp_avgs, exp_avg_sqs, steps, main_grads, grads, weights, hyper, group_ids, touched,
        multiplier, found_inf, rule, max_grad_value,
    )  # fmt: skip
