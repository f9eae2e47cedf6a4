"""The exp of a GPU: how wrong it may be, that error in Triton's interpreter, and how far it moves what the ops return.

`ex2.approx`, which Triton takes for exp2 and exp, has a relative error of at most 2^-22 and is exact at 0 (PTX's
manual). NumPy's, in the interpreter, is right to a unit in the last place, 2^-23.
"""

from typing import Any

import torch
from torch import Tensor

from fused_grpo._maths.distributions import transform_logits

ERROR = 2.0**-22
# All too large, all too small, or one or the other as the bits of the argument say.
SIGNS = ("up", "down", "mixed", "mixed reversed")


def make_exp_noisy(monkeypatch: Any, sign: str) -> None:
    """Until the end of the test. The same argument has the same error every time."""
    import numpy
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def noisy(exact: Any) -> Any:
        def exp(self: Any, x: Any) -> Any:
            step = numpy.float32(ERROR if sign in ("up", "mixed") else -ERROR)
            if "mixed" in sign:
                bits = numpy.ascontiguousarray(x.data).view(numpy.uint32).reshape(x.data.shape)
                step = numpy.where(bits * numpy.uint32(2654435761) >> 31, step, -step)
            right = exact(self, x).data
            return TensorHandle(numpy.where(x.data == 0, right, right * (1 + step)), x.dtype)

        return exp

    for name in ("create_exp", "create_exp2"):
        monkeypatch.setattr(InterpreterBuilder, name, noisy(getattr(InterpreterBuilder, name)))


def moved_by_exp(inputs: dict[str, Tensor], g: Tensor, g_entropy: Tensor, **head: Any) -> dict[str, Tensor]:
    """How far ERROR may move each output and gradient, element by element, to first order in it.

    The exp of z, off by a factor of 1 + e, is the exp of z + e. Two of them make a term: its own, and one that takes a
    sum to another maximum or through the softplus. So results are those of logits that are off by |e_v| <= 2 ERROR:

        d log p_t = -sum_{v != t} p_v e_v                at most 1 - p_t of it: z_t itself is in no exp
        dH        = -sum_v p_v (log p_v + H) e_v         at most M = sum_v p_v |log p_v + H| of it
        d(g (1[v = t] - p_v))         = -g p_v (e_v - mean e)
        d(-g_H p_v (log p_v + H))     = -g_H p_v ((log p_v + H + 1) (e_v - mean e) + dH)

    The last two, with |e_v - mean e| at most twice as much, go through the transform and the products with |h| and |w|.

    Args:
        inputs: hidden [N, D], weight [V, D] and targets [N], in fp64, with `bias` [V] if there is one.
        g, g_entropy: [N], the upstream gradients of the log-probs and entropies; 0 in rows that are ignored.
        head: temperature [N], logit_scale and softcap.
    """
    hidden, weight, targets = (inputs[name].detach() for name in ("hidden", "weight", "targets"))
    raw = (hidden @ weight.t()).requires_grad_()
    z = transform_logits(raw, bias=inputs.get("bias"), **head)
    (slope,) = torch.autograd.grad(z.sum(), raw)
    log_p = z.detach().log_softmax(1)
    p = log_p.exp()
    surprise = (log_p - (p * log_p).sum(1, keepdim=True)).abs()
    M = (p * surprise).sum(1, keepdim=True)
    logits_gradient = 2 * g.abs()[:, None] + g_entropy.abs()[:, None] * (2 * surprise + 2 + M)
    logits_gradient = logits_gradient * p * slope.abs()
    moved = {
        "logprobs": 1 - p.gather(1, targets.clamp_min(0)[:, None])[:, 0],
        "entropy": M[:, 0],
        "hidden": logits_gradient @ weight.abs(),
        "weight": logits_gradient.t() @ hidden.abs(),
        "bias": logits_gradient.sum(0),
    }
    return {name: 2 * ERROR * x for name, x in moved.items()}
