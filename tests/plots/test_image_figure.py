"""The figure of images with captions: the title is above them all, whatever their shapes."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from vitkit.plots.figure import grid_of_images


@pytest.mark.parametrize("first", [(20, 80), (80, 20), (40, 40)])
def test_the_title_is_above_all_images(first):
    images = [np.full((*size, 3), 90, np.uint8) for size in (first, (50, 50), (80, 10))]
    figure = grid_of_images(images, [["cat"], ["dog"], ["emu"]], "photos: first training batch")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (title,) = figure.texts
    bottom = title.get_window_extent(renderer).y0
    shown = [axes for axes in figure.axes if axes.get_label() == "image"]
    assert bottom > max(axes.get_window_extent(renderer).y1 for axes in shown)
    assert title.get_window_extent(renderer).y1 < figure.bbox.y1


def test_photographs_are_reduced_and_small_images_are_not():
    generator = np.random.default_rng(0)
    shapes = [(1399, 20, 3), (1400, 20, 3), (30, 2801, 1), (9, 7, 1)]
    images = [generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]
    figure = grid_of_images(iter(images), [[str(shape)] for shape in shapes], "sizes")
    drawn = [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
    shapes = [array.shape for array in drawn]
    assert shapes == [(1399, 20, 3), (700, 10, 3), (8, 701, 3), (9, 7, 3)]
    assert (drawn[0] == images[0]).all()
    assert (drawn[3] == images[3]).all()
    corner = images[1][:2, :2].astype(float).mean((0, 1))
    assert np.abs(drawn[1][0, 0] - corner).max() < 1
