"""Benchmarks run only behind a correctness check, on two threads at most so that runs can be compared."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

from fused_grpo.env import environment

# Benchmarks import the modules beside them; pytest's importlib mode leaves sys.path alone.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_benchmark_update_machine_info(config, machine_info) -> None:
    machine_info["node"] = platform.machine()  # no host names in files that get published
    machine_info["fused_grpo"] = environment()
    machine_info["torch_threads"] = torch.get_num_threads()
