"""Paths of a network: small ones written out (`explicit`), sums over all of them by a run (`pathsum`).

`norms` has what users call: `path_norm`, `basis_path_norm`, `BasisPathPenalty`.

A network of one hidden unit has m = 4 weights, 4 paths, and 3 basis paths:

>>> import gspace, torch
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False)).double()
>>> analysis = gspace.analyze(model)
>>> wiring = wire(analysis.edges, dict(model.named_parameters()))
>>> paths = enumerate_paths(wiring)
>>> count_paths(wiring), rank(structure_matrix(wiring, paths)), wiring.m - wiring.H
(4.0, 3, 3)
>>> w = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64)
>>> path_values(wiring, w, paths).tolist()
[10.0, 14.0, 15.0, 21.0]

The output is the sum of the values of active paths, weighted by the inputs (Eq. 1):

>>> x = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
>>> as_function(model, wiring)(w, x).tolist()
[[25.0, 35.0]]
>>> activation_status(wiring, paths, torch.tensor([[True, True]])).tolist()
[[True, True, True, True]]

Every path is a product of powers of basis paths (⊙), and weights follow from them and from the free weights:

>>> basis = basis_paths(gspace.build_skeleton(model, analysis), dict(model.named_parameters()))
>>> combine(paths[3], basis).tolist()
[-1, 1, 1]
>>> v = odot(w, basis.A)
>>> v.tolist(), weights_of(basis, w[basis.free], v).tolist()
([10.0, 15.0, 14.0], [2.0, 3.0, 5.0, 7.0])
>>> I, O = skeleton_products(basis, w)
>>> I.tolist(), O.tolist(), reference_values(basis, I, O).tolist()
([1.0, 2.0], [1.0, 5.0], [10.0, 5.0, 2.0])

A step of SGD on v: ∂ℓ/∂v by the Inverse-Chain-Rule, path ratios, Weight-Allocation; or all at once, in two ways:

>>> loss = lambda weights: as_function(model, wiring)(weights, x).sum()
>>> gradient = torch.func.grad(loss)(w)
>>> torch.allclose(jacobian(basis, w).T @ inverse_chain_rule(basis, w, gradient)[0], gradient)
True
>>> allocate_weights(basis, w, torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)).tolist()
[2.0, 6.0, 5.0, 7.0]
>>> sgd = lambda v, g: v - 0.1 * g
>>> torch.allclose(dense_step(basis, w, gradient, sgd), autograd_step(basis, w, loss, sgd))
True
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
