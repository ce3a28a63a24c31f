from itertools import pairwise

from simulator.report.plot_style import line_style, use_log_scale


def test_forty_lines_are_all_different_and_neighbours_in_both_ways() -> None:
    styles = [line_style(number) for number in range(40)]
    assert len({tuple(style.values()) for style in styles}) == 40
    for style, following in pairwise(styles):
        assert style["color"] != following["color"]
        assert style["linestyle"] != following["linestyle"]


def test_ticks_of_a_logarithmic_axis_are_numbers_that_people_read() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2], [8, 3000])
    use_log_scale(axes, "y")
    figure.canvas.draw()
    shown = [text.get_text() for text in axes.get_yticklabels()]
    assert {"10", "20", "50", "1,000", "2,000"} <= set(shown)
    assert not any("^" in text for text in shown)
