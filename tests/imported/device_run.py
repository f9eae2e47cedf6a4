"""What pytest does where FUSED_GRPO_TEST_DEVICE is set: tests/conftest.py registers this as a plugin.

It wraps the ops before tests are imported, leaves out what is about CPUs, counts the calls that went to the device, and
says which tests made none. What a test printed follows its result at once, so that a run that is ended has it. An error
of CUDA's ends a process's context, and would be the error of every test after it: the process ends, and pytest-xdist
starts another.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import device_under_test as dut
import pytest

CALLS = "calls on the device"
# Others leave the context as it was: no memory, a product that the vendor refuses, a wait in a capture.
HARMLESS = r"out of memory|CUBLAS_STATUS_(?!EXECUTION_FAILED)|operation (?:not permitted|failed)[a-z ]* captur"
LOST = re.compile(rf"CUDA error: (?!{HARMLESS})|device-side assert|illegal memory access")


def pytest_configure(config: pytest.Config) -> None:
    if reason := dut.why_not():
        raise pytest.UsageError(reason)
    dut.install()
    config.pluginmanager.register(Said(config))


class Said:
    """Prints what tests printed, in the process that has the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self.plugins = config.pluginmanager

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: Any = self.plugins.get_plugin("terminalreporter")
        if terminal is not None and report.when == "call" and report.capstdout:
            terminal.ensure_newline()
            terminal.write(report.capstdout)
            terminal.ensure_newline()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = dut.CALLS.copy()
    try:
        yield
    finally:
        if not item.get_closest_marker("dry_run"):  # whose tensors are on the device
            item.user_properties.append((CALLS, dict(dut.CALLS - before)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    error = call.excinfo.value if call.excinfo else None
    if dut.NAME == "cuda" and isinstance(error, RuntimeError) and LOST.search(str(error)):
        print(f"{item.nodeid} has ended the CUDA context:\n{report.longreprtext}", file=sys.stderr, flush=True)
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"{item.nodeid} has ended the CUDA context", returncode=1)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    calls, without = Counter[str](), Counter[str]()
    for report in reports:
        counts = dict(report.user_properties).get(CALLS)
        if report.when == "call" and counts is not None:
            calls.update(counts)
            without.update({report.nodeid.partition("[")[0]: int(not counts)})
    shown = ", ".join(f"{name} {count}" for name, count in sorted(calls.items()))
    terminalreporter.write_line(f"calls on {dut.NAME}: {shown or 'none'}")
    names = [name for name, count in without.items() if count]
    terminalreporter.write_line(f"tests without a call on {dut.NAME}: {', '.join(names) or 'none'}")
