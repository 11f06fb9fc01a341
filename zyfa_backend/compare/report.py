"""The HTML report: one file with everything in it, so that it can be mailed and opened offline."""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template
from typing import Any

from . import plots
from .results import Series
from .table import COLUMNS, interval_of, machine_line, remarks, significant, value_of
from .variants import BASELINE

POSITION = (
    "Mean KL from the baseline of the tokens at a position of their window, in bins that grow with the position. "
    "A line that rises to the right means that the error grows with the context."
)
DISTRIBUTION = (
    "For every KL on the horizontal axis, the share of tokens that are further from the baseline than that. A mean "
    "hides whether all tokens are a little off or few are far off: the right end of the curves shows the latter."
)
DIVERGENCE = (
    "Share of prompts whose greedy continuation is still equal to the baseline's after so many tokens. The curve of "
    "the noise band shows how fast two implementations without quantisation part."
)
TTFT = (
    "One dot per prompt, the bar is the median. One request at a time was sent, with prefix caching off and a fresh "
    "cache salt each, so every prompt was computed in full."
)


def render(results: dict[str, Any], series: dict[str, Series]) -> str:
    """The report as HTML text. Everything a browser needs is in it; no address is loaded."""
    names = list(series)
    colours = {name: plots.style(name, names)[0] for name in names}
    template = resources.files(__package__).joinpath("templates", "report.html").read_text(encoding="utf-8")
    compared = len(series) > 1
    nothing = "<p>No variant besides the baseline was measured.</p>"
    return Template(template).substitute(
        title=escape(f"What ZYFA costs in quality: {_short(results['model'])}"),
        created=escape(results["created"].replace("T", " ").replace("+00:00", " UTC")),
        machine=escape(machine_line(results)),
        summary=_summary(results),
        command=escape(results["command"]),
        heads="".join(f"<th>{escape(c.title)}<small>{escape(c.unit)}</small></th>" for c in COLUMNS),
        rows="\n".join(_row(row, colours[row["name"]]) for row in results["variants"]),
        remarks="\n".join(f"<li>{escape(line)}</li>" for line in remarks(results)),
        failures="".join(_failure(failure) for failure in results["failures"]),
        explain_position=POSITION,
        plot_position=plots.kl_by_position(series) if compared else nothing,
        explain_distribution=DISTRIBUTION,
        plot_distribution=plots.kl_distribution(series) if compared else nothing,
        prompt_plots=_prompt_plots(results, series, compared),
        meanings="\n".join(f"<dt>{escape(c.title)}</dt><dd>{escape(c.meaning)}</dd>" for c in COLUMNS),
        method=_method(results),
        servers="\n".join(_server(row) for row in results["variants"]),
    )


def _summary(results: dict[str, Any]) -> str:
    """One sentence per variant that quantises, in words."""
    said = []
    for row in results["variants"]:
        if row["name"] in (BASELINE, (results["noise_band"] or {}).get("variant")):
            continue
        times = f", {significant(row['kl_over_noise'])} times the noise band," if row["kl_over_noise"] else ""
        said.append(
            f"<li><b>{escape(row['name'])}</b> is {significant(row['kl'])} nats per token from the baseline{times} and "
            f"changes the perplexity by {100 * (row['perplexity_ratio'] - 1):+.2f}%.</li>"
        )
    return f"<ul>{''.join(said)}</ul>" if said else "<p>No variant of ZYFA was measured.</p>"


def _row(row: dict[str, Any], colour: str) -> str:
    cells = []
    for column in COLUMNS:
        interval = interval_of(row, column)
        small = f"<small>{escape(interval)}</small>" if interval else ""
        cells.append(f"<td>{escape(value_of(row, column))}{small}</td>")
    swatch = f'<span class="swatch" style="background:{colour}"></span>'
    ran = f'<small class="kernel">{escape(row["kernel"])}</small>'
    return f'<tr><td class="name">{swatch}{escape(row["name"])}{ran}</td>{"".join(cells)}</tr>'


def _failure(failure: dict[str, str]) -> str:
    return (
        f'<div class="failure"><h3>{escape(failure["name"])} failed</h3><pre>{escape(failure["error"])}</pre></div>'
    )


def _prompt_plots(results: dict[str, Any], series: dict[str, Series], compared: bool) -> str:
    if results["settings"]["prompts"] == 0:
        return ""
    parts = []
    if compared:
        parts.append(f"<h2>Greedy continuations</h2><p>{DIVERGENCE}</p>{plots.divergence(series)}")
    parts.append(f"<h2>Time to first token</h2><p>{TTFT}</p>{plots.ttft(series)}")
    return "\n".join(parts)


def _method(results: dict[str, Any]) -> str:
    settings, text, bootstrap = results["settings"], results["text"], results["bootstrap"]
    items = [
        f"Text: {text['name']}, {text['tokens']:,} tokens (SHA-256 of its UTF-8 {text['sha256'][:16]}…). Scored were "
        f"{settings['scored_tokens']:,} tokens in {settings['windows']} windows of up to {settings['context']:,} "
        "tokens, spread evenly over the text; every window was one request, and every server got the same token ids.",
        f"KL(baseline ‖ variant) per token over the tokens in both servers' top {settings['top_k']} (and the text's "
        "own token) plus one bucket for the rest. Merging outcomes can only lower a KL divergence, so this is a lower "
        "bound; what the servers list are log-probabilities of the prompt, that is, of prefill.",
        f"Continuations: {settings['prompts']} prompts of {settings['prompt_tokens']:,} tokens from the same text, "
        f"{settings['max_tokens']} tokens each at temperature 0, not stopping at the end-of-text token.",
        f"Intervals: {bootstrap['interval']} of {bootstrap['resamples']:,} bootstrap resamples of "
        f"{bootstrap['token_unit']} ({bootstrap['token_blocks']} of them) for KL, perplexity and top-1 agreement, and "
        "of whole prompts for the other columns. Neighbouring tokens share their context, so single tokens are not "
        "resampled.",
    ]
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _server(row: dict[str, Any]) -> str:
    counts = "".join(
        f"<li><code>{escape(name)}</code>: {count['calls']:,} calls, {count['tokens']:,} tokens</li>"
        for name, count in row["kernels"].items()
    )
    what = f" — {escape(row['what'])}" if row["what"] else ""
    ran = f"<ul>{counts}</ul>" if counts else f"<p>Attention: <code>{escape(row['kernel'])}</code></p>"
    return (
        f"<h3>{escape(row['name'])}{what}</h3>{ran}<pre>{escape(row['command'])}</pre>"
        f'<p class="muted">{escape(row["engine"])} {escape(row["engine_version"])}, {row["seconds"]:g} s with start '
        f"and stop</p>"
    )


def _short(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1] if model.startswith(("/", ".")) else model
