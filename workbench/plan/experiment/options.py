"""The options that several of torch's optimizers have, with what each is for."""

from typing import Annotated, Any

from pydantic import Field

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
