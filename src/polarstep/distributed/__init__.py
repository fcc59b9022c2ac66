"""The same step on many ranks: no rank gathers everything, and none repeats another's work.

layout      where the parts of a parameter lie, read once from its mesh and placements
ledger      bytes and FLOPs of every plan, as formulas
plans       which plan a bucket of matrices takes
local       whole matrices on a rank: the step of one process, without communication
sharded     Algorithm 1 on shards; no matrix is gathered
owner       each matrix is computed by one rank: M's parts go there, T's parts come back
owned_graph the owner's arithmetic between its exchanges, as a CUDA graph
status      which gradients are there, and whether a rank failed: one small exchange a step
wire        the collectives themselves
step        runs all buckets, the communication of one beside the arithmetic of another
"""
