import io
import pickle
import struct
import sysconfig
from hashlib import md5
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import EpsImagePlugin, Image
from sklearn.datasets import load_digits
from torch.testing import assert_close

from workbench.model.vision import torchvision
from workbench.plan.experiment.experiment import CIFAR10, Digits, ImageFolder, Synthetic
from workbench.plan.experiment.task import Text
from workbench.plan.graph.graph import Input
from workbench.train.data.datasets import Centres, Sequences, fit, open_data
from workbench.train.data.feed import order, rows_of_step
from workbench.train.data.reading import DataError

RGB, GREY = (3, 32, 32), (1, 32, 32)


@pytest.fixture(autouse=True)
def one_thread():
    """As ranks have; small operators on a busy machine are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Files like CIFAR-10's own, of 20 images each, with their checksums made known."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)

    def batch(name):
        pixels = rng.integers(0, 256, (20, 3 * 32 * 32), dtype=np.uint8).tobytes()
        labels = b"".join(b"K%c" % (row % 10) for row in range(20))
        # The operations of the originals, which are by Python 2 and NumPy 1.
        text = b"\x80\x02}(U\x04data" + (
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
            b"(K\x01(K\x14M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
            b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
        )
        text += b"U\x06labels](" + labels + b"eu."
        (folder / name).write_bytes(text)
        return [name, md5(text).hexdigest()]

    dataset = torchvision().datasets.CIFAR10
    monkeypatch.setattr(dataset, "train_list", [batch(f"data_batch_{i}") for i in range(1, 6)])
    monkeypatch.setattr(dataset, "test_list", [batch("test_batch")])
    return CIFAR10(root=str(tmp_path))


@pytest.fixture
def folder(tmp_path):
    """Three classes, of 2, 3 and 4 images, each of one color; half as many for the test."""
    for split, factor in (("train", 1), ("test", 2)):
        for label, color in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255)]):
            place = tmp_path / split / f"class{label}"
            place.mkdir(parents=True)
            for number in range((label + 2) // factor):
                Image.new("RGB", (40 + number, 30), color).save(place / f"{number}.png")
    return ImageFolder(root=str(tmp_path))


@pytest.fixture
def values(cifar, folder):
    return {
        "digits": (Digits(), 10),
        "synthetic": (Synthetic(samples=48), 10),
        "cifar10": (cifar, 10),
        "imagefolder": (folder, 3),
    }


KINDS = ["digits", "synthetic", "cifar10", "imagefolder"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [RGB, GREY, (3, 17, 40)], ids=str)
def test_batches_have_the_models_shape(values, kind, shape):
    value, classes = values[kind]
    data = open_data(value, (Input(shape),), classes, "train")
    assert data.num_classes == classes
    for rows in ([0, len(data) - 1, 3], []):
        images, labels = data.batch(torch.tensor(rows, dtype=torch.long))
        assert images.shape == (len(rows), *shape)
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert images.is_contiguous()
        assert labels.shape == (len(rows),)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_the_same_in_every_batch_and_on_every_rank(values, kind):
    value, classes = values[kind]
    ranks = [open_data(value, (Input((3, 24, 40)),), classes, "train") for _ in range(2)]
    rows = torch.arange(7)
    images, labels = ranks[0].batch(rows)
    for row in rows:
        one, label = ranks[1].batch(row[None])
        assert torch.equal(one[0], images[row])
        assert torch.equal(label[0], labels[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [RGB, GREY], ids=str)
def test_a_model_with_other_classes_is_refused(values, kind, shape):
    value, classes = values[kind]
    with pytest.raises(DataError, match=rf"has {classes} classes, the model 1000; trace it with"):
        open_data(value, (Input(shape),), 1000, "train")


@pytest.mark.parametrize("kind", ["digits", "cifar10", "imagefolder"])
def test_pictures_need_a_model_of_pictures(values, kind):
    value, classes = values[kind]
    with pytest.raises(DataError, match=r"\(channels, height, width\), the model reads \(64,\)"):
        open_data(value, (Input((64,)),), classes, "train")


@pytest.mark.parametrize("kind", ["cifar10", "imagefolder"])
def test_color_cannot_become_four_channels(values, kind):
    value, classes = values[kind]
    with pytest.raises(DataError, match="the model reads 4 channels; color images give 1 or 3"):
        open_data(value, (Input((4, 8, 8)),), classes, "train").batch(torch.tensor([0]))


def test_a_picture_is_as_high_and_as_wide_as_the_model_reads():
    pixels = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8)
    found = fit(pixels, (1, 4, 6), highest=255, mean=0.5, std=0.5)
    plain = (pixels.float() - 127.5) / 127.5
    assert_close(found, F.interpolate(plain, (4, 6), mode="bilinear", antialias=True))


def test_digits_are_scikit_learns_own():
    known = load_digits()
    halves = [open_data(Digits(), (Input((1, 8, 8)),), 10, split) for split in ("train", "test")]
    mine, theirs = set(), set()
    for half in halves:
        images, labels = half.batch(torch.arange(len(half)))
        pixels = (images * 16 * 0.376 + 16 * 0.305).round().to(torch.uint8).numpy()
        mine |= {(p.tobytes(), int(t)) for p, t in zip(pixels, labels, strict=True)}
    for image, label in zip(known.images, known.target, strict=True):
        theirs.add((image.astype(np.uint8).tobytes(), int(label)))
    assert mine == theirs
    assert len(halves[0]) + len(halves[1]) == len(known.images)


def test_digits_splits_are_stratified_and_normalized():
    train, test = (open_data(Digits(), (Input(GREY),), 10, split) for split in ("train", "test"))
    images, labels = train.batch(torch.arange(len(train)))
    assert abs(images.mean()) < 0.02
    small, _ = open_data(Digits(), (Input((1, 8, 8)),), 10, "train").batch(torch.arange(len(train)))
    assert abs(small.std() - 1) < 0.02
    held_out = test.batch(torch.arange(len(test)))[1].bincount()
    assert (len(train), len(test)) == (1442, 355)
    assert_close(held_out / labels.bincount(), torch.full((10,), 0.25), atol=0.01, rtol=0)


def test_digits_hold_bytes_not_images():
    data = open_data(Digits(), (Input((3, 224, 224)),), 10, "train")
    held = [value for value in vars(data).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in held) < 128 * 1024


@pytest.mark.parametrize("shape", [RGB, (1, 20, 12), (16,)], ids=str)
def test_synthetic_images_can_be_learnt(shape):
    """Logistic regression, from scratch, on the flattened pixels."""
    value = Synthetic(samples=256, classes=4)
    train, test = (open_data(value, (Input(shape),), 4, split) for split in ("train", "test"))
    images, labels = train.batch(torch.arange(256))
    weight = torch.zeros(4, images[0].numel(), requires_grad=True)
    for _ in range(30):
        F.cross_entropy(images.flatten(1) @ weight.T, labels).backward()
        weight.data -= 0.05 * weight.grad
        weight.grad = None
    unseen, truth = test.batch(torch.arange(len(test)))
    assert len(test) == 64
    guess = (unseen.flatten(1) @ weight.T).argmax(dim=1)
    assert (guess == truth).double().mean() > 0.95


@pytest.mark.parametrize(
    ("split", "part", "sums"),
    [
        ("train", 0, [500.27, 21.782, 949, 936]),
        ("train", 1, [529.104, 15.759, 1015, 867]),
        ("test", 0, [488.023, 21.155, 748, 883]),
        ("test", 2, [478.122, 16.611, 902, 869]),
    ],
)
def test_synthetic_data_are_the_same_in_every_version(split, part, sums):
    """Figures that were written down, and runs that are compared, rest on these values."""
    data, rows = Synthetic(samples=16, classes=3), torch.arange(4)
    every = (
        Centres(data, (2, 8, 8), split, part),
        Centres(data, (5,), split, part),
        Sequences(data, (9,), split, 50, part),
        Sequences(data, (9,), split, 50, part, per_token=True),
    )
    found = [one.batch(rows)[0].double().abs().sum().item() for one in every]
    assert found == pytest.approx(sums, abs=0.01)


def test_synthetic_test_images_are_new():
    value = Synthetic(samples=8, classes=2)
    train, test = (open_data(value, (Input((3, 4, 4)),), 2, split) for split in ("train", "test"))
    seen, _ = train.batch(torch.arange(8))
    new, _ = test.batch(torch.arange(2))
    assert min((a - b).abs().max() for a in seen for b in new) > 0.1


def test_cifar10_pictures_are_the_files_own(cifar, monkeypatch):
    path = f"{cifar.root}/cifar-10-batches-py/test_batch"
    with open(path, "rb") as file:
        content = pickle.load(file, encoding="latin1")
    monkeypatch.setattr(pickle, "load", None)  # which would import what a file names
    data = open_data(cifar, (Input(RGB),), 10, "test")
    images, labels = data.batch(torch.tensor([4, 2]))
    expected = torch.from_numpy(content["data"][[4, 2]].reshape(2, 3, 32, 32))
    assert_close(images * 255 * 0.251 + 255 * 0.473, expected.float(), atol=1e-3, rtol=0)
    assert labels.tolist() == [4, 2]
    assert (len(data), len(open_data(cifar, (Input(RGB),), 10, "train"))) == (20, 100)


def test_cifar10_that_is_missing_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"download=True\), or unpack https://.* in .*nowhere"):
        open_data(CIFAR10(root=str(tmp_path / "nowhere")), (Input(RGB),), 10, "train")


def test_cifar10_that_is_damaged_is_refused(cifar):
    with open(f"{cifar.root}/cifar-10-batches-py/data_batch_3", "ab") as file:
        file.write(b"!")
    with pytest.raises(DataError, match="no intact CIFAR-10"):
        open_data(cifar, (Input(RGB),), 10, "train")


def test_cifar10_that_is_there_is_not_fetched(cifar):
    fetching = cifar.model_copy(update={"download": True})
    assert len(open_data(fetching, (Input(RGB),), 10, "test")) == 20


def test_cifar10_that_cannot_be_fetched(tmp_path, monkeypatch):
    def unreachable(self):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision().datasets.CIFAR10, "download", unreachable)
    with pytest.raises(DataError, match=r"could not be fetched \(no route to host\); unpack"):
        open_data(CIFAR10(root=str(tmp_path / "new"), download=True), (Input(RGB),), 10, "train")


@pytest.mark.parametrize("reverse", [False, True])
def test_folder_images_come_in_the_order_of_names(folder, monkeypatch, reverse):
    """In whichever order a file system lists them."""
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda own: iter(sorted(listed(own), reverse=reverse)))
    data = open_data(folder, (Input((3, 5, 6)),), 3, "train")
    images, labels = data.batch(torch.arange(len(data)))
    assert labels.tolist() == [0] * 2 + [1] * 3 + [2] * 4
    assert_close(images.argmax(dim=1)[:, 2, 2], labels)
    assert_close(images[0, 0], torch.full((5, 6), (1 - 0.449) / 0.226))
    assert len(open_data(folder, (Input((3, 5, 6)),), 3, "test")) == 1 + 1 + 2


def test_postscript_that_is_called_a_jpeg_is_handed_to_no_program(folder, tmp_path, monkeypatch):
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "EPS")
    path = tmp_path / "train" / "class0" / "0.png"
    path.write_bytes(picture.getvalue())
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("it was run"))
    with pytest.raises(DataError, match=r"class0/0\.png cannot be read as an image"):
        open_data(folder, (Input(RGB),), 3, "train").batch(torch.tensor([0]))


def test_an_image_that_would_take_all_memory_is_told_with_its_file(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(DataError, match=r"0\.png cannot be read as an image: .*bomb"):
        open_data(folder, (Input(RGB),), 3, "train").batch(torch.tensor([0]))


def test_folder_images_are_decoded_only_when_asked_for(folder, tmp_path):
    (tmp_path / "train" / "class1" / "0.png").write_text("no image")
    data = open_data(folder, (Input(RGB),), 3, "train")
    data.batch(torch.tensor([0, 1, 3]))
    with pytest.raises(DataError, match=r"class1/0\.png cannot be read as an image"):
        data.batch(torch.tensor([2]))


def test_the_order_in_which_folders_are_listed_does_not_matter(folder, monkeypatch):
    listed = Path.iterdir
    monkeypatch.setattr(
        Path, "iterdir", lambda self: sorted(listed(self), reverse=self.name == "test")
    )
    assert open_data(folder, (Input(RGB),), 3, "test").num_classes == 3


@pytest.mark.parametrize(
    ("spoilt", "text"),
    [
        (lambda root: (root / "train").rename(root / "no"), "no class folders in .*/train; Image"),
        (
            lambda root: (root / "test").rename(root / "val"),
            "no class folders in .*/test; Image",
        ),
        (
            lambda root: (root / "test" / "class2").rename(root / "test" / "class9"),
            "in one of them only: class2, class9",
        ),
        (
            lambda root: [file.unlink() for file in (root / "train" / "class0").iterdir()],
            "no valid file for the classes class0",
        ),
    ],
)
def test_folders_that_are_not_as_they_must_be(folder, tmp_path, spoilt, text):
    spoilt(tmp_path)
    with pytest.raises(DataError, match=text):
        open_data(folder, (Input(RGB),), 3, "train")


@pytest.mark.parametrize(("length", "batch_size"), [(12, 4), (13, 4), (3, 8), (1, 1)])
def test_an_epoch_takes_every_sample_once(length, batch_size):
    steps = -(-length // batch_size)
    for epoch in range(3):
        parts = [rows_of_step(length, batch_size, 7, epoch * steps + i) for i in range(steps)]
        assert [len(part) for part in parts[:-1]] == [batch_size] * (steps - 1)
        assert sorted(torch.cat(parts).tolist()) == list(range(length))
        assert torch.equal(torch.cat(parts), order(7, epoch, length))


def test_order_depends_on_seed_and_epoch_alone():
    first = order(0, 0, 50)
    assert torch.equal(first, order(0, 0, 50))
    assert not torch.equal(first, order(0, 1, 50))
    assert not torch.equal(first, order(1, 0, 50))
    assert not torch.equal(order(0, 1, 50), order(1, 0, 50))


def test_resizing_and_grey_are_pils():
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, (12, 10, 3), dtype=np.uint8)
    pixels = torch.from_numpy(rgb).permute(2, 0, 1)[None]
    grey = fit(pixels, (1, 12, 10), highest=255, mean=0, std=1)[0, 0] * 255
    assert_close(
        grey, torch.from_numpy(np.array(Image.fromarray(rgb).convert("L"))).float(), atol=1, rtol=0
    )
    half = fit(pixels, (3, 6, 5), highest=255, mean=0, std=1)[0] * 255
    theirs = np.array(Image.fromarray(rgb).resize((5, 6), Image.Resampling.BILINEAR))
    assert_close(half, torch.from_numpy(theirs).permute(2, 0, 1).float(), atol=1.01, rtol=0)


def text(shape=(16,), classes=256, split="train", file=None, vocabulary=256, per_token=True):
    value = Text(file=None if file is None else str(file))
    return open_data(
        value, (Input(shape, vocabulary=vocabulary),), classes, split, per_token=per_token
    )


def test_of_a_text_every_byte_has_the_next_one_and_every_tenth_sequence_is_held_out(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(95)))  # eleven sequences of eight, and one more byte
    train, test = (text((8,), split=split, file=file) for split in ("train", "test"))
    assert (len(train), len(test)) == (10, 1)
    inputs, labels = test.batch(torch.tensor([0]))
    assert inputs.tolist() == [list(range(72, 80))]
    assert labels.tolist() == [list(range(73, 81))]
    inputs, _ = train.batch(torch.arange(10))
    assert inputs[:, 0].tolist() == [8 * i for i in range(11) if i != 9]


def test_the_standard_library_is_there_and_begins_like_its_first_module():
    data = text()
    assert len(data) > 100_000
    first = Path(sysconfig.get_path("stdlib"), "__future__.py").read_bytes()[:16]
    assert bytes(data.batch(torch.tensor([0]))[0][0].tolist()) == first


@pytest.mark.parametrize(
    "wrong",
    [dict(vocabulary=255), dict(classes=255), dict(per_token=False), dict(vocabulary=None)],
)
def test_text_is_for_models_of_bytes(wrong):
    with pytest.raises(DataError, match="ids of 256 tokens or more and score as many classes"):
        text(**wrong)


def test_a_text_that_is_not_there_or_too_short(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        text(file=tmp_path / "no.txt")
    (tmp_path / "short.txt").write_bytes(b"ab" * 20)
    with pytest.raises(DataError, match="40 bytes are too few for 10 sequences of 16 tokens"):
        text(split="test", file=tmp_path / "short.txt")
