"""Labels of the picture of formats: each on a side where it covers nothing."""

from __future__ import annotations

from kvlab.book.quant_plots import label_sides


def test_a_label_avoids_points_and_labels_placed_before() -> None:
    # b lies where a's label would stand, c under b, d so far that nothing is in its way
    points = [(1.0, 0.0, "a-long-name"), (1.5, 0.0, "b"), (1.5, -0.1, "c"), (9.0, 0.0, "d")]
    assert label_sides(points) == {
        "a-long-name": "middle left",
        "b": "middle right",
        "c": "middle left",
        "d": "middle right",
    }


def test_where_every_side_is_taken_the_label_stands_above() -> None:
    ring = [(0.9, 0.0, "w"), (1.1, 0.0, "e"), (1.0, 0.15, "n"), (1.0, -0.15, "s")]
    assert label_sides([(1.0, 0.0, "mid"), *ring])["mid"] == "top center"
