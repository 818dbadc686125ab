"""gspace: train and study ReLU networks modulo their rescaling symmetry."""

from gspace.equivalence import Equivalence, are_equivalent
from gspace.graph import Analysis, Edges, Pin, UnitGroup, analyze
from gspace.inner import InGSpace
from gspace.optim import GSGD
from gspace.scaling import Scales, balance_, random_scales, rescale_
from gspace.skeleton import Skeleton, build_skeleton, init_skeleton_
from gspace.trace import TraceError

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "Edges",
    "Equivalence",
    "GSGD",
    "InGSpace",
    "Pin",
    "Scales",
    "Skeleton",
    "TraceError",
    "UnitGroup",
    "analyze",
    "are_equivalent",
    "balance_",
    "build_skeleton",
    "init_skeleton_",
    "random_scales",
    "rescale_",
]
