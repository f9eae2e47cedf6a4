"""PyTorch without what it looks up for messages that no test reads.

Where an operator is registered it looks through all modules, twice. Every seed is noted for each kind of accelerator,
with the whole stack, until there is one: in these tests there is none.
"""

import inspect
import sys
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any


def make_quick() -> None:
    """From here on, in this process and its forks."""
    import torch

    library: Any = torch.library
    torch._library.utils.get_source = line_of_caller
    library.inspect = SimpleNamespace(**{**vars(inspect), "getmodule": module_of_frame})
    for accelerator in (torch.cuda, torch.mtia, torch.xpu):
        accelerator.traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]


def line_of_caller(stacklevel: int) -> str:
    """PyTorch's `get_source`, which reads the source of the line, too."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def module_of_frame(frame: FrameType) -> ModuleType | None:
    """Python's `getmodule` also has a fork copy the memory of all modules."""
    return sys.modules.get(frame.f_globals.get("__name__", ""))
