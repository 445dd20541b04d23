"""Folders of `torch.distributed.checkpoint`: read as torch wrote them, or refused."""

import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from workbench.model import CheckpointError
from workbench.model.weights.distributed import read
from workbench.plan.placement.placement import RankConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:torch.distributed", "ignore:ComplexHalf support is experimental"
)
ROOT = Path(__file__).parents[3]
TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.complex32, torch.bool, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
BITS = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 0]).view(3, 4)


def everything(_name: str) -> bool:
    return True


def same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    bits = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (found, expected)]
    assert torch.equal(*bits)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_type_of_elements_is_read(tmp_path, dtype):
    values = BITS.to(dtype)
    state = {
        "whole": values,
        "turned": values.t(),
        "piece": values[1:, ::2],
        "number": values[0, 1],
    }
    state |= {"none": values[:0], "repeated": values[0, :1].expand(5)}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    found = read(tmp_path / "in", everything)
    assert set(found) == set(state)
    for name, tensor in state.items():
        same(found[name], tensor)


def test_nested_parameters_and_channels_last(tmp_path):
    weight = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    state = {"model": {"w": weight}, "optimizer": {"state": [{"m": torch.ones(3)}, 5], "lr": 0.1}}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    found = read(tmp_path / "in", everything)
    assert set(found) == {"model.w", "optimizer.state.0.m"}
    same(found["model.w"], weight)


def saved(config: RankConfig, folder: str) -> None:
    """One of two ranks that save what they share: in pieces of unlike sizes, or whole."""
    store, rank = dist.FileStore(f"{folder}/store", 2), config.rank
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    odd, wide = torch.arange(15.0).view(5, 3), torch.arange(28.0).view(4, 7)
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    state = {
        "rows": distribute_tensor(odd, mesh, [Shard(0)]),
        "columns": distribute_tensor(wide, mesh, [Shard(1)]),
        "copies": distribute_tensor(wide, mesh, [Replicate()]),
        "sharded": sharded_tensor.full(spec, (3, 2), 7.0),
        "step": rank,
    }
    dcp.save(state, checkpoint_id=f"{folder}/in")
    dist.destroy_process_group()


@pytest.mark.slow
def test_pieces_of_two_ranks_come_together(tmp_path, on_ranks):
    on_ranks.seated(2, saved, str(tmp_path))
    assert len(list((tmp_path / "in").glob("*.distcp"))) == 2
    found = read(tmp_path / "in", everything)
    same(found["rows"], torch.arange(15.0).view(5, 3))
    same(found["columns"], torch.arange(28.0).view(4, 7))
    same(found["copies"], found["columns"])
    same(found["sharded"], torch.full((3, 2), 7.0))


@pytest.fixture
def folder(tmp_path):
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "n": 5}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    return tmp_path / "in"


def told(folder: Path) -> torchs.Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def refused(folder: Path, match: str, metadata: torchs.Metadata | None = None) -> None:
    if metadata is not None:
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"{folder}.* cannot be read: .*{match}"):
        read(folder, everything)


def place_of(metadata: torchs.Metadata, name: str):
    (place,) = (p for index, p in metadata.storage_data.items() if index.fqn == name)
    return place


BUILD = {
    "a class": "ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00xK\x01s\x86b.",
    "a function": "ctorch.serialization\n_get_layout\n}X\x01\x00\x00\x00xK\x01sb.",
}


@pytest.mark.parametrize("what", BUILD)
def test_metadata_set_nothing_in_what_torch_has(folder, what):
    (folder / ".metadata").write_bytes(BUILD[what].encode("latin1"))
    refused(folder, "a Name in the place of a Record")
    assert not hasattr(torchs.Metadata, "x")
    assert not hasattr(torch.serialization._get_layout, "x")


def test_metadata_are_read_once(folder):
    """So that what is loaded is what was looked at."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from workbench.model.weights.distributed import read\n"
        "opened = []\n"
        "sys.addaudithook(lambda e, a: e == 'open' and opened.append(str(a[0])))\n"
        f"read(Path({str(folder)!r}), lambda name: True)\n"
        "print(sum(each.endswith('.metadata') for each in opened))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_what_is_no_tensor_is_not_opened(folder):
    metadata = told(folder)
    for index, place in metadata.storage_data.items():
        if index.fqn == "n":
            place.relative_path, place.length = "nowhere", 10**12
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert set(read(folder, everything)) == {"a", "b"}


class Calls:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_chunk_that_would_call_something(folder, monkeypatch):
    monkeypatch.chdir(folder)
    metadata, content = told(folder), io.BytesIO()
    torch.save(Calls(), content)
    (folder / "other").write_bytes(content.getvalue())
    place = place_of(metadata, "a")
    place.relative_path, place.offset, place.length = "other", 0, len(content.getvalue())
    refused(folder, r"it holds what \w+\.mkdir makes, and no plain tensor", metadata)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("path", ["../in/__0_0.distcp", "/etc/passwd", "..", ".", ""])
def test_files_beside_the_metadata_alone(folder, path):
    metadata = told(folder)
    place_of(metadata, "a").relative_path = path
    refused(folder, "no file beside it|no file", metadata)


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("value", [-1, 2**62, 2**70, True, "0", 3, None])
def test_places_that_cannot_be(folder, field, value):
    metadata = told(folder)
    setattr(place_of(metadata, "a"), field, value)
    refused(folder, "", metadata)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((2**40, 2**20), "do not cover it"),
        ((2, 4), "do not cover it"),
        ((2,), ""),
        ((1, 6), "reaches beyond it"),
        ((2, -3), ""),
        ((0, 2**62, 2**62), ""),
        ((1,) * 65, "65 dimensions"),
    ],
)
def test_sizes_that_cannot_be(folder, size, said):
    metadata = told(folder)
    metadata.state_dict_metadata["a"].size = Sized(size)
    refused(folder, said, metadata)


class Sized(tuple):
    """Pickled as a `torch.Size` is, whatever is in it."""

    def __reduce__(self):
        return torch.Size, (tuple(self),)


def test_tensors_larger_than_their_files(folder):
    """A chunk whose strides are 0 has few bytes, and any size."""
    metadata, content = told(folder), io.BytesIO()
    size, offsets = torch.Size([2**40]), torch.Size([0])
    torch.save(torch.zeros(1).expand(2**40), content)
    (folder / "other").write_bytes(content.getvalue())
    entry = metadata.state_dict_metadata["b"]
    entry.size, entry.chunks = size, [torchs.ChunkStorageMetadata(offsets, size)]
    place = place_of(metadata, "b")
    place.relative_path, place.offset, place.length = "other", 0, len(content.getvalue())
    refused(folder, "its tensors have 4,398,046,511,128 bytes, and its files", metadata)


def written(folder: Path, name: str, value, change=None, **save) -> None:
    """Puts what `torch.save` makes of a value into the place of a tensor's only chunk."""
    metadata, content = told(folder), io.BytesIO()
    torch.save(value, content, **save)
    (folder / "other").write_bytes(content.getvalue() if change is None else change(content))
    place = place_of(metadata, name)
    place.relative_path, place.offset, place.length = "other", 0, (folder / "other").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(5), r"it holds \(torch\.float32, \(5,\)\)"),
        (torch.ones(4, dtype=torch.float64), r"it holds \(torch\.float64"),
        (torch.ones(4, dtype=torch.complex64).conj(), "it holds"),
        (torch.ones(4).to_sparse(), r"what torch\._utils\._rebuild_sparse_tensor makes"),
        ({"a": torch.ones(4)}, "a dict in the place of a Record"),
    ],
)
def test_a_chunk_that_is_another(folder, value, said):
    written(folder, "b", value)
    refused(folder, said)


def again(content: io.BytesIO, compression: int, **changes: bytes) -> bytes:
    """A zip with the same files, some of which are changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(content) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            key = name.partition("/")[2]
            new.writestr(name, changes.get(key, old.read(name)))
    return out.getvalue()


def test_numbers_of_another_byte_order(folder):
    def swapped(content: io.BytesIO) -> bytes:
        values = torch.arange(4.0).numpy().byteswap().tobytes()
        return again(content, zipfile.ZIP_STORED, **{"byteorder": b"big", "data/0": values})

    written(folder, "b", torch.arange(4.0), swapped)
    assert read(folder, everything)["b"].tolist() == [0, 1, 2, 3]


def test_compressed_and_old_files_are_refused(folder):
    written(folder, "b", torch.ones(4), lambda content: again(content, zipfile.ZIP_DEFLATED))
    refused(folder, "data.pkl is compressed")
    written(folder, "b", torch.ones(4), _use_new_zipfile_serialization=False)
    refused(folder, "not a zip file")
    metadata = told(folder)
    place_of(metadata, "b").transform_descriptors = ["zstd"]
    refused(folder, "its tensors are compressed", metadata)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x00K\x04\x85", b"K\x01K\x04\x85"),  # it begins one later
        (b"q\x06K\x01\x85", b"q\x06K\x02\x85"),  # and with a stride of two
        (b"q\x06K\x01\x85", b"q\x06M\xff\xff\x85"),
    ],
)
def test_a_tensor_beyond_its_bytes(folder, old, new):
    def moved(content: io.BytesIO) -> bytes:
        with zipfile.ZipFile(content) as parts:
            pickled = parts.read("archive/data.pkl")
        assert old in pickled
        return again(content, zipfile.ZIP_STORED, **{"data.pkl": pickled.replace(old, new)})

    written(folder, "b", torch.ones(4), moved)
    refused(folder, "reaches beyond its bytes")


def test_a_list_of_a_million_files_is_not_read(folder):
    """It would take hundreds of bytes of memory for each of its own."""

    def many(content: io.BytesIO) -> bytes:
        whole, out = content.getvalue(), io.BytesIO()
        with zipfile.ZipFile(out, "w") as parts:
            for number in range(3000):
                parts.writestr(f"archive/{number}", b"")
        return whole + out.getvalue()

    written(folder, "b", torch.ones(4), many)
    refused(folder, "")


def test_other_elements_are_refused(folder):
    metadata = told(folder)
    metadata.state_dict_metadata["a"].properties.dtype = torch.qint8
    refused(folder, "", metadata)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pipe_is_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, "no file|its files")
