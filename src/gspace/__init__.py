"""gspace: train and study ReLU networks modulo their rescaling symmetry."""

from gspace import paths
from gspace.analysis import Analysis, Edges, Pin, TraceError, UnitGroup, analyze
from gspace.baselines import FrozenSkeletonSGD, PathSGD
from gspace.diagnostics import RatioStatistics, balancedness, compare_invariance, distance, invariance_gap
from gspace.equivalence import Equivalence, are_equivalent
from gspace.flatness import psi_flatness
from gspace.inner import InGSpace
from gspace.norms import BasisPathPenalty, basis_path_norm, path_norm
from gspace.optim import GSGD
from gspace.pathsum import PathError
from gspace.quantization import Mapping, check_mappings, equalize_, mappings, smooth_
from gspace.scaling import Scales, balance_, random_scales, rescale_
from gspace.skeleton import Skeleton, build_skeleton, init_skeleton_

__version__ = "0.1.0"

__all__ = [
    "GSGD",
    "Analysis",
    "BasisPathPenalty",
    "Edges",
    "Equivalence",
    "FrozenSkeletonSGD",
    "InGSpace",
    "Mapping",
    "PathError",
    "PathSGD",
    "Pin",
    "RatioStatistics",
    "Scales",
    "Skeleton",
    "TraceError",
    "UnitGroup",
    "analyze",
    "are_equivalent",
    "balance_",
    "balancedness",
    "basis_path_norm",
    "build_skeleton",
    "check_mappings",
    "compare_invariance",
    "distance",
    "equalize_",
    "init_skeleton_",
    "invariance_gap",
    "mappings",
    "path_norm",
    "paths",
    "psi_flatness",
    "random_scales",
    "rescale_",
    "smooth_",
]
