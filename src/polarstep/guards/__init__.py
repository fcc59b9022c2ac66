"""Misuse of the optimizer that a step must notice, because it would pass in silence otherwise.

captured  raises for steps that a CUDA graph cannot replay
resized   raises for a parameter that has another shape than its state
mistakes  warns, once each, of parameters without gradients, replaced layers, one rate for all groups
"""
