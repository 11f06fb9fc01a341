"""The HTML report and the terminal table: everything in one file, every value in its place."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from zyfa_backend.commands import compare as command
from zyfa_backend.compare import plots, results, table
from zyfa_backend.compare.engines import VLLM
from zyfa_backend.compare.metrics import TopK
from zyfa_backend.compare.report import render
from zyfa_backend.compare.runner import Outcome, ServerOptions, Settings
from zyfa_backend.compare.state import Measurement
from zyfa_backend.compare.text import Plan
from zyfa_backend.compare.variants import KNOWN, UNQUANTISED, Variant

LENGTH, WINDOWS, PROMPTS, TOKENS = 257, 3, 5, 12


def measurement(noise: float, seed: int, ttft: float) -> Measurement:
    """Scores around a common distribution, as a server with errors of size `noise` in its logits would give them."""
    base, own = np.random.default_rng(0), np.random.default_rng(seed)
    scores = []
    for _ in range(WINDOWS):
        logits = base.normal(size=(LENGTH - 1, 40)) * 2 + noise * own.normal(size=(LENGTH - 1, 40))
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        order = np.argsort(-logprobs, axis=1)[:, :20]
        scores.append(
            TopK(
                order.astype(np.int32),
                np.take_along_axis(logprobs, order, axis=1).astype(np.float32),
                logprobs[:, 0].astype(np.float32),
            )
        )
    continuations = np.tile(np.arange(TOKENS, dtype=np.int32), (PROMPTS, 1))
    if noise:
        continuations[1:, 4:] += 1
    return Measurement(
        scores=scores,
        continuations=continuations,
        ttft_s=ttft + 0.01 * own.random(PROMPTS),
        kernel="torch/fp8-hd128-causal-lean" if noise > 0.1 else "CPU_ATTN",
        kernels={"torch/fp8-hd128-causal-lean": {"calls": 12345, "tokens": 678}} if noise > 0.1 else {},
        platform="cpu",
        command="ZYFA_CONFIG=lean vllm serve '<model>' & more",
        engine_version="0.32.0",
        max_model_len=8192,
        seconds=61.0,
    )


@pytest.fixture
def compared():
    variants = {
        "baseline": KNOWN["baseline"],
        "baseline2": UNQUANTISED,
        "lean": KNOWN["lean"],
        "int8": KNOWN["int8"],
        "mine": Variant("mine", what="defined as: <b>&"),
    }
    noises = {"baseline": 0.0, "baseline2": 0.02, "lean": 0.6, "int8": 0.2, "mine": 0.3}
    measured = {name: measurement(noise, index, 0.1 + noise) for index, (name, noise) in enumerate(noises.items())}
    plan = Plan([list(range(LENGTH))] * WINDOWS, [list(range(30))] * PROMPTS, 5000)
    outcome = Outcome(plan, variants, measured, [], {"exact": "the server ended\n  | <log line>"})
    settings = Settings(prompts=PROMPTS, max_tokens=TOKENS, top_k=20)
    options = ServerOptions(("--dtype=float32",))
    run = SimpleNamespace(engine=VLLM, model="/models/some-model", settings=settings, options=options, text="x")
    return results.document(run, outcome, "zyfa compare /models/some-model --json", "my <text>.txt")


class Page(HTMLParser):
    """Collects what a browser would load, the text of cells, and whether tags are balanced."""

    VOID = {"meta", "link", "br", "img", "hr", "input"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset", "action", "poster"):
                self.loads.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_one_file_that_loads_nothing(compared):
    html = render(*compared)
    page = Page(html)
    assert page.open == []  # every element is closed
    assert all(load.startswith("#") for load in page.loads)
    assert not re.search(r"@import|url\((?!#)|<script|<link|<iframe|<img", html)
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", html)
    assert len(page.ids) == len(set(page.ids))
    assert {load.removeprefix("#") for load in page.loads} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(page.ids)


def test_report_has_every_plot_with_every_variant(compared):
    html = render(*compared)
    drawn = dict(re.findall(r'data-plot="(\w+)"(.*?)</svg>', html, re.DOTALL))
    assert set(drawn) == {"position", "distribution", "divergence", "ttft"}
    for name, svg in drawn.items():
        labels = set(re.findall(r">([\w-]+)</text>", svg))
        assert {"baseline2", "lean", "int8", "mine"} <= labels, name
        assert svg.count("<path") > 10
    assert "nats/token" in drawn["position"] and "Position in the window" in drawn["position"]
    assert "Time to first token (s)" in drawn["ttft"] and ">baseline</text>" in drawn["ttft"]


def test_report_says_what_was_measured_where_and_how(compared):
    html = render(*compared)
    document = compared[0]
    for said in (
        "zyfa compare /models/some-model --json",
        document["machine"]["cpu"],
        f"vllm {document['versions']['vllm']}" if "vllm" in document["versions"] else "zyfa",
        "my &lt;text&gt;.txt",
        "lower bound",
        "95% percentile",
        "blocks of 128 neighbouring tokens",
        "torch/fp8-hd128-causal-lean</code>: 12,345 calls",
        "exact failed",
        "| &lt;log line&gt;",
        "defined as: &lt;b&gt;&amp;",
    ):
        assert said in html, said
    for column in table.COLUMNS:
        assert f"<dt>{column.title}</dt>" in html
        assert column.meaning.count(". ") + 1 >= 2  # two sentences each


def test_document_is_strict_json_and_consistent(compared):
    document, series = compared
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    rows = {row["name"]: row for row in document["variants"]}
    assert list(rows) == ["baseline", "baseline2", "lean", "int8", "mine"]
    for name in ("kernel", "kl", "kl_over_noise", "perplexity", "token_agreement", "first_divergence", "ttft_s"):
        assert all(name in row for row in rows.values())
    assert rows["baseline2"]["kl"] < rows["int8"]["kl"] < rows["lean"]["kl"]
    assert rows["lean"]["kl"] == pytest.approx(series["lean"].kl.mean())
    assert document["noise_band"]["upper"] == rows["baseline2"]["kl_interval"][1]
    assert rows["lean"]["kl_over_noise"] == pytest.approx(rows["lean"]["kl"] / document["noise_band"]["upper"])
    # One of five prompts stays equal, four differ from the fifth token on.
    assert rows["lean"]["first_divergence"] == pytest.approx((12 + 4 * 4) / 5)
    assert rows["lean"]["token_agreement"] == pytest.approx((1 + 4 * 4 / 12) / 5)
    assert rows["lean"]["never_diverged"] == pytest.approx(0.2)
    assert rows["lean"]["ttft_ratio"] == pytest.approx(0.7 / 0.1, rel=0.15)
    assert series["lean"].survival.tolist() == [1.0] * 5 + [0.2] * 8


def test_binning_by_position():
    positions = np.concatenate([np.arange(1, 1025)] * 2)
    centres, means = plots.bin_by_position(positions, positions.astype(float))
    assert (np.diff(centres) > 0).all() and len(centres) > 5
    assert centres[0] >= 1 and centres[-1] <= 1024
    # A bin's mean of the position itself lies near its centre.
    np.testing.assert_allclose(means, centres, rtol=0.25)
    alone, mean = plots.bin_by_position(np.array([1, 2, 3]), np.array([1.0, 2.0, 6.0]))
    assert len(alone) == 1 and mean == pytest.approx([3.0])


@pytest.mark.parametrize("prompts", [True, False])
def test_table_in_the_terminal(compared, tmp_path, capsys, prompts):
    document, _ = compared
    if not prompts:
        document["settings"]["prompts"] = 0
    command._print_table(document, tmp_path)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) < 400
    for row in document["variants"]:
        assert re.search(rf"│ {row['name']} +│", printed)
    lean = next(row for row in document["variants"] if row["name"] == "lean")
    assert table.significant(lean["kl"]) in printed and f"{lean['perplexity_ratio']:.4f}" in printed
    assert ("continuing prompts" in printed) == prompts
    assert "torch/fp8-hd128-causal-lean" in printed and str(tmp_path / "report.html") in printed


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0109, "0.0109"), (1.1e-4, "0.000110"), (2.346e-5, "0.0000235"), (3e-9, "3.00e-09"), (97.26, "97.3"),
     (123.4, "123"), (0.5, "0.500"), (12.0, "12.0")],
)  # fmt: skip
def test_significant_digits(value, text):
    assert table.significant(value) == text


def test_a_comparison_without_prompts_and_with_the_baseline_alone():
    measured = measurement(0.0, 0, 0.1)
    empty = Measurement(**{**measured.__dict__, "continuations": np.zeros((0, 0), np.int32), "ttft_s": np.zeros(0)})
    plan = Plan([list(range(LENGTH))] * WINDOWS, [], 5000)
    outcome = Outcome(plan, {"baseline": KNOWN["baseline"]}, {"baseline": empty})
    run = SimpleNamespace(engine=VLLM, model="m", settings=Settings(prompts=0), options=ServerOptions(), text="x")
    document, series = results.document(run, outcome, "zyfa compare m", "t")
    html = render(document, series)
    assert "No variant besides the baseline" in html and Page(html).open == []
    assert document["variants"][0]["ttft_s"] is None
