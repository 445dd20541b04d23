"""Names that are nearly right."""

import pytest

from workbench.plan.io.errors import alike, perhaps, unknown

NAMES = ("sgd", "adamw", "top_k", "local_sgd")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *(("AdamW", "adamw"), ("SGD", "sgd"), ("topk", "top_k"), ("Top-K", "top_k")),
        *(("LocalSGD", "local_sgd"), ("adam", None), ("", None)),
    ],
)
def test_a_name_is_meant_in_any_case(given, name):
    assert alike(given, NAMES) == name


@pytest.mark.parametrize(
    ("given", "said"),
    [("ADAM", "; did you mean 'adamw'?"), ("LocalSGDs", "; did you mean 'local_sgd'?"), ("x", "")],
)
def test_what_is_near_is_offered(given, said):
    assert perhaps(given, NAMES) == said


def test_what_is_unknown_is_near_in_any_case():
    assert unknown("scheme", "SHARD_UOT", ["shard_out", "other"]) == (
        "no scheme 'SHARD_UOT'; did you mean 'shard_out'?"
    )
