"""Elements of the live page: every text is escaped, and curves are drawn at the right place."""

import re

import pytest

from unskew.reporting.live_html import axis_ticks, draw_curve, escaped, scrolling_table


@pytest.mark.fuzz
def test_texts_are_escaped_and_shortened():
    assert escaped("<b>\"'&") == "&lt;b&gt;&quot;&#x27;&amp;"
    assert len(escaped("x" * 100_000)) < 400
    table = scrolling_table("key", "a < b", ["<th>"], [["<td>"]])
    assert table.count("&lt;") == 4  # the caption is also the label of the region
    assert '<th scope="col">' in table


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [-1e299, 1e299], [1e15, 1e15 + 1], [0.3, 0.1, 0.2], [-5.0]])
def test_every_value_is_between_the_ends_of_its_axis(values):
    ticks = axis_ticks(values)
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= min(values) <= max(values) <= ticks[-1]
    curve = draw_curve(list(enumerate(values, 1)), "loss")
    places = [tuple(map(float, pair.split())) for pair in re.search(r'd="M([^"h]*)', curve)[1].split("L")]
    assert len(places) == len(values)
    assert all(60 <= x <= 590 and 10 <= y <= 205 for x, y in places)


def test_a_curve_goes_from_the_lower_left_to_the_upper_right():
    points = [(1, 0.0), (3, 50.0), (5, 100.0)]
    assert 'd="M2.0 20.0L45.0 11.0L88.0 2.0"' in draw_curve(points)
    large = draw_curve(points, "test accuracy (%)")
    assert 'd="M60.0 205.0L325.0 107.5L590.0 10.0"' in large
    assert 'aria-label="test accuracy (%) by round, from 0 to 100; 100 in round 5"' in large
