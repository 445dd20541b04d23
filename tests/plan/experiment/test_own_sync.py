"""Algorithms and codecs of one's own where the names of built-in ones are."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from tests.own_sums import Half, Sign, Star, Tree
from tests.plan.graphs import mlp
from workbench.plan import SGD, Codec, Experiment, ExperimentError, Pipelined, Plan, Synchronous
from workbench.plan.collective.algorithm import chosen, dry_run
from workbench.plan.collective.codec import OwnCodec, as_codec
from workbench.plan.experiment.sync import check_own
from workbench.plan.extension import extension as extensions
from workbench.plan.extension.extension import name_of
from workbench.plan.extension.user_object import Own, OwnObjectError, mapped

PLAN = Plan.data_parallel(mlp(4, 4), 2)


def experiment(sync):
    return Experiment(plan=PLAN, data="digits", optimizer=SGD(lr=0.1), steps=1, sync=sync)


@pytest.fixture
def offered(monkeypatch):
    """An installed package offers a tree and a codec."""

    def entry_points(group):
        places = {"workbench.algorithms": ("tree", "Tree"), "workbench.codecs": ("sign", "Sign")}
        if group not in places:
            return EntryPoints([])
        name, attribute = places[group]
        return EntryPoints([EntryPoint(name, f"tests.own_sums:{attribute}", group)])

    monkeypatch.setattr(extensions, "entry_points", entry_points)


def test_an_installed_one_is_found_in_any_case_and_offered(offered):
    assert Synchronous(algorithm="Tree").algorithm == Synchronous(algorithm="tree").algorithm
    assert as_codec("SIGN") == as_codec("sign")
    with pytest.raises(ExperimentError, match=r"called 'trees'; there are .*; did you mean 'tree"):
        Synchronous(algorithm="trees")


def test_given_in_any_way_it_is_the_same(offered):
    tree = Tree()
    for given in (tree, Tree, "tests.own_sums:Tree", "tree"):
        sync = Synchronous(algorithm=given)
        assert name_of(sync.algorithm) == "Tree"
        assert dry_run(sync.algorithm, 100, 4, 4) == tree.dry(100, 4, 4)
        assert chosen(sync.algorithm, (4,), "gloo", 1, beside=True) is sync.algorithm
    for given in (Sign(), Sign, "tests.own_sums:Sign", "sign"):
        for sync in (Synchronous(codec=given), Pipelined(codec=given)):
            assert (sync.codec.name, sync.codec.error_feedback) == ("Sign", True)
            assert [sync.codec.encoded_bytes(n) for n in (0, 1, 10)] == [0, 5, 14]
    assert Synchronous(codec=Half()).codec.name == "half"
    assert Synchronous(codec=OwnCodec(own=Sign(), error_feedback=False)).inexact.endswith("signs")
    assert Synchronous(codec=Sign()).inexact == "gradients travel as signs, with error feedback"


def test_built_in_names_come_first(offered):
    assert Synchronous(algorithm="ring", codec="int8").codec == Codec(name="int8")
    with pytest.raises(ExperimentError, match=r"'rung'; there are 'auto', .*, 'tree'"):
        Synchronous(algorithm="rung")
    with pytest.raises(ExperimentError, match=r"no codec 'int3'; there are 'fp16', .*, 'sign'"):
        Synchronous(codec="int3")


@pytest.mark.parametrize("sync", [Synchronous, Pipelined])
def test_text_says_where_to_import_it_from(sync):
    given = sync(algorithm="tests.own_sums:Star", codec="tests.own_sums:Sign")
    text = experiment(given).to_toml()
    assert 'algorithm = {name = "tests.own_sums:Star", file = ""}' in text
    again = Experiment.from_toml(text)
    assert again.sync == given
    assert again.to_toml() == text
    found = []
    mapped(again, lambda own, place: found.append((own.name, place)) or own)
    assert found == [
        ("tests.own_sums:Star", "sync.algorithm"),
        ("tests.own_sums:Sign", "sync.codec.own"),
    ]


def test_the_text_of_an_object_is_refused_when_it_is_needed():
    again = Experiment.from_toml(experiment(Synchronous(algorithm=Star(), codec=Sign())).to_toml())
    assert again.sync.codec.error_feedback  # needs no object
    for use in (
        lambda: dry_run(again.sync.algorithm, 10, 4, 2),
        lambda: again.sync.codec.encoded_bytes(10),
        lambda: check_own(again.sync),
    ):
        with pytest.raises(OwnObjectError, match="was an object of the process that made the"):
            use()


class Floating(Sign):
    def encoded_bytes(self, length):
        return length / 8


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(algorithm=Tree(), codec="int8"), "algorithm 'Tree' cannot take codec 'int8': it has"),
        (dict(algorithm=Tree(), codec=Sign()), "algorithm 'Tree' cannot take codec 'Sign'"),
        (dict(algorithm="backend", codec=Sign()), "algorithm 'backend' cannot take codec 'Sign'"),
        (dict(algorithm=Sign()), "Sign is none of the algorithms: it does not extend their base"),
        (dict(codec=Star()), "Star is none of the codecs: it does not extend their base class"),
        (dict(codec="tests.own_sums:Star"), "tests.own_sums:Star is none of the codecs"),
        (dict(codec="tests.own_sums:No"), "'tests.own_sums:No' cannot be loaded in this process"),
        (dict(codec={"own": Sign(), "chunk": 3}), "chunk: there is no such field"),
    ],
)
def test_what_cannot_be_is_refused(fields, said):
    with pytest.raises(ExperimentError) as caught:
        Synchronous(**fields)
    assert said in str(caught.value)


def test_what_is_imported_is_refused_before_it_is_submitted():
    sync = Synchronous(algorithm="tests.own_sums:Tree", codec="int8")  # nothing is imported yet
    with pytest.raises(ValueError, match="algorithm 'Tree' cannot take codec 'int8'"):
        check_own(sync)
    with pytest.raises(OwnObjectError, match=r"tests.own_sums:Sign is none of the algorithms"):
        check_own(Synchronous(algorithm="tests.own_sums:Sign"))
    check_own(Synchronous(algorithm="tests.own_sums:Star", codec="int8"))


def test_bytes_are_whole_numbers():
    with pytest.raises(OwnObjectError, match=r"encoded_bytes\(10\) must be a whole number >= 0"):
        as_codec(Floating()).encoded_bytes(10)


def test_another_object_is_another_algorithm():
    """Also of the same class: it may have other options."""

    class Chunked(Star):
        def __init__(self, chunks):
            self.chunks = chunks

        def rounds(self, flat, members, me):
            for part in flat.tensor_split(self.chunks):
                yield from super().rounds(part, members, me)

    one, two = (Synchronous(algorithm=Chunked(chunks)).algorithm for chunks in (1, 2))
    assert one != two
    assert [dry_run(own, 10, 4, 2).messages for own in (one, two)] == [(1, 1), (2, 2)]
    assert isinstance(one, Own)
