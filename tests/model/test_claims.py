"""docs/claims.md says what the commands print."""

import re
from pathlib import Path

import pytest
from cogapp import Cog

from perilune.cli.model import model_info
from perilune.model.presets import PRESETS, preset

CLAIMS = Path(__file__).parents[2] / "docs" / "claims.md"


def test_the_generated_blocks_are_fresh():
    text = CLAIMS.read_text(encoding="utf-8")
    assert text.count("[[[cog") == 3
    assert Cog().process_string(text, str(CLAIMS)) == text


def test_a_stale_number_would_be_noticed():
    text = CLAIMS.read_text(encoding="utf-8")
    stale = text.replace("| 104.19 B |", "| 104.18 B |")
    assert stale != text
    assert Cog().process_string(stale, str(CLAIMS)) == text


@pytest.mark.parametrize(
    ("name", "path"),
    re.findall(r"`perilune model info (\S+)[^`]*`<br>`\.([\w.]+)`", CLAIMS.read_text()),
)
def test_every_command_names_a_model_and_a_field(name, path):
    assert name in PRESETS
    value = model_info(preset(name), 1)
    for key in path.split("."):
        value = value[key]
    assert isinstance(value, int | float)
