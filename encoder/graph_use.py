"""`GraphUse`: what one graph did. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GraphUse:
    """Counts of one graph since the start."""

    replays: int = 0
    segments: int = 0
    useful_patches: int = 0
    run_patches: int = 0  # padding included
    predicted_ms: float = 0.0  # of the replays that have ended
    real_ms: float = 0.0  # the same on the device
