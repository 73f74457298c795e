"""Memory that stays with the process between two evaluations of a model."""

from __future__ import annotations

import functools

import torch

LARGEST = 31 * 2**20
"""glibc adapts to blocks of up to 32 MiB."""


@functools.cache
def keep_pages() -> None:
    """Let the C library keep freed activations instead of giving them back to the system.

    glibc maps large blocks and unmaps them when they are freed, so that every activation of
    every forward is new memory, zeroed page by page. It stops doing so for blocks up to the
    largest mapped one that it has seen freed. The block here is never written to and costs
    nothing; other C libraries do not care.
    """
    torch.empty(LARGEST, dtype=torch.uint8)
