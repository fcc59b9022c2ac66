"""Muon for PyTorch with exact, inexact and randomized polar steps."""
