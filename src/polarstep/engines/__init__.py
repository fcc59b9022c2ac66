"""How a step touches C and X: ``momentum`` before the polar map, ``update`` after it.

torch    torch's operations, on any device and in any layout
fused    kernels, which find C and X by their addresses
replay   the steps of the fused engine: planned once and, on a GPU, replayed as CUDA graphs
  replay_plan   which parameters take part, and the tables that the kernels read
  graphs        capturing launches, and replaying them
"""
