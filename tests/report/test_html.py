"""The page stands alone, is well formed, hides nothing and escapes everything; its files are written whole."""

import os
import re
from collections import Counter
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from looplm.errors import UserError
from looplm.report.html import report_html, write_report
from looplm.report.sample import sample_html
from looplm.report.schema import Command, QuickstartReport, Sample, SampleToken

VOID = {"meta", "br", "path", "rect", "use", "circle", "line", "image"}


class Page(HTMLParser):
    """Checks nesting and collects attributes and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.visible: list[str] = []
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, (tag, self.open)
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.visible.append(data)


@pytest.fixture(scope="module")
def page_text(report: QuickstartReport) -> str:
    return report_html(report)


def test_nothing_comes_from_outside(page_text: str) -> None:
    page = Page(page_text)
    for forbidden in ("http:", "https:", "//", "@import", "<script", "<link", "<iframe", "javascript"):
        assert forbidden not in page_text, forbidden
    targets = {value for _, name, value in page.attributes if name in ("href", "src", "xlink:href", "data")}
    assert all(target.startswith("#") for target in targets), targets
    ids = {f"#{value}" for _, name, value in page.attributes if name == "id"}
    assert set(re.findall(r"url\(([^)]*)\)", page_text)) <= ids


def test_ids_are_unique_and_every_link_has_its_target(page_text: str) -> None:
    page = Page(page_text)
    ids = Counter(value for _, name, value in page.attributes if name == "id")
    assert max(ids.values()) == 1, ids.most_common(3)
    assert {value[1:] for _, name, value in page.attributes if name == "href"} <= set(ids)


def test_every_colour_is_defined_for_light_and_dark(page_text: str) -> None:
    style = files("looplm.report").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r"var\((--[\w-]+)\)", page_text)) - {"--c", "--share"}
    for name in used:
        assert f"{name}:" in light and f"{name}:" in dark, name


def test_every_section_and_finding_is_there(page_text: str, report: QuickstartReport) -> None:
    text = "".join(Page(page_text).visible)
    for words in (
        report.shipped.name,
        report.trained.name,
        "The fold task",
        "Try next",
        "torch",
        "one-loop twin",
        "beats its one-loop twin",
        "0.3 ln R",
        "Token-loops",
        "per_loop",
        "k = 4",
        "All together",
    ):
        assert words in text, words
    assert "smoke run" not in text


def test_text_is_escaped_and_whitespace_kept(report: QuickstartReport) -> None:
    text = '\n    <script>alert("&amp;")</script>\t'
    hostile = report.model_copy(
        update={
            "shipped": report.shipped.model_copy(
                update={
                    "name": "<i>name</i>",
                    "description": "<b>bold</b>",
                    "sample": Sample(
                        prompt=text,
                        exit_threshold=0.5,
                        tokens=(SampleToken(text=text, exit_loops=2, token_loops=4),),
                        weight_passes=2,
                    ),
                }
            ),
            "next_commands": (Command(command="a < b && c", explanation="<u>"),),
        }
    )
    page_text = report_html(hostile)
    for raw in ("<script", "<i>", "<b>", "<u>"):
        assert raw not in page_text, raw
    visible = "".join(Page(page_text).visible)
    assert visible.count(text) == 2
    assert "a < b && c" in visible


def test_depth_of_a_token_is_told_three_ways() -> None:
    tokens = tuple(SampleToken(text="x", exit_loops=loop, token_loops=12) for loop in (1, 3, 12))
    html = sample_html(Sample(prompt="p", exit_threshold=0.9, tokens=tokens, weight_passes=16), 4)
    assert '<span class="t l3" data-loop="3">x</span>' in html
    # Past the last colour the number still tells.
    assert '<span class="t l8" data-loop="12">x</span>' in html
    assert "left at loop 4: 0%" in html and "left at loop 12: 33%" in html
    assert "claimed depth 5.33 loops, 8.00 weight passes and 12.00 token-loops per token" in html
    style = files("looplm.report").joinpath("page.css").read_text(encoding="utf-8")
    underlines = [re.search(rf"\.l{loop} \{{[^}}]*border-bottom-style: (\w+)", style) for loop in (1, 2, 3, 4)]
    assert len({match.group(1) for match in underlines if match}) == 4


def test_files_are_written_whole(report: QuickstartReport, page_text: str, tmp_path: Path) -> None:
    smoke = report.model_copy(update={"smoke": True})
    json_path, html_path = write_report(smoke, tmp_path / "new" / "folder")
    assert QuickstartReport.model_validate_json(json_path.read_text(encoding="utf-8")) == smoke
    written, plain = html_path.read_text(encoding="utf-8").splitlines(), page_text.splitlines()
    added = [line for line in written if line not in plain]
    assert len(added) == 1 and "This is a smoke run" in added[0]
    assert set(plain) <= {*written, ""}
    assert sorted(path.name for path in json_path.parent.iterdir()) == ["report.html", "report.json"]


def test_an_interrupted_write_leaves_the_old_file(
    report: QuickstartReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(report, tmp_path)
    before = (tmp_path / "report.json").read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        write_report(report.model_copy(update={"smoke": True}), tmp_path)
    assert (tmp_path / "report.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_a_directory_that_cannot_be_is_a_user_error(report: QuickstartReport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="could not be written"):
        write_report(report, tmp_path / "file" / "below")
