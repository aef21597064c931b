"""GuardedGraph with a graph that counts its replays: what has moved is told before anything runs."""

from __future__ import annotations

import pytest
import torch

import gradacc_fused as gf


class Graph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


def guarded():
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 4, 5)]
    for param in params[:2]:
        param.grad = torch.zeros_like(param)
    graph = Graph()
    return params, graph, gf.GuardedGraph(graph, lambda: (param.grad for param in params))


def test_gradients_that_stayed_are_replayed():
    params, graph, guard = guarded()
    for param in params[:2]:
        param.grad.fill_(7.0)  # another value in the same place
    guard.replay()
    guard.replay()
    assert graph.replays == 2


def test_a_gradient_that_moved_is_refused():
    params, graph, guard = guarded()
    kept = params[1].grad  # so that its memory is not given out again
    params[1].grad = torch.zeros(4)
    with pytest.raises(gf.WindowError, match=r"gradients\[1\] must lie where it lay .*torch.float32 \[4\] at 0x"):
        guard.replay()
    assert graph.replays == 0
    params[1].grad = kept
    guard.replay()
    assert graph.replays == 1


def test_a_gradient_that_appeared_or_went_is_refused():
    params, graph, guard = guarded()
    params[2].grad = torch.zeros(5)
    with pytest.raises(gf.WindowError, match=r"gradients\[2\] must lie .* none, got torch.float32 \[5\]"):
        guard.replay()
    params[2].grad = None
    params[0].grad = None
    with pytest.raises(gf.WindowError, match=r"gradients\[0\] .* got none"):
        guard.replay()
    assert graph.replays == 0


def test_another_view_of_the_same_memory_is_refused():
    params, _, _ = guarded()
    whole = torch.zeros(2, 2)
    views = [whole]
    guard = gf.GuardedGraph(Graph(), lambda: views)
    views[0] = whole.t()
    with pytest.raises(gf.WindowError, match=r"gradients\[0\]"):
        guard.replay()
    views[:] = []
    with pytest.raises(gf.WindowError, match=r"gradients\[0\] .* got none"):
        guard.replay()
