"""The options that several of torch's optimizers have, with what each is for.

Parameters with options of their own, as torch's parameter groups.

Optimizers as values: those of `torch.optim` that work element by element.

Each takes torch's own arguments, with torch's own defaults, and says what torch remembers of a
parameter (`remembers`): tensors like the parameter, which are cut, saved and moved as it is, and
single numbers. A test holds names, defaults and first values against torch itself.

An optimizer that looks at whole matrices, at all parameters together, or at sparse gradients gives
another result for a piece than for the whole, and is refused by its name.

Source: the documentation of torch.optim, where each has its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from workbench.plan.io.value import Value, by_name

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _said(description: str) -> Any:
    """What a field is, where a type is shared by several optimizers."""
    return Field(description=description)


Rate = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False),
    _said("The learning rate; may be given first, without its name."),
]
Momentum = Annotated[
    float, Field(ge=0, lt=1), _said("The part of its velocity that each update keeps.")
]
Betas = Annotated[
    tuple[Fraction, Fraction],
    _said("The parts of the averages of gradients, and of their squares, that updates keep."),
]
Epsilon = Annotated[Positive, _said("What is added to the denominator of an update.")]
Decay = Annotated[
    Positive, _said("The part of the weights that is added to their gradient (L2 penalty).")
]
Shrinking = Annotated[
    Positive, _said("The part of the weights, times lr, that each update takes from them.")
]
Decoupled = Annotated[bool, _said("Whether weight decay shrinks weights, as AdamW's does.")]
Greatest = Annotated[bool, _said("Whether to divide by the greatest average of squares so far.")]


class ParameterGroup(Value):
    """Parameters with options of their own, by name or by their number of dimensions.

    What is given must hold: with both, a parameter matches by its name and has few enough
    dimensions. The first group that matches a parameter has it.

        wb.AdamW(1e-3, groups=[wb.ParameterGroup(dims=1, weight_decay=0.0)])   # biases and norms
        wb.SGD(0.1, groups=[wb.ParameterGroup("head.*", "*.norm.*", lr=0.01)])

    All further keywords are options of the optimizer, and override its own.

    Raises:
        ExperimentError: neither patterns nor dims are given, or no option.
    """

    model_config = ConfigDict(extra="allow")

    patterns: tuple[str, ...] = ()
    """Names of parameters, in which `*`, `?` and `[...]` are those of `fnmatch`; given one after
    another, without a name."""
    dims: int | None = Field(default=None, ge=0)
    """The most dimensions that a parameter of the group has."""

    def __init__(self, /, *patterns: str, **fields: Any) -> None:
        if patterns:
            fields["patterns"] = patterns
        super().__init__(**fields)

    @model_validator(mode="before")
    @classmethod
    def _one_pattern_or_several(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and isinstance(fields.get("patterns"), str):
            return {**fields, "patterns": (fields["patterns"],)}
        return fields

    @model_validator(mode="after")
    def _is_of_something(self) -> Self:
        if not self.patterns and self.dims is None:
            raise ValueError("a group needs patterns of names, as '*.bias', or dims")
        if not self.options:
            raise ValueError(f"{self} has no options of its own, such as weight_decay or lr")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's options that are others for this group."""
        return dict(self.model_extra or {})

    def matches(self, name: str, dims: int) -> bool:
        """Whether a parameter of this name, with so many dimensions, is one of these."""
        named = not self.patterns or any(fnmatchcase(name, each) for each in self.patterns)
        return named and (self.dims is None or dims <= self.dims)

    def __str__(self) -> str:
        said = [repr(pattern) for pattern in self.patterns]
        said += [] if self.dims is None else [f"dims={self.dims}"]
        return f"ParameterGroup({', '.join(said)})"


@dataclass(frozen=True)
class Remembered:
    """What an optimizer remembers of a parameter, with its value before the first update.

    Attributes:
        elements: tensors like the parameter.
        numbers: single numbers, in fp32 whatever the parameter is.
    """

    elements: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=lambda: {"step": 0.0})

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of it."""
        return (*self.numbers, *self.elements)

    def __getitem__(self, name: str) -> float:
        return {**self.numbers, **self.elements}[name]


def _zeros(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


class Optimizer(Value):
    """An optimizer of torch, whose first argument is the learning rate.

    Raises:
        TypeError: more than the learning rate is given without its name.
    """

    fused: ClassVar[bool] = False
    """Whether torch has one kernel for a whole update, on a CPU as on a GPU."""
    _streamed: ClassVar[int] = 0
    """Of one that is not fused: how often its kernels read or write a number for each element."""
    _temporaries: ClassVar[int] = 0
    """Of one that is not fused: the most tensors like the parameter that it makes on its way."""
    _copies_gradient: ClassVar[bool] = True
    """Of one that is not fused: whether another of them holds the gradient with weight decay."""

    lr: Rate = 1e-3
    maximize: bool = False
    """Whether to climb."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with options of their own; all others have those above."""

    def __init__(self, /, *lr: float, **fields: Any) -> None:
        if len(lr) > 1:
            name = type(self).__name__
            raise TypeError(f"{name} takes lr alone without its name, got {lr}")
        super().__init__(**dict(zip(("lr",), lr, strict=False)), **fields)

    @model_validator(mode="before")
    @classmethod
    def _torch_chooses_the_kernel(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name in _KERNELS:
            if fields.get(name) is not None:
                raise ValueError(
                    f"{name} is not for the optimizer to say: where torch has a fused kernel for "
                    f"it, updates are computed by that one; leave {name} out"
                )
        return {name: value for name, value in fields.items() if name not in _KERNELS}

    @model_validator(mode="after")
    def _groups_have_its_options(self) -> Self:
        if not self.groups:
            return self
        checked = []
        for group in self.groups:
            known = self.options
            unknown = sorted(set(group.options) - set(known))
            if unknown:
                raise ValueError(
                    f"groups: {group} has {', '.join(unknown)}, which {type(self).__name__} has "
                    f"not; its options are {', '.join(known)}"
                )
            own = self._with(group)
            options = {name: getattr(own, name) for name in group.options}
            checked.append(ParameterGroup(*group.patterns, dims=group.dims, **options))
        # In the type of its field, an option is equal to itself when it is read from TOML again.
        self.__dict__["groups"] = tuple(checked)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of torch's optimizer."""
        return self.model_dump(exclude={"kind", "groups"})

    @property
    def remembers(self) -> Remembered:
        """What it remembers of a parameter outside of groups."""
        raise NotImplementedError

    def group_of(self, name: str, dims: int) -> int:
        """0 for a parameter of no group, else 1 + the index of the first group that matches.

        Args:
            name: the parameter's name.
            dims: the number of its dimensions.
        """
        for index, group in enumerate(self.groups, 1):
            if group.matches(name, dims):
                return index
        return 0

    @property
    def parted(self) -> tuple[Self, ...]:
        """The optimizer of the parameters without a group, and that of each group."""
        return (self.replace(groups=()), *map(self._with, self.groups))

    def of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Self]:
        """The optimizer of each of these parameters, without groups.

        Args:
            shapes: the shapes of whole parameters, by name.
        """
        parted = self.parted
        return {name: parted[self.group_of(name, len(shape))] for name, shape in shapes.items()}

    def at_rate(self, lr: float) -> Self:
        """The same at another learning rate; those of groups keep their ratio to it."""
        groups = []
        for group in self.groups:
            options = group.options
            if "lr" in options:
                options["lr"] = at_rate(options["lr"], self.lr, lr)
            groups.append(ParameterGroup(*group.patterns, dims=group.dims, **options))
        return self.replace(lr=lr, groups=tuple(groups))

    def check_groups(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Checks that every group has a parameter.

        Args:
            shapes: the shapes of all parameters that are trained, by name.

        Raises:
            ValueError: one has none; the text names what there is.
        """
        taken = [self.group_of(name, len(shape)) for name, shape in shapes.items()]
        for index, group in enumerate(self.groups, 1):
            if index in taken:
                continue
            if any(group.matches(name, len(shape)) for name, shape in shapes.items()):
                raise ValueError(
                    f"optimizer: all parameters of {group} are in earlier groups, of which the "
                    f"first that matches has it; put it before them, or leave it out"
                )
            names = list(shapes)
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ValueError(
                f"optimizer: {group} matches no parameter; give one of "
                f"{', '.join(map(repr, names[:_NAMED]))}{more}"
            )

    @property
    def passes(self) -> int:
        """How often an update reads or writes a number for each element, where none was timed."""
        return 3 + 2 * len(self.remembers.elements) if self.fused else self._streamed

    @property
    def workspace(self) -> int:
        """How many tensors like a parameter its update needs for a moment, one after another."""
        if self.fused:
            return 0
        decays = getattr(self, "weight_decay", 0.0) > 0
        decays &= not getattr(self, "decoupled_weight_decay", False)
        return self._temporaries + int(self._copies_gradient and (decays or self.maximize))

    def _with(self, group: ParameterGroup) -> Self:
        """The optimizer of a group's parameters."""
        return self.replace(groups=(), **group.options)


_NAMED = 6  # parameters, in an error
_KERNELS = ("foreach", "fused", "capturable", "differentiable")  # torch's, of how it computes


def at_rate(value: float, base: float, lr: float) -> float:
    """A learning rate where another one than `base` is asked for: it keeps its ratio to that."""
    return lr if value == base else value * (lr / base)


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`."""

    fused: ClassVar[bool] = True
    kind: Literal["sgd"] = "sgd"
    momentum: Momentum = 0.0
    dampening: float = Field(default=0.0, ge=0)
    """The part of a gradient that does not enter the velocity."""
    weight_decay: Decay = 0.0
    nesterov: bool = False
    """Whether the velocity is that after the next step: Nesterov's momentum."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum > 0")
        if self.nesterov and self.dampening:
            raise ValueError("nesterov needs dampening 0")
        return self

    @property
    def remembers(self) -> Remembered:
        return Remembered(_zeros("momentum_buffer") if self.momentum > 0 else {}, {})


class Adam(Optimizer):
    """Adam, as `torch.optim.Adam`."""

    fused: ClassVar[bool] = True
    kind: Literal["adam"] = "adam"
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: Decay = 0.0
    amsgrad: Greatest = False
    decoupled_weight_decay: Decoupled = False

    @property
    def remembers(self) -> Remembered:
        return _of_adam(self.amsgrad)


class AdamW(Optimizer):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`."""

    fused: ClassVar[bool] = True
    kind: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: Shrinking = 1e-2
    amsgrad: Greatest = False

    @property
    def remembers(self) -> Remembered:
        return _of_adam(self.amsgrad)


def _of_adam(amsgrad: Greatest) -> Remembered:
    return Remembered(_zeros("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())))


class Adagrad(Optimizer):
    """Adagrad, as `torch.optim.Adagrad`."""

    _streamed: ClassVar[int] = 11
    _temporaries: ClassVar[int] = 1
    kind: Literal["adagrad"] = "adagrad"
    lr: Rate = 1e-2
    lr_decay: Positive = 0.0
    """How fast the learning rate falls: lr / (1 + step lr_decay)."""
    weight_decay: Decay = 0.0
    initial_accumulator_value: Positive = 0.0
    """What the sums of squares begin with."""
    eps: Epsilon = 1e-10

    @property
    def remembers(self) -> Remembered:
        return Remembered({"sum": self.initial_accumulator_value})


class Adadelta(Optimizer):
    """Adadelta, as `torch.optim.Adadelta`."""

    _streamed: ClassVar[int] = 27
    _temporaries: ClassVar[int] = 2
    kind: Literal["adadelta"] = "adadelta"
    lr: Rate = 1.0
    rho: float = Field(default=0.9, ge=0, le=1)
    """The part of the average of squares that each update keeps."""
    eps: Epsilon = 1e-6
    weight_decay: Decay = 0.0

    @property
    def remembers(self) -> Remembered:
        return Remembered(_zeros("square_avg", "acc_delta"))


class Adamax(Optimizer):
    """Adam with the infinity norm, as `torch.optim.Adamax`."""

    _streamed: ClassVar[int] = 16
    _temporaries: ClassVar[int] = 1
    kind: Literal["adamax"] = "adamax"
    lr: Rate = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: Decay = 0.0

    @property
    def remembers(self) -> Remembered:
        return Remembered(_zeros("exp_avg", "exp_inf"))


class NAdam(Optimizer):
    """Adam with Nesterov momentum, as `torch.optim.NAdam`."""

    _streamed: ClassVar[int] = 22
    _temporaries: ClassVar[int] = 2
    kind: Literal["nadam"] = "nadam"
    lr: Rate = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: Decay = 0.0
    momentum_decay: Positive = 4e-3
    """How fast the momentum grows from step to step."""
    decoupled_weight_decay: Decoupled = False

    @property
    def remembers(self) -> Remembered:
        return Remembered(_zeros("exp_avg", "exp_avg_sq"), {"step": 0.0, "mu_product": 1.0})


class RAdam(Optimizer):
    """Rectified Adam, as `torch.optim.RAdam`."""

    _streamed: ClassVar[int] = 25
    _temporaries: ClassVar[int] = 5
    kind: Literal["radam"] = "radam"
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: Decay = 0.0
    decoupled_weight_decay: Decoupled = False

    @property
    def remembers(self) -> Remembered:
        return Remembered(_zeros("exp_avg", "exp_avg_sq"))


class RMSprop(Optimizer):
    """RMSprop, as `torch.optim.RMSprop`."""

    _streamed: ClassVar[int] = 13
    _temporaries: ClassVar[int] = 1
    kind: Literal["rmsprop"] = "rmsprop"
    lr: Rate = 1e-2
    alpha: Positive = 0.99
    """The part of the average of squares that each update keeps."""
    eps: Epsilon = 1e-8
    weight_decay: Decay = 0.0
    momentum: Momentum = 0.0
    centered: bool = False
    """Whether the average is subtracted from the squares: their variance."""

    @property
    def remembers(self) -> Remembered:
        momentum = ("momentum_buffer",) if self.momentum > 0 else ()
        average = ("grad_avg",) if self.centered else ()
        return Remembered(_zeros("square_avg", *momentum, *average))


class Rprop(Optimizer):
    """Resilient backpropagation, as `torch.optim.Rprop`; `lr` is the first step's size."""

    _streamed: ClassVar[int] = 34
    _temporaries: ClassVar[int] = 3
    _copies_gradient: ClassVar[bool] = False
    kind: Literal["rprop"] = "rprop"
    lr: Rate = 1e-2
    etas: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=1)]] = (0.5, 1.2)
    """The factors of a step size after a change of sign, and after none."""
    step_sizes: tuple[Positive, Positive] = (1e-6, 50.0)
    """The least and the greatest step size."""

    @property
    def remembers(self) -> Remembered:
        return Remembered({"prev": 0.0, "step_size": self.lr})


class ASGD(Optimizer):
    """Averaged stochastic gradient descent, as `torch.optim.ASGD`."""

    _streamed: ClassVar[int] = 7
    _temporaries: ClassVar[int] = 1
    kind: Literal["asgd"] = "asgd"
    lr: Rate = 1e-2
    lambd: Positive = 1e-4
    """How fast weights decay, times the learning rate."""
    alpha: Positive = 0.75
    """The power with which the learning rate falls."""
    t0: Positive = 1e6
    """The step at which averaging begins."""
    weight_decay: Decay = 0.0

    @property
    def remembers(self) -> Remembered:
        return Remembered({"ax": 0.0}, {"step": 0.0, "eta": self.lr, "mu": 1.0})


AnyOptimizer = (
    SGD | Adam | AdamW | Adagrad | Adadelta | Adamax | NAdam | RAdam | RMSprop | Rprop | ASGD
)

OPTIMIZERS: Mapping[str, type[Value]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
    "adadelta": Adadelta,
    "adamax": Adamax,
    "nadam": NAdam,
    "radam": RAdam,
    "rmsprop": RMSprop,
    "rprop": Rprop,
    "asgd": ASGD,
}

REFUSED = {
    "muon": "it orthogonalizes whole matrices, of which a rank may hold a piece",
    "adafactor": "it keeps means over the rows and columns of whole matrices, and scales a step by "
    "the norm of a whole parameter, of which a rank may hold a piece",
    "lbfgs": "it takes inner products over all parameters, and evaluates the loss several times "
    "in a step",
    "sparseadam": "it takes sparse gradients, and all gradients here are dense",
}

NamedOptimizer = Annotated[
    Annotated[AnyOptimizer, Field(discriminator="kind")],
    by_name("optimizer", OPTIMIZERS, refused=REFUSED),
]
"""A field that takes an optimizer, or the name of one."""
