"""The same step on many ranks: no rank gathers everything, and none repeats another's work.

A step of shares, from the top; :mod:`polarstep.muon` takes it:

distribution the step of an optimizer: ranks agree, each does its share by its plan, and ranks end it
plans        the table of plans, what they cost, and which one a parameter takes
parts        which rank computes which matrix, and what travels to it and back
exchange     how M gets to the ranks that compute T, and T back; on a GPU with owned_graph
local_shard  this rank's part of a parameter, where it consists of whole matrices
carries      what a map carries from step to step, in parts

What these and a step of one process need:

agree        what ranks agree on before and after a step: gradients, options, copies, and errors
layout       where the parts of a parameter lie, read once from its mesh and placements
collectives  all-to-all, all-gather, and where ranks meet on the host
"""
