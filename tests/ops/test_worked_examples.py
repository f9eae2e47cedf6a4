"""The examples in the docstrings of the formulas run, and give the numbers that they show."""

import doctest
import importlib
import pkgutil

import pytest

from fused_grpo import _maths

MODULES = [f"_maths.{module.name}" for module in pkgutil.iter_modules(_maths.__path__)] + ["config", "logprobs"]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_give_what_they_show(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"fused_grpo.{name}"), raise_on_error=False)
    assert result.failed == 0
    assert result.attempted > 0
