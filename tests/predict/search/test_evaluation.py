"""Collections are put off, and go on as they were."""

import gc

import pytest

from workbench.predict.search.evaluation import uncollected


@pytest.fixture(autouse=True)
def as_it_was():
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("was", [True, False])
def test_collections_are_off_inside_and_as_before_afterwards(was):
    (gc.enable if was else gc.disable)()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is was


def test_an_error_inside_leaves_them_as_before():
    gc.enable()
    with pytest.raises(ValueError, match="inside"), uncollected():
        raise ValueError("inside")
    assert gc.isenabled()
