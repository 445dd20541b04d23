"""Data of models that read several inputs: drawn, and one's own."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import Dataset

from workbench.plan.experiment.experiment import Digits, Synthetic
from workbench.plan.experiment.task import Text, TorchData
from workbench.plan.graph.graph import Input
from workbench.train.data.datasets import open_data
from workbench.train.data.reading import DataError

INPUTS = (
    Input((5,), vocabulary=7, name="ids"),
    Input((5,), "bool", name="mask"),
    Input((4,), name="meta"),
)
FIRST = torch.arange(3)


def drawn(inputs, **more):
    fields = dict(num_classes=3, split="train") | more
    return open_data(Synthetic(samples=40, classes=3), inputs, **fields)


def test_drawn_inputs_have_their_shapes_and_kinds():
    (ids, mask, meta), labels = drawn(INPUTS).batch(FIRST)
    assert [x.shape for x in (ids, mask, meta)] == [(3, 5), (3, 5), (3, 4)]
    assert [x.dtype for x in (ids, mask, meta)] == [torch.int64, torch.bool, torch.float32]
    assert labels.tolist() == [0, 1, 2]
    assert 0 <= ids.min() <= ids.max() < 7


def test_masks_are_true_up_to_lengths_that_differ():
    (_, masks, _), _ = drawn(INPUTS).batch(torch.arange(40))
    lengths = masks.sum(-1)
    assert torch.equal(masks, torch.arange(5) < lengths[:, None])
    assert sorted(set(lengths.tolist())) == [1, 2, 3, 4, 5]


def test_a_mask_of_one_truth_is_either():
    masks, _ = drawn((Input((), "bool"),)).batch(torch.arange(40))
    assert masks.shape == (40,)
    assert set(masks.tolist()) == {False, True}


def test_equal_inputs_are_not_drawn_alike():
    for one in (Input((4,)), Input((9,), vocabulary=50), Input((9,), "bool")):
        pair = replace(one, name="a"), replace(one, name="b")
        (a, b), _ = drawn(pair).batch(torch.arange(10))
        assert not torch.equal(a, b)


def test_a_row_is_the_same_whoever_asks_and_new_in_the_other_split():
    one, other = drawn(INPUTS), drawn(INPUTS, split="test")
    (inputs, labels), (again, same) = one.batch(FIRST), one.batch(torch.tensor([2, 1]))
    assert_close(again, tuple(x[[2, 1]] for x in inputs), rtol=0, atol=0)
    assert torch.equal(same, labels[[2, 1]])
    assert len(other) == 10
    assert not torch.equal(other.batch(FIRST)[0][2], inputs[2])
    assert [len(x) for x in one.batch(FIRST[:0])[0]] == [0, 0, 0]


def test_next_tokens_are_those_of_the_input_with_as_many_tokens_as_classes():
    inputs = Input((5,), vocabulary=2, name="kinds"), INPUTS[0]
    data = drawn(inputs, num_classes=7, per_token=True)
    (_, ids), labels = data.batch(FIRST)
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    with pytest.raises(DataError, match="scores 9 classes for each"):
        drawn(inputs, num_classes=9, per_token=True)


@pytest.mark.parametrize("data", [Digits(), Text()], ids=["digits", "text"])
def test_what_gives_one_tensor_is_no_data_of_several_inputs(data):
    with pytest.raises(DataError, match="gives one tensor, the model reads several: ids 5 of 7"):
        open_data(data, INPUTS, 10, "train")


def test_pictures_are_no_masks():
    with pytest.raises(DataError, match="a mask"):
        open_data(Digits(), (Input((1, 8, 8), "bool"),), 10, "train")


class Rows(Dataset):
    """Samples of one's own, as `make` makes them of (ids, mask, meta, label)."""

    def __init__(self, make, length=9):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        ids = (torch.arange(5) + index) % 7
        return self.make(ids, ids > index % 5, torch.full((4,), float(index)), index % 3)


def as_tuple(ids, mask, meta, label):
    return (ids, mask, meta), label


def as_mapping(ids, mask, meta, label):
    return {"meta": meta, "mask": mask, "ids": ids}, label


def as_fields(ids, mask, meta, label):
    return {"meta": meta, "mask": mask, "label": label, "ids": ids, "more": 1}


def opened(make, read=INPUTS, **more):
    return open_data(TorchData(train=Rows(make), **more), read, 3, "train")


KEYS = dict(inputs=("ids", "mask", "meta"), targets="label")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "more"),
    [(as_tuple, {}), (as_mapping, {}), (as_fields, KEYS)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_own_samples_have_inputs_in_a_tuple_or_by_name(make, more, workers):
    data = opened(make, workers=workers, **more)
    expected = [Rows(as_tuple)[index] for index in (4, 1)]
    if workers:
        ((inputs, labels),) = data.ahead(lambda: iter([[(0, 4), (0, 1)]]))
    else:
        inputs, labels = data.batch(torch.tensor([4, 1]))
    assert isinstance(inputs, tuple)
    for place, found in enumerate(inputs):
        assert torch.equal(found, torch.stack([sample[0][place] for sample in expected]))
    assert labels.tolist() == [1, 1]


def test_no_rows_are_inputs_of_no_rows():
    inputs, labels = opened(as_mapping).batch(torch.arange(0))
    assert [tuple(x.shape) for x in inputs] == [(0, 5), (0, 5), (0, 4)]
    assert labels.shape == (0,)


def test_one_named_input_may_come_alone_or_by_its_name():
    for make in (lambda i, m, x, y: (x, y), lambda i, m, x, y: ({"meta": x}, y)):
        inputs, _ = opened(make, (INPUTS[2],)).batch(FIRST)
        assert inputs.shape == (3, 4)


def test_a_collate_function_may_make_them():
    def collate(samples):
        ids, mask, meta, labels = (torch.as_tensor([s[i] for s in samples]) for i in range(4))
        return {"ids": ids, "mask": mask, "meta": meta}, labels

    def listed(ids, mask, meta, label):
        return ids.tolist(), mask.tolist(), meta.tolist(), label

    inputs, _ = opened(listed, collate=collate).batch(FIRST)
    assert [x.dtype for x in inputs] == [torch.int64, torch.bool, torch.float32]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda i, m, x, y: ({"ids": i, "mask": m}, y), "are ids, mask, and the model reads ids"),
        (
            lambda i, m, x, y: ({"ids": i, "mask": m, "meta": x, "extra": x}, y),
            "are extra, ids, mask, meta, and the model reads",
        ),
        (lambda i, m, x, y: ((i, m), y), "list of 2: a mapping with these keys"),
        (lambda i, m, x, y: (x, y), "are Tensor: a mapping with these keys"),
        (lambda i, m, x, y: ((i, m, "x"), y), r"got (tuple|list) of 3"),
        (lambda i, m, x, y: ((i, m, x[:3]), y), r"inputs 'meta' of 3 samples have shape \(3, 3\)"),
        (lambda i, m, x, y: ((i, m.long(), x), y), "inputs 'mask' are torch.int64.*reads a mask"),
        (lambda i, m, x, y: ((i.float(), m, x), y), "inputs 'ids' are torch.float32.*token ids"),
        (lambda i, m, x, y: ((m, m, x), y), "inputs 'ids' are torch.bool.*token ids"),
        (lambda i, m, x, y: ((i, m, x.long()), y), "inputs 'meta' are torch.int64.*real numbers"),
        (lambda i, m, x, y: ((i, m, m[:4]), y), r"'meta' are torch.bool.*Input\(\(4,\), 'bool'\)"),
        (lambda i, m, x, y: ((i, m, x * 1j), y), "'meta' are torch.complex64.*view_as_real"),
        (lambda i, m, x, y: ((i + 1, m, x), y), "token 7 of 'ids' is not in"),
        (
            lambda i, m, x, y: ((i, m, x) if y else (i, m), y),
            "samples cannot be collated",
        ),
        (as_fields, "batches are mappings with the keys"),
    ],
)
def test_other_inputs_are_one_clear_error(make, says):
    with pytest.raises(DataError, match=says):
        opened(make).batch(torch.tensor([0, 1, 2]))


def test_keys_that_batches_do_not_have():
    with pytest.raises(DataError, match="must be two of them, got"):
        opened(as_fields, inputs=("ids", "msk"), targets="label").batch(FIRST)
