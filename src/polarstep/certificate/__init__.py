"""How inexact a polar step was: γ and ν from singular values, cheap bounds on them, and a monitor."""

from __future__ import annotations

from polarstep.certificate.cheap import certified, cheap_certificate
from polarstep.certificate.exact import Certificate, Measures, certify, measure
from polarstep.certificate.monitor import Monitor

__all__ = [
    "Certificate",
    "Measures",
    "Monitor",
    "certified",
    "certify",
    "cheap_certificate",
    "measure",
]
