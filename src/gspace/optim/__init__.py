"""Optimizers in G-space, from the skeleton to the step.

`skeleton`, `reference` and `coordinates` are the mathematics; `choice` keeps a skeleton as state of an optimizer.
`plan` is what a step needs to know of a network, `step` the definition of one. `eager` takes it, `exact` with
BatchNorm, `fast` in compiled kernels. `base` keeps books for `gsgd` and `inner`; `baselines` has the optimizers that
these are compared with.
"""
