"""Data sets by name: those that the workbench opens itself, and a person's own."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from workbench.plan.experiment.task import DataSet, TorchData, as_data
from workbench.plan.value import by_name


class Digits(DataSet):
    """scikit-learn's 1,797 real 8x8 grey images of ten digits, resized to the model's input."""

    kind: Literal["digits"] = "digits"

    @property
    def known_samples(self) -> tuple[int, int]:
        """The samples of the training and of the test split."""
        return 1442, 355


class Synthetic(DataSet):
    """Seeded images drawn around one centre for each class: learnable, of any shape and size."""

    kind: Literal["synthetic"] = "synthetic"
    samples: int = Field(default=1024, ge=1)
    """Images of the training split; the test split has a quarter as many."""
    classes: int = Field(default=10, ge=2)
    """Classes of images, each drawn around a centre of its own."""

    @property
    def known_samples(self) -> tuple[int, int]:
        """The samples of the training and of the test split."""
        return self.samples, max(1, self.samples // 4)


class CIFAR10(DataSet):
    """60,000 32x32 color images of ten classes, through torchvision."""

    kind: Literal["cifar10"] = "cifar10"
    root: str = "data"
    """Folder that holds, or receives, the data set."""
    download: bool = False
    """Whether what the folder lacks is fetched."""


class ImageFolder(DataSet):
    """A folder with `train/<class>/*` and `test/<class>/*` images, through torchvision."""

    kind: Literal["imagefolder"] = "imagefolder"
    root: str
    """The folder."""


Data = Annotated[
    Annotated[Digits | Synthetic | CIFAR10 | ImageFolder | TorchData, Field(discriminator="kind")],
    by_name(
        "data",
        {"digits": Digits, "synthetic": Synthetic, "cifar10": CIFAR10},
        "ImageFolder(root), a torch Dataset, two of them (train, test), 'module:function', and the "
        "name of an installed one",
    ),
    BeforeValidator(as_data),
]
