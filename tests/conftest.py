"""What holds for every test: a skipped one is a failure, since nobody reads skips."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# No test is timed: a loaded machine must not fail one. CI draws the same examples every time.
settings.register_profile("perilune", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("perilune")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write the golden files that tests compare with anew, where a test can"
    parser.addoption("--write-golden", action="store_true", default=False, help=text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _refuse_skip((yield))


def _refuse_skip(report):
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a test may not be skipped: {report.longrepr}"
    return report
