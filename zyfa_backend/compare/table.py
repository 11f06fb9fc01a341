"""The columns that the terminal table and the HTML report share, and the remarks beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .variants import BASELINE, NOISE


@dataclass(frozen=True)
class Column:
    """A metric: its key in the JSON document, its heading with unit, how a value is written, and what it means."""

    key: str
    title: str
    unit: str
    write: Callable[[float], str]
    group: str
    meaning: str


def significant(value: float) -> str:
    """Three significant digits, without an exponent between a millionth and 100,000."""
    if value == 0:
        return "0"
    if not 1e-6 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


TEXT, PROMPTS = "on the text", "continuing prompts"

COLUMNS = (
    Column(
        "kl",
        "KL",
        "nats/token",
        significant,
        TEXT,
        "How far the variant's next-token distribution is from the baseline's, averaged over the scored tokens: 0 "
        "means equal. It is computed over the tokens that both servers list plus one bucket for all others: "
        "a lower bound of the divergence over the whole vocabulary.",
    ),
    Column(
        "kl_over_noise",
        "KL ÷ noise",
        "×",
        significant,
        TEXT,
        "The same KL as a multiple of the noise band's upper end. At 1 the variant is no further from the baseline "
        "than another implementation without quantisation is.",
    ),
    Column(
        "perplexity",
        "Perplexity",
        "",
        lambda value: f"{value:.2f}" if value < 1000 else f"{value:.0f}",
        TEXT,
        "exp of the mean negative log-probability of the text's own tokens: the lower, the better the model predicts "
        "the text. It depends on the text and the tokenizer, so only the differences between the rows mean something.",
    ),
    Column(
        "perplexity_ratio",
        "PPL ÷ baseline",
        "",
        lambda value: f"{value:.4f}",
        TEXT,
        "The variant's perplexity over the baseline's on the same tokens. The interval is of the ratio itself, so it "
        "is much narrower than the two perplexities' own.",
    ),
    Column(
        "top1_agreement",
        "Top-1 agreement",
        "",
        percent,
        TEXT,
        "Share of positions of the text where both servers find the same token most likely. The text is fixed, so one "
        "difference does not cause the next.",
    ),
    Column(
        "token_agreement",
        "Greedy agreement",
        "",
        percent,
        PROMPTS,
        "Share of equal tokens, place by place, when both servers continue the same prompts greedily. After a first "
        "difference the continuations go their own ways, so this falls much faster than the KL grows.",
    ),
    Column(
        "first_divergence",
        "First difference",
        "tokens",
        lambda value: f"{value:.1f}",
        PROMPTS,
        "Number of equal tokens before the first different one, averaged over the prompts. A continuation without any "
        "difference counts as its full length.",
    ),
    Column(
        "ttft_s",
        "TTFT",
        "s",
        significant,
        PROMPTS,
        "Median time from sending a prompt to its first token, one request at a time, with nothing cached. Prompts all "
        "have the same length, and a first request is discarded as warm-up.",
    ),
)


def value_of(row: dict[str, Any], column: Column) -> str:
    value = row.get(column.key)
    if value is None or (row["name"] == BASELINE and column.key in ("kl", "perplexity_ratio")):
        return "—"
    if row["name"] == BASELINE and column.key in ("top1_agreement", "token_agreement", "first_divergence"):
        return "—"
    return column.write(value)


def interval_of(row: dict[str, Any], column: Column) -> str:
    """The 95% interval as text, empty where there is none."""
    interval = row.get(f"{column.key}_interval")
    if interval is None or value_of(row, column) == "—":
        return ""
    return f"{column.write(interval[0])} – {column.write(interval[1])}"


def remarks(results: dict[str, Any]) -> list[str]:
    """What a reader should know beside the numbers, one sentence each."""
    said = []
    noise = results["noise_band"]
    if noise is None:
        said.append(f"No noise band: {NOISE} was not measured, so KL has nothing to be a multiple of.")
    elif noise["upper"] == 0:
        said.append("The noise band has no width: both baselines gave equal values, so no multiple is given.")
    else:
        said.append(
            f"Noise band: the KL of {NOISE} from the baseline, {significant(noise['lower'])} – "
            f"{significant(noise['upper'])} nats/token; multiples are of its upper end."
        )
    blocks = results["bootstrap"]["token_blocks"]
    if blocks < 16:
        said.append(f"Only {blocks} blocks of tokens: the intervals are rough, and more --tokens would help.")
    top_k, mass = results["settings"]["top_k"], max(row["unlisted_mass"] for row in results["variants"])
    growth = max((1 - row["kl_half_list"] / row["kl"] for row in results["variants"] if row["kl"] > 0), default=0.0)
    said.append(
        f"KL over the top {top_k} tokens and a rest bucket, which holds {mass:.1%} of the probability on average: a "
        f"lower bound. From half that list it is up to {growth:.0%} lower; a larger --top-k tightens it."
    )
    said += [f"{failure['name']} failed and is missing here." for failure in results["failures"]]
    return said


def machine_line(results: dict[str, Any]) -> str:
    machine = results["machine"]
    hardware = ", ".join(machine["gpus"]) or machine["cpu"]
    memory = f", {machine['memory_gib']:g} GiB" if machine["memory_gib"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"{hardware}, {machine['cores']} cores{memory}; {versions}"
