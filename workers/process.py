"""What an actor settles first in a process of its own: devices, logs, traces. Before torch is imported."""

from __future__ import annotations

import logging
import os

from workers import spans


def set_up_process(service: str, *, on_gpu: bool = False) -> None:
    """`service` is the name under which its spans are collected; `ENCPOOL_LOG_LEVEL` says what it logs."""
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all of them visible to an actor that asked for none
    level = os.environ.get("ENCPOOL_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    spans.set_up(service)
