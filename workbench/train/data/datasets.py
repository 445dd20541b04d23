"""The data sets that come with the workbench, fitted to what a model reads, and who opens them.

There are samples drawn around one centre for each class (images, token ids, masks, several inputs
together), text, scikit-learn's digits, CIFAR-10 and folders of images.
"""

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from filelock import FileLock
from PIL import Image
from torch import Tensor

from workbench.model.vision import torchvision
from workbench.model.weights.pickled import records
from workbench.plan.experiment.experiment import (
    CIFAR10,
    Data,
    Digits,
    ImageFolder,
    Synthetic,
    TorchData,
)
from workbench.plan.experiment.task import Text
from workbench.plan.graph.graph import Graph, Input, shown
from workbench.train.data.collated import Batch
from workbench.train.data.reading import DataError
from workbench.train.data.samples import OwnSamples

# Rec. 601 luma, as PIL and torchvision turn color into grey.
_LUMA = (0.299, 0.587, 0.114)


def fit(
    pixels: Tensor, shape: tuple[int, int, int], *, highest: float, mean: float, std: float
) -> Tensor:
    """Float32 images of this shape: bilinearly resized, then normalized.

    Args:
        pixels: [n, channels, height, width] of integers 0 ... `highest`; grey or RGB.
        shape: the channels, height and width that the model reads. Grey is repeated to any number
            of channels; RGB is averaged to grey for a model that reads one.
        highest: the integer that means white.

    Raises:
        DataError: RGB for a model that reads neither one nor three channels.
    """
    channels, height, width = shape
    if pixels.shape[1] == 3 and channels not in (1, 3):
        raise DataError(f"the model reads {channels} channels; color images give 1 or 3")
    images = pixels.to(torch.float32)
    if pixels.shape[1] == 3 and channels == 1:
        images = (images * torch.tensor(_LUMA).view(3, 1, 1)).sum(dim=1, keepdim=True)
    images = images.sub_(highest * mean).div_(highest * std)
    if images.shape[2:] != (height, width):
        images = F.interpolate(images, (height, width), mode="bilinear", antialias=True)
    return images.expand(len(images), channels, height, width).contiguous()


_BYTES = 256
_TENTH = 10
_NO_LIBRARY = ("site-packages", "dist-packages", "test")  # not on every machine
_REPLACED = 0.25  # of the tokens of a sequence
_CENTRES_SEED = 1 << 40
_INPUTS_APART = 0x9E3779B1  # of 32 bits, which are all that torch's generator takes of a seed


def seed_of(sample: int, part: int = 0) -> int:
    """The seed of what is drawn for a sample: another one for each of a model's inputs."""
    return (sample + part * _INPUTS_APART) % (1 << 32) if part else sample


class Drawn:
    """One split of samples that are drawn when they are asked for, each seeded by its number.

    Args:
        part: the number of the input among the model's.
    """

    def __init__(self, data: Synthetic, split: Literal["train", "test"], part: int) -> None:
        self._part = part
        self._first = 0 if split == "train" else data.samples
        self._length = data.samples if split == "train" else max(1, data.samples // 4)

    def __len__(self) -> int:
        return self._length

    def _generators(self, indices: Tensor) -> Iterator[torch.Generator]:
        """What each of these samples is drawn with, one after another."""
        generator = torch.Generator()
        for index in indices.tolist():
            yield generator.manual_seed(seed_of(self._first + index, self._part))


class Centres(Drawn):
    """One split: sample i is the centre of class i % classes, plus noise of the same strength.

    Centres are coarse patterns (4x4, resized), which survive pooling. Nothing else is
    resident: noise is drawn, seeded by the sample's number, when the sample is asked for.
    """

    def __init__(
        self,
        data: Synthetic,
        shape: tuple[int, ...],
        split: Literal["train", "test"],
        part: int = 0,
    ) -> None:
        super().__init__(data, split, part)
        self.num_classes, self._shape = data.classes, shape
        coarse = (shape[0], 4, 4) if len(shape) == 3 else shape
        generator = torch.Generator().manual_seed(seed_of(_CENTRES_SEED, part))
        self._centres = torch.randn(data.classes, *coarse, generator=generator)

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(indices), *self._shape)
        for image, generator in zip(images, self._generators(indices), strict=True):
            image.normal_(generator=generator)
        labels = indices % self.num_classes
        centres = self._centres[labels]
        if len(self._shape) == 3:
            centres = F.interpolate(centres, self._shape[1:], mode="bilinear", antialias=True)
        return images.add_(centres.view_as(images)), labels


class Sequences(Drawn):
    """One split: sample i is the token ids of class i % classes, a quarter of them replaced.

    Its label is that class; or of each token, the next one.
    """

    def __init__(
        self,
        data: Synthetic,
        shape: tuple[int, ...],
        split: Literal["train", "test"],
        vocabulary: int,
        part: int = 0,
        *,
        per_token: bool = False,
    ) -> None:
        super().__init__(data, split, part)
        self.num_classes = None if per_token else data.classes
        self._classes, self._per_token = data.classes, per_token
        shape = (*shape[:-1], shape[-1] + 1) if per_token else shape
        self._shape, self._vocabulary = shape, vocabulary
        generator = torch.Generator().manual_seed(seed_of(_CENTRES_SEED, part))
        self._of_class = torch.randint(vocabulary, (data.classes, *shape), generator=generator)

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(len(indices), *self._shape, dtype=torch.int64)
        labels = indices % self._classes
        each = zip(tokens, self._generators(indices), labels.tolist(), strict=True)
        for row, generator, label in each:
            others = torch.randint(self._vocabulary, self._shape, generator=generator)
            replaced = torch.rand(self._shape, generator=generator) < _REPLACED
            row.copy_(torch.where(replaced, others, self._of_class[label]))
        if self._per_token:
            return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        return tokens, labels


class Bytes:
    """One split of a text, resident as the bytes that it is.

    Sequences lie one behind the other, and the label of a sequence's last byte is the first of the
    next one. What is left of the text is shorter than one.

    Args:
        split: "train", or "test": every tenth sequence.
        vocabulary: the number of tokens; None: the model reads none.
        per_token: whether it scores classes for each token.

    Raises:
        DataError: the model is none of bytes, or the text cannot be read or is too short.
    """

    num_classes = None

    def __init__(
        self,
        data: Text,
        shape: tuple[int, ...],
        classes: int,
        split: Literal["train", "test"],
        vocabulary: int | None,
        *,
        per_token: bool,
    ) -> None:
        if len(shape) != 1 or not per_token or min(vocabulary or 0, classes) < _BYTES:
            reads = "real numbers" if vocabulary is None else f"ids of {vocabulary} tokens"
            raise DataError(
                f"{data!r} is for models that read sequences of ids of {_BYTES} tokens or more and "
                f"score as many classes for each; this one reads {reads}, {shape}, and scores "
                f"{classes} classes{' for each' if per_token else ''}"
            )
        self._text = torch.from_numpy(_text(data.file))
        (self._length,) = shape
        sequences = torch.arange((len(self._text) - 1) // self._length)
        held_out = sequences % _TENTH == _TENTH - 1
        self._sequences = sequences[held_out if split == "test" else ~held_out]
        if not len(self._sequences):
            raise DataError(
                f"{data!r}: {len(self._text)} bytes are too few for {_TENTH} sequences of "
                f"{self._length} tokens"
            )

    def __len__(self) -> int:
        return len(self._sequences)

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        first = self._sequences[indices] * self._length
        both = self._text[first[:, None] + torch.arange(self._length + 1)].long()
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _text(file: str | None) -> npt.NDArray[np.uint8]:
    """The bytes of a file, or of the standard library's sources in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(library.glob("*.py")) + sorted(library.glob("*/*.py"))
    of_packages = [path for path in sources if path.parent.name not in _NO_LIBRARY]
    try:
        paths = of_packages if file is None else [Path(file).expanduser()]
        return np.frombuffer(b"".join(path.read_bytes() for path in paths), dtype=np.uint8).copy()
    except OSError as error:
        raise DataError(f"the text cannot be read: {error}") from error


class EightByEight:
    """One split, resident as the 8x8 bytes that it is (115 KB for both splits together).

    Every fifth image of each class, in the file's order, is the test split's (355); the
    others are the training split's (1,442).

    Raises:
        DataError: scikit-learn, which has the images, is not installed.
    """

    num_classes = 10

    def __init__(self, shape: tuple[int, int, int], split: Literal["train", "test"]) -> None:
        # The file itself, because importing `sklearn.datasets` takes a second and 100 MB.
        package = importlib.util.find_spec("sklearn")
        if package is None or package.origin is None:
            raise DataError("Digits() come with scikit-learn: pip install scikit-learn")
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
        labels = table[:, -1]
        # How many images of the same class came before each image.
        earlier = np.array([np.sum(labels[:i] == label) for i, label in enumerate(labels)])
        rows = (earlier % 5 == 4) == (split == "test")
        self._shape = shape
        self._pixels = torch.from_numpy(table[rows, :-1].reshape(-1, 1, 8, 8))
        self._labels = torch.from_numpy(labels[rows].astype(np.int64))

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        pixels = self._pixels[indices]
        images = fit(pixels, self._shape, highest=16, mean=0.305, std=0.376)
        return images, self._labels[indices]


class Pictures:
    """One split, resident as bytes (154 MB for training, 31 MB for test).

    Args:
        data: the place of the files, and whether they may be fetched. Of several ranks on one host
            the first fetches and the others wait.

    Raises:
        DataError: the files are missing or damaged, or cannot be fetched.
    """

    num_classes = 10

    def __init__(
        self, data: CIFAR10, shape: tuple[int, int, int], split: Literal["train", "test"]
    ) -> None:
        root = Path(data.root).expanduser()
        try:
            if data.download:
                root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / "cifar10.lock") if data.download else nullcontext():
                published = torchvision().datasets.CIFAR10
                if data.download:
                    files = published.__new__(published)  # its __init__ unpickles
                    files.root = str(root)
                    files.download()
            listed = published.train_list if split == "train" else published.test_list
            found = [_batch(root / published.base_folder / name, md5) for name, md5 in listed]
        except (RuntimeError, OSError) as error:
            raise DataError(_remedy(root, data.download, error)) from error
        self._shape = shape
        self._pixels = torch.cat([pixels for pixels, _ in found])
        self._labels = torch.cat([labels for _, labels in found])

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        images = fit(self._pixels[indices], self._shape, highest=255, mean=0.473, std=0.251)
        return images, self._labels[indices]


def _batch(path: Path, md5: str) -> tuple[Tensor, Tensor]:
    """Pixels and labels of one of CIFAR-10's files: a pickle, which is read once, and as data."""
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise OSError(f"{path.name} is not as it was published")
    held = records(content)
    pixels = bytearray(held["data"].state[-1], "latin1")
    images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 3, 32, 32)
    return images, torch.tensor(held["labels"], dtype=torch.int64)


def _remedy(root: Path, download: bool, error: Exception) -> str:
    by_hand = f"unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz in {root.resolve()}"
    if download:
        return f"CIFAR-10 could not be fetched ({error}); {by_hand}"
    return (
        f"no intact CIFAR-10 in {root.resolve()}; use "
        f"CIFAR10(root={str(root)!r}, download=True), or {by_hand}"
    )


class Files:
    """One split: `root/<split>/<class>/**`, in the order of names, decoded when asked for.

    Args:
        shape: channels, height and width that the model reads; images are resized to it whole, and
            read as color unless the model has one channel.

    Raises:
        DataError: a folder is missing or empty, the splits have different classes, or (in
            `batch`) a file is no image.
    """

    def __init__(
        self, data: ImageFolder, shape: tuple[int, int, int], split: Literal["train", "test"]
    ) -> None:
        root = Path(data.root).expanduser()
        classes = {name: _classes(root, name) for name in ("train", "test")}
        if classes["train"] != classes["test"]:
            only = sorted(set(classes["train"]) ^ set(classes["test"]))
            raise DataError(
                f"train/ and test/ in {root.resolve()} must have the same classes; "
                f"in one of them only: {', '.join(only)}"
            )
        try:
            self._files = torchvision().datasets.ImageFolder(root / split).samples
        except FileNotFoundError as error:
            raise DataError(f"{root.resolve() / split}: {error}") from error
        self.num_classes = len(classes["train"])
        self._shape = shape

    def __len__(self) -> int:
        return len(self._files)

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        chosen = [self._files[row] for row in indices.tolist()]
        channels, height, width = self._shape
        grey = channels == 1
        pixels = torch.zeros(len(chosen), 1 if grey else 3, height, width, dtype=torch.uint8)
        for row, (path, _) in zip(pixels, chosen, strict=True):
            row.copy_(_decoded(path, "L" if grey else "RGB", (width, height)))
        images = fit(pixels, self._shape, highest=255, mean=0.449, std=0.226)
        return images, torch.tensor([label for _, label in chosen], dtype=torch.int64)


def _classes(root: Path, split: str) -> list[str]:
    folder = root / split
    found = (
        sorted(item.name for item in folder.iterdir() if item.is_dir()) if folder.is_dir() else []
    )
    if not found:
        raise DataError(
            f"no class folders in {folder.resolve()}; ImageFolder needs train/<class>/* and "
            f"test/<class>/* in its root"
        )
    return found


FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded, whatever a file is called: not PostScript, for which Pillow runs a program."""


def _decoded(path: str, mode: str, size: tuple[int, int]) -> Tensor:
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.draft(mode, size)  # a JPEG much larger than `size` is decoded at a fraction
            resized = image.convert(mode).resize(size, Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # by format
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    pixels = torch.from_numpy(np.array(resized))
    return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)


class Masks(Drawn):
    """One split: each line of the last dimension is true up to a random length, at least 1."""

    def __init__(
        self,
        data: Synthetic,
        shape: tuple[int, ...],
        split: Literal["train", "test"],
        part: int = 0,
    ) -> None:
        super().__init__(data, split, part)
        self.num_classes, self._shape = data.classes, shape

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        *lines, length = self._shape or (1,)
        least, places = int(bool(self._shape)), torch.arange(length)
        masks = torch.empty(len(indices), *lines, length, dtype=torch.bool)
        for mask, generator in zip(masks, self._generators(indices), strict=True):
            until = torch.randint(least, length + 1, (*lines, 1), generator=generator)
            torch.lt(places, until, out=mask)
        return masks.view(len(indices), *self._shape), indices % self.num_classes


class Together:
    """One split of a model that reads several inputs: of each its own samples, with one label.

    Args:
        per_token: whether labels are the next tokens: of the input with as many tokens as classes.

    Raises:
        DataError: no input has as many.
    """

    def __init__(
        self,
        data: Synthetic,
        inputs: Sequence[Input],
        num_classes: int,
        split: Literal["train", "test"],
        *,
        per_token: bool = False,
    ) -> None:
        counts = [one.vocabulary for one in inputs]
        if per_token and num_classes not in counts:
            raise DataError(
                f"{data!r} has the next tokens as labels, and the model scores {num_classes} "
                f"classes for each, as many as no input has tokens: give data of your own"
            )
        self._labels = counts.index(num_classes) if per_token else 0
        self.num_classes = None if per_token else data.classes
        self._parts: list[Centres | Sequences | Masks] = []
        for part, one in enumerate(inputs):
            if one.vocabulary is not None:
                told = per_token and part == self._labels
                made = Sequences(data, one.shape, split, one.vocabulary, part, per_token=told)
                self._parts.append(made)
            else:
                kind = Masks if one.dtype == "bool" else Centres
                self._parts.append(kind(data, one.shape, split, part))

    def __len__(self) -> int:
        return len(self._parts[0])

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
        inputs, labels = zip(*(part.batch(indices) for part in self._parts), strict=True)
        return inputs, labels[self._labels]


Split = Literal["train", "test"]


class Dataset(Protocol):
    """One split: numbered samples, made ready for the model when they are asked for.

    The same index gives the same bits on every rank and in every batch of an epoch.
    """

    @property
    def num_classes(self) -> int | None:
        """The number of classes; None: nobody knows, or targets are no classes."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, epoch: int = ...) -> Batch:
        """(inputs, targets); n may be 0.

        Inputs are one tensor [n, *shape], or a tuple of one for each that the model reads. Those
        of the built-in ones are float32 and normalized, and targets int64 labels [n]; other targets
        are any nesting of tensors [n, ...].
        """
        ...


def open_data(
    data: Data,
    inputs: Sequence[Input],
    num_classes: int,
    split: Split,
    seed: int = 0,
    *,
    per_token: bool = False,
) -> Dataset:
    """The data set that a value names, fitted to a model.

    Raises:
        DataError: the files are not there, or the data does not fit the model.
        OwnObjectError: the user's own data cannot be loaded here.
    """
    opened: Dataset
    match data:
        case Synthetic() if len(inputs) > 1:
            opened = Together(data, inputs, num_classes, split, per_token=per_token)
        case Synthetic():
            (one,) = inputs
            if one.vocabulary is not None:
                opened = Sequences(data, one.shape, split, one.vocabulary, per_token=per_token)
            else:
                kind = Masks if one.dtype == "bool" else Centres
                opened = kind(data, one.shape, split)
        case Text():
            one = _only(data, inputs)
            told = one.shape, num_classes, split, one.vocabulary
            opened = Bytes(data, *told, per_token=per_token)
        case Digits():
            opened = EightByEight(_picture(data, inputs), split)
        case CIFAR10():
            opened = Pictures(data, _picture(data, inputs), split)
        case ImageFolder():
            opened = Files(data, _picture(data, inputs), split)
        case TorchData():
            return OwnSamples(data, split, inputs, seed)
    if opened.num_classes not in (None, num_classes):
        raise DataError(
            f"{data!r} has {opened.num_classes} classes, the model {num_classes}; "
            f"trace it with num_classes={opened.num_classes}"
        )
    return opened


def open_for(graph: Graph, data: Data, split: Split, seed: int = 0) -> Dataset:
    per_token = graph.scores_tokens
    return open_data(data, graph.inputs, graph.num_classes, split, seed, per_token=per_token)


def order_seed(data: Dataset, seed: int) -> int | None:
    """The seed of the order in which epochs take the samples; None: they take them as they come."""
    return None if isinstance(data, OwnSamples) and data.is_stream else seed


def _only(data: Data, inputs: Sequence[Input]) -> Input:
    if len(inputs) > 1:
        raise DataError(f"{data!r} gives one tensor, the model reads several: {shown(inputs)}")
    return inputs[0]


def _picture(data: Data, inputs: Sequence[Input]) -> tuple[int, int, int]:
    one = _only(data, inputs)
    if not one.is_real or len(one.shape) != 3:
        ids = f", ids of {one.vocabulary} tokens" if one.vocabulary else ", a mask"
        read = f"{one.shape}" + ids * (not one.is_real)
        raise DataError(f"{data!r} gives (channels, height, width), the model reads {read}")
    channels, height, width = one.shape
    return channels, height, width
