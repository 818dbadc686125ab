"""gspace: train and study ReLU networks modulo their rescaling symmetry."""

import gspace_command  # noqa: F401, I001 -- before torch: Ctrl-C while `python -m gspace` imports it

from gspace import paths
from gspace.analysis import Analysis, Edges, Pin, TraceError, UnitGroup, analyze
from gspace.group.equivalence import Equivalence, are_equivalent
from gspace.group.scaling import Scales, balance_, random_scales, rescale_
from gspace.measure.diagnostics import RatioStatistics, balancedness, compare_invariance, distance, invariance_gap
from gspace.measure.flatness import psi_flatness
from gspace.optim.baselines import FrozenSkeletonSGD, PathSGD
from gspace.optim.factory import factory
from gspace.optim.gsgd import GSGD
from gspace.optim.inner import InGSpace
from gspace.optim.initial import init_skeleton_
from gspace.optim.skeleton import Skeleton, build_skeleton
from gspace.paths.norms import BasisPathPenalty, basis_path_norm, path_norm
from gspace.paths.pathsum import PathError
from gspace.quantization import Mapping, check_mappings, equalize_, mappings, smooth_

__version__ = "0.2.0"

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
    "factory",
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
