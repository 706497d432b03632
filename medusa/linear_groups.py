"""Linear layers that multiply the same input, such as the query, key and value projections, as one product.

For the few rows of a decoding step a matrix product costs as much to start as to do, and one larger product shares the
processor's cores better. Which layers share an input is observed in a forward, not guessed from their names. Nothing
relies on it afterwards: a layer that is given another input than the one before it multiplies anew.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class LinearGroup(nn.Module):
    """Layers of one parent with one input, [.., D] -> a part of the outputs for each, in the order they are called."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        sizes = [layer.out_features for layer in layers]
        first = layers[0].weight
        # `linear` is an nn.Linear so that it can be packed like others.
        self.linear = nn.Linear(layers[0].in_features, sum(sizes), bias=False, device="meta")
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if any(layer.bias is not None for layer in layers):
            biases = [first.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
            self.linear.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
        self.sizes = sizes
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        """Output of layer `index`; [..., out_features], not contiguous."""
        if index == 0 or self._input is not x:
            self._input, self._parts = x, self.linear(x).split(self.sizes, dim=-1)
        part = self._parts[index]
        if index == len(self.sizes) - 1:  # hold on to nothing between steps
            self._input, self._parts = None, ()
        return part


class GroupedLinear(nn.Module):
    """One layer of a group, in the layer's old place. The first one owns the group."""

    def __init__(self, group: LinearGroup, index: int) -> None:
        super().__init__()
        if index == 0:
            self.group = group
        self._part = group.part
        self.index = index
        self.in_features, self.out_features = group.linear.in_features, group.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        return self._part(x, self.index)


@torch.no_grad()
def group_linears(model: nn.Module, run: Callable[[], Any], pays: Callable[[list[list[Tensor]]], bool]) -> int:
    """Put siblings that `run()`, a forward of `model`, gives one and the same input into groups, where that pays;
    returns how many groups there are.

    pays: asked once for all groups of the same shapes, with their weights in the model's order. For inference only: the
    layers' own weights are gone.
    """
    by_shapes: dict[tuple[torch.Size, ...], list[tuple[nn.Module, list[nn.Linear]]]] = defaultdict(list)
    for parent, layers in _siblings(model, _observe(model, run)):
        by_shapes[tuple(layer.weight.shape for layer in layers)].append((parent, layers))
    num_groups = 0
    for found in by_shapes.values():
        if not pays([[layer.weight.detach() for layer in layers] for _, layers in found]):
            continue
        num_groups += len(found)
        for parent, layers in found:
            names = {id(child): name for name, child in parent.named_children()}
            group = LinearGroup(layers)
            for index, layer in enumerate(layers):
                setattr(parent, names[id(layer)], GroupedLinear(group, index))
    return num_groups


def _siblings(model: nn.Module, calls: list[tuple[nn.Linear, Tensor]]) -> Iterator[tuple[nn.Module, list[nn.Linear]]]:
    """Layers of one parent that were called once, with the same tensor."""
    times = Counter(id(layer) for layer, _ in calls)
    for parent in model.modules():
        children = {id(child) for child in parent.children()}
        by_input: dict[int, list[nn.Linear]] = defaultdict(list)
        for layer, x in calls:
            if id(layer) in children and times[id(layer)] == 1:
                by_input[id(x)].append(layer)
        yield from ((parent, layers) for layers in by_input.values() if len(layers) > 1)


def _observe(model: nn.Module, run: Callable[[], Any]) -> list[tuple[nn.Linear, Tensor]]:
    """Which layers were called with which tensor, in order. The tensors are kept, so that no two share an id."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        if args:
            calls.append((layer, args[0]))

    layers = [module for module in model.modules() if type(module) is nn.Linear]
    with _hooked(layers, note):
        run()
    return calls


@contextmanager
def _hooked(layers: list[nn.Linear], note: Callable[..., None]) -> Iterator[None]:
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
