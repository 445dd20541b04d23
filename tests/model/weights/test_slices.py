"""Any span of any cut is read from any pieces that cover the tensor."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from workbench.model import (
    CheckpointError,
    Piece,
    PieceSet,
    Snapshot,
    WeightsFile,
    expect,
    index_pieces,
)
from workbench.model.weights.files import write_tensors
from workbench.plan.graph.graph import Weight
from workbench.plan.placement.placement import Shard

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def numbered(shape, dtype=torch.float32):
    """A tensor in which every element differs (as far as its type can tell)."""
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def part(tensor, shard, rank):
    return torch.cat([tensor.narrow(shard.dim, *span) for span in shard.spans(rank)], shard.dim)


def cut(tensor, shard):
    shape, dim, blocks = tuple(tensor.shape), shard.dim, shard.blocks
    return [
        Piece(part(tensor, shard, rank), shape, dim, shard.span(rank)[0], blocks)
        for rank in range(len(shard.sizes))
    ]


def write_pieces(path, pieces):
    snapshot = Snapshot()
    snapshot.take(pieces)
    snapshot.write(path)


def save(directory, **cuts):
    """Writes one file for each rank: `save(directory, name=(tensor, shard))`."""
    ranks = max(len(shard.sizes) for _, shard in cuts.values())
    files = [f"rank{rank}.safetensors" for rank in range(ranks)]
    for rank, file in enumerate(files):
        pieces = {
            name: cut(tensor, shard)[rank]
            for name, (tensor, shard) in cuts.items()
            if rank < len(shard.sizes)
        }
        write_pieces(directory / file, pieces)
    index_pieces(directory, files)
    return PieceSet(directory)


@st.composite
def cuts(draw, shape):
    """A cut of a tensor of this shape, with pieces of any sizes, zero included, in blocks."""
    dim = draw(st.integers(0, len(shape) - 1))
    blocks = draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
    length = shape[dim] // blocks
    bounds = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    edges = [0, *bounds, length]
    return Shard(dim, tuple(b - a for a, b in pairwise(edges)), blocks)


@st.composite
def saved_and_wanted(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    return shape, draw(cuts(shape)), draw(cuts(shape)), draw(st.sampled_from(DTYPES))


@pytest.mark.slow
@given(saved_and_wanted())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_any_cut_reads_what_any_other_saved(tmp_path_factory, case):
    shape, saved, wanted, dtype = case
    tensor = numbered(shape, dtype)
    pieces = save(tmp_path_factory.mktemp("pieces"), w=(tensor, saved))
    assert pieces.shape("w") == shape
    assert_close(pieces.read("w"), tensor, rtol=0, atol=0)
    for rank in range(len(wanted.sizes)):
        got = pieces.read("w", wanted, rank)
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert_close(got, part(tensor, wanted, rank), rtol=0, atol=0)


@given(saved_and_wanted())
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_slices_of_a_file_of_whole_tensors(tmp_path_factory, case):
    shape, _, wanted, dtype = case
    tensor = numbered(shape, dtype)
    path = tmp_path_factory.mktemp("file") / "w.safetensors"
    write_tensors(path, {"w": tensor})
    reader = WeightsFile(path)
    assert reader.shape("w") == shape
    assert_close(reader.read("w"), tensor, rtol=0, atol=0)
    for rank in range(len(wanted.sizes)):
        got = reader.read("w", wanted, rank)
        assert_close(got, part(tensor, wanted, rank), rtol=0, atol=0)


def test_scalars_are_one_piece(tmp_path):
    write_pieces(tmp_path / "a", {"n": Piece(torch.tensor(3), ())})
    index_pieces(tmp_path, ["a"])
    assert PieceSet(tmp_path).read("n").item() == 3
    assert PieceSet(tmp_path).shape("n") == ()


def test_what_is_read_is_the_reader_s_own(tmp_path):
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"w": numbered((4, 4))})
    before = path.read_bytes()
    for piece in (WeightsFile(path).read("w"), WeightsFile(path).read("w", Shard(0, (2, 2)), 1)):
        piece.zero_()
        assert piece.untyped_storage().nbytes() == piece.numel() * 4
    assert path.read_bytes() == before
    assert_close(WeightsFile(path).read("w"), numbered((4, 4)))


def test_names_are_in_order_and_may_hold_anything(tmp_path):
    odd = 'a "quoted" näme\\with.dots/and slashes'
    shard = Shard(0, (1, 2))
    pieces = save(tmp_path, **{"z": (numbered((3,)), shard), odd: (numbered((3,)), shard)})
    assert set(pieces.names) == {"z", odd}
    assert_close(pieces.read(odd), numbered((3,)))


def test_the_index_is_text_that_a_person_can_read(tmp_path):
    save(tmp_path, w=(numbered((3, 2)), Shard(0, (1, 2))))
    assert (tmp_path / "index.toml").read_text() == (
        'format = "workbench pieces 1"\n\n[tensors]\n\n[tensors."w"]\nshape = [3, 2]\n'
        'dtype = "float32"\npieces = [\n'
        '    { file = "rank0.safetensors", dim = 0, start = 0, length = 1 },\n'
        '    { file = "rank1.safetensors", dim = 0, start = 1, length = 2 },\n]\n'
    )


def test_a_piece_of_several_blocks_says_where_each_is(tmp_path):
    save(tmp_path, w=(numbered((9,)), Shard(0, (2, 1), blocks=3)))
    lines = (tmp_path / "index.toml").read_text().splitlines()
    assert [line.strip(" {},") for line in lines if "rank1" in line] == [
        'file = "rank1.safetensors", dim = 0, start = 2, length = 1',
        'file = "rank1.safetensors", dim = 0, start = 5, length = 1, offset = 1',
        'file = "rank1.safetensors", dim = 0, start = 8, length = 1, offset = 2',
    ]
    path = tmp_path / "index.toml"
    path.write_text(path.read_text().replace("offset = 2", "offset = 3", 1))
    with pytest.raises(CheckpointError, match="the offsets of 'w' in the index do not fit"):
        PieceSet(tmp_path)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 1], "'w' overlap at 1: b begins at 1, the one before ends at 2"),
        ([0, 3], "'w' leave a hole at 2: b begins at 3, the one before ends at 2"),
        ([0], "'w' cover 2 of 5"),
        ([1], "'w' leave a hole at 0"),
    ],
)
def test_pieces_cover_the_tensor_once(tmp_path, starts, message):
    files = ["a", "b"][: len(starts)]
    for file, start in zip(files, starts, strict=True):
        write_pieces(tmp_path / file, {"w": Piece(torch.zeros(2, 3), (5, 3), 0, start)})
    with pytest.raises(CheckpointError, match=message):
        index_pieces(tmp_path, files)


def test_pieces_are_cut_along_one_dimension(tmp_path):
    write_pieces(tmp_path / "a", {"w": Piece(torch.zeros(1, 2), (2, 2), 0, 0)})
    write_pieces(tmp_path / "b", {"w": Piece(torch.zeros(2, 1), (2, 2), 1, 1)})
    with pytest.raises(CheckpointError, match=r"are cut along \[0, 1\]"):
        index_pieces(tmp_path, ["a", "b"])


def test_pieces_agree_on_the_whole(tmp_path):
    write_pieces(tmp_path / "a", {"w": Piece(torch.zeros(1, 2), (2, 2), 0, 0)})
    write_pieces(tmp_path / "b", {"w": Piece(torch.zeros(1, 2), (3, 2), 0, 1)})
    with pytest.raises(CheckpointError, match=r"b has 'w' as part of \(3, 2\) .* a as part of"):
        index_pieces(tmp_path, ["a", "b"])


@pytest.mark.parametrize(
    ("shape", "whole", "dim", "start"),
    [((2, 3), (4, 4), 0, 0), ((2, 3), (4, 3), 0, 3), ((2,), (2, 2), 0, 0), ((2,), (4,), 0, -1)],
)
def test_a_piece_is_part_of_its_whole(shape, whole, dim, start):
    with pytest.raises(ValueError, match="is no part of"):
        Piece(torch.zeros(shape), whole, dim, start)


def test_a_piece_of_blocks_is_part_of_each():
    for held, whole, start in ((3, 6, 2), (2, 7, 0), (2, 5, 0)):
        with pytest.raises(ValueError, match=r"is no part of .* of each of 2 blocks"):
            Piece(torch.zeros(held, 1), (whole, 1), 0, start, blocks=2)


def test_a_cut_that_does_not_fit(tmp_path):
    write_tensors(tmp_path / "w", {"w": numbered((4, 4))})
    for shard in (Shard(0, (2, 3)), Shard(2, (4,))):
        with pytest.raises(CheckpointError, match=r"'w' of shape \(4, 4\) cannot be cut as S"):
            WeightsFile(tmp_path / "w").read("w", shard, 0)


def test_an_unknown_tensor_suggests_the_nearest(tmp_path):
    write_tensors(tmp_path / "w", {"features.0.weight": numbered((4,))})
    with pytest.raises(CheckpointError, match=r"did you mean 'features.0.weight'"):
        WeightsFile(tmp_path / "w").read("features.1.weight")
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        save(tmp_path, w=(numbered((2,)), Shard(0, (2,)))).shape("b")


def test_weights_of_another_model(tmp_path):
    write_tensors(tmp_path / "w", {"fc.weight": numbered((4, 4)), "fc.bias": numbered((4,))})
    reader = WeightsFile(tmp_path / "w")
    expect(reader, [Weight("fc.weight", (4, 4)), Weight("fc.bias", (4,))], of="w")
    wrong = [Weight("fc.weight", (4, 5)), Weight("fc2.bias", (4,))]
    with pytest.raises(CheckpointError) as caught:
        expect(reader, wrong, of="the file w")
    assert str(caught.value).startswith("the file w is of another model: 'fc.weight' has shape")
    assert "did you mean 'fc.bias'" in str(caught.value)


def test_files_of_whole_tensors_are_no_pieces(tmp_path):
    write_tensors(tmp_path / "w", {"w": numbered((4,))})
    with pytest.raises(CheckpointError, match="holds whole tensors, not pieces"):
        index_pieces(tmp_path, ["w"])


class TestDamage:
    """A set of pieces of which something was lost or changed."""

    @pytest.fixture
    def directory(self, tmp_path):
        save(tmp_path, w=(numbered((6, 4)), Shard(0, (2, 4))))
        return tmp_path

    def refused(self, directory, *parts):
        with pytest.raises(CheckpointError) as caught:
            PieceSet(directory)
        for part in parts:
            assert part in str(caught.value)

    def test_no_index(self, directory):
        (directory / "index.toml").unlink()
        self.refused(directory, "index.toml does not exist")

    def test_a_missing_file(self, directory):
        (directory / "rank1.safetensors").unlink()
        self.refused(directory, "rank1.safetensors does not exist")

    @pytest.mark.parametrize("length", [0, 7, 20, 100])
    def test_a_truncated_file(self, directory, length):
        path = directory / "rank1.safetensors"
        path.write_bytes(path.read_bytes()[:length])
        self.refused(directory, "rank1.safetensors is no whole safetensors file", "truncated")

    def test_one_byte_less(self, directory):
        path = directory / "rank1.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        self.refused(directory, "rank1.safetensors is no whole safetensors file")

    def test_something_else(self, directory):
        (directory / "rank0.safetensors").write_bytes(b"PK\x03\x04 a pickle in a zip" * 20)
        self.refused(directory, "rank0.safetensors is no whole safetensors file")

    def test_another_piece(self, directory):
        write_tensors(directory / "rank0.safetensors", {"w": numbered((3, 4))})
        self.refused(directory, "rank0.safetensors: 'w' has shape (3, 4)", "(2, 4)")

    def test_another_tensor(self, directory):
        write_tensors(directory / "rank0.safetensors", {"v": numbered((2, 4))})
        self.refused(directory, "no tensor 'w'", "rank0.safetensors")

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("length = 4", "length = 3", "'w' cover 5 of 6"),
            ("length = 4", 'length = "4"', "length: Input should be a valid integer (got '4')"),
            ("length = 4", "length = -4", "greater than or equal to 0"),
            ("length = 4", "lenght = 4", "lenght"),
            ("dim = 0", "dim = 7", "cut along [0, 7]"),
            ("float32", "float31", "unknown type 'float31'"),
            ("float32", "int64", "has shape (2, 4) and type torch.float32"),
            ("pieces 1", "pieces 9", "has format 'workbench pieces 9'"),
            ("rank0.safetensors", "../rank0.safetensors", "not a file beside the index"),
            ("[tensors]", "[tensors", "is no TOML"),
        ],
    )
    def test_an_edited_index(self, directory, old, new, message):
        path = directory / "index.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        self.refused(directory, "index.toml" if "shape" not in message else "", message)

    def test_an_index_of_other_bytes(self, directory):
        (directory / "index.toml").write_bytes(b"\xff\xfe\x00")
        self.refused(directory, "is no TOML")


def test_nothing_in_a_file_is_a_pickle(tmp_path):
    save(tmp_path, w=(numbered((6, 4)), Shard(0, (2, 4))))
    raw = (tmp_path / "rank0.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert set(header) == {"__metadata__", "w"}
    assert json.loads(header["__metadata__"]["pieces"]) == {"w": [[6, 4], 0, 0, 2]}
