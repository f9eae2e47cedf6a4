"""Before anything imports Triton or a model library: interpret kernels, and never go to the network."""

from __future__ import annotations

import os

# Triton decides when a kernel is decorated whether it is interpreted, so this comes before every import.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
