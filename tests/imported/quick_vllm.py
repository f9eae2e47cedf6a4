"""vLLM looks at a model's class in a process of its own, so that CUDA is not initialised in the one that serves it.

There is no CUDA in these tests, and on a machine without vLLM's cache each class takes such a process 10 s, in which it
imports vLLM anew. Here it is looked at in the process that loads it.
"""

import importlib.util
import sys
from typing import Any

REGISTRY = "vllm.model_executor.models.registry"


class Finder:
    """Changes the module once it is imported, whenever that is: importing it takes as long as vLLM."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(cls)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            assert callable(module._run_in_subprocess)
            module._run_in_subprocess = lambda look: look()

        spec.loader.exec_module = exec_module
        return spec


def make_quick() -> None:
    """From here on, in this process and its forks."""
    if REGISTRY not in sys.modules:
        sys.meta_path.insert(0, Finder)
