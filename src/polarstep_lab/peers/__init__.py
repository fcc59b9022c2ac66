"""Optimizers of other libraries in the same training loop, as the methods ``peer:…``.

A peer updates the hidden matrices, and torch's AdamW everything else. Which parameters are hidden
matrices, and the rates of all others, are the same as with our Muon
(:mod:`polarstep_lab.peers.together`). What a peer is, how it is installed, and how its learning rate is
meant, is a row of the table in :mod:`polarstep_lab.peers.catalogue`.
"""

from polarstep_lab.peers.catalogue import PEERS, Peer, find_peer, load, versions

__all__ = ["PEERS", "Peer", "find_peer", "load", "versions"]
