"""Optimizers in G-space, from the skeleton to the step.

`skeleton`, `reference` and `coordinates` are the mathematics; `choice` keeps a skeleton as state of an optimizer.
`step` is the definition of a step, `eager` takes it, `exact` with BatchNorm, `fast` in compiled kernels. `base` keeps
books for `gsgd` and `inner`; `baselines` has the optimizers that these are compared with.
"""
