"""What a running optimizer does: certificates of its polar steps, spectra, noise."""

from __future__ import annotations

from polarstep.diagnostics.certificate import Certificate, certify
from polarstep.diagnostics.cheap import certified, cheap_certificate

__all__ = ["Certificate", "certified", "certify", "cheap_certificate"]
