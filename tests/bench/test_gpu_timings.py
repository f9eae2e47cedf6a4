"""The parts of the timings on a GPU, at the tiny sizes of their dry run."""

import math

import pytest

from fused_grpo.bench.gpu import kernels, tiles, timings
from fused_grpo.bench.gpu.scale import TINY
from fused_grpo.passes.choice import why_not_interpreted

pytestmark = pytest.mark.skipif(why_not_interpreted() is not None, reason=f"Triton: {why_not_interpreted()}")

PARTS = {
    "ceilings": (timings.ceilings, {"product", "copy"}),
    "gemms": (kernels.gemms, {"logits", "dH", "dW", "dW, added"}),
    "passes": (
        kernels.passes,
        {"row_statistics", "softmax_weights_", "logits_gradient_, entropy", "scale_hidden", "scale_"},
    ),
    "forward": (kernels.forward, {"kernel without logits", "GEMM and a reduction", "tiles of 8 x 100"}),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_measures_what_it_says(name):
    part, wanted = PARTS[name]
    figures = {figure.figure: figure.value for figure in part(TINY)}
    assert wanted <= figures.keys()
    assert all(value is not None and 0 < value < math.inf for value in figures.values())


def test_a_tile_that_does_not_compile_is_named_and_the_next_one_measured():
    *gemms, row, other = tiles.tiles(TINY)
    assert [figure.value is not None for figure in gemms] == [True, True, False]
    assert gemms[2].figure.startswith("tile 24 x 32 x 16")
    assert "power of 2" in gemms[2].note
    assert (row.figure, row.unit) == (other.figure, "GB/s") == ("row tile 64, num_warps 1", "GB/s")
