"""What has to work where torch and triton are all that is installed beside the package: see test_package.py.

Run by the Python of such an environment, with the name of a function below.
"""

import importlib
import os
import pkgutil
import sys

import torch

import fused_grpo
import fused_grpo.integrations
from fused_grpo.errors import UnavailableError


def ops() -> None:
    """Log-probs, both losses and their gradients, by the implementation that the environment asks for."""
    impl = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "auto"
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    batch = {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32), "advantages": torch.tensor([1.0, -1.0])}
    logprobs = fused_grpo.linear_logprobs(hidden, weight, torch.arange(6), impl=impl)
    loss = fused_grpo.grpo_loss(logprobs, **batch, impl=impl).loss
    fused = fused_grpo.fused_linear_grpo_loss(hidden, weight, torch.arange(6), **batch, impl=impl).loss
    one, other = (torch.autograd.grad(x, [hidden, weight]) for x in (loss, fused))
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), 1).diagonal()
    assert (logprobs - exact).abs().max() < 1e-4
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) and a.any() for a, b in zip(one, other, strict=True))


def integrations() -> None:
    """A line per module: imported, or the error that says what it wants."""
    for module in pkgutil.iter_modules(fused_grpo.integrations.__path__):
        if not module.name.startswith("_"):
            print(module.name, attempt(f"fused_grpo.integrations.{module.name}"), sep=": ")


def trainer() -> None:
    import fused_grpo.trainer

    for name in fused_grpo.trainer.__all__:
        try:
            getattr(fused_grpo.trainer, name)
            print(name, "imported", sep=": ")
        except UnavailableError as error:
            print(name, error, sep=": ")


def attempt(name: str) -> str:
    try:
        importlib.import_module(name)
    except UnavailableError as error:
        return str(error)
    return "imported"


if __name__ == "__main__":
    globals()[sys.argv[1]]()
