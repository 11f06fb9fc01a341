"""Distances between what two servers said about the same tokens, with bootstrap intervals.

All log-probabilities are natural logarithms, so a KL divergence is in nats per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# The rest bucket is 1 minus a sum of float32 probabilities, so anything below a few ulp is rounding: both sides get
# this floor, which bounds what rounding can add to the divergence of a token by about 1e-5.
REST_FLOOR = 1e-6
BLOCK_TOKENS = 128
RESAMPLES = 2000


@dataclass(frozen=True)
class TopK:
    """The listed next-token log-probabilities at `n` positions.

    ids: int32 [n, k], -1 where a list is shorter. logprobs: float32 [n, k], -inf there; sorted, most likely first.
    actual: float32 [n], the log-probability of the token that the text has next.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    actual: np.ndarray

    def __post_init__(self) -> None:
        if self.ids.shape != self.logprobs.shape or self.ids.shape[:1] != self.actual.shape:
            raise ValueError(
                f"shapes do not fit: ids {self.ids.shape}, logprobs {self.logprobs.shape}, actual {self.actual.shape}"
            )

    def __len__(self) -> int:
        return len(self.actual)

    def truncated(self, k: int) -> TopK:
        """The same with at most k listed tokens per position."""
        return TopK(self.ids[:, :k], self.logprobs[:, :k], self.actual)

    @staticmethod
    def concatenate(parts: list[TopK]) -> TopK:
        width = max(part.ids.shape[1] for part in parts)

        def padded(array: np.ndarray, fill: float) -> np.ndarray:
            return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill)

        return TopK(
            np.concatenate([padded(part.ids, -1) for part in parts]),
            np.concatenate([padded(part.logprobs, -np.inf) for part in parts]),
            np.concatenate([part.actual for part in parts]),
        )


def coarse_kl(p: TopK, q: TopK, chunk: int = 256) -> np.ndarray:
    """KL(p || q) per position over the tokens that both lists have plus one bucket for all others, float64 [n], nats.

    Merging outcomes never raises a KL divergence (log-sum inequality: Cover & Thomas, Elements of Information Theory,
    theorem 2.7.1), so this is a lower bound of the divergence over the whole vocabulary.
    """
    if len(p) != len(q):
        raise ValueError(f"both sides need the same positions, got {len(p)} and {len(q)}")
    return np.concatenate([_coarse_kl(p, q, slice(i, i + chunk)) for i in range(0, len(p), chunk)] or [np.zeros(0)])


def _coarse_kl(p: TopK, q: TopK, rows: slice) -> np.ndarray:
    same = (p.ids[rows, :, None] == q.ids[rows, None, :]) & (p.ids[rows, :, None] >= 0)
    both = same.any(axis=2)
    p_log = p.logprobs[rows].astype(np.float64)
    q_log = np.take_along_axis(q.logprobs[rows].astype(np.float64), same.argmax(axis=2), axis=1)
    p_prob = np.where(both, np.exp(p_log), 0.0)
    q_prob = np.where(both, np.exp(q_log), 0.0)
    with np.errstate(invalid="ignore"):  # -inf - -inf in columns that `both` leaves out
        listed = np.where(both, p_prob * (p_log - q_log), 0.0).sum(axis=1)
    p_rest = np.maximum(1.0 - p_prob.sum(axis=1), REST_FLOOR)
    q_rest = np.maximum(1.0 - q_prob.sum(axis=1), REST_FLOOR)
    # Floors and float32 inputs can leave a sum of -1e-7 where both sides are equal.
    return np.maximum(listed + p_rest * np.log(p_rest / q_rest), 0.0)


def unlisted_mass(p: TopK) -> np.ndarray:
    """Probability outside of the list, float64 [n]: how much of each distribution the rest bucket holds."""
    return np.maximum(1.0 - np.exp(p.logprobs.astype(np.float64)).sum(axis=1), 0.0)


def same_most_likely(p: TopK, q: TopK) -> np.ndarray:
    """Whether both sides rank the same token first, bool [n]; equal log-probabilities go to the lower token id."""
    return _most_likely(p) == _most_likely(q)


def _most_likely(p: TopK) -> np.ndarray:
    best = p.logprobs == p.logprobs.max(axis=1, keepdims=True)
    return np.where(best, p.ids, np.iinfo(np.int32).max).min(axis=1)


def agreement(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Share of continuation positions with the same token, float64 [prompts]; both int [prompts, tokens]."""
    return (reference == other).mean(axis=1)


def first_divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Number of equal tokens before the first difference, int [prompts]; the length where there is none."""
    different = reference != other
    return np.where(different.any(axis=1), different.argmax(axis=1), reference.shape[1])


def surviving(divergence: np.ndarray, length: int) -> np.ndarray:
    """Share of prompts that are still identical after n tokens, n = 0 … length, float64 [length + 1]."""
    return (divergence[None, :] >= np.arange(length + 1)[:, None]).mean(axis=1)


@dataclass(frozen=True)
class Estimate:
    """A statistic with the ends of its 95% bootstrap percentile interval."""

    value: float
    low: float
    high: float


def blocks_of(window_lengths: list[int], block: int = BLOCK_TOKENS) -> np.ndarray:
    """Block number of each token when every window is cut into runs of `block` neighbouring tokens, int [total].

    A remainder shorter than half a block joins the block before it, so that no resampled unit is a handful of tokens.
    """
    numbers: list[np.ndarray] = []
    start = 0
    for length in window_lengths:
        count = max(1, int(length / block + 0.5))
        numbers.append(start + np.minimum(np.arange(length) // block, count - 1))
        start += count
    return np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)


def mean_over_blocks(
    values: np.ndarray,
    blocks: np.ndarray,
    transform: Callable[[np.ndarray], np.ndarray] = lambda mean: mean,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Estimate:
    """transform(mean of values), with an interval from resampling whole blocks.

    Neighbouring tokens share a context, so their errors are correlated: resampling single tokens would give intervals
    that are too narrow (Künsch 1989, The Jackknife and the Bootstrap for General Stationary Observations).
    """
    if len(values) == 0:
        raise ValueError("there are no values to average")
    sums = np.bincount(blocks, weights=values)
    counts = np.bincount(blocks)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
    means = transform(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(transform(np.asarray(values.mean()))), float(low), float(high))


def over_prompts(
    values: np.ndarray,
    statistic: Callable[..., np.ndarray] = np.mean,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Estimate:
    """statistic(values) (np.mean or np.median), with an interval from resampling prompts."""
    if len(values) == 0:
        raise ValueError("there are no prompts to average")
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(statistic(values[drawn], axis=1), [2.5, 97.5])
    return Estimate(float(statistic(values)), float(low), float(high))
