"""The screening example runs, and each of its screens does what it says."""

import re
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "screening.py"


def test_the_screens_stop_mask_and_redirect(capsys):
    runpy.run_path(str(SCRIPT), run_name="__main__")
    titles = r"(plain|ends_before_code \(screened\)|never_says_get \(length\)|redirects_when_unsure \(length\)):\n"
    _, *parts = re.split(titles, capsys.readouterr().out)
    texts = dict(zip((title.split()[0] for title in parts[::2]), parts[1::2], strict=True))
    assert list(texts) == ["plain", "ends_before_code", "never_says_get", "redirects_when_unsure"]
    assert texts["plain"].startswith(texts["ends_before_code"].rstrip())
    assert len(texts["ends_before_code"]) < len(texts["plain"])
    assert "get" in texts["plain"] and "get" not in texts["never_says_get"]
    assert "See also: " in texts["redirects_when_unsure"]
