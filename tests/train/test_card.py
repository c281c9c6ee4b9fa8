"""The card holds the numbers of its run; the record beside the bundled model is whole."""

from pathlib import Path

import pytest

from perilune.text.chat import ParsedMessage
from perilune.train import card
from perilune.train.baseline import Baseline
from perilune.train.config import differences
from perilune.train.recipes import recipe
from perilune.train.run_facts import read_facts
from perilune.train.run_log import read_metrics
from perilune.train.samples import PROMPTS, Sample

NANO = Path(__file__).parents[2] / "models" / "nano"


def test_the_recipe_is_the_run_of_the_bundled_model_but_for_what_the_card_tells():
    run, config = read_facts(NANO), recipe("nano")
    changed = differences(run.recipe, config.as_json())
    assert "; ".join(changed) in (NANO / "README.md").read_text(encoding="utf-8")
    assert all(phrase.startswith("optim.") for phrase in changed), changed
    assert run.steps == config.steps


def test_scores_stand_beside_the_baselines():
    text = card.score_section([{"step": 3, "bpb/prose": 1.23456}], [Baseline("prose", 9876, 2, 3)])
    assert "| prose | 9,876 | **1.235** | 2.000 | 3.000 |" in text


def test_the_card_tells_run_scores_and_ten_samples():
    text = (NANO / "README.md").read_text(encoding="utf-8")
    run = read_facts(NANO)
    assert f"{run.steps:,} steps" in text
    assert run.device in text
    assert f"torch {run.torch}" in text
    for key, value in read_metrics(NANO / "metrics.jsonl")[-1].items():
        if key.startswith("bpb/"):
            assert f"**{value:.3f}**" in text
    for number, (prompt, _) in enumerate(PROMPTS, start=1):
        assert f"**{number}. {prompt}**" in text
    assert "curve.png" in text
    assert (NANO / "curve.png").is_file()


def test_sources_are_listed_with_version_and_licence():
    source = {
        "name": "wordnet-base",
        "origin": "debian",
        "version": "wordnet-base_1%3a3.0-37_all.deb",
        "licence": "WordNet 3.0",
        "kinds": ["chat", "prose"],
        "num_documents": 1234,
        "text_bytes": 5_600_000,
    }
    expected = "| wordnet-base | Debian 12 | wordnet-base_1:3.0-37_all | WordNet 3.0 | chat, prose"
    assert f"{expected} | 1,234 | 5.60 |" in card.source_section({"sources": [source]})


@pytest.mark.parametrize(
    ("answer", "is_cut", "body"),
    [
        (ParsedMessage(reasoning="hm", text="yes"), False, "[thinks] hm\nyes"),
        (ParsedMessage(text="yes"), True, "yes\n[cut here]"),
        (ParsedMessage(), False, "[nothing]"),
    ],
)
def test_a_sample_is_shown_as_it_came(answer, is_cut, body):
    section = card.sample_section([Sample("Why?", 4, answer, is_cut)])
    assert f"**5. Why?**\n\n~~~~text\n{body}\n~~~~\n" in section
