"""gradacc_fused: gradient accumulation, exact by construction and at the floor of bytes and launches.

Example::

    import gradacc_fused as gf

    opt = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), max_grad_norm=1.0)
    with opt.window() as window:
        for piece in pieces:
            loss_sum, n_active = model_loss(piece)
            window.backward(loss_sum, weight=n_active, reduction="sum")
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "gradacc_fused needs PyTorch, and it is not installed. Run 'pip install torch' first, then reinstall "
        "gradacc_fused with 'pip install --no-build-isolation gradacc_fused' to build its compiled backends."
    ) from error

from .accumulate import accumulate_
from .attempts import PieceOutput
from .backends import cpu as _cpu  # noqa: F401  loads the compiled ops where they are
from .backends import cuda as _cuda  # noqa: F401
from .backends import reference as _reference  # noqa: F401  registers the ops for every device
from .backends.registry import BackendStatus, backends
from .batch.denominators import Term
from .batch.memory import MicroBatch, find_micro_batch
from .batch.plan import Piece, Plan
from .batch.planner import Limits, plan_batch, plan_pieces
from .batch_norm import convert_batch_norm
from .capture import GuardedGraph
from .clip import clip_, norm_
from .errors import BackendUnavailableError, DenominatorError, NonFiniteError, WindowError
from .explain import explain
from .layout import n_partials
from .lion import Lion
from .optimizer import GradAccumOptimizer
from .results import StepResult
from .rules import hyper_rows
from .update import update_
from .verify import SplitCheck, check_split
from .window import Window

__version__ = "0.1.0"

__all__ = [
    "BackendStatus",
    "BackendUnavailableError",
    "DenominatorError",
    "GradAccumOptimizer",
    "GuardedGraph",
    "Limits",
    "Lion",
    "MicroBatch",
    "NonFiniteError",
    "Piece",
    "PieceOutput",
    "Plan",
    "SplitCheck",
    "StepResult",
    "Term",
    "Window",
    "WindowError",
    "accumulate_",
    "backends",
    "check_split",
    "clip_",
    "convert_batch_norm",
    "explain",
    "find_micro_batch",
    "hyper_rows",
    "n_partials",
    "norm_",
    "plan_batch",
    "plan_pieces",
    "update_",
]
