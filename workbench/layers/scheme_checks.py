"""What a scheme is checked for, in one process that plays all ranks of a group in turn.

Each rank gets its slice of the weights and what it reads, and computes with what the scheme gives
it. What all ranks give is then put together as the scheme says it lies, and held against torch's
own layer:

    placement    outputs and gradients of the input        gradients of weights
    Replicate    equal on all ranks                        equal on all ranks
    Shard        the pieces, one after the other           the pieces, one after the other
    Partial      the sum

Nothing here uses the library's conversions: pieces are cut and put together by indices. Collectives
between ranks are checked by `cluster.verify`.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from workbench.layers.local.idle import Idle
from workbench.layers.local.local import held, idles, local_module
from workbench.model.tracing.rewrites.linears import TransposedLinear
from workbench.model.tracing.trace import trace
from workbench.plan.errors import PlanError
from workbench.plan.extension.extension import Check
from workbench.plan.graph import Graph, Layer
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.placement.layout import Layout
from workbench.plan.placement.placement import Partial, Placement, Replicate, Shard
from workbench.plan.placement.schemes import Scheme
from workbench.plan.plan import Plan

Shape = tuple[int, ...]

GROUPS = (2, 3, 4)
_ROWS = 3
_TOLERANCE = 1e-10


def _transposed(features: int) -> nn.Module:
    """A linear layer whose matrix is [in_features, out_features], as GPT-2's; a square one.

    A scheme that ignores `Layer.transposed` makes a plan for it, and computes something else.
    """
    weight = nn.Parameter(torch.randn(features, features))
    return TransposedLinear(weight, nn.Parameter(torch.randn(features)))


# Small layers of many kinds: a module, and the shape of one sample.
_SMALL: tuple[tuple[Callable[[], nn.Module], Shape], ...] = (
    (lambda: nn.Linear(12, 8), (12,)),
    (lambda: nn.Linear(12, 8, bias=False), (5, 12)),
    (lambda: _transposed(12), (5, 12)),
    (lambda: nn.Conv1d(4, 8, 3, padding=1), (4, 6)),
    (lambda: nn.Conv2d(4, 8, 3, padding=1), (4, 5, 5)),
    (lambda: nn.Conv2d(8, 8, 3, groups=4), (8, 5, 5)),
    (lambda: nn.Conv3d(4, 8, 3, padding=1), (4, 3, 3, 3)),
    (lambda: nn.ConvTranspose1d(4, 8, 2, stride=2), (4, 6)),
    (lambda: nn.ConvTranspose2d(4, 8, 2, stride=2), (4, 5, 5)),
    (lambda: nn.GroupNorm(4, 8), (8, 5)),
    (lambda: nn.LayerNorm(12), (5, 12)),
    (lambda: nn.PReLU(8), (8, 5)),
    (lambda: nn.Softmax(dim=-1), (8, 5)),
    (lambda: nn.AvgPool1d(2), (8, 6)),
)


@dataclass(frozen=True, eq=False)
class _Case:
    """One layer, in a group with shares; what is computed of it is computed once."""

    graph: Graph
    layer: Layer
    module: nn.Module
    choice: LayerPlan

    @cached_property
    def whole(self) -> "_Run":
        return _whole(self)

    @cached_property
    def split(self) -> "_Run | str":
        return _split(self)

    def __str__(self) -> str:
        shares = self.choice.shares
        by = "" if shares is None else f" by {'/'.join(map('{:g}'.format, shares))}"
        return f"{self.layer.target} {self.layer.name!r} over {self.choice.group_size} ranks{by}"


@dataclass(frozen=True)
class _Run:
    """What one process, or all ranks of a group together, compute: values by name."""

    output: Tensor
    input_grad: Tensor
    weight_grads: dict[str, Tensor]


def checks_of(
    scheme: Scheme, module: nn.Module | None = None, input_shape: Shape = ()
) -> list[Check]:
    """Checks a scheme on layers that it takes, in groups of 2 to 4 with several shares.

    Args:
        scheme: the scheme.
        module: a model, of which the layers are meant; None: small layers of many kinds.
        input_shape: the shape of one sample of the model.
    """
    taken = "it takes a layer, and can divide it"
    try:
        cases = [
            case
            for graph, root in _models(module, input_shape)
            for case in _cases(scheme, graph, root)
        ]
    except PlanError as error:
        return [Check(taken, False, str(error))]
    if not cases:
        return [Check(taken, False, "it took none of the layers; give a model that has one")]
    names = dict.fromkeys(case.layer.target for case in cases)
    found = [Check(taken, True, f"{len(cases)} divisions of {', '.join(names)}")]
    for what, find in _CHECKS.items():
        found.append(_check(what, cases, find))
    return found


def _models(module: nn.Module | None, input_shape: Shape) -> list[tuple[Graph, nn.Module]]:
    if module is not None:
        return [(trace(module, input_shape=input_shape), module)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        small = [(nn.Sequential(make()), shape) for make, shape in _SMALL]
        return [(trace(one, input_shape=shape), one) for one, shape in small]


def small_models(scheme: Scheme) -> list[tuple[nn.Module, Shape]]:
    """Small classifiers with a layer that takes a scheme, and the shapes of their samples.

    For runs on real ranks. The layer is called "1"; one with weights is before it, so that a
    gradient flows through it.
    """
    found: list[tuple[nn.Module, Shape]] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for make, shape in _SMALL:
            layer = make()
            width = layer(torch.zeros(1, *shape)).numel()
            first = nn.Linear(shape[-1], shape[-1])
            model = nn.Sequential(first, layer, nn.Flatten(), nn.Linear(width, 10))
            choice = LayerPlan(scheme, GROUPS[0])
            if choice.meant.takes(trace(model, input_shape=shape)["1"]):
                found.append((model, shape))
    return found


def _cases(scheme: Scheme, graph: Graph, root: nn.Module) -> list[_Case]:
    """Every layer that takes it in groups of every size, with equal and unequal shares and none."""
    found = []
    for layer in graph.layers:
        if layer.name in graph.shares_weights or layer.kind == "attention":
            continue  # attention needs its ranks; `cluster.verify` has them
        for size in GROUPS:
            choice = LayerPlan(scheme, size)
            if not choice.meant.takes(layer):
                continue
            units = choice.meant.units(layer)
            unequal = (tuple(range(1, size + 1)), (0, *(1,) * (size - 1)), (2, *(1,) * (size - 1)))
            for shares in (None, *(unequal if units else ())):
                one = LayerPlan(scheme, size, shares)
                try:
                    Plan(graph, size, {layer.name: one})
                except PlanError:
                    # Fewer units than ranks, or a rank without any, may be refused; equal ones of
                    # enough units may not.
                    if shares is None and units >= size:
                        raise
                    continue
                own = copy.deepcopy(root.get_submodule(layer.name)).double()
                found.append(_Case(graph, layer, own, one))
    return found


def _check(what: str, cases: Sequence[_Case], find: Callable[[_Case], str]) -> Check:
    """One check of all cases; the first complaint is what it says."""
    for case in cases:
        try:
            complaint = find(case)
        except Exception as error:  # whatever the scheme's own module raises
            complaint = f"{type(error).__name__}: {error}"
        if complaint:
            return Check(what, False, f"{case}: {complaint}")
    return Check(what, True, f"{len(cases)} divisions")


def _consistent(case: _Case) -> str:
    plan = Plan(case.graph, case.choice.group_size, {case.layer.name: case.choice})
    again = Plan(case.graph, case.choice.group_size, {case.layer.name: case.choice})
    if plan.flow.weights != again.flow.weights or plan.flow.outputs != again.flow.outputs:
        return "asked twice, it states different placements"
    return ""


def _tiled(case: _Case) -> str:
    """Whether the pieces of each weight, put together, are the weight."""
    tensors = _tensors(case.module)
    for name, placement in _weights(case).items():
        whole = torch.arange(tensors[name].numel()).view(tensors[name].shape)
        pieces = [_piece(whole, placement, r) for r in range(case.choice.group_size)]
        if not torch.equal(_together(pieces, placement), whole):
            return f"the pieces of {name!r} ({placement}) are not the whole"
    return ""


def _outputs(case: _Case) -> str:
    one, split = case.whole, case.split
    if isinstance(split, str):
        return split
    return _difference("output", one.output, split.output)


def _input_gradients(case: _Case) -> str:
    one, split = case.whole, case.split
    if isinstance(split, str):
        return split
    return _difference("gradient of the input", one.input_grad, split.input_grad)


def _weight_gradients(case: _Case) -> str:
    one, split = case.whole, case.split
    if isinstance(split, str):
        return split
    complaints = (
        _difference(f"gradient of {name!r}", grad, split.weight_grads[name])
        for name, grad in one.weight_grads.items()
    )
    return next(filter(None, complaints), "")


def _flops(case: _Case) -> str:
    """Whether the shares of the operations are at least the whole: nothing is left out."""
    division = case.choice.division(case.layer)
    read, given = case.choice.meant.layouts(case.layer, division, None)
    shares = [
        case.choice.meant.flops(case.layer, division, member, read, given)
        for member in range(case.choice.group_size)
    ]
    return "" if sum(shares) >= 1 - _TOLERANCE else f"shares {shares} are less than the whole"


_CHECKS: dict[str, Callable[[_Case], str]] = {
    "it states the same each time": _consistent,
    "the pieces of each weight tile it or are the whole": _tiled,
    "outputs are those of the layer": _outputs,
    "gradients of the input are those of the layer (the adjoint)": _input_gradients,
    "gradients of weights are those of the layer, the same on ranks that hold the same": (
        _weight_gradients
    ),
    "the shares of the operations are the whole": _flops,
}


def _weights(case: _Case) -> dict[str, Replicate | Shard]:
    division = case.choice.division(case.layer)
    read, _ = case.choice.meant.layouts(case.layer, division, None)
    return {
        case.layer.within(weight): case.choice.meant.holds(case.layer, weight, division, read)
        if weight.shape
        else Replicate()
        for weight in case.layer.weights
    }


def _whole(case: _Case) -> _Run:
    """What torch's own layer computes, with a gradient of the output that has no pattern."""
    module, x = case.module, _input(case)
    for parameter in module.parameters():
        parameter.grad = None
    output = module(x.clone())
    output.backward(_noise(output.shape, 1))
    assert x.grad is not None
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return _Run(output.detach(), x.grad, grads)


def _split(case: _Case) -> _Run | str:
    """What all ranks of the group compute together; or where they do not agree."""
    k, layer, choice = case.choice.group_size, case.layer, case.choice
    plan = Plan(case.graph, k, {layer.name: choice})
    read, given = plan.flow.inputs[layer.name], plan.flow.outputs[layer.name]
    placed, tensors, x = _weights(case), _tensors(case.module), _input(case).detach()
    shape = (_ROWS, *layer.output_shape)
    grad = _noise(shape, 1)
    outputs, inputs, weights = [], [], list[dict[str, nn.Parameter]]()
    for member in range(k):
        pieces = {
            f"{layer.name}.{name}": _piece(tensors[name].detach(), cut, member).clone()
            for name, cut in placed.items()
        }
        local = local_module(case.module, layer, plan.flow, member, pieces, choice)
        if idles(layer, plan.flow, member):
            local = Idle(local, held(layer.output_shape, given, member))
        mine = _piece(x, read.placement, member).clone().requires_grad_()
        output = local(mine.clone())
        mine_given = _piece(grad, given.placement, member)
        if output.shape != mine_given.shape:
            return f"rank {member} gives {tuple(output.shape)}, not {tuple(mine_given.shape)}"
        output.backward(mine_given)
        outputs.append(output.detach())
        inputs.append(torch.zeros_like(mine) if mine.grad is None else mine.grad)
        weights.append({_leaf(name): p for name, p in local.named_parameters()})
    back: Placement = read.placement
    if back == Replicate() and choice.sums_back(Layout(k, given.placement)):
        back = Partial()
    found = {}
    for name, cut in placed.items():
        grads = [
            torch.zeros_like(one[name]) if (own := one[name].grad) is None else own
            for one in weights
            if name in one
        ]
        if len(grads) < k:
            continue  # a buffer
        if (differing := _unlike(grads, cut)) is not None:
            return f"ranks 0 and {differing} hold {name!r} alike, with different gradients"
        found[name] = _together(grads, cut)
    for what, values, placement in (("output", outputs, given.placement), ("input", inputs, back)):
        if (differing := _unlike(values, placement)) is not None:
            return f"ranks 0 and {differing} differ in the {what} that all have whole"
    return _Run(_together(outputs, given.placement), _together(inputs, back), found)


def _leaf(name: str) -> str:
    return name.replace("unused_bias", "bias")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _input(case: _Case) -> Tensor:
    return _noise((_ROWS, *case.layer.input_shape), 0).requires_grad_()


def _noise(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _indices(cut: Shard, member: int) -> list[int]:
    return [start + i for start, length in cut.spans(member) for i in range(length)]


def _piece(whole: Tensor, placement: Placement, member: int) -> Tensor:
    if not isinstance(placement, Shard):
        return whole
    return whole.index_select(
        placement.dim, torch.tensor(_indices(placement, member), dtype=torch.long)
    )


def _together(pieces: Sequence[Tensor], placement: Placement) -> Tensor:
    match placement:
        case Partial():
            return torch.stack(list(pieces)).sum(0)
        case Shard() as cut:
            order = [i for member in range(len(pieces)) for i in _indices(cut, member)]
            joined = torch.cat(list(pieces), cut.dim)
            return joined.index_select(cut.dim, torch.tensor(order).argsort())
        case _:
            return pieces[0]


def _unlike(values: Sequence[Tensor], placement: Placement) -> int | None:
    """The first rank whose value is not that of rank 0, where all should have the same."""
    if placement != Replicate():
        return None
    return next((i for i, one in enumerate(values) if not _near(values[0], one)), None)


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)


def _difference(what: str, one: Tensor, other: Tensor) -> str:
    if _near(one, other):
        return ""
    if one.shape != other.shape:
        return f"the {what} has the shape {tuple(other.shape)}, not {tuple(one.shape)}"
    return f"the {what} differs by up to {(one - other).abs().max().item():.2g}"
