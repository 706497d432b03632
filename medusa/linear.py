"""Faster float32 linear layers on a CPU, for the handful of rows that a tree step multiplies.

A matrix product of 4 to 32 rows is where stock `F.linear` is weakest: weights packed beforehand by MKL or by oneDNN can
be several times faster, and so can MKL's product written the other way round (`W x^T`). Which one wins depends on the
machine, the shape and the number of rows, so `pack_linears` measures all on the model's own weights (a few seconds) and
gives every layer the best. A packed weight replaces the original: no memory is added, but for a weight that is tied to
the embeddings. All compute the same product; `F.linear` is the reference, and a kernel that differs from it is not
used. Heads only guess, so theirs may also be rounded to bfloat16, which halves what is read from memory.

This is the one place that writes onto a base model, and only on one that the engine owns.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEASURED_ROWS = (1, 4, 8, 16, 32)
SAMPLE_BYTES = 600_000_000  # weights that are measured: more than a processor's caches hold
GROUP_SAMPLE_BYTES = 60_000_000
REPEATS = 3
MKL_ROWS = (
    256  # what MKL lays its weights out for: packed for fewer rows they are slow for more, not the other way round
)
TOLERANCE = 1e-4  # of a kernel's output, relative to its norm

Shape = tuple[int, int]  # (out, in)
Seconds = dict[str, tuple[float, ...]]  # by kernel, then by MEASURED_ROWS
Kernel = Callable[[Tensor, Any, "Tensor | None"], Tensor]


def multiply_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def multiply_transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] @ weight [out, in].T as (weight @ x.T).T; the result's last dimension is not contiguous."""
    product = torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t()
    if bias is not None:
        product = product + bias
    return product.unflatten(0, x.shape[:-1])


class MklWeight(NamedTuple):
    """packed: opaque. like: float32 [out, in] of one number, from which the operator takes the shape only."""

    packed: Tensor
    like: Tensor


def multiply_mkl(x: Tensor, weight: MklWeight, bias: Tensor | None) -> Tensor:
    """`weight` as `pack_mkl_weight` made it.

    The operator wants the number of rows that the weight was packed for, and falls back to the original weight for
    another. MKL itself takes any number with any packing, so it is told the one that there is.
    """
    num_rows = x.numel() // x.shape[-1]
    product: Tensor = torch.ops.mkl._mkl_linear(x, weight.packed, weight.like, bias, num_rows)
    return product


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`weight` as `pack_weight` made it."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def multiply_rounded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`weight` as `round_weight` made it; about three digits."""
    bias = None if bias is None else bias.bfloat16()
    return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), weight, bias, "none", [], "").float()


def can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack_weight(weight: Tensor) -> Tensor:
    """oneDNN's blocked copy of a float32 [out, in] weight, laid out for about 16 rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 16)


def pack_mkl_weight(weight: Tensor) -> MklWeight:
    """MKL's packed copy of a float32 [out, in] weight. It must not be moved in memory."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), MKL_ROWS)
    return MklWeight(packed, torch.zeros(1).expand(weight.shape))


def round_weight(weight: Tensor) -> Tensor:
    return pack_weight(weight.bfloat16())


def can_round() -> bool:
    """Whether this CPU multiplies bfloat16 by itself."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_mkl() -> bool:
    """Whether this torch was built with MKL, as those for x86 are."""
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


KERNELS: dict[str, Kernel] = {
    "plain": multiply_plain,
    "transposed": multiply_transposed,
    "mkl": multiply_mkl,
    "packed": multiply_packed,
    "rounded": multiply_rounded,
}
# Kernels that want the weight in a form of their own, for any number of rows.
FORMS: dict[str, Callable[[Tensor], Any]] = {"mkl": pack_mkl_weight, "packed": pack_weight, "rounded": round_weight}
EXACT = ("plain", "transposed", *(["mkl"] if has_mkl() else []), "packed")


@dataclass(frozen=True)
class LinearPlan:
    """Which kernel multiplies how many rows: `by_rows[i]` up to `MEASURED_ROWS[i]` rows, `beyond` for more."""

    by_rows: tuple[str, ...]
    beyond: str

    def kernel(self, num_rows: int) -> str:
        for limit, name in zip(MEASURED_ROWS, self.by_rows, strict=True):
            if num_rows <= limit:
                return name
        return self.beyond


PLAIN_PLAN = LinearPlan(("plain",) * len(MEASURED_ROWS), "plain")
FORM_PLANS = {name: LinearPlan((name,) * len(MEASURED_ROWS), name) for name in FORMS}


class FastLinear(nn.Module):
    """An inference-only `nn.Linear` that multiplies by plan. `weight` is opaque where the plan has a form for it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.plan = plan
        self.weight = FORMS[plan.beyond](weight) if plan.beyond in FORMS else weight.detach()
        self.bias = None if bias is None else bias.detach()
        self._kernels = [KERNELS[plan.kernel(rows)] for rows in range(MEASURED_ROWS[-1] + 1)]
        self._beyond = KERNELS[plan.beyond]

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.in_features
        kernel = self._kernels[num_rows] if num_rows < len(self._kernels) else self._beyond
        return kernel(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, plan={'/'.join(self.plan.by_rows)}"


@dataclass
class LinearReport:
    """What `pack_linears` did: seconds per product by (out, in) shape, kernel and number of rows, and the plans."""

    seconds: dict[Shape, Seconds] = field(default_factory=dict)
    plans: dict[Shape, LinearPlan] = field(default_factory=dict)
    num_layers: int = 0

    def summary(self) -> dict[str, Any]:
        """JSON-ready: the plan of each shape."""
        return {f"{out}x{inner}": list(plan.by_rows) for (out, inner), plan in self.plans.items()}


def choose_plan(seconds: Seconds) -> LinearPlan:
    """The form that is fastest summed over the measured row counts; unpacked, the better kernel for each."""
    unpacked = tuple(zip(seconds["plain"], seconds["transposed"], strict=True))
    kernels = tuple("plain" if plain <= other else "transposed" for plain, other in unpacked)
    total = {LinearPlan(kernels, "plain"): sum(min(pair) for pair in unpacked)}
    total |= {plan: sum(seconds[name]) for name, plan in FORM_PLANS.items() if name in seconds}
    return min(total, key=lambda plan: total[plan])


def sample_weights(layers: Iterable[nn.Linear]) -> list[Tensor]:
    """Weights to measure with, in the model's order: the first `SAMPLE_BYTES`, and the first of each further shape."""
    sampled: list[Tensor] = []
    shapes, num_bytes = set(), 0
    for layer in layers:
        weight = layer.weight.detach()
        if num_bytes < SAMPLE_BYTES or weight.shape not in shapes:
            sampled.append(weight)
            shapes.add(weight.shape)
            num_bytes += weight.nbytes
    return sampled


def measure_kernels(weights: list[Tensor], kernels: Iterable[str] = EXACT) -> dict[Shape, Seconds]:
    """Median seconds of one product by shape, kernel and `MEASURED_ROWS`.

    All weights are gone through in the model's order, as a forward does it: what it finds in the processor's caches
    decides which kernel is faster, and one weight measured over and over would be found there every time. A kernel
    that gives another product than `F.linear` is left out, with a warning.
    """
    shapes = [(weight.shape[0], weight.shape[1]) for weight in weights]
    result: dict[Shape, Seconds] = {shape: {} for shape in shapes}
    firsts = {shape: index for index, shape in reversed(list(enumerate(shapes)))}
    for name in kernels:
        operands = [FORMS[name](weight) for weight in weights] if name in FORMS else weights
        checked = firsts.values() if name in FORMS and name in EXACT else ()
        if not all(is_exact(KERNELS[name], operands[i], weights[i]) for i in checked):
            message = f"linear layers: the kernel {name!r} computes another product here; decoding may be slower"
            warnings.warn(message, stacklevel=2)
            continue
        by_rows = [_time_pass(KERNELS[name], operands, shapes, rows) for rows in MEASURED_ROWS]
        for shape in result:
            result[shape][name] = tuple(seconds[shape] for seconds in by_rows)
    return result


def is_exact(kernel: Kernel, operand: Any, weight: Tensor) -> bool:
    """Whether the kernel gives `F.linear`'s product, up to rounding, for all kinds of numbers of rows."""
    for rows in (*MEASURED_ROWS, MEASURED_ROWS[-1] + 1):
        x = torch.randn(rows, weight.shape[1])
        expected = F.linear(x, weight)
        if not bool((kernel(x, operand, None) - expected).norm() <= TOLERANCE * expected.norm()):
            return False
    return True


def _time_pass(kernel: Kernel, operands: list[Tensor], shapes: list[Shape], rows: int) -> dict[Shape, float]:
    """Seconds of one product by shape: the mean over a pass, the median of `REPEATS` passes."""
    inputs = {inner: torch.randn(1, rows, inner) for _, inner in shapes}
    passes: dict[Shape, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        spent: dict[Shape, list[float]] = defaultdict(list)
        for operand, shape in zip(operands, shapes, strict=True):
            start = time.perf_counter()
            kernel(inputs[shape[1]], operand, None)
            spent[shape].append(time.perf_counter() - start)
        for shape, seconds in spent.items():
            passes[shape].append(mean(seconds))
    return {shape: median(seconds) for shape, seconds in passes.items()}


@torch.no_grad()
def grouping_pays(groups: list[list[Tensor]]) -> bool:
    """Whether one product by all weights of a group together is faster here than one by each. groups: weights
    [out, in] of groups of the same shapes, in the model's order."""
    if not all(can_pack(weight) for weight in groups[0]):
        return False
    sampled = groups[: max(1, GROUP_SAMPLE_BYTES // sum(weight.nbytes for weight in groups[0]))]
    alone = measure_kernels([weight for group in sampled for weight in group])
    [together] = measure_kernels([torch.cat(group) for group in sampled]).values()
    return _best(together) < sum(_best(alone[(weight.shape[0], weight.shape[1])]) for weight in groups[0])


def _best(seconds: Seconds) -> float:
    plan = choose_plan(seconds)
    return sum(seconds[plan.kernel(rows)][i] for i, rows in enumerate(MEASURED_ROWS))


@torch.no_grad()
def pack_linears(model: nn.Module, *, may_round: bool = False) -> LinearReport:
    """Replace every float32 CPU `nn.Linear` inside `model` by a `FastLinear` tuned on this machine.

    may_round: also try weights in bfloat16, where this CPU multiplies them; for heads, whose guesses are verified.
    For inference only: gradients and `state_dict` of the packed layers are gone. On another device or dtype nothing
    is touched and the report is empty.
    """
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and can_pack(child.weight)
    ]
    if not layers:
        return LinearReport()
    kernels = [*EXACT, "rounded"] if may_round and can_round() else EXACT
    report = LinearReport(measure_kernels(sample_weights(child for _, _, child in layers), kernels))
    report.plans = {shape: choose_plan(seconds) for shape, seconds in report.seconds.items()}
    report.num_layers = len(layers)
    for parent, name, child in layers:
        plan = report.plans[(child.out_features, child.in_features)]
        setattr(parent, name, FastLinear(child.weight, child.bias, plan))
    return report
