"""The maths of a row, derived once for all kernels, and the functions that they share.

A row has logits z_v = softcap(logit_scale * (h.w_v + bias_v)) / temperature and a target t. With m near the largest of
the other logits, and sums over v != t,

    s = sum_v e^(z_v - m)        w = sum_v e^(z_v - m) (z_v - m)        d = m + log s - z_t

**Log-prob and entropy.**

    log p = -softplus(d)        1 - p = -expm1(log p)        p_v = (1 - p) e^(z_v - m) / s
    H = -p log p + (1 - p) (softplus(-d) + log s - w / s)

so a token of probability 1 - 1e-9 keeps a log-prob of -1e-9 where a log-sum-exp minus z_t would round to 0, no rounding
can make a log-prob positive, and the entropy is a sum of terms that are all >= 0. m, s and w of parts of the columns
(tiles, splits, shards) merge into those of the row.

**Gradient**, with g = dL/d log p and g_H = dL/dH:

    dL/dz_v = -g p_v - g_H p_v (log p_v + H)                  v != t
    dL/dz_t =  g (1 - p) - g_H p (log p + H)
    dL/d(h.w_v) = dL/dz_v * slope_v        slope_v = dsoftcap_v * logit_scale / temperature, dsoftcap = 1 - tanh^2 or 1

**Softmax weights**, where g_H = 0: with E_v = e^(z_v - m) dsoftcap_v for v != t, E_t = -s dsoftcap_t,

    d log p / d(h.w_v) = scale * E_v        scale = -(1 - p) / s * logit_scale / temperature

for the target as for any other token. The gradients of a linear head are then products with the weights as they are,
dH = factor (E W) and dW = E^T (factor h) with factor = g scale: no pass over d-logits, nothing to scatter.

The loss of a token and its derivatives are in grpo_loss.py, the divergence of two rows in divergence.py. Triton has no
expm1, log1p or tanh, and the interpreter has no libdevice, so they are implemented here. No mask uses a finite number
in place of -inf: very negative logits stay exact.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x, flushed to 0 below 1e-38; tl.exp takes three more instructions for subnormal results."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def expm1_minus_x(x):
    """exp(x) - 1 - x to a few ulp: a series where the terms would cancel, the formula elsewhere."""
    # The Taylor series up to x^9; the next term is below 1e-8 of the sum at |x| = 0.5.
    near = tl.where(tl.abs(x) < 0.5, x, 0.0)
    poly = 2.7557319e-6 * near + 2.4801587e-5
    poly = poly * near + 1.9841270e-4
    poly = poly * near + 1.3888889e-3
    poly = poly * near + 8.3333333e-3
    poly = poly * near + 4.1666667e-2
    poly = poly * near + 1.6666667e-1
    poly = poly * near + 0.5
    return tl.where(tl.abs(x) < 0.5, poly * near * near, tl.exp(x) - 1.0 - x)


@triton.jit
def expm1(x):
    """exp(x) - 1 to a few ulp."""
    near = tl.where(tl.abs(x) < 0.5, x, 0.0)
    return tl.where(tl.abs(x) < 0.5, near + expm1_minus_x(near), tl.exp(x) - 1.0)


@triton.jit
def log1p(y):
    """log(1 + y) to a few ulp, for y > -1."""
    u = 1.0 + y
    # Kahan: y / (u - 1) corrects log(u) for the rounding of 1 + y.
    lost = tl.where(u == 1.0, 1.0, u - 1.0)
    return tl.where(u == 1.0, y, tl.log(u) * (y / lost))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow and to a few ulp in both tails."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def tanh(x):
    """tanh(x) to a few ulp: a polynomial where 1 - 2 e^-2x / (1 + e^-2x) would cancel, that formula elsewhere."""
    y = tl.abs(x)
    near = tl.minimum(y, 0.6)
    square = near * near
    # Fitted to (tanh(x) / x - 1) / x^2 on [0, 0.6] for the least relative error of tanh, 3e-9.
    # Fused by hand, since the kernel of the divergence lets the compiler fuse nothing. 2 log2(e) is one factor.
    poly = tl.fma(square, -5.8951466e-3, 2.0795962e-2)
    poly = tl.fma(poly, square, -5.3783827e-2)
    poly = tl.fma(poly, square, 1.3331924e-1)
    poly = tl.fma(poly, square, -3.3333299e-1)
    e = tl.exp2(y * -2.8853900817779268)
    size = tl.where(y < 0.6, tl.fma(near, square * poly, near), 1.0 - 2.0 * e / (1.0 + e))
    return tl.where(x < 0.0, -size, size)


@triton.jit
def inverse(temperature):
    """1 / temperature, correctly rounded: every kernel must scale by the same bits."""
    return tl.math.div_rn(tl.full(temperature.shape, 1.0, tl.float32), temperature)


@triton.jit
def load_logits(start, bias, columns, C, MASKED: tl.constexpr):
    """h.w + bias at these columns, fp32; 0 past the end."""
    if MASKED:
        x = tl.load(start + columns, mask=columns < C, other=0.0)
        if bias is not None:
            x += tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)
    else:
        x = tl.load(start + columns)
        if bias is not None:
            x += tl.load(bias + columns).to(tl.float32)
    return x


@triton.jit
def add_bias(raw, bias, columns, V):
    """x = raw + bias for a tile of raw h.w [ROWS, COLUMNS] in fp32; None is no bias."""
    if bias is not None:
        raw += tl.load(bias + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    return raw


@triton.jit
def logit(x, logit_scale, softcap, inverse_temperature):
    """z = softcap(logit_scale * x) / temperature for x = h.w + bias in fp32."""
    if softcap is None:
        return x * (logit_scale * inverse_temperature)
    else:
        # An optional float cannot be annotated, and without annotation it may be fp64.
        cap = tl.cast(softcap, tl.float32)
        return cap * tanh(x * logit_scale * (1.0 / cap)) * inverse_temperature


@triton.jit
def softcap_slope(x, logit_scale, softcap):
    """softcap'(logit_scale * x). 1 - tanh^2 is 4 e / (1 + e)^2 here, which does not cancel where it saturates."""
    e = exp(-2.0 * tl.abs(x * logit_scale * (1.0 / tl.cast(softcap, tl.float32))))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def logit_slope(x, logit_scale, softcap, inverse_temperature):
    """dz / dx."""
    slope = logit_scale * inverse_temperature
    if softcap is not None:
        slope = slope * softcap_slope(x, logit_scale, softcap)
    return slope


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    pairs = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def column_blocks(tile, WIDTH: tl.constexpr):
    """A tile as a tuple of blocks of at most WIDTH columns, left to right."""
    if tile.shape[1] <= WIDTH:
        return (tile,)
    else:
        left_half, right_half = halves(tile)
        return column_blocks(left_half, WIDTH) + column_blocks(right_half, WIDTH)


@triton.jit
def start_statistics(target):
    """(target logit, maximum, total, weighted) before the first logit; the target logit is -inf for a target of -1."""
    none = tl.full(target.shape, float("-inf"), tl.float32)
    zero = tl.zeros(target.shape, tl.float32)
    return tl.where(target < 0, none, zero), none, zero, zero


@triton.jit
def sum_at_targets(x, first_column, target):
    """The values of a tile at the targets, 0 for rows whose target is not in the tile."""
    columns = first_column + tl.arange(0, x.shape[1])
    return tl.sum(tl.where(columns[None, :] == target[:, None], x, 0.0), 1)


@triton.jit
def hide_targets(x, first_column, target, V):
    """A tile with -inf at the targets and past the end."""
    columns = first_column + tl.arange(0, x.shape[1])
    # Added, not selected: LLVM would pack two combined masks into words and unpack them bit by bit.
    past_the_end = tl.where(columns < V, 0.0, float("-inf"))[None, :]
    return tl.where(columns[None, :] == target[:, None], float("-inf"), x) + past_the_end


@triton.jit
def add_tile(maximum, total, weighted, x, factor, ENTROPY: tl.constexpr, NARROW: tl.constexpr):
    """Update the running statistics [ROWS] by the logits z = factor * x of a tile x [ROWS, COLUMNS]; factors > 0."""
    # Narrow blocks are summed element by element, then across threads once. With the entropy there are two sums.
    blocks = column_blocks(x, NARROW // 2 if ENTROPY else NARROW)
    top = blocks[0]
    for i in tl.static_range(1, len(blocks)):
        top = tl.maximum(top, blocks[i])
    new_maximum = tl.maximum(maximum, factor * tl.max(top, 1))
    # All logits so far are -inf: with any finite shift, -inf - shift is not NaN.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    sums = tl.zeros(top.shape, tl.float32)
    products = tl.zeros(top.shape, tl.float32)
    for i in tl.static_range(len(blocks)):
        centred = factor[:, None] * blocks[i] - shift[:, None]
        e = exp(centred)
        sums += e
        if ENTROPY:
            # Below -128 exp is 0 in fp32: the clamps only avoid 0 * -inf.
            products += e * tl.maximum(centred, -128.0)
    rescale = exp(maximum - shift)
    if ENTROPY:
        moved = weighted + tl.maximum(maximum - shift, -128.0) * total
        weighted = rescale * moved + tl.sum(products, 1)
    return new_maximum, rescale * total + tl.sum(sums, 1), weighted


@triton.jit
def merge_statistics(maximum, total, weighted, ENTROPY: tl.constexpr):
    """The statistics [ROWS] of a row from those of its parts [PARTS, ROWS]."""
    new_maximum = tl.max(maximum, 0)
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    drop = maximum - shift[None, :]
    rescale = tl.exp(drop)
    merged = new_maximum
    if ENTROPY:
        merged = tl.sum(rescale * (weighted + tl.maximum(drop, -128.0) * total), 0)
    return new_maximum, tl.sum(rescale * total, 0), merged


@triton.jit
def finish_row(maximum, total, weighted, target_logit, ENTROPY: tl.constexpr):
    """(log p of the target, entropy) from the statistics of all the other tokens."""
    # Without another token (V = 1, or all others at -inf) the target is certain, d = -inf. A target at -inf, or of
    # -1, has d = inf: log p = -inf, and all probability is that of the others. The replacements avoid inf - inf.
    is_certain = total == 0.0
    total = tl.where(is_certain, 1.0, total)
    log_total = tl.log(total)
    missing = target_logit == float("-inf")
    target_logit = tl.where(missing, 0.0, target_logit)
    # (maximum - target) first: the difference of two large numbers is exact, their sums with log_total are not.
    d = tl.where(missing, float("inf"), (maximum - target_logit) + log_total)
    logprob = -softplus(d)
    entropy = logprob
    if ENTROPY:
        # Of one token beside the target this is 0, and no rounding may make it less.
        spread = tl.maximum(log_total - tl.math.div_rn(weighted, total), 0.0, propagate_nan=tl.PropagateNan.ALL)
        others_entropy = tl.where(is_certain, 0.0, softplus(-d)) + spread
        entropy = -expm1(logprob) * others_entropy - tl.exp(logprob) * tl.maximum(logprob, -128.0)
    return logprob, entropy
