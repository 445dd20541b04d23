"""Codecs as values: names, fields that belong to them, exact lengths, TOML."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.own_sums import Sign
from tests.plan.graphs import mlp
from workbench.plan import SGD, Codec, Experiment, ExperimentError, Plan, Synchronous
from workbench.plan.collective.codec import as_codec

PLAN = Plan.data_parallel(mlp(4, 4), 2)


@pytest.mark.parametrize(
    ("codec", "length", "nbytes"),
    [
        (Codec(name="fp16"), 7, 14),
        (Codec(name="bf16"), 7, 14),
        (Codec(name="bf16_truncated"), 0, 0),
        (Codec(name="int8"), 1024, 1024 + 4),
        (Codec(name="int8"), 1025, 1025 + 8),
        (Codec(name="int8", chunk=2), 5, 5 + 12),
        (Codec(name="int4"), 5, 3 + 4),
        (Codec(name="int4", chunk=4), 8, 4 + 8),
        (Codec(name="top_k", fraction=0.25), 8, 16),
        (Codec(name="top_k"), 3, 8),
        (Codec(name="top_k"), 0, 0),
    ],
)
def test_lengths(codec, length, nbytes):
    assert codec.encoded_bytes(length) == nbytes


def test_int8_quarters_the_bytes():
    assert 4 * 10**6 / Codec(name="int8").encoded_bytes(10**6) == pytest.approx(4, rel=0.004)


CODECS = st.one_of(
    st.sampled_from(["fp16", "bf16", "bf16_truncated", "int8", "int4", "top_k"]),
    st.builds(
        Codec,
        name=st.sampled_from(["int8", "int4"]),
        chunk=st.sampled_from([2, 1024, 65536]),
        error_feedback=st.booleans(),
    ),
    st.builds(
        Codec,
        name=st.just("top_k"),
        fraction=st.sampled_from([0.001, 0.5, 1.0]),
        error_feedback=st.booleans(),
    ),
    st.builds(Codec, name=st.sampled_from(["fp16", "bf16"]), error_feedback=st.booleans()),
)


@given(codec=CODECS)
def test_an_experiment_with_a_codec_goes_through_toml(codec):
    experiment = Experiment(
        plan=PLAN, data="digits", optimizer=SGD(lr=0.1), steps=1, sync=Synchronous(codec=codec)
    )
    assert experiment.sync.codec == as_codec(codec)
    assert Experiment.from_toml(experiment.to_toml()) == experiment


def test_people_write_a_name_where_it_says_all():
    plain = Synchronous(codec=Codec(name="int8", chunk=1024))
    assert plain.model_dump()["codec"] == "int8"
    kept = Synchronous(codec=Codec(name="int8", error_feedback=True))
    assert kept.model_dump()["codec"] == {"name": "int8", "error_feedback": True}


def test_what_is_inexact_is_said():
    experiment = Experiment(
        plan=PLAN, data="digits", optimizer=SGD(lr=0.1), steps=1, sync=Synchronous(codec="int8")
    )
    assert "gradients travel as int8 with a scale for every 1024 values" in repr(experiment)
    assert Synchronous().inexact == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(codec="int9"), "no codec 'int9'; there are 'fp16', 'bf16', 'bf16_truncated', 'int8'"),
        (dict(codec={"name": "fp16", "chunk": 64}), "chunk is for 'int8' and 'int4', 'fp16' has"),
        (dict(codec={"name": "int8", "fraction": 0.5}), "fraction is for 'top_k', 'int8' has none"),
        (dict(codec={"name": "int8", "chunk": 3}), "chunk: Input should be a multiple of 2"),
        (dict(codec={"name": "top_k", "fraction": 0.0}), "fraction: Input should be greater than"),
        (dict(codec=3), "codec: "),
        (dict(codec="int8", algorithm="backend"), "algorithm 'backend' cannot take codec 'int8'"),
        (
            dict(codec="bf16", algorithm="halving_doubling"),
            "algorithm 'halving_doubling' cannot take codec 'bf16'; 'auto', 'direct', 'ring', 'hie",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields, said):
    with pytest.raises(ExperimentError) as caught:
        Synchronous(**fields)
    assert said in str(caught.value)


def test_nothing_is_encoded_of_no_values_whatever_a_codec_says():
    codec = as_codec(Sign())
    assert [codec.encoded_bytes(length) for length in (0, 1, 2)] == [0, 5, 6]
