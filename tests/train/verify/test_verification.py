"""What a verification says of the differences that it holds."""

from dataclasses import replace

import pytest

from tests.plan.graphs import mlp
from workbench.train.verify.verification import KINDS, Coverage, Difference, Verification

GRAPH = mlp(4, 3, 2)


def verification(*differences, precision="fp64", **fields):
    return Verification("net", precision, 3, differences, **fields)


OUTPUT = Difference("output", "y", 1, 2e-11)
WEIGHT = Difference("weight", "w", 2, 5e-11)
REPEAT = Difference("repeat", "w", 0, 0.0)


def test_kinds_come_in_their_order_once():
    found = verification(REPEAT, WEIGHT, OUTPUT, replace(OUTPUT, name="z"))
    assert found.kinds == ("output", "weight", "repeat")


def test_of_a_kind_the_worst_is_given():
    worse = replace(OUTPUT, name="z", error=3e-11)
    assert verification(WEIGHT, OUTPUT, worse, replace(OUTPUT, error=0.0)).of("output") is worse


@pytest.mark.parametrize(
    ("precision", "rounding", "tolerance"),
    [
        ("fp64", 0.0, 1e-10),
        ("fp32", 0.0, 1e-4),
        ("fp32", 9e-6, 1e-4),
        ("fp32", 2e-3, 2e-2),
        ("fp32", 0.023, 0.23),
        ("fp32", 0.025, 0.24),
        ("fp32", 5.0, 0.24),
    ],
)
def test_the_tolerance_is_ten_times_the_rounding_within_bounds(precision, rounding, tolerance):
    found = verification(replace(OUTPUT, rounding=rounding), precision=precision)
    assert found.tolerance("output") == pytest.approx(tolerance)


def test_the_largest_rounding_of_a_kind_counts_for_all_of_it():
    several = [replace(OUTPUT, rounding=rounding) for rounding in (1e-3, 5e-3, 0.0)]
    found = verification(*several, replace(WEIGHT, rounding=1e-2), precision="fp32")
    assert found.tolerance("output") == pytest.approx(0.05)
    assert found.tolerance("weight") == pytest.approx(0.1)
    assert found.tolerance("buffer") == 1e-4


@pytest.mark.parametrize("rounding", [0.0, 3e-6])
def test_a_repeat_may_differ_by_its_rounding_only(rounding):
    within = Difference("repeat", "w", 0, rounding, rounding)
    assert verification(OUTPUT, within).repeatable is True
    assert verification(OUTPUT, within).exact
    beyond = replace(within, error=rounding + 1e-12)
    assert verification(OUTPUT, beyond).repeatable is False
    assert not verification(OUTPUT, beyond).exact


def test_what_ran_once_is_not_known_to_be_repeatable():
    assert verification(OUTPUT).repeatable is None


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_one_kind_beyond_its_tolerance_is_not_exact(kind):
    others = [Difference(each, "x", 0, 1e-10) for each in KINDS[:-1] if each != kind]
    assert verification(*others, Difference(kind, "x", 0, 1e-10)).exact
    assert not verification(*others, Difference(kind, "x", 0, 1.01e-10)).exact


def test_a_run_that_differs_is_the_worst_and_one_that_does_not_the_least():
    assert verification(WEIGHT, replace(REPEAT, error=1e-300)).worst.what == "repeat"
    assert verification(REPEAT, replace(OUTPUT, error=1e-300)).worst.what == "output"


def test_a_verification_names_its_worst_tensor():
    said = repr(verification(OUTPUT, WEIGHT, REPEAT))
    assert said == (
        "<Verification net fp64: exact, 2 tensors, worst weight of 'w' on rank 2: 5.0e-11 "
        "(tolerance 1e-10); two runs are alike>"
    )
    wrong = repr(verification(OUTPUT, replace(REPEAT, error=1.0)))
    assert "NOT EXACT, 1 tensors, worst repeat" in wrong
    assert wrong.endswith("; TWO RUNS DIFFER>")


def test_what_was_covered_is_said_where_it_is_known():
    coverage = Coverage(operations=4, seen=3, parameters=6, gradients=5)
    said = repr(verification(OUTPUT, coverage=coverage))
    assert said.endswith("; covered 3 of 4 operations, gradients of 5 of 6 parameters>")
    assert "covered" not in repr(verification(OUTPUT))
    assert "runs" not in repr(verification(OUTPUT))


def test_a_frame_has_a_line_for_each_tensor():
    frame = verification(replace(OUTPUT, rounding=1e-3), WEIGHT, precision="fp32").to_frame()
    assert list(frame.columns) == ["what", "name", "rank", "error", "rounding", "tolerance"]
    assert frame.values.tolist() == [
        ["output", "y", 1, 2e-11, 1e-3, 1e-2],
        ["weight", "w", 2, 5e-11, 0.0, 1e-4],
    ]


def test_it_is_written_as_a_table(tmp_path):
    verification(OUTPUT, WEIGHT).save(tmp_path / "found.csv")
    assert (tmp_path / "found.csv").read_text().splitlines()[1].startswith("output,y,1,2e-11")
    with pytest.raises(ValueError, match=r"\.txt"):
        verification(OUTPUT).save(tmp_path / "found.txt")


def test_its_rich_form_counts_tensors_and_names_the_worst():
    html = verification(OUTPUT, replace(OUTPUT, name="z", rank=7), WEIGHT)._repr_html_()
    cells = [part.split("<")[0] for part in html.replace("<th", "<td").split("<td")[1:]]
    found = [cell.split(">", 1)[1] for cell in cells]
    assert found[-12:] == [
        *("output", "2", "2.0e-11", "1e-10", "y", "1"),
        *("weight", "1", "5.0e-11", "1e-10", "w", "2"),
    ]
    assert "fp64, 3 steps: <b>exact ✓" in html
    assert "not exact" in verification(replace(OUTPUT, error=1.0))._repr_html_()


def test_its_rich_form_has_the_notes_as_text():
    html = verification(OUTPUT, REPEAT, notes=("a < b",))._repr_html_()
    assert "<br>two runs are alike<br>a &lt; b" in html
    assert "rounding alone" not in html


def test_rounding_that_widens_one_kind_is_told():
    widened = verification(WEIGHT, replace(OUTPUT, rounding=1e-2), precision="fp32")
    assert "rounding alone" in widened._repr_html_()


def difference(what, name):
    return Difference(what, name, 0, 0.0)


def everything(graph):
    outputs = [difference("output", name) for name in graph.outputs]
    return [*outputs, *(difference("gradient", name) for name in graph.trainable)]


def test_a_whole_model_is_covered():
    operations, parameters = len(GRAPH.layers), len(GRAPH.trainable)
    found = Coverage.of(GRAPH, everything(GRAPH))
    assert found == Coverage(operations, operations, parameters, parameters)


def test_without_its_output_no_operation_is_seen():
    compared = everything(GRAPH)[len(GRAPH.outputs) :]
    found = Coverage.of(GRAPH, compared)
    assert (found.seen, found.gradients) == (0, len(GRAPH.trainable))
    assert found.missing == tuple(layer.name for layer in GRAPH.layers if layer.rows > 0)


def test_a_parameter_without_gradient_is_missing():
    *compared, last = everything(GRAPH)
    found = Coverage.of(GRAPH, [*compared, difference("weight", last.name)])
    assert found.gradients == len(GRAPH.trainable) - 1
    assert found.missing == (last.name,)


def test_what_does_not_act_on_the_batch_is_no_operation():
    first, *rest = GRAPH.layers
    graph = replace(GRAPH, layers=(replace(first, rows=0), *rest))
    found = Coverage.of(graph, everything(GRAPH))
    assert found.operations == found.seen == len(rest)
