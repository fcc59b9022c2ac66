"""A step: which matrices go through a polar map together, and how they are read and written.

collect           the parameters that have a gradient, and the bucket of each matrix
  magnitude       the largest entry of each of many tensors, in few launches
step              equation (1) for one bucket, written once
by_tensors        buckets in plain torch operations, on any device
  target          one parameter of such a step: its momentum, M, and the update of X
replay            buckets on a GPU, captured once and replayed as CUDA graphs
  replay_plan     which parameters take part, and the tables that the kernels read
  by_tables       one bucket by tables of addresses
elementwise_step  AdamW, SGD and other element-wise rules
carried           the entries of the state that a polar map carries from step to step
low_precision     compensated rounding of 16-bit parameters, and momentum in fewer bits
resting           matrices that stop because their gradient has become zero
"""
