"""The first tutorial is run as it stands, and prints what it says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tutorial/first-rewrite.md"


def blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_the_first_tutorial_prints_what_it_says(tmp_path):
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(blocks("python")), encoding="utf-8")
    settings = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = "".join(blocks("text")).splitlines()
    assert len(shown) == 7
    printed = [
        line for line in done.stdout.splitlines() if line.startswith("loss") or " of " in line
    ]
    assert [figures(line) for line in printed] == [figures(line) for line in shown]


def figures(line: str) -> list[str]:
    """Return a line with its peak to the nearest ten megabytes, which is what repeats."""
    found = re.search(r"peak (\d+) MB", line)
    return [re.sub(r"peak \d+ MB", "", line), str(round(int(found[1]), -1)) if found else ""]
