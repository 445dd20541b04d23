"""What is under a MAC is opened with its key alone."""

import pickle

import pytest
import torch

from workbench.plan.extension import sealed
from workbench.plan.extension.sealed import KEY_BYTES, SealError

ONE, OTHER = bytes(KEY_BYTES), bytes(range(KEY_BYTES))


def test_a_value_comes_back_under_its_own_key_alone():
    packed = sealed.pack({"a": 1}, ONE)
    assert sealed.unpack(packed, ONE) == {"a": 1}
    with pytest.raises(SealError, match="not written under this cluster's key"):
        sealed.unpack(packed, OTHER)
    for place in (0, 31, 32, len(packed) - 1):
        changed = bytearray(packed)
        changed[place] ^= 1
        with pytest.raises(SealError):
            sealed.unpack(bytes(changed), ONE)
    with pytest.raises(SealError):
        sealed.unpack(b"", ONE)


def test_torchs_constants_come_back():
    for one in (torch.float16, torch.strided, torch.channels_last, torch.contiguous_format):
        assert sealed.loads(pickle.dumps(one)) is one


@pytest.mark.parametrize("key", [b"", b"short"])
def test_without_a_key_nothing_is_sealed_or_opened(key):
    for call in (lambda: sealed.pack(1, key), lambda: sealed.unpack(sealed.pack(1, ONE), key)):
        with pytest.raises(ValueError, match="a key has 32 bytes"):
            call()


def test_a_process_that_is_no_engine_opens_nothing(monkeypatch):
    monkeypatch.delenv(sealed.KEY_FILE, raising=False)
    with pytest.raises(SealError, match="only engines open"):
        sealed.own_key()
