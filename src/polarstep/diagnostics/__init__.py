"""Measurements on a running optimizer: certificates of polar steps, spectra, gradient noise."""

from __future__ import annotations

from polarstep.diagnostics.certificate import Certificate, certify
from polarstep.diagnostics.cheap_bounds import certified, cheap_certificate
from polarstep.diagnostics.gradient_noise import NoiseDraws, draw_noise, held_still, mean_gradient
from polarstep.diagnostics.layer_heatmap import heatmap, read_rows
from polarstep.diagnostics.measures import Measures, measure
from polarstep.diagnostics.monitor import Monitor
from polarstep.diagnostics.per_sample import noise_norms, per_sample_gradients

__all__ = [
    "Certificate",
    "Measures",
    "Monitor",
    "NoiseDraws",
    "certified",
    "certify",
    "cheap_certificate",
    "draw_noise",
    "heatmap",
    "held_still",
    "mean_gradient",
    "measure",
    "noise_norms",
    "per_sample_gradients",
    "read_rows",
]
