"""The phase picture: readable for every kind of layer, and honest about what it cannot do."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from upconv.draw import DrawingError, draw, figure_of, strips_of
from upconv.planner import Problem

LAYERS = {
    "dcgan": Problem.of(1, 8, 8, (8, 8), 4, stride=2, padding=1),
    "stride one": Problem.of(1, 8, 8, (64, 64), (3, 7)),
    "unlike dimensions": Problem.of(1, 8, 8, (9, 9), (3, 5), (2, 3), (1, 2), 0, (2, 1)),
    "64 phases": Problem.of(1, 8, 8, (64, 64), 16, stride=8, padding=4),
    "stride four": Problem.of(1, 8, 8, (64, 64), 8, stride=4, padding=2),
    "large kernel": Problem.of(1, 8, 8, (64, 64), 9, stride=3, padding=4, output_padding=2),
    "one pixel": Problem.of(1, 8, 8, (1, 1), 1),
    "line": Problem.of(1, 8, 8, (512,), 16, stride=8, padding=4),
    "long line": Problem.of(1, 8, 8, (512,), 41, stride=20, padding=10),
    "volume": Problem.of(1, 8, 8, (16, 32, 32), 3, stride=2, padding=1, dilation=2),
    "padding eats the first inputs": Problem.of(1, 8, 8, (40, 40), 2, stride=1, padding=5),
}


@pytest.mark.parametrize("problem", LAYERS.values(), ids=LAYERS.keys())
def test_no_words_overlap_or_leave_the_page(problem: Problem) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_of(problem)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    page = figure.bbox
    words = [(text.get_text(), text.get_window_extent()) for text in figure.axes[0].texts]
    assert len(words) > 5
    for word, box in words:
        inside = box.x0 >= page.x0 and box.x1 <= page.x1 and box.y0 >= page.y0 and box.y1 <= page.y1
        assert inside, f"{word!r} leaves the page"
    for (one, box), (other, other_box) in combinations(words, 2):
        assert not box.overlaps(other_box), f"{one!r} lies on {other!r}"


@pytest.mark.parametrize(("name", "starts"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_ending_says_the_format(tmp_path: Path, name: str, starts: bytes) -> None:
    path = draw(LAYERS["dcgan"], tmp_path / name)
    assert path.read_bytes().startswith(starts)
    if name.endswith("svg"):
        ElementTree.parse(path)


def test_dimensions_with_the_same_numbers_share_a_strip() -> None:
    assert [strip.axes for strip in strips_of(LAYERS["volume"])] == ["depth, height and width"]
    assert [strip.axes for strip in strips_of(LAYERS["unlike dimensions"])] == ["height", "width"]


def test_the_strip_shows_the_products_of_the_definition() -> None:
    """Output 3 of kernel 4, stride 2, padding 1 is w2*x1 + w0*x2."""
    (strip,) = strips_of(LAYERS["dcgan"])
    assert [(tap.k, i) for tap, i in strip.meetings(3)] == [(2, 1), (0, 2)]


def test_the_usual_way_is_shown_for_an_output_that_wastes() -> None:
    """Kernel 3, stride 2: odd outputs meet one tap of three, the other two fall on zeros."""
    (strip,) = strips_of(Problem.of(1, 8, 8, (16,), 3, stride=2))
    o = strip.example()
    assert o is not None
    assert o % 2 == 1
    assert [tap.k for tap, _ in strip.meetings(o)] == [1]
    (no_zeros,) = strips_of(Problem.of(1, 8, 8, (16,), 3))
    assert no_zeros.example() is None


def words_of(problem: Problem) -> list[str]:
    return [text.get_text() for text in figure_of(problem).axes[0].texts]


def test_a_volume_shows_a_plane_and_how_often_it_is_used() -> None:
    words = words_of(Problem.of(1, 8, 8, (8, 8, 8), 3, stride=2))
    assert "In a plane of one depth: both directions together" in words
    assert "like 0,0: 4 of 9 weights" in words
    twice = "At depth 0, 2, 4, ... these weights are needed twice: for the depth's w0, w2."
    assert twice in words
    assert any("27 the usual way, 3.38 on average" in line for line in words)


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.png.txt"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DrawingError, match=r"\.svg or \.png"):
        draw(LAYERS["dcgan"], tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DrawingError, match="cannot write"):
        draw(LAYERS["dcgan"], tmp_path / "no" / "a.png")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DrawingError, match=r"pip install 'upconv\[plot\]'"):
        draw(LAYERS["dcgan"], tmp_path / "a.png")
