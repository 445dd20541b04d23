"""Rows of deep models: a partition of the layers, with equal blocks in stacks."""

import pytest

from tests.plan import graphs
from tests.plan.graphs import Builder
from tests.widgets.editor.kit import residual
from workbench.widgets.editor.rows import folded


def leaves(nodes):
    return [i for node in nodes for i in (leaves(node.children) if node.children else node.layers)]


@pytest.mark.parametrize("graph", [graphs.vgg(), residual(3), residual(12)], ids=repr)
def test_every_layer_is_a_leaf_once(graph):
    rows = folded(graph)
    assert sorted(leaves(rows)) == list(range(len(graph.layers)))

    def check(node):
        for child in node.children:
            assert set(child.layers) <= set(node.layers)
            check(child)

    for row in rows:
        check(row)


def test_a_small_model_is_not_folded():
    assert {row.kind for row in folded(graphs.vgg())} == {"layer"}


def test_equal_blocks_are_one_row_which_unfolds_to_the_layers_of_one():
    graph = residual(12)
    rows = folded(graph)
    assert [(r.kind, r.label, r.count) for r in rows] == [
        ("layer", "stem", 1),
        ("layer", "relu", 1),
        ("stack", "stage.0 … 11", 12),
        ("layer", "pool", 1),
        ("layer", "flatten", 1),
        ("layer", "head", 1),
    ]
    stack = rows[2]
    assert [child.label for child in stack.children] == [
        "conv1", "bn1", "relu", "conv2", "bn2", "add_0",
    ]  # fmt: skip
    conv1 = stack.children[0]
    assert [graph.layers[i].name for i in conv1.layers] == [f"stage.{i}.conv1" for i in range(12)]
    assert [child.label for child in conv1.children[:2]] == ["stage.0.conv1", "stage.1.conv1"]


def test_a_block_that_differs_parts_a_stack():
    builder = Builder((8, 4, 4))
    for block in range(15):
        builder.conv(f"blocks.{block}.conv", 16 if block >= 7 else 8)
        builder.norm(f"blocks.{block}.bn").same(f"blocks.{block}.relu", "elementwise")
    rows = folded(builder.graph())
    assert [(row.kind, row.label) for row in rows] == [
        ("stack", "blocks.0 … 6"),
        ("block", "blocks.7"),
        ("stack", "blocks.8 … 14"),
    ]


def test_names_without_numbers_are_rows_of_their_own():
    builder = Builder((8,))
    for index in range(50):
        builder.linear("x" * (index + 1), 8)
    assert {row.kind for row in folded(builder.graph())} == {"layer"}
