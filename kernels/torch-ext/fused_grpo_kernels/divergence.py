"""The divergence of a teacher's softmax from a student's, and the student's logits overwritten by its gradient.

With c = z - max z of a row's transformed logits, e = e^c, S the sum of e (s of the student, t of the teacher),
d = c_s - c_t and rho = S_s / S_t, p the student's softmax and q the teacher's,

    reverse_kl   KL(p | q) = X / S_s - log rho               X_v = e_s d
    forward_kl   KL(q | p) = log rho + Y / S_t               X_v = e_t      Y_v = -e_t d
    jsd          -((1 - beta) X + beta Y) / S_s              X_v = e_s log(M / e_s)      Y_v = f log(M / f)

with f = rho e_t and M = (1 - beta) e_s + beta f, without an index v for sums over the row, and
d divergence / dz_v = x X_v - y e_s,v with two numbers of the row. One logarithm, of M over the larger of e_s and f,
gives both of jsd: the other is |d - log rho| more.

The largest logits take no part in the sums: S - 1 is a sum of its own, log rho is log1p((s - t) / S_t) with the two
sums of the others (near -1, of a student far surer than its teacher, that has lost digits: the logarithm of S_s / S_t),
and where the student's most probable token has more than half of the probability, its gradient is minus the sum of the
others', which a difference of two probabilities near 1 would lose.

The sums start with the first block and are relative to the largest logits so far. Where a block has larger ones, they
are rescaled, and X and Y move with d: no sweep finds the largest logits first.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import exp, inverse, load_logits, log1p, logit, logit_slope
from .finish_rows import Statistics, finish_rows
from .softmax_weights import row_statistics
from .tuning import pair_tile

# Of c: e^c is 0 there, and its product with c too. Of a logit: the largest one is found from there on.
LEAST, LOWEST = tl.constexpr(-128.0), tl.constexpr(-1e30)
REVERSE, FORWARD, JSD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {"reverse_kl": REVERSE, "forward_kl": FORWARD, "jsd": JSD}

# Both models, and every sweep, must round alike: c is 0 only at the largest logit, and equal logits have no divergence.
# A compiler fuses a product into a sum where it likes, in one model, or in one sweep, and not in the other.
ROUND_EACH = {"enable_fp_fusion": False}

ROW_VECTORS = ["student_temperature", "teacher_temperature", "upstream", "targets", "grad_logprobs", "divergence"]


@triton.jit
def _logits(model, first, V, BLOCK_V: tl.constexpr):
    """(h.w + bias, the transformed logits) of a block of a row of a model; -inf past the end."""
    start, bias, logit_scale, softcap, inverse_temperature = model
    columns = first + tl.arange(0, BLOCK_V)
    # Masks cost as much as the maths, and only the last block needs them.
    if first + BLOCK_V > V:
        x = load_logits(start, bias, columns, V, True)
        z = tl.where(columns < V, logit(x, logit_scale, softcap, inverse_temperature), float("-inf"))
    else:
        x = load_logits(start, bias, columns, V, False)
        z = logit(x, logit_scale, softcap, inverse_temperature)
    return x, z


@triton.jit
def _log_of_mixture(gap, weight):
    """log(1 - weight + weight e^-gap) for gap >= 0, without the cancellation of 1 - e^-gap."""
    # Fitted to (1 - e^-g) / g on [0, 0.25] for the least relative error, 1e-8. Fused by hand, as in `tanh`.
    poly = tl.fma(gap, 7.6724701e-3, -4.1565122e-2)
    poly = tl.fma(poly, gap, 1.6666163e-1)
    poly = tl.fma(poly, gap, -0.49999996)
    fall = tl.where(gap < 0.25, gap * tl.fma(poly, gap, 1.0), 1.0 - exp(-gap))
    y = weight * fall
    u = 1.0 - y
    # What the rounding of u took from the logarithm: near 1 its slope is 1, and elsewhere u is nearly exact.
    return tl.log(u) + ((1.0 - u) - y)


@triton.jit
def _terms(c_s, c_t, log_rho, beta, KIND: tl.constexpr):
    """(e_s, e_t or f, X, Y) of a block."""
    if KIND != FORWARD:
        c_s = tl.maximum(c_s, LEAST, propagate_nan=tl.PropagateNan.ALL)
    if KIND != REVERSE:
        c_t = tl.maximum(c_t, LEAST, propagate_nan=tl.PropagateNan.ALL)
    if KIND == JSD:
        e_s, e_t, d = exp(c_s), exp(c_t + log_rho), (c_s - c_t) - log_rho
        gap, is_student_larger = tl.abs(d), d > 0.0
        log_larger = _log_of_mixture(gap, tl.where(is_student_larger, beta, 1.0 - beta))
        log_smaller = log_larger + gap
        x = e_s * tl.where(is_student_larger, log_larger, log_smaller)
        y = e_t * tl.where(is_student_larger, log_smaller, log_larger)
    else:
        e_s, e_t = exp(c_s), exp(c_t)
        # A token of probability 0 adds nothing; 0 * inf would be NaN.
        d = tl.where((e_s if KIND == REVERSE else e_t) == 0.0, 0.0, c_s - c_t)
        x, y = (e_s * d, e_t) if KIND == REVERSE else (e_t, -e_t * d)
    return e_s, e_t, x, y


@triton.jit
def _sums(student, teacher, m_s, m_t, log_rho, beta, V, KIND: tl.constexpr, BLOCK_V: tl.constexpr):
    """(m_s, m_t, s, t, X without the student's largest logit, X there, Y) of a row.

    The largest logits are found on the way, but for jsd, which is given them. The sums are relative to those so far.
    Equal largest logits but one are in s and t.
    """
    zero = tl.zeros([BLOCK_V], tl.float32)
    s, t, x, x_peak, y, peaks_s, peaks_t = zero, zero, zero, zero, zero, zero, zero
    for first in range(0, V, BLOCK_V):
        z_s, z_t = _logits(student, first, V, BLOCK_V)[1], _logits(teacher, first, V, BLOCK_V)[1]
        c_s, c_t = z_s - m_s, z_t - m_t
        # Few blocks have a logit as large as the largest so far.
        has_peaks = tl.max(tl.maximum(c_s, c_t), 0) >= 0.0
        if has_peaks and KIND != JSD:
            top_s, top_t = tl.maximum(m_s, tl.max(z_s, 0)), tl.maximum(m_t, tl.max(z_t, 0))
            rise_s, rise_t = top_s - m_s, top_t - m_t
            m_s, m_t, decay_s, decay_t, fall = top_s, top_t, exp(-rise_s), exp(-rise_t), rise_t - rise_s
            # A sum may be inf, of tokens without probability in the other model: 0 * inf is to be 0.
            if KIND == REVERSE:
                x = decay_s * tl.where(decay_s == 0.0, 0.0, x + fall * s)
                x_peak = decay_s * tl.where(decay_s == 0.0, 0.0, x_peak + fall * peaks_s)
            else:
                x, x_peak = decay_t * x, decay_t * x_peak
                y = decay_t * tl.where(decay_t == 0.0, 0.0, y - fall * (t + peaks_t))
            # Former peaks are others.
            x, x_peak = tl.where(rise_s > 0.0, x + x_peak, x), tl.where(rise_s > 0.0, 0.0, x_peak)
            s, peaks_s = tl.where(rise_s > 0.0, decay_s * (s + peaks_s), s), tl.where(rise_s > 0.0, 0.0, peaks_s)
            t, peaks_t = tl.where(rise_t > 0.0, decay_t * (t + peaks_t), t), tl.where(rise_t > 0.0, 0.0, peaks_t)
            c_s, c_t = z_s - m_s, z_t - m_t
        e_s, e_t, x_terms, y_terms = _terms(c_s, c_t, log_rho, beta, KIND)
        if has_peaks:
            peaks_s += tl.where(c_s == 0.0, 1.0, 0.0)
            peaks_t += tl.where(c_t == 0.0, 1.0, 0.0)
            x_peak += tl.where(c_s == 0.0, x_terms, 0.0)
            e_s, x_terms = tl.where(c_s == 0.0, 0.0, e_s), tl.where(c_s == 0.0, 0.0, x_terms)
            e_t = tl.where(c_t == 0.0, 0.0, e_t)
        s += e_s
        t += e_t
        x += x_terms
        y += y_terms
    ties_s, ties_t = tl.sum(peaks_s, 0) - 1.0, tl.sum(peaks_t, 0) - 1.0
    return m_s, m_t, tl.sum(s, 0) + ties_s, tl.sum(t, 0) + ties_t, tl.sum(x, 0), tl.sum(x_peak, 0), tl.sum(y, 0)


@triton.jit
def _log_rho(s, t):
    change = (s - t) / (1.0 + t)
    return tl.where(change < -0.5, tl.log((1.0 + s) / (1.0 + t)), log1p(change))


@triton.jit
def _divergence_of(s, t, x, y, beta, KIND: tl.constexpr):
    if KIND == JSD:
        value = ((beta - 1.0) * x - beta * y) / (1.0 + s)
    elif KIND == REVERSE:
        value = x / (1.0 + s) - _log_rho(s, t)
    else:
        value = y / (1.0 + t) + _log_rho(s, t)
    return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize_on_alignment=ROW_VECTORS)
def _divergence_kernel(
    student,
    teacher,
    gradient,
    student_bias,
    teacher_bias,
    student_temperature,
    teacher_temperature,
    upstream,
    targets,
    grad_logprobs,
    divergence,
    V,
    student_row,
    teacher_row,
    gradient_row,
    student_scale: tl.float32,
    student_softcap,
    teacher_scale: tl.float32,
    teacher_softcap,
    beta: tl.float32,
    KIND: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: rows. A program owns the memory of one row of both tiles, which it reads twice, or three times for jsd.

    `gradient` is the same memory as `student`, in elements of the same or of half the size, written left to right
    behind a barrier: see `_logits_gradient_kernel`. None is no gradient, and one read less.
    """
    row = tl.program_id(0).to(tl.int64)
    inverse_s, inverse_t = inverse(tl.load(student_temperature + row)), inverse(tl.load(teacher_temperature + row))
    student_args = (student + row * student_row, student_bias, student_scale, student_softcap, inverse_s)
    teacher_args = (teacher + row * teacher_row, teacher_bias, teacher_scale, teacher_softcap, inverse_t)
    m_s, m_t, log_rho = tl.full([], LOWEST, tl.float32), tl.full([], LOWEST, tl.float32), 0.0
    if KIND == JSD:
        m_s, m_t, s, t = _sums(student_args, teacher_args, m_s, m_t, log_rho, beta, V, FORWARD, BLOCK_V)[:4]
        log_rho = _log_rho(s, t)
        x_others, x_peak, y = _sums(student_args, teacher_args, m_s, m_t, log_rho, beta, V, KIND, BLOCK_V)[4:]
    else:
        m_s, m_t, s, t, x_others, x_peak, y = _sums(
            student_args, teacher_args, m_s, m_t, log_rho, beta, V, KIND, BLOCK_V
        )
    tl.store(divergence + row, _divergence_of(s, t, x_others + x_peak, y, beta, KIND))
    if gradient is not None:
        weight, g, target = tl.load(upstream + row), 0.0, -1
        if targets is not None:
            g, target = tl.load(grad_logprobs + row), tl.load(targets + row).to(tl.int32)
        if KIND == FORWARD:
            x_factor, e_factor = -weight / (1.0 + t), (g - weight) / (1.0 + s)
        else:
            factor = weight if KIND == REVERSE else (beta - 1.0) * weight
            x_factor = factor / (1.0 + s)
            e_factor = (x_factor * (x_others + x_peak) + g) / (1.0 + s)
        gradient_of_others = x_factor * x_others - e_factor * s
        # c of the most probable token, 0, where it has more than half of the probability; elsewhere 1, which no c is.
        confident = tl.where(s < 1.0, 0.0, 1.0)
        for first in range(0, V, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            raw, z = _logits(student_args, first, V, BLOCK_V)
            c_s, c_t = z - m_s, _logits(teacher_args, first, V, BLOCK_V)[1] - m_t
            terms = _terms(c_s, c_t, log_rho, beta, KIND)
            dz = x_factor * terms[2] - e_factor * terms[0]
            # Minus the gradient of all the others, with that of the target.
            at_target = tl.where(columns == target, g, 0.0)
            dz = tl.where(c_s == confident, at_target - g - gradient_of_others, dz + at_target)
            d_raw = dz * logit_slope(raw, student_scale, student_softcap, inverse_s)
            tl.debug_barrier()
            tl.store(gradient + row * gradient_row + columns, d_raw.to(gradient.dtype.element_ty), mask=columns < V)


def divergence_gradient_(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: str,
    beta: float,
    upstream: Tensor | None,
    student_head: Mapping[str, Any],
    teacher_head: Mapping[str, Any],
    targets: Tensor | None = None,
    grad_logprobs: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """The divergence of each row, and the student's logits overwritten by the gradient of the loss.

    Args:
        student, teacher: [R, V] fp32, raw h.w of the same tokens; columns adjacent, rows may be further apart than V.
        kind: "reverse_kl", "forward_kl" or "jsd".
        beta: of "jsd", between 0 and 1.
        upstream: [R] fp32, dL/ddivergence; None for no gradient, then no tile is written.
        student_head, teacher_head: bias [V] or None, temperature [R], logit_scale and softcap of each, by name; all
            but the temperature may be left out.
        targets, grad_logprobs: [R] int64 in [0, V) and [R] fp32, dL/dlogprobs of the student's targets, which is
            added; or neither.
        dtype: of the gradient. bf16 and fp16 are written into the front half of each row's memory.

    Returns:
        (divergences [R] fp32, in nats and never negative; dL/d(h.w) of the student [R, V] of `dtype`, a view of the
        memory of `student`, or None). dL/dbias is the sum of the latter over rows.

    Memory: none.
    """
    R, V = student.shape
    gradient = None if upstream is None else student.view(dtype)[:, :V]
    divergence = torch.empty(R, dtype=torch.float32, device=student.device)
    if R == 0:
        return divergence, gradient
    heads = [{"bias": None, "logit_scale": 1.0, "softcap": None, **head} for head in (student_head, teacher_head)]
    rows = [head[name] for name in ("bias", "temperature") for head in heads]
    rows += [upstream, targets, grad_logprobs]
    with launching_on(student.device):
        _divergence_kernel[(R,)](
            student,
            teacher,
            gradient,
            *(None if vector is None else vector.contiguous() for vector in rows),
            divergence,
            V,
            student.stride(0),
            teacher.stride(0),
            None if gradient is None else gradient.stride(0),
            *(head[name] for head in heads for name in ("logit_scale", "softcap")),
            beta,
            KIND=KINDS[kind].value,
            **pair_tile(student.device).launch_options() | ROUND_EACH,
        )
    return divergence, gradient


class Divergence:
    """The divergence of two tiles in two steps, for a gradient that depends on the student's log-probs.

    Args:
        student, teacher, kind, beta, student_head, teacher_head: as in `divergence_gradient_`.
        targets: [R] int64 in [0, V), of `statistics` and of the gradient.
        entropy: also compute the student's entropies.
        differentiated: whether `gradient_` will be called; here it makes no difference.
    """

    def __init__(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        kind: str,
        beta: float,
        student_head: Mapping[str, Any],
        teacher_head: Mapping[str, Any],
        targets: Tensor,
        entropy: bool = False,
        differentiated: bool = True,
    ) -> None:
        self._tiles, self._targets, self._entropy = (student, teacher), targets, entropy
        options = {"kind": kind, "beta": beta, "student_head": student_head, "teacher_head": teacher_head}
        self._options: dict[str, Any] = options
        self._divergence: Tensor | None = None

    @property
    def divergence(self) -> Tensor:
        """[R] fp32. Where there is a gradient, of the same launch."""
        if self._divergence is None:
            self._divergence, _ = divergence_gradient_(*self._tiles, upstream=None, **self._options)
        return self._divergence

    def statistics(self) -> Statistics:
        """Those of the student, as `finish_rows` returns them: a pass of its own, before the gradient."""
        head = self._options["student_head"]
        state = row_statistics(self._tiles[0], self._targets, entropy=self._entropy, **head)
        return finish_rows([state], entropy=self._entropy)

    def gradient_(self, upstream: Tensor, grad_logprobs: Tensor, *, dtype: torch.dtype) -> Tensor:
        """The gradient of `divergence_gradient_`, for dL/ddivergence and dL/dlogprobs, each [R] fp32."""
        self._divergence, gradient = divergence_gradient_(
            *self._tiles,
            upstream=upstream,
            targets=self._targets,
            grad_logprobs=grad_logprobs,
            dtype=dtype,
            **self._options,
        )
        assert gradient is not None
        return gradient
