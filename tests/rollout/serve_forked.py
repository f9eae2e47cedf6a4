"""`python -m vllm.entrypoints.openai.api_server`, whose engine and worker are forks, as they are beside a GPU.

On a CPU vLLM spawns them: each imports everything anew, which takes most of the half minute of a start.
"""

from __future__ import annotations

import multiprocessing
import runpy

from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor

for module in (utils, multiproc_executor):
    module.get_mp_context = lambda: multiprocessing.get_context("fork")
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
