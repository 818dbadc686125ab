"""Rescaling for quantizers: which layers share a scale, whether a table of them is right, and scales that help.

`mapping` is the data, `find` makes it from an `Analysis`, `check` compares a table with it, `solve` chooses scales, and
`export` writes what llm-compressor reads.
"""

from gspace.quantization.check import check_mappings, effects
from gspace.quantization.export import awq, smoothquant
from gspace.quantization.find import mappings
from gspace.quantization.mapping import Mapping, Mappings, Side
from gspace.quantization.solve import equalize_, smooth_

__all__ = [
    "Mapping",
    "Mappings",
    "Side",
    "awq",
    "check_mappings",
    "effects",
    "equalize_",
    "mappings",
    "smooth_",
    "smoothquant",
]
