"""Shapes: published ones as published, files refused where they are no trees, budgets kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.config import SpeculationConfig
from foretell.drafters import check
from foretell.spec.drafter import Drafter
from foretell.spec.options import read_options
from foretell.spec.tree_shape import (
    PUBLISHED,
    DynamicShape,
    FixedShape,
    TreeOptions,
    TreePath,
    chain,
    read_shape,
)


def closed(paths: list[TreePath]) -> bool:
    """Every node's parent and likelier siblings are there too."""
    known = {(), *paths}
    return all(p[:-1] in known and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in known) for p in paths)


@pytest.mark.parametrize(
    ("name", "count", "by_depth"),
    [("medusa", 63, [10, 28, 23, 2]), ("eagle", 25, [4, 8, 8, 3, 2])],
)
def test_published_shapes(name: str, count: int, by_depth: list[int]):
    shape = read_shape(name)
    assert shape.num_nodes == count
    lengths = [len(path) for path in shape.paths]
    assert [lengths.count(d) for d in range(1, max(lengths) + 1)] == by_depth
    assert closed(shape.paths)


@pytest.mark.parametrize("shape", [*map(read_shape, PUBLISHED), chain(9)])
def test_any_budget_leaves_a_tree(shape: FixedShape):
    for budget in range(shape.num_nodes + 3):
        part = shape.paths[:budget]
        assert closed(part)
        assert len(part) == min(budget, shape.num_nodes)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 63))
def test_the_fixed_form_of_a_dynamic_shape(depth: int, topk: int, nodes: int):
    shape = DynamicShape(depth, topk, nodes)
    paths = shape.fixed().paths
    assert closed(paths)
    assert max(map(len, paths)) <= depth
    assert max(map(max, paths)) < topk
    most = sum(topk**d for d in range(1, depth + 1))
    assert len(paths) == min(nodes, most)
    assert paths == shape.fixed().paths, "it depends on nothing but the options"


def test_a_chain_is_the_narrowest_shape():
    assert chain(3).paths == [(0,), (0, 0), (0, 0, 0)]
    assert DynamicShape(3, 1, 3).fixed().paths == chain(3).paths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [0, 0], [1", "not JSON"),
        ('{"a": 1}', r"must be a list of paths such as \[\[0\], \[1\], \[0, 0\]\]"),
        ("[[0], [0.5]]", "must be a list of paths"),
        ("[[0], [true]]", "must be a list of paths"),
        ("[0, 1]", "must be a list of paths"),
        ("[]", "from 1 to 63 paths, not 0"),
        (json.dumps([[i] for i in range(64)]), "from 1 to 63 paths, not 64"),
        ("[[0], [0]]", r"path \[0\] is there twice"),
        ("[[0], []]", r"path \[\]: must be one or more ranks"),
        ("[[0], [0, -1]]", r"path \[0, -1\]: must be one or more ranks"),
        ("[[0], [1, 0]]", r"path \[1, 0\] needs its parent \[1\]"),
        ("[[0], [2]]", r"path \[2\] needs its sibling \[1\]"),
        ("[[0], [0, 0], [0, 0, 1]]", r"path \[0, 0, 1\] needs its sibling \[0, 0, 0\]"),
    ],
)
def test_files_that_hold_no_tree(text: str, message: str, tmp_path: Path):
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_shape(str(path))
    assert str(error.value).startswith(f"tree={str(path)!r}: ")
    assert "\n" not in str(error.value)


def test_files_and_names(tmp_path: Path):
    path = tmp_path / "tree.json"
    path.write_text("[[1], [0], [0, 0]]")
    assert set(read_shape(str(path)).paths) == {(0,), (1,), (0, 0)}
    with pytest.raises(ValueError, match="tree='media': no such file, nor one of medusa, eagle"):
        read_shape("media")
    with pytest.raises(ValueError, match="no such file"):
        read_shape(str(tmp_path))


def options(**given: str) -> TreeOptions:
    return read_options(TreeOptions, given, "scheme")


def test_options_give_shapes():
    assert isinstance(options(), Drafter.Options)
    assert options().is_chain
    assert options().shape(6).fixed().paths == chain(6).paths
    assert options(depth="3").shape(5).num_nodes == 3
    assert options(depth="5", topk="4", nodes="24").shape(5) == DynamicShape(5, 4, 24)
    assert options(topk="4").shape(6) == DynamicShape(6, 4, 24)
    assert options(topk="4", depth="20").shape(5).num_nodes == 63
    assert options(tree="eagle").shape(5).num_nodes == 25
    assert not options(tree="eagle").is_chain


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth": "64"}, "scheme option depth=64: must be from 1 to 63"),
        ({"topk": "0"}, "scheme option topk=0: must be from 1 to 63"),
        ({"topk": "2", "nodes": "64"}, "scheme option nodes=64: must be from 1 to 63"),
        ({"trust": "0"}, "scheme option trust=0.0: must be above 0 and at most 100"),
        ({"nodes": "8"}, "scheme option nodes=8: topk=1 is a chain"),
        ({"tree": "eagle", "topk": "2"}, "tree='eagle': a fixed tree has its own"),
    ],
)
def test_options_out_of_range(given: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        options(**given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tree=eagle,k=3", "k=3 has no effect beside tree=eagle: leave it out"),
        ("depth=4,k=3", "k=3 has no effect beside depth=4"),
        ("depth=4,topk=2,nodes=8,k=8", "k=8 has no effect beside depth=4"),
    ],
)
@pytest.mark.parametrize("method", ["draft-model", "eagle", "eagle3", "mtp", "medusa"])
def test_k_beside_what_decides_instead_is_refused(method: str, text: str, message: str):
    config = SpeculationConfig.parse(f"{method}:{text}")
    assert config is not None
    with pytest.raises(ValueError, match=message):
        check(config)


def test_command_line_form():
    config = SpeculationConfig.parse("draft-model:depth=5,topk=4,nodes=24")
    assert config is not None
    assert options(**config.options).shape(config.k) == DynamicShape(5, 4, 24)
