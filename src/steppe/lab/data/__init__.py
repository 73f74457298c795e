"""Data sets by name, as batches that are reproducible to the bit."""

from steppe.lab.data.augment import Augmentation, Pipeline
from steppe.lab.data.catalog import Found, available, default_root, fetch
from steppe.lab.data.named import content_fingerprint, is_table, load, located, names, verify
from steppe.lab.data.order import epoch_order, generator, mix, sequential_order
from steppe.lab.data.split import Data, MemorySplit, Split
from steppe.lab.data.user import wrap

__all__ = [
    "Augmentation",
    "Data",
    "Found",
    "MemorySplit",
    "Pipeline",
    "Split",
    "available",
    "content_fingerprint",
    "default_root",
    "epoch_order",
    "fetch",
    "generator",
    "is_table",
    "load",
    "located",
    "mix",
    "names",
    "sequential_order",
    "verify",
    "wrap",
]
