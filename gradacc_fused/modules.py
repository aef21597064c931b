"""The modules that own an optimizer's parameters: it knows parameters, so they are looked up among living objects."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence

import torch


def living_modules() -> list[torch.nn.Module]:
    """All modules there are: one walk over the heap."""
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.nn.Module)]


def models_of(params: Sequence[torch.Tensor]) -> list[torch.nn.Module]:
    """The outermost modules that own one of ``params``."""
    ours = {id(param) for param in params}
    modules = living_modules()
    parents: dict[int, list[torch.nn.Module]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    roots: dict[int, torch.nn.Module] = {}
    seen: set[int] = set()
    reached = [
        module
        for module in modules
        if any(id(param) in ours for param in module.__dict__.get("_parameters", {}).values())
    ]
    while reached:
        module = reached.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = parents.get(id(module), [])
        reached.extend(above)
        if not above:
            roots[id(module)] = module
    return list(roots.values())


def named_modules_of(params: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module of those models, named from its model's class on."""
    for root in models_of(params):
        for name, module in root.named_modules():
            yield (f"{type(root).__name__}.{name}" if name else type(root).__name__), module


def buffers_of(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, str]]:
    """(module, name) of the buffers that these modules themselves hold."""
    return [(module, name) for module in modules for name in module._buffers]


def ranks_averaged(params: Sequence[torch.Tensor]) -> int:
    """Ranks that DistributedDataParallel averages the gradients over; 1 where no such module holds the parameters."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    wrapper = torch.nn.parallel.DistributedDataParallel
    for _, module in named_modules_of(params):
        if isinstance(module, wrapper):
            return torch.distributed.get_world_size(module.process_group)
    return 1
