"""What the checklist makes of a plug-in: its limits, its claims, its refusals."""

from __future__ import annotations

import sys

import plugin_packages
import pytest
import torch

from perilune.cli.main import main
from perilune.core.errors import UnsupportedError
from perilune.kernels import verdict
from perilune.kernels.plugins import find, load_run
from perilune.kernels.registry import spec
from perilune.kernels.serving import op_folder
from perilune.kernels.testing import check, check_properties, implementations, refusals

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
TRUE = "def run(*x, **y): return true(*x, **y)"


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """Installs a backend `mine` of `situ` with the given `run`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(body: str, claims: str = "") -> None:
        folder = plugin_packages.make(tmp_path / "mine", "mine", body, claims=claims)
        monkeypatch.syspath_prepend(str(folder))

    yield install
    sys.modules.pop("mine", None)


def found_of(*families: str) -> list:
    situ = spec("situ")
    found = list(check(situ, backend="mine"))
    found += check_properties(situ, drawn=4, backend="mine", families=families)
    return [*found, *refusals(situ, implementations(situ, "mine"), found, 4)]


def red(*families: str) -> set[str]:
    return {f"{r.family}: {r.what}" for r in found_of(*families) if not r.passed}


def test_a_limit_that_is_declared_is_kept_for_the_plug_in(plugin):
    plugin(TRUE, "gradients=False")
    run = load_run(find("situ", "mine"))
    assert torch.is_tensor(run(X, 4.0, 25.0))
    with pytest.raises(UnsupportedError, match=r"mine 1.0.* in float32, not in bfloat16"):
        run(X.bfloat16(), 4.0, 25.0)
    with pytest.raises(UnsupportedError, match="situ forward only, without gradients"):
        run(gate_up_2I=X.clone().requires_grad_(), beta=4.0, linear_beta=25.0)


def test_forward_only_is_green_and_its_refusals_are_counted(plugin, capsys):
    plugin(TRUE, "gradients=False")
    assert main(["kernels", "check", "situ", "--backend", "mine", "--seed", "4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.split("\n")]
    conformance = next(row for row in rows if row[1:3] == ["mine", "conformance"])
    cases = len(spec("situ").cases)
    assert [int(count) for count in conformance[3:]] == [2 * cases, 0, cases]
    kept = verdict.read(op_folder(spec("situ")), find("situ", "mine"), "cpu")
    assert (kept.refused, kept.seed) == (cases, 4)


SOME = """
def run(gate_up_2I, beta, linear_beta):
    if {condition}:
        raise UnsupportedError("not this one")
    return true(gate_up_2I, beta, linear_beta)
"""


@pytest.mark.parametrize(
    ("condition", "missing"),
    [
        ("gate_up_2I.shape[0] > 200", set()),
        ("True", {"something", "a gradient"}),
        ("torch.is_grad_enabled()", {"a gradient"}),
    ],
)
def test_a_backend_may_refuse_some_inputs_but_not_all_it_declares(plugin, condition, missing):
    plugin(SOME.format(condition=condition))
    assert red("source", "lengths") == {f"refusals: {what} is served" for what in missing}


FAULTS = {
    "served": "from perilune.kernels.situ.reference import situ_glu as run",
    "conformance": "def run(*x, **y): raise ValueError('no')",
    "source": """
def run(*x, **y):
    try:
        return true(*x, **y)
    except RuntimeError:
        return None
""",
}


@pytest.mark.parametrize("family", FAULTS)
def test_a_plug_in_is_held_to_the_same_rules(plugin, family):
    plugin(FAULTS[family])
    assert family in {what.partition(":")[0] for what in red("served", "source")}


BY_BATCH = """
def run(gate_up_2I, beta, linear_beta):
    return true(gate_up_2I, beta, linear_beta) * (1 + 2.0**-22 * (len(gate_up_2I) > 1))
"""


@pytest.mark.parametrize(("claim", "families"), [("", set()), ("batch_invariant=256", {"batches"})])
def test_what_a_plug_in_claims_is_checked(plugin, claim, families):
    plugin(BY_BATCH, claim)
    assert {what.partition(":")[0] for what in red("batches")} == families


@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        ("dtypes=(torch.float16,)", "situ has no tolerance for torch.float16 on cpu"),
        ("distribution='other'", "other is not installed: mine needs it"),
    ],
)
def test_what_cannot_be_checked_is_refused(plugin, claims, sentence):
    plugin(TRUE, claims)
    with pytest.raises(UnsupportedError, match=sentence):
        implementations(spec("situ"), "mine")
