"""A figure on a page: drawn without a network, named for who cannot see it, its data readable as a table."""

from __future__ import annotations

import html
import re

import pytest

from kvlab.book import new_figure, show

go = pytest.importorskip("plotly.graph_objects")


def figure():
    drawn = new_figure("context (tokens)", "cache (GiB)", log_x=True)
    drawn.add_scatter(x=[1024, 32768], y=[0.3125, 10.0], name="Llama-3 70B")
    drawn.add_bar(x=["fp8"], y=[5], name="<b>")
    return drawn


def cells(markup: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", markup)
    return [[html.unescape(c) for c in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


@pytest.mark.parametrize("words", [{"alt": "", "caption": "c"}, {"alt": "a", "caption": " "}])
def test_a_figure_says_what_it_shows_and_whence(shown, words) -> None:
    with pytest.raises(ValueError, match="alt and caption: must say"):
        show(figure(), **words)
    assert shown == []


def test_one_output_carries_both_drawings_and_the_words(shown) -> None:
    show(figure(), alt="Bytes grow with length.", caption="Computed by kvlab.")
    (bundle,) = shown
    assert set(bundle) == {"application/vnd.plotly.v1+json", "text/html", "text/plain"}
    assert [t["type"] for t in bundle["application/vnd.plotly.v1+json"]["data"]] == ["scatter", "bar"]
    assert bundle["text/plain"] == "Bytes grow with length.\nComputed by kvlab."
    page = bundle["text/html"]
    assert 'role="img" aria-label="Bytes grow with length."' in page
    assert "<figcaption>Computed by kvlab.</figcaption>" in page


def test_the_data_stay_readable_as_a_table(shown) -> None:
    show(figure(), alt="a", caption="c")
    assert cells(shown[0]["text/html"]) == [
        ["series", "context (tokens) (log scale)", "cache (GiB)"],
        ["Llama-3 70B", "1024", "0.3125"],
        ["Llama-3 70B", "32768", "10"],
        ["<b>", "fp8", "5"],
    ]


def test_a_long_series_shows_its_beginning(shown) -> None:
    drawn = new_figure("n", "bytes")
    drawn.add_scatter(x=list(range(1000)), y=list(range(1000)))
    show(drawn, alt="a", caption="c")
    assert len(cells(shown[0]["text/html"])) == 201
    assert "800 further points are not listed." in shown[0]["text/html"]


def test_nothing_is_fetched_from_another_server(shown) -> None:
    show(figure(), alt="a", caption="c")
    page = shown[0]["text/html"]
    assert not re.search(r"https?://|//cdn", page) and "_static/vendor/plotly.min.js" in page
    assert len(page) < 20_000  # no plotly.js inside


def test_words_cannot_end_the_script_or_the_attribute(shown) -> None:
    drawn = new_figure("x", "y")
    drawn.add_scatter(x=[1], y=[2], name="</script><script>alert(1)</script>")
    drawn.update_layout(title_text="</script>")
    show(drawn, alt='a "quoted" <alt>', caption="c </figcaption><script>")
    page = shown[0]["text/html"]
    assert page.count("</script>") == 1 and page.endswith("</script>") and page.count("<script>") == 2
    assert 'aria-label="a &quot;quoted&quot; &lt;alt&gt;"' in page and page.count("</figcaption>") == 1


def test_each_figure_of_a_page_has_its_own_box(shown) -> None:
    show(figure(), alt="a", caption="c")
    show(figure(), alt="a", caption="c")
    names = [re.search(r'<div id="([^"]+)"', b["text/html"])[1] for b in shown]
    assert len(set(names)) == 2
    assert all(f"getElementById('{n}')" in b["text/html"] for n, b in zip(names, shown, strict=True))


def test_ground_is_transparent_and_axes_name_their_scale() -> None:
    drawn = new_figure("tokens", "ms", log_x=True)
    assert drawn.layout.paper_bgcolor == drawn.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert (drawn.layout.xaxis.title.text, drawn.layout.yaxis.title.text) == ("tokens (log scale)", "ms")
    assert drawn.layout.xaxis.type == "log"


@pytest.mark.parametrize(
    ("names", "texts", "legend"),
    [
        (("lru", "lfu"), (None, None), True),  # nothing else tells the two apart
        (("lru", "lfu"), (["", "lru"], None), False),  # a label at its end does
        (("lru",), (None,), False),
        ((None, None), (None, None), False),
    ],
)
def test_lines_that_nothing_else_tells_apart_get_a_legend(shown, names, texts, legend) -> None:
    figure = new_figure(x="pool", y="rate")
    for name, text in zip(names, texts, strict=True):
        figure.add_scatter(x=[1, 2], y=[3, 4], name=name, text=text)
    show(figure, alt="Two lines.", caption="Made up.")
    assert shown[0]["application/vnd.plotly.v1+json"]["layout"]["showlegend"] is legend


def test_a_figure_that_labels_its_lines_itself_gets_none(shown) -> None:
    figure = new_figure(x="pool", y="rate")
    for name in ("lru", "lfu"):
        figure.add_scatter(x=[1, 2], y=[3, 4], name=name)
    figure.add_annotation(x=2, y=4, text="both")
    show(figure, alt="Two lines.", caption="Made up.")
    assert shown[0]["application/vnd.plotly.v1+json"]["layout"]["showlegend"] is False


def test_panels_side_by_side_need_none(shown) -> None:
    figure = new_figure(x="key", y="query")
    for panel in ("", "2"):
        figure.add_scatter(x=[1], y=[1], name=f"mask {panel}", xaxis=f"x{panel}", yaxis=f"y{panel}")
    show(figure, alt="Two masks.", caption="Made up.")
    assert shown[0]["application/vnd.plotly.v1+json"]["layout"]["showlegend"] is False
