"""Paths of a network: small ones written out (`explicit`, `statements`), sums over all of them by a run (`pathsum`).

`norms` has what users call: `path_norm`, `basis_path_norm`, `BasisPathPenalty`.
"""

from gspace.paths.explicit import (
    Basis,
    Path,
    Wiring,
    activation_status,
    allocate_weights,
    as_function,
    autograd_step,
    basis_paths,
    combine,
    count_paths,
    dense_step,
    enumerate_paths,
    inverse_chain_rule,
    jacobian,
    odot,
    path_values,
    rank,
    reference_values,
    skeleton_products,
    structure_matrix,
    weights_of,
    wire,
)

__all__ = [
    "Basis",
    "Path",
    "Wiring",
    "activation_status",
    "allocate_weights",
    "as_function",
    "autograd_step",
    "basis_paths",
    "combine",
    "count_paths",
    "dense_step",
    "enumerate_paths",
    "inverse_chain_rule",
    "jacobian",
    "odot",
    "path_values",
    "rank",
    "reference_values",
    "skeleton_products",
    "structure_matrix",
    "weights_of",
    "wire",
]
