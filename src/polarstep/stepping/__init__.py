"""What a step begins with, and what it does beside equation (1).

collect      the parameters that have a gradient
  magnitude  the largest entry of each of many tensors, in few launches
resting      matrices that stop because their gradient has become zero

The step itself is in :mod:`polarstep.muon`: :mod:`polarstep.bucket` has the matrices that go through a
polar map together, :mod:`polarstep.state` what is kept of them, and :mod:`polarstep.engines` how they
are read and written.
"""
