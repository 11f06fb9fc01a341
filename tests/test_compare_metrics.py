"""The metrics of compare against values derived by hand, from fp64 distributions, or by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zyfa_backend.compare import metrics
from zyfa_backend.compare.metrics import TopK


def top_k(probabilities: np.ndarray, k: int, actual: int = 0) -> TopK:
    """The k most likely tokens of each row of `probabilities` [n, vocabulary], as a server would list them."""
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :k]
    listed = np.take_along_axis(probabilities, order, axis=1)
    with np.errstate(divide="ignore"):
        return TopK(
            order.astype(np.int32),
            np.log(listed).astype(np.float32),
            np.log(probabilities[:, actual]).astype(np.float32),
        )


def full_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * (np.log(p) - np.log(q))).sum(axis=1)


def test_kl_of_distributions_derived_by_hand():
    # Both lists hold tokens 0 and 1: the rest is 1/4 against 1/8.
    # KL = 1/2 ln(1/2 : 1/2) + 1/4 ln(1/4 : 3/8) + 1/4 ln(1/4 : 1/8) = 1/4 ln(2/3) + 1/4 ln 2 = 1/4 ln(4/3)
    p = top_k(np.array([[1 / 2, 1 / 4, 1 / 8, 1 / 8]]), 2)
    q = top_k(np.array([[1 / 2, 3 / 8, 1 / 16, 1 / 16]]), 2)
    assert metrics.coarse_kl(p, q) == pytest.approx([math.log(4 / 3) / 4], rel=1e-6)


def test_a_token_in_one_list_only_goes_to_the_rest():
    # p lists 0 and 1, q lists 0 and 2, so only token 0 stays: KL = 1/2 ln(1/2 : 1/4) + 1/2 ln(1/2 : 3/4).
    p = top_k(np.array([[1 / 2, 1 / 4, 1 / 8, 1 / 8]]), 2)
    q = top_k(np.array([[1 / 4, 1 / 8, 1 / 2, 1 / 8]]), 2)
    assert metrics.coarse_kl(p, q) == pytest.approx([math.log(2) / 2 + math.log(2 / 3) / 2], rel=1e-6)


def test_lists_with_nothing_in_common_say_nothing():
    p = top_k(np.array([[0.9, 0.05, 0.03, 0.02]]), 1)
    q = top_k(np.array([[0.1, 0.8, 0.05, 0.05]]), 1)
    assert metrics.coarse_kl(p, q) == pytest.approx([0.0])


def test_order_and_length_of_the_lists_do_not_matter():
    p = TopK(np.array([[3, 7, 9]]), np.log(np.array([[0.5, 0.3, 0.1]], np.float32)), np.zeros(1, np.float32))
    q = TopK(
        np.array([[9, -1, 3, 7]]),
        np.array([[math.log(0.2), -np.inf, math.log(0.4), math.log(0.35)]], np.float32),
        np.zeros(1, np.float32),
    )
    expected = sum(a * math.log(a / b) for a, b in ((0.5, 0.4), (0.3, 0.35), (0.1, 0.2), (0.1, 0.05)))
    assert metrics.coarse_kl(p, q) == pytest.approx([expected], rel=1e-5)


def test_equal_servers_have_a_kl_of_zero_even_when_the_list_holds_all_probability():
    probabilities = np.array([[1.0 - 3e-8, 1e-8, 2e-8], [0.7, 0.2, 0.1]])
    same = top_k(probabilities, 3)
    assert (metrics.coarse_kl(same, same) == 0).all()


def test_chunks_do_not_change_the_result():
    rng = np.random.default_rng(3)
    p, q = (top_k(rng.dirichlet(np.full(30, 0.3), size=50), 10) for _ in range(2))
    np.testing.assert_array_equal(metrics.coarse_kl(p, q, chunk=7), metrics.coarse_kl(p, q, chunk=1000))


def test_different_numbers_of_positions_are_refused():
    one, two = (top_k(np.full((n, 4), 0.25), 2) for n in (1, 2))
    with pytest.raises(ValueError, match="1 and 2"):
        metrics.coarse_kl(one, two)


vocabulary = st.integers(3, 40)


def of_fp32(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Error of a divergence from lists in fp32: their rest is 1 minus a sum, off by some 2^-24 that meets p / q."""
    return 1e-5 + 2.0**-20 * (p / q).max(axis=1)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=vocabulary, spread=st.floats(0.05, 3.0), k=st.integers(1, 40))
def test_coarsening_never_exceeds_the_full_divergence_and_is_tight_for_the_whole_vocabulary(seed, size, spread, k):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(8, size)) * 2
    others = logits + spread * rng.normal(size=(8, size))
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (logits, others))
    full = full_kl(p, q)
    coarse = metrics.coarse_kl(top_k(p, k), top_k(q, k))
    assert (coarse <= full + of_fp32(p, q)).all()
    assert (coarse >= 0).all()
    whole = metrics.coarse_kl(top_k(p, size), top_k(q, size))
    np.testing.assert_allclose(whole, full, atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 15))
def test_a_longer_list_of_the_same_tokens_never_lowers_the_divergence(seed, k):
    # The same tokens in both lists, so that k + 1 refines the partition of k (lists with other members need not).
    rng = np.random.default_rng(seed)
    p, q = (rng.dirichlet(np.full(16, 0.5), size=4) + 1e-3 for _ in range(2))
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    ids = np.tile(np.arange(16, dtype=np.int32), (4, 1))
    lists = [TopK(ids, np.log(x).astype(np.float32), np.zeros(4, np.float32)) for x in (p, q)]
    shorter = metrics.coarse_kl(*[x.truncated(k) for x in lists])
    longer = metrics.coarse_kl(*[x.truncated(k + 1) for x in lists])
    assert (longer >= shorter - of_fp32(p, q)).all()


def test_unlisted_mass():
    p = top_k(np.array([[0.5, 0.25, 0.125, 0.125], [1.0, 0.0, 0.0, 0.0]]), 2)
    assert metrics.unlisted_mass(p) == pytest.approx([0.25, 0.0], abs=1e-7)


def test_most_likely_token_with_ties_is_the_lower_id():
    tied = TopK(np.array([[5, 2, 9]]), np.array([[-1.0, -1.0, -2.0]], np.float32), np.zeros(1, np.float32))
    other = TopK(np.array([[2, 5, 9]]), np.array([[-1.0, -1.0, -2.0]], np.float32), np.zeros(1, np.float32))
    clear = TopK(np.array([[5, 2, 9]]), np.array([[-0.9, -1.0, -2.0]], np.float32), np.zeros(1, np.float32))
    assert metrics.same_most_likely(tied, other).all()
    assert not metrics.same_most_likely(tied, clear).any()


def test_perplexity_of_a_known_distribution():
    # A model that gives every token 1/8 has perplexity 8; half 1/2 and half 1/32 gives sqrt(2 · 32) = 8 as well.
    surprise = -np.log(np.array([1 / 2, 1 / 32] * 64))
    estimate = metrics.mean_over_blocks(surprise, metrics.blocks_of([128], 16), np.exp)
    assert estimate.value == pytest.approx(8)
    assert estimate.low == pytest.approx(8) and estimate.high == pytest.approx(8)  # all blocks are alike


def test_agreement_and_divergence_by_hand():
    reference = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    other = np.array([[1, 2, 3, 4], [1, 2, 9, 4], [9, 2, 3, 4], [1, 9, 9, 9]])
    np.testing.assert_array_equal(metrics.agreement(reference, other), [1, 0.75, 0.75, 0.25])
    divergence = metrics.first_divergence(reference, other)
    np.testing.assert_array_equal(divergence, [4, 2, 0, 1])
    np.testing.assert_array_equal(metrics.surviving(divergence, 4), [1, 0.75, 0.5, 0.25, 0.25])


def test_blocks_stay_inside_of_windows_and_short_remainders_join():
    blocks = metrics.blocks_of([10, 4, 11], block=4)
    np.testing.assert_array_equal(blocks, [0] * 4 + [1] * 4 + [2] * 2 + [3] * 4 + [4] * 4 + [5] * 4 + [6] * 3)
    np.testing.assert_array_equal(metrics.blocks_of([9], block=4), [0] * 4 + [1] * 5)
    np.testing.assert_array_equal(metrics.blocks_of([1], block=4), [0])


def test_mean_over_blocks_is_the_mean_of_tokens_also_for_unequal_blocks():
    values = np.arange(10.0)
    blocks = np.array([0] * 7 + [1] * 3)
    assert metrics.mean_over_blocks(values, blocks).value == pytest.approx(4.5)


def coverage(correlated: bool, blockwise: bool, trials: int = 200) -> float:
    """How often the interval for a mean holds the true mean 0, over simulated series of 4096 tokens."""
    rng = np.random.default_rng(7)
    hits = 0
    for trial in range(trials):
        noise = rng.normal(size=4096)
        if correlated:  # a moving average over 16 tokens: neighbours are alike, blocks of 128 almost independent
            noise = np.convolve(rng.normal(size=4096 + 15), np.full(16, 0.25), mode="valid")
        blocks = metrics.blocks_of([2048, 2048]) if blockwise else np.arange(4096)
        estimate = metrics.mean_over_blocks(noise, blocks, seed=trial, resamples=400)
        hits += estimate.low <= 0 <= estimate.high
    return hits / trials


def test_bootstrap_intervals_cover_the_truth():
    # Binomial: 95% of 200 trials, standard deviation 1.5%; 32 blocks make a percentile interval a little narrow.
    assert 0.89 <= coverage(correlated=False, blockwise=True) <= 0.99
    assert 0.87 <= coverage(correlated=True, blockwise=True) <= 0.99


@pytest.mark.slow
def test_resampling_single_tokens_would_not_cover():
    # Why blocks: with correlated neighbours, an interval from single tokens misses the truth most of the time.
    assert coverage(correlated=True, blockwise=False) < 0.6


def test_intervals_of_prompts_cover_and_repeat():
    rng = np.random.default_rng(11)
    hits = 0
    for trial in range(200):
        values = rng.exponential(size=32)
        estimate = metrics.over_prompts(values, np.median, seed=trial, resamples=400)
        hits += estimate.low <= math.log(2) <= estimate.high
    assert 0.88 <= hits / 200 <= 1.0
    assert metrics.over_prompts(values, seed=5) == metrics.over_prompts(values, seed=5)


def test_nothing_to_average_is_an_error():
    with pytest.raises(ValueError, match="no values"):
        metrics.mean_over_blocks(np.zeros(0), np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="no prompts"):
        metrics.over_prompts(np.zeros(0))


def test_concatenated_windows_keep_their_values():
    a = top_k(np.array([[0.5, 0.3, 0.2]]), 3)
    b = top_k(np.array([[0.6, 0.3, 0.1]]), 2)
    both = TopK.concatenate([a, b])
    assert both.ids.tolist() == [[0, 1, 2], [0, 1, -1]]
    assert both.logprobs[1, 2] == -np.inf
    np.testing.assert_allclose(metrics.coarse_kl(both, both), 0)
