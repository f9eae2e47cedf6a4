"""How long a GRPO step takes on GPUs on which it has not run: from the sizes of the model, the batch and the GPUs.

docs/planning.md has the phases of a step and what is left out; bench/predictions/measured.md has how far off the
predictions are.

Lengths have the distribution of the largest entropy with this mean and maximum: exponential, cut off. An engine with
fewer places than sequences refills them until none waits, and then drains: what is left of a sequence at that time has
the distribution of renewal theory, S_e(t) = integral of S / mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

from fused_grpo.config import check_option_types, check_ranges
from fused_grpo.errors import InputError

BINS = 64  # of the lengths
MACHINE = 8  # GPUs with fast links between them
MOST_GPUS = 16_384  # of which all splits are predicted in a quarter of a minute
MAX_SEQUENCES = 1024  # of a vLLM engine, unless --max-num-seqs says otherwise
TRAINING_BYTES = 16  # of a parameter: weight, gradient and AdamW state in fp32
USABLE, COLOCATED = 0.9, 0.3  # shares of a GPU's memory: of a server or a trainer alone, and of vLLM in its process


@dataclass(frozen=True)
class GPU:
    """Peaks of the vendor: FLOP/s of dense bf16 products, bytes/s of the memory, bytes of it."""

    flops: float
    bandwidth: float
    memory: float
    reached: float = 1.0
    """What programs reach of these peaks, relative to Hopper."""


GPUS = {
    "a100": GPU(312e12, 2.04e12, 80e9),
    "h20": GPU(148e12, 4.0e12, 96e9),
    "h100": GPU(989e12, 3.35e12, 80e9),
    "h200": GPU(989e12, 4.8e12, 141e9),
    "b200": GPU(2250e12, 8.0e12, 180e9, 0.75),
    "gb200": GPU(2500e12, 8.0e12, 186e9, 0.75),
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What runs reach of the peaks (shares of 1), and seconds that no peak says."""

    bandwidth: float = 0.7
    """Share of the memory's bandwidth while decoding."""
    decode: float = 0.5
    """Share of the FLOP/s in the engine, for completions and prompts."""
    host: float = 4e-3
    """Time of the engine's scheduler and launches for one token of all sequences."""
    sequence: float = 2e-5
    """The same for each sequence: sampling, detokenizing, stop conditions."""
    all_reduce: float = 1e-5
    """One all-reduce of tensor parallelism, for each doubling of its GPUs."""
    far_all_reduce: float = 8e-5
    """What an all-reduce takes longer if it leaves the machine."""
    mfu: float = 0.41
    """Share of the FLOP/s in training."""
    expert_mfu: float = 0.10
    """The same for mixtures of experts, attention excepted."""

    def __post_init__(self) -> None:
        check_option_types(self)
        shares = ("above 0, at most 1", lambda value: 0 < value <= 1, "bandwidth decode mfu expert_mfu")
        seconds = ("at least 0", lambda value: 0 <= value < math.inf, "host sequence all_reduce far_all_reduce")
        check_ranges(self, (shares, seconds))


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a causal LM."""

    model_params: float
    """Number of parameters, embeddings included, such as 7.6e9."""
    active_params: float | None = None
    """Of a mixture of experts: parameters that one token is computed with, such as 3.3e9. None is all."""
    layers: int
    """Number of layers."""
    hidden_size: int
    """Width of the hidden states."""
    heads: int
    """Number of attention heads."""
    kv_heads: float
    """Number of heads of keys and values. Of latent attention: numbers that are cached of a token, by 2 * head_dim."""
    head_dim: int = 128
    """Width of a head."""
    vocab_size: int
    """Number of tokens in the vocabulary."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""

    def __post_init__(self) -> None:
        check_option_types(self)
        sizes = "model_params active_params layers hidden_size heads kv_heads head_dim vocab_size"
        check_ranges(self, (("above 0", lambda value: 0 < value < math.inf, sizes),))
        if self.active > self.model_params:
            raise InputError(f"got active_params={self.active:g}, want at most model_params={self.model_params:g}")
        embeddings = self.head * (1 if self.tie_word_embeddings else 2)
        if self.active <= embeddings:
            raise InputError(
                f"got {self.active:g} parameters for a token, want more than the {embeddings:g} of the embedding and "
                "the head; fix: count these, too"
            )

    @property
    def active(self) -> float:
        return self.model_params if self.active_params is None else self.active_params

    @property
    def head(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def in_products(self) -> float:
        """Parameters that a token is multiplied with: without the embedding, if that is not the head too."""
        return self.active - (0 if self.tie_word_embeddings else self.head)

    @property
    def token_bytes(self) -> float:
        """Keys and values of a token, in 16 bits."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def attention_flop(self) -> int:
        """Of a token that looks back on one other."""
        return 4 * self.layers * self.heads * self.head_dim

    def bytes_read(self, sequences: float) -> float:
        """Of the weights in 16 bits, for one token of so many sequences. Each meets `active` of the parameters.

        >>> sizes = {"layers": 48, "hidden_size": 2048, "heads": 32, "kv_heads": 4, "vocab_size": 151_936}
        >>> moe = ModelSize(model_params=30e9, active_params=3e9, **sizes)
        >>> [round(moe.bytes_read(count) / 1e9, 1) for count in (1, 8, 1000)]
        [6.0, 34.2, 60.0]
        """
        return 2 * self.model_params * (1 - float((1 - self.active / self.model_params) ** sequences))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A batch, the GPUs and the way to sample. Lengths in tokens."""

    size: ModelSize
    gpus: int
    """Number of GPUs, of rollouts and training together."""
    gpu: str = "h100"
    """Kind of the GPUs: a100, h20, h100, h200, b200 or gb200."""
    prompts: int = 64
    """Prompts of a generated batch."""
    num_generations: int = 16
    """Completions of each prompt."""
    prompt_length: int = 512
    """Mean length of the prompts."""
    completion_length: float = 1024
    """Mean length of the completions (`completions/mean_length` in the log of a run)."""
    max_completion_length: int = 4096
    """Length of the longest completion."""
    generate_ahead: int = 0
    """Batches that servers sample while the optimizer learns. 0: rollouts and training take turns."""
    in_flight: bool = False
    """Servers sample of several batches at a time and take new weights in the middle of completions, so that they
    never drain: prime-rl and NeMo-RL, not this trainer."""
    gradient_checkpointing: bool = True
    """Recompute each layer in the backward pass."""
    log_prob_passes: int = 0
    """Forward passes besides the loss: one for a reference, one for old log-probs of several steps per generation."""
    share_prompts: bool = True
    """Compute a prompt once for its completions in the training pass."""
    reward_seconds: float = 0.0
    """Seconds that the rewards of a batch take."""
    tool_seconds: float = 0.0
    """Seconds that a completion waits for its tools, all calls together."""
    sync_bandwidth: float = 10e9
    """Bytes per second of a weight sync, of all servers together."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that vLLM takes. None is 0.9 for servers and 0.3 in the trainer's process."""
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        check_option_types(self)
        counts = "prompts num_generations max_completion_length"
        lengths = "prompt_length generate_ahead log_prob_passes reward_seconds tool_seconds"
        ranges = (
            (f"1 to {MOST_GPUS}", lambda value: 1 <= value <= MOST_GPUS, "gpus"),
            ("at least 1", lambda value: value >= 1, counts),
            ("at least 0", lambda value: 0 <= value < math.inf, lengths),
            ("above 0", lambda value: value > 0, "completion_length sync_bandwidth"),
            ("above 0, at most 1", lambda value: 0 < value <= 1, "gpu_memory_utilization"),
            (f"one of {', '.join(GPUS)}", lambda value: value in GPUS, "gpu"),
        )
        check_ranges(self, ranges)
        if self.completion_length > self.max_completion_length:
            given = f"completion_length={self.completion_length:g}, max_completion_length={self.max_completion_length}"
            raise InputError(f"got {given}, want a mean that is at most the maximum; fix: raise the maximum")

    @property
    def completions(self) -> int:
        return self.prompts * self.num_generations


@dataclass(frozen=True)
class Step:
    """A step on one split of the GPUs, whether or not the optimizer's state fits.

    In process (`colocate`) the same GPUs sample and train.
    """

    run: Run
    rollout_gpus: int
    train_gpus: int
    tensor_parallel: int
    colocate: bool = False

    @property
    def replicas(self) -> int:
        return self.rollout_gpus // self.tensor_parallel

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds of each."""
        return {
            "rollouts": rollout_seconds(self.run, self.rollout_gpus, self.tensor_parallel, colocate=self.colocate),
            "rewards": self.run.reward_seconds,
            "training": train_seconds(self.run, self.train_gpus),
            "sync": 2 * self.run.size.model_params / self.run.sync_bandwidth,
        }

    @property
    def seconds(self) -> float:
        rollouts, rewards, training, sync = self.phases.values()
        is_prefetched = self.run.generate_ahead > 0 and not self.colocate
        return sync + (max(rollouts, rewards + training) if is_prefetched else rollouts + rewards + training)

    @property
    def bottleneck(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])


@lru_cache
def survivors(mean: float, longest: float) -> tuple[float, ...]:
    """S(t): shares of the completions that are longer than t, on average over each of BINS equal parts of [0, longest].

    So they add up to the mean, even where it is shorter than a part.

    >>> [round(survivors(500.0, 1000.0)[index], 2) for index in (0, 32, 63)]  # the mean is in the middle: uniform
    [0.99, 0.49, 0.01]
    >>> round(sum(survivors(2.0, 1000.0)) * 1000 / BINS, 6)
    2.0
    """
    if mean >= longest:
        return (1.0,) * BINS
    low, high = -700.0, 700.0  # the rate of the exponential, in 1 / longest
    for _ in range(60):
        rate = (low + high) / 2
        average = 0.5 if abs(rate) < 1e-6 else 1 / rate - 1 / math.expm1(rate)
        low, high = (rate, high) if average * longest > mean else (low, rate)
    ends = [index / BINS for index in range(BINS + 1)]
    if abs(rate) < 1e-6:
        return tuple(1 - (a + b) / 2 for a, b in pairwise(ends))
    grown = [math.expm1(rate * (1 - at)) for at in ends]
    falls = [(a - b) * BINS / rate - 1 for a, b in pairwise(grown)]  # the mean of expm1(rate * (1 - t)) in each part
    return tuple(fall / grown[0] for fall in falls)


def token_seconds(run: Run, tensor_parallel: int, sequences: float, context: float) -> float:
    """One token of so many sequences, of `context` tokens on average, in an engine on so many GPUs."""
    gpu, size, rates = GPUS[run.gpu], run.size, run.rates
    read = size.bytes_read(sequences) + sequences * context * size.token_bytes
    flop = sequences * (2 * size.in_products + size.attention_flop * context)
    all_reduce = rates.all_reduce * math.log2(tensor_parallel) + rates.far_all_reduce * (tensor_parallel > MACHINE)
    device = read / (gpu.bandwidth * rates.bandwidth) + flop / (gpu.flops * rates.decode)
    host = rates.host + rates.sequence * sequences
    return device / (tensor_parallel * gpu.reached) + host + 2 * size.layers * all_reduce


def rollout_seconds(run: Run, gpus: int, tensor_parallel: int, *, colocate: bool = False) -> float:
    """The completions of a batch; infinite where the model and one sequence do not fit into an engine."""
    gpu, size, replicas = GPUS[run.gpu], run.size, gpus // tensor_parallel
    if replicas == 0:
        return math.inf
    per_replica = math.ceil(run.completions / replicas)
    alive, part = survivors(run.completion_length, run.max_completion_length), run.max_completion_length / BINS
    ages = [(index + 0.5) * part for index in range(BINS)]
    leaving = tuple(min(1.0, sum(alive[index:]) * part / run.completion_length) for index in range(BINS))  # S_e
    age = sum(leaving) * part  # mean number of tokens of a sequence in an engine that is refilled
    utilization = run.gpu_memory_utilization or (COLOCATED if colocate else USABLE)
    cache = (utilization * tensor_parallel * gpu.memory - 2 * size.model_params) / size.token_bytes
    shared = run.prompt_length / run.num_generations  # tokens of a prompt for each sequence: the prefix cache
    places = min(MAX_SEQUENCES, int(cache / (age + shared)))
    if places < 1:
        return math.inf
    prompt_tokens = math.ceil(per_replica / run.num_generations) * run.prompt_length
    seconds = 2 * prompt_tokens * size.in_products / (tensor_parallel * gpu.flops * gpu.reached * run.rates.decode)
    if run.in_flight:
        places = min(places, per_replica * max(1, run.generate_ahead))
        full = token_seconds(run, tensor_parallel, places, run.prompt_length + age)
        return seconds + full * per_replica * run.completion_length / places

    def drained(shares: Sequence[float], sequences: int) -> float:
        """The time in which so many that start at once end, of whom these shares are unfinished at each age."""
        total = 0.0
        for share, at in zip(shares, ages, strict=True):
            # The probability that the batch takes that long. Replicas may be more than there are sequences.
            unfinished = 1 - (1 - share) ** min(sequences * replicas, run.completions)
            seconds_per_token = token_seconds(run, tensor_parallel, max(1.0, sequences * share), run.prompt_length + at)
            total += part * unfinished * seconds_per_token
        return total

    together = drained(alive, per_replica)
    # Sequences that start together grow together: the cache is fullest long after the start.
    fullest = max(share * (at + shared) for share, at in zip(alive, ages, strict=True))
    if per_replica > min(MAX_SEQUENCES, cache / fullest):
        places = min(places, per_replica)
        full = token_seconds(run, tensor_parallel, places, run.prompt_length + age)
        refilled = full * (per_replica * run.completion_length / places - age) + drained(leaving, places)
        together = max(together, refilled)  # to wait for a place makes nothing faster
    return seconds + together + run.tool_seconds


def train_seconds(run: Run, gpus: int) -> float:
    """Log-probs, forward and backward pass of a batch, on so many GPUs."""
    gpu, size, rates = GPUS[run.gpu], run.size, run.rates
    alive, part = survivors(run.completion_length, run.max_completion_length), run.max_completion_length / BINS
    completion = run.completions * run.completion_length
    prompt = run.prompt_length * (run.prompts if run.share_prompts else run.completions)
    # The mean number of tokens that a token of a completion looks back on.
    back = run.prompt_length + sum((index + 0.5) * part * share for index, share in enumerate(alive)) / sum(alive)
    passes = 6 + 2 * run.gradient_checkpointing + 2 * run.log_prob_passes
    products = passes * (size.in_products - size.head) * (prompt + completion)
    products += (6 + 2 * run.log_prob_passes) * size.head * completion
    attention = passes / 2 * size.attention_flop * (completion * back + prompt * run.prompt_length / 2)
    mfu = rates.mfu if size.active == size.model_params else rates.expert_mfu
    return (products / mfu + attention / rates.mfu) / (gpus * gpu.flops * gpu.reached)


def splits(run: Run) -> list[Step]:
    """The best step of every split that fits into the GPUs' memory, the fastest first; InputError if none does.

    One where all GPUs sample and train in turn has vLLM in the trainer's processes, each with an engine of its own.
    """
    needed, memory = TRAINING_BYTES * run.size.model_params, GPUS[run.gpu].memory
    possible = []
    for rollout_gpus in range(1, run.gpus):
        if (run.gpus - rollout_gpus) * USABLE * memory >= needed:
            # Of a width that leaves GPUs over, those would train.
            powers = (2**power for power in range(rollout_gpus.bit_length()))
            widths = [width for width in powers if rollout_gpus % width == 0]
            steps = [Step(run, rollout_gpus, run.gpus - rollout_gpus, width) for width in widths]
            possible.append(min(steps, key=lambda one: one.seconds))
    utilization = run.gpu_memory_utilization or COLOCATED
    if not run.generate_ahead and run.gpus * (1 - utilization) * memory >= needed:
        possible.append(Step(run, run.gpus, run.gpus, 1, colocate=True))
    fitting = sorted((one for one in possible if one.seconds < math.inf), key=lambda one: one.seconds)
    if not fitting:
        raise InputError(
            f"got {run.gpus} x {run.gpu} for {run.size.model_params / 1e9:.3g}B parameters, want memory for weights, "
            f"gradients and AdamW state ({needed / 1e9:,.0f} GB), and for engines; fix: more GPUs, or LoRA"
        )
    return fitting
