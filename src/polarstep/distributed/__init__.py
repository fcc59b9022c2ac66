"""The same step on many ranks: no rank gathers everything, and none repeats another's work.

To read it from the top:

step         runs all buckets, the communication of one beside the arithmetic of another
status       what ranks agree on before a step: gradients, and errors
layout       where the parts of a parameter lie, read once from its mesh and placements
ledger       bytes and FLOPs of every plan, as formulas
plans        which plan the matrices of a parameter take:
  local        "local": the step of one process, on whole matrices that lie on this rank
  gather       "gather": every rank gathers whole matrices, and computes all of them
  owner        "owner" and "replicated": one rank computes a matrix; M's parts go there, T's come back
    spread       each rank's parts of the matrices, and which rank owns which
    owned_graph  the owner's arithmetic between its two exchanges, as a CUDA graph
  sharded      "sharded": Algorithm 1 on shards; no matrix is gathered
    summed       what one rank computes there from a small matrix that was summed over the ranks
carries      what a map carries from step to step, in parts
resting      matrices in parts that stop because their gradient has become zero
unstarted    entries of a checkpoint for parameters that were never updated
wire         the collectives themselves
"""
