"""What a step works with: which matrices go through a polar map together, and their state.

collect           the parameters that have a gradient, and the bucket of each matrix
  magnitude       the largest entry of each of many tensors, in few launches
elementwise_step  AdamW, SGD and other element-wise rules
carried           the entries of the state that a polar map carries from step to step
low_precision     compensated rounding of 16-bit parameters, and momentum in fewer bits
resting           matrices that stop because their gradient has become zero

The step itself is in :mod:`polarstep.muon`, and how it reads and writes in :mod:`polarstep.engines`.
"""
