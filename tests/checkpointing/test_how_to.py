"""The page on how to solve a chain: its code runs and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "solve-a-chain.md"
BLOCKS = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Run the code blocks in one namespace and return what each text block should equal."""
    namespace: dict[str, object] = {}
    results = []
    for kind, content in BLOCKS:
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(content, namespace)
            results.append(output.getvalue())
    return results


def test_every_block_of_code_is_followed_by_its_output() -> None:
    assert [kind for kind, _ in BLOCKS] == ["python", "text"] * (len(BLOCKS) // 2)


@pytest.mark.parametrize("number", range(len(BLOCKS) // 2))
def test_a_block_prints_what_the_page_shows(number: int, printed: list[str]) -> None:
    legend = re.compile(r"^ +A F_all .*\n", re.MULTILINE)  # the page explains the marks in words
    assert legend.sub("", printed[number]) == BLOCKS[2 * number + 1][1]
