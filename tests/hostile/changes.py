"""What the author of a hostile file does to it."""

import json
import pickle
import random
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any

import tomlkit

MARKUP = ("<xss onload=x>", "\"'><xss>", "</td><xss>", "&lt;xss", "javascript:xss")
NAMES = (
    *("planted_live:Thing", "planted_file:Thing", "planted_file:thing.deep", "os:system"),
    *("planted_algorithms", "planted_codecs", "planted_data", "planted_schemes"),
    *("planted_strategies", "builtins:eval", "torch:load", "subprocess:Popen", "pickle:loads"),
)
LEAVES: tuple[Any, ...] = (
    *MARKUP,
    *NAMES,
    *("", "../../etc/passwd", "/dev/zero", "/etc/passwd", "\x00", "\u202e", "a" * 10_000, "nan"),
    *(0, -1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 0.0, -0.0, 1e308, -1e308, 5e-324),
    *(float("inf"), float("nan"), True, False, date(2000, 1, 1), [], {}, [[]], [0], [0] * 100),
    *({"<xss>": 0}, {"name": "planted_live:Thing"}, {"own": "planted_file:Thing"}),
    *({"name": "planted_file:Thing", "file": "/dev/zero"}, {"kind": "own", "given": NAMES[0]}),
)
KEYS = (*MARKUP, "plan", "kind", "self", "__class__", "__init__", "sync", "loss", "data", "scheme")


def changed(path: Path, draw: random.Random) -> None:
    """Changes one file in place, as what it is or as bytes."""
    content = path.read_bytes()
    try:
        if path.suffix == ".toml" and draw.random() < 0.8:
            made = tomlkit.dumps(leaf_changed(tomllib.loads(content.decode()), draw)).encode()
        elif path.suffix in (".json", ".jsonl", ".cell") and draw.random() < 0.8:
            lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
            lines[-1] = json.dumps(leaf_changed(json.loads(lines[-1]), draw), default=str)
            made = "\n".join(lines).encode()
        elif (path.name == ".metadata" or path.suffix == ".distcp") and draw.random() < 0.8:
            made = pickle_changed(content, draw)
        else:
            made = bytes_changed(content, draw)
    except (TypeError, ValueError, RecursionError):  # it cannot be written so
        made = bytes_changed(content, draw)
    path.write_bytes(made)


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each value, of tables and lists as of what is in them."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*place, key))


def leaf_changed(content: Any, draw: random.Random) -> Any:
    """The same with one to three other values, keys, or tables deep in each other."""
    for _ in range(draw.randint(1, 3)):
        places = list(leaves(content))
        if not places:
            return draw.choice(LEAVES)
        *around, last = draw.choice(places)
        held = content
        for key in around:
            held = held[key]
        what = draw.randrange(8)
        if what == 0 and isinstance(held, dict):
            held[draw.choice(KEYS)] = deepcopy(draw.choice(LEAVES))
        elif what == 1:
            deep: Any = draw.choice(NAMES)
            for _ in range(draw.choice((3, 100, 2000))):
                deep = {"a": deep} if draw.random() < 0.5 else [deep]
            held[last] = deep
        elif what == 2 and isinstance(held, dict):
            del held[last]
        else:
            held[last] = deepcopy(draw.choice(LEAVES))  # else a list may come to lie in itself
    return content


BUILD = b"N}X\x01\x00\x00\x00xK\x01s\x86b"  # sets x in what is on the stack
CALLS = (
    b"cposix\nsystem\nX\x0e\x00\x00\x00touch executed\x85R",
    b"cbuiltins\nexec\nX\x12\x00\x00\x00import planted_file\x85R",
    b"cplanted_live\nThing\n)R",
    b"cplanted_file\nThing\n)R",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n" + BUILD,
    b"ctorch.serialization\n_get_layout\n" + BUILD,
    b"cpathlib\nPath\n" + BUILD,
    b"\x82\x01",
    b"(iposix\nsystem\n",
    b"Pplanted_file\n",
    b"r\xff\xff\xff\xff",
)
SWAPS = (
    (b"torch.distributed.checkpoint.metadata", b"posix"),
    (b"MetadataIndex", b"system"),
    (b"_StorageInfo", b"popen"),
    (b"TensorStorageMetadata", b"BytesStorageMetadata"),
    (b"BytesStorageMetadata", b"TensorStorageMetadata"),
    (b"__0_0.distcp", b"../../../etc/passwd"),
    (b"float32", b"load"),
    (b"torch._utils", b"planted_live"),
    (b"_rebuild_tensor_v2", b"_rebuild_parameter"),
    (b"collections", b"builtins"),
    (b"OrderedDict", b"eval"),
    (b"storage", b"module"),
    (b"little", b"bigger"),
)


def pickle_changed(content: bytes, draw: random.Random) -> bytes:
    """A pickle, or what holds some, that names, calls or sets something else."""
    what = draw.randrange(4)
    if what == 0:
        return (
            pickle.dumps(draw.choice(LEAVES)) if draw.random() < 0.2 else draw.choice(CALLS) + b"."
        )
    if what == 1:
        old, new = draw.choice(SWAPS)
        sized = bytes([140, len(old)]) + old, bytes([140, len(new)]) + new  # SHORT_BINUNICODE
        return content.replace(*sized) if sized[0] in content else content.replace(old, new)
    place = draw.randrange(len(content))
    if what == 2:
        return content[:place] + draw.choice(CALLS) + content[place:]
    return bytes_changed(content, draw)


def bytes_changed(content: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, cut off, doubled or others."""
    made = bytearray(content or b"\0")
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(made) or 1)
        what = draw.randrange(6)
        if what == 0:
            made[place : place + 1] = bytes([draw.randrange(256)])
        elif what == 1:
            made = made[:place]
        elif what == 2:
            made[place:place] = made[place : place + draw.randrange(1, 64)]
        elif what == 3:
            made[place : place + 8] = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(
                8, "little"
            )
        elif what == 4:
            made[place:place] = draw.choice(NAMES).encode()
        else:
            made[place : place + 4] = draw.randbytes(4)
    return bytes(made)
