"""The same step on many ranks: no rank gathers everything, and none repeats another's work.

The upper half is a step of shares. It imports the step of one process, polarstep.stepping, and is
imported by the optimizer above that. To read it from the top:

step         runs all buckets, the communication of one beside the arithmetic of another
plans        the table of plans, what they cost, and which one a parameter takes:
  local        "local": the step of one process, on whole matrices that lie on this rank
  owner        "owner" and "replicated": one rank computes a matrix; M's parts go there, T's come back
    spread       each rank's parts of the matrices, and which rank owns which
    owned_graph  the owner's arithmetic between its two exchanges, as a CUDA graph
carries      what a map carries from step to step, in parts
resting      matrices in parts that stop because their gradient has become zero
unstarted    entries of a checkpoint for parameters that were never updated

The lower half knows of no optimizer. A step of one process imports it, too, as its parameters may be in
parts:

status       what ranks agree on before a step: gradients, and errors
copies       plain parameters that should be alike on all ranks, and are not
gather       the plan "gather": every rank gathers whole matrices, and computes all of them
layout       where the parts of a parameter lie, read once from its mesh and placements
collectives  all-to-all, all-gather, and where ranks meet on the host
"""
