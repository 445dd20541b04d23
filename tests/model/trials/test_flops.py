"""Counting FLOPs: of recurrent layers, and saying so where they cannot be counted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.traced import calling
from workbench.model import trace
from workbench.model.record.runs import FlopCounter
from workbench.plan import Layer, Machine, Plan
from workbench.predict import predict


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("cls", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers(cls, gates, bidirectional):
    """Each of 5 steps multiplies by the weights of both layers and all directions once."""
    layer = cls(8, 4, 2, batch_first=True, bidirectional=bidirectional)
    graph = trace(calling(lambda self, x: self.layer(x)[0], layer=layer), input_shape=(5, 8))
    ways = 1 + bidirectional
    first, second = gates * 4 * (8 + 4) * ways, gates * 4 * (4 * ways + 4) * ways
    assert graph["layer"].flops == 2 * 5 * (first + second)
    assert graph.uncounted == ()


def test_what_cannot_be_counted_is_said():
    graph = trace(
        calling(lambda self, x: self.both(x, x), both=nn.Bilinear(8, 8, 4)), input_shape=(8,)
    )
    assert graph.uncounted == ("both",)
    assert "GFLOP per sample without those of both" in repr(graph)
    assert "FLOPs of both are not known" in graph._repr_html_()


@torch.fx.wrap
def by_another_library(x):
    return torch.ops.elsewhere.double(x)


def test_operations_of_other_libraries_are_not_known():
    torch.library.define("elsewhere::double", "(Tensor x) -> Tensor")
    torch.library.impl("elsewhere::double", "CompositeExplicitAutograd", lambda x: x * 2)
    graph = trace(calling(lambda self, x: by_another_library(x)), input_shape=(4,))
    assert graph.uncounted == ("by_another_library",)


@pytest.mark.parametrize(
    "module", [nn.LayerNorm((5, 8)), nn.RMSNorm((5, 8)), nn.GroupNorm(5, 5), nn.Embedding(4, 2)]
)
def test_what_does_no_such_operations_is_not_missed(module):
    def forward(self, x):
        return self.layer(x.abs().long().clamp(0, 3) if isinstance(module, nn.Embedding) else x)

    assert trace(calling(forward, layer=module), input_shape=(5, 8)).uncounted == ()


def test_what_is_not_known_is_unknown_and_not_0():
    graph = trace(
        calling(
            lambda self, x: self.both(x, x) + self.one(x),
            both=nn.Bilinear(8, 8, 8),
            one=nn.Linear(8, 8),
        ),
        input_shape=(8,),
    )
    assert graph["both"].flops is None
    assert graph["both"].flops_text == "unknown"
    assert graph["both"].counted_flops == 0
    assert graph["one"].flops == 2 * 8 * 8
    assert graph.flops == sum(layer.counted_flops for layer in graph.layers)
    assert '<td style="text-align:left">unknown</td>' in graph._repr_html_()
    frame = graph.to_frame().set_index("layer")
    assert frame["flops"].isna().sum() == 1
    plan = Plan.data_parallel(graph, 2)
    assert Plan.from_toml(plan.to_toml()).graph == graph
    assert predict(plan, Machine.preset("h100-nvlink")).underestimated == ("both",)


X = torch.rand(2, 5, 8)
SQUARE = torch.rand(2, 5, 5) + 5 * torch.eye(5)
IMAGE = torch.rand(2, 4, 6, 6)


UNKNOWN = {
    "fft": lambda: torch.fft.fft(X),
    "rfft": lambda: torch.fft.irfft(torch.fft.rfft2(X)),
    "stft": lambda: torch.stft(X[:, 0], 4, window=torch.ones(4), return_complex=True),
    "cdist": lambda: torch.cdist(X, X),
    "cdist of many": lambda: torch.cdist(torch.rand(30, 3), torch.rand(30, 3)),
    "pdist": lambda: F.pdist(X[0]),
    "solve": lambda: torch.linalg.solve(SQUARE, X),
    "solve triangular": lambda: torch.linalg.solve_triangular(SQUARE, X, upper=True),
    "inverse": lambda: torch.linalg.inv(SQUARE),
    "determinant": lambda: torch.linalg.det(SQUARE),
    "svd": lambda: torch.linalg.svdvals(X),
    "qr": lambda: torch.linalg.qr(X),
    "cholesky": lambda: torch.linalg.cholesky(SQUARE @ SQUARE.mT),
    "eigh": lambda: torch.linalg.eigvalsh(SQUARE),
    "matrix exponential": lambda: torch.matrix_exp(SQUARE),
    "bilinear": lambda: F.bilinear(X, X, torch.rand(3, 8, 8)),
    "linear interpolation": lambda: F.interpolate(X, 9, mode="linear"),
    "bilinear interpolation": lambda: nn.Upsample(scale_factor=2, mode="bilinear")(IMAGE),
    "bicubic interpolation": lambda: F.interpolate(IMAGE, (9, 9), mode="bicubic"),
    "antialiased interpolation": lambda: F.interpolate(
        IMAGE, (3, 3), mode="bilinear", antialias=True
    ),
    "grid sample": lambda: F.grid_sample(IMAGE, torch.rand(2, 6, 6, 2), align_corners=False),
    "bessel": lambda: torch.special.bessel_j0(X),
    "zeta": lambda: torch.special.zeta(X + 2, X + 1),
    "i0": lambda: torch.i0(X),
    "digamma": lambda: torch.digamma(X),
    "gamma in place": lambda: X.clone().lgamma_(),
    "ctc": lambda: F.ctc_loss(X.transpose(0, 1).log(), torch.ones(2, 2).long(), (5, 5), (2, 2)),
}


NOTHING = {
    "views": lambda: X.view(2, 40).mT.unsqueeze(0).expand(3, 40, 2).unbind(0),
    "views in place": lambda: X.clone().unsqueeze_(0).transpose_(0, 1).squeeze_(),
    "copies": lambda: X.double().contiguous().clone().to(torch.bfloat16).mT.reshape(80),
    "made": lambda: (torch.arange(3), torch.zeros(3), X.new_ones(2), torch.rand_like(X)),
    "cat": lambda: torch.cat([torch.stack([X, X]), X[None]]).chunk(3),
    "pad": lambda: F.pad(F.pad(X, (1, 1)), (1, 1), mode="reflect"),
    "moved": lambda: X.roll(1, 1).flip(2).repeat(1, 2, 1).repeat_interleave(2, 1),
    "index": lambda: (X[:, [0, 1]], X.gather(1, X.long()), X.index_select(1, X[0, 0].long())),
    "written": lambda: X.clone().index_put_((torch.tensor([0]),), X[0]).fill_(0.0),
    "scattered": lambda: X.scatter_add(1, X.long(), X).index_add(1, torch.arange(5), X),
    "masked": lambda: X.masked_fill(X > 0.5, 0.0)[X > 0.5].nonzero(),
    "triangles": lambda: (X.tril(), X.triu()),
    "embedding": lambda: F.embedding(torch.arange(5), X[0]),
    "bag": lambda: F.embedding_bag(torch.arange(5)[None], X[0]),
    "unfold": lambda: F.fold(F.unfold(IMAGE, 3), (6, 6), 3),
    "shuffle": lambda: F.pixel_shuffle(IMAGE, 2),
    "nearest": lambda: F.interpolate(IMAGE, scale_factor=2),
    "elementwise": lambda: F.gelu((X * 2 - 1).exp().sin().clamp(0, 1) / X).pow(3).rsqrt(),
    "activations": lambda: [
        activation(X)
        for activation in (F.relu, F.silu, F.mish, F.elu, F.selu, F.celu, F.softplus, F.glu)
    ],
    "more activations": lambda: [
        activation(X)
        for activation in (F.hardswish, F.hardsigmoid, F.hardtanh, F.logsigmoid, F.relu6)
    ],
    "prelu": lambda: F.prelu(X, torch.rand(5)),
    "in place": lambda: F.hardswish(X.clone().mul_(2).masked_fill_(X > 1, 0), inplace=True),
    "comparisons": lambda: (X > 0) & (X <= 1) | X.isnan(),
    "where": lambda: torch.where(X > 0, X, 0.0),
    "sorted": lambda: (X.sort(), X.topk(2), X.median(1), X.unique(), X.cummax(1)),
    "reductions": lambda: (X.sum(1), X.mean(), X.std(2), X.amax(1), X.max(1), X.argmin(2)),
    "norms of values": lambda: (X.norm(dim=1), X.logsumexp(1), X.prod(1), X.any(1)),
    "running sums": lambda: (X.cumsum(1), X.cumprod(1), X.logcumsumexp(1)),
    "softmax": lambda: (X.softmax(1), X.log_softmax(1)),
    "dropout": lambda: F.dropout2d(F.dropout(IMAGE, 0.1), 0.1),
    "layer norm": lambda: F.layer_norm(X, (8,)),
    "rms norm": lambda: F.rms_norm(X, (8,)),
    "group norm": lambda: F.group_norm(IMAGE, 2),
    "batch norm": lambda: nn.BatchNorm2d(4)(IMAGE),
    "batch norm in evaluation": lambda: nn.BatchNorm2d(4).eval()(IMAGE),
    "instance norm": lambda: F.instance_norm(IMAGE),
    "local response": lambda: F.local_response_norm(IMAGE, 2),
    "normalized": lambda: F.normalize(X, dim=2),
    "weight norm": lambda: torch._weight_norm(X[0], X[0, :, :1]),
    "pools": lambda: F.avg_pool2d(F.max_pool2d(IMAGE, 2), 2),
    "adaptive pools": lambda: F.adaptive_avg_pool2d(F.adaptive_max_pool2d(IMAGE, 3), 2),
    "pools in 1-D and 3-D": lambda: (F.avg_pool1d(X, 2), F.max_pool3d(IMAGE, 2)),
    "losses": lambda: (F.mse_loss(X, X), F.cross_entropy(X, X[:, 0].long())),
    "complex": lambda: torch.view_as_real(torch.polar(X, X) * 2),
    "asserted": lambda: torch._assert_async((X >= 0).all()),
}


def ran(function):
    counter = FlopCounter()
    with torch.no_grad(), counter:
        function()
    return counter


@pytest.mark.parametrize("function", UNKNOWN.values(), ids=UNKNOWN)
def test_what_computes_without_a_formula_is_not_known(function):
    assert ran(function).foreign


@pytest.mark.parametrize("function", NOTHING.values(), ids=NOTHING)
def test_what_moves_values_or_does_little_with_each_is_nothing(function):
    counter = ran(function)
    assert (counter.flops, counter.foreign) == (0, False)


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda: X @ torch.rand(8), 2 * 2 * 5 * 8),
        (lambda: torch.dot(X[0, 0], X[0, 1]), 2 * 8),
        (lambda: torch.addmv(X[0, :, 0], SQUARE[0], X[0, :, 1]), 2 * 25),
        (lambda: X[0, :, :5].clone().addmm_(SQUARE[0], SQUARE[1]), 2 * 125),
        (lambda: X[:, :, :5].clone().baddbmm_(SQUARE, SQUARE), 2 * 2 * 125),
        (lambda: torch.einsum("bij,bkj->bik", X, X), 2 * 2 * 5 * 5 * 8),
    ],
)
def test_products_have_a_formula(function, flops):
    counter = ran(function)
    assert (counter.flops, counter.foreign) == (flops, False)


def test_products_by_groups_have_a_formula():
    """Each of 6 rows is multiplied by the matrix of its group; of 3 groups all are by theirs."""
    rows, matrices = torch.rand(6, 8).bfloat16(), torch.rand(3, 8, 16).bfloat16()
    ends = torch.tensor([1, 4, 6], dtype=torch.int32)
    counter = ran(lambda: torch._grouped_mm(rows, matrices, offs=ends))
    assert (counter.flops, counter.foreign) == (2 * 6 * 8 * 16, False)
    counter = ran(lambda: torch._grouped_mm(torch.rand(3, 4, 8).bfloat16(), matrices))
    assert (counter.flops, counter.foreign) == (2 * 3 * 4 * 8 * 16, False)


def test_a_layer_without_a_formula_is_not_known():
    def forward(self, x):
        return self.head(torch.fft.rfft(x).abs() + F.interpolate(x[:, None], 5)[:, 0])

    graph = trace(calling(forward, head=nn.Linear(5, 3)), input_shape=(8,))
    assert [graph[name].target for name in graph.uncounted] == ["torch._C._fft.fft_rfft"]


def test_what_is_known_in_part_is_said_so():
    layer = Layer("x", "op", ("input",), (4,), (4,), flops=3_000_000, uncounted=True)
    assert layer.flops_text == "3.00 or more"
    assert Layer("x", "op", ("input",), (4,), (4,)).flops == 0
