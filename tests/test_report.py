"""`upconv report`: what the page says, and that it works in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from report_helpers import browser, made_up_results, write

from upconv import cli
from upconv.report import write_report
from upconv.report.entries import read_entries
from upconv.report.marks import Scale, number, times
from upconv.results import ResultsError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
OLDER = sorted((Path(__file__).parent / "older_results").glob("*.json"))

Capture = pytest.CaptureFixture[str]
Page = Any


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    source = write(folder / "h200.json", made_up_results())
    return write_report([source], folder / "report.html")


class Tags(HTMLParser):
    """Every tag with its attributes; all that are opened must be closed in order."""

    EMPTY = ("meta", "link", "input", "br", "rect", "line", "path", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


def tags_of(path: Path) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(path.read_text())
    assert parser.open == []
    return parser.found


def test_from_bench_to_page_without_a_gpu(tmp_path: Path, capsys: Capture) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.html"
    layer = ["--in-channels=8", "--out-channels=6", "--kernel=4", "--stride=2", "--input=2,8,9,9"]
    options = ["--device=cpu", "--seconds=0.02", "--direction=both", "--dtype=float32,bfloat16"]
    options += ["--commit=abc1234"]
    assert cli.main(["bench", *layer, *options, "--out", str(results)]) == 0
    assert cli.main(["report", str(results), "-o", str(page)]) == 0
    assert f"written: {page}" in capsys.readouterr().err
    text = page.read_text()
    found = json.loads(results.read_text())
    assert f"PyTorch {found['environment']['torch']}" in text
    assert "commit abc1234" in text
    assert found["environment"]["date"] in text
    tagged = [attributes for tag, attributes in tags_of(page) if "data-ratio" in attributes]
    assert len(tagged) == len(found["rows"]) == 4
    assert {attributes["data-dtype"] for attributes in tagged} == {"float32", "bfloat16"}


def test_the_page_is_whole_and_accessible(made_up: Path) -> None:
    tags = tags_of(made_up)
    names = [tag for tag, _ in tags]
    assert names.count("table") == names.count("caption") == 4
    assert all(attributes.get("scope") for tag, attributes in tags if tag == "th")
    images = [attributes for _, attributes in tags if attributes.get("role") == "img"]
    assert images
    assert all(attributes.get("aria-label") for attributes in images)
    text = made_up.read_text()
    assert "<b>" not in text
    assert "off&lt;b&gt;" in text
    # Nothing is fetched: no address but those of the page itself.
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", text)
    assert "://" not in re.sub(r"http://www\.w3\.org/\S+", "", text)


def test_what_is_bad_is_said(made_up: Path) -> None:
    text = made_up.read_text()
    assert '<strong class="bad">wrong</strong> <small>error 5.0e-01 &gt; 2.0e-03</small>' in text
    assert '<strong class="bad">failed</strong> <small>RuntimeError: no memory</small>' in text
    assert "dcgan1 against PyTorch: 0.80× slower" in text
    assert "(tf32, contiguous, forward): slower here: 120 us expected" in text
    assert "channels_last was not timed (kb79_1d" in text


def test_a_borrowed_gradient_is_said(tmp_path: Path) -> None:
    results = made_up_results()
    backward = [row for row in results["rows"] if row["direction"] == "backward"]
    backward[0]["kernel"] = "sm90_wgmma_fprop + aten"
    path = write_report([write(tmp_path / "a.json", results)], tmp_path / "a.html")
    # Once in each of the two charts.
    assert path.read_text().count("PyTorch’s operator for one gradient") == 2


def test_files_of_older_versions_have_no_floor(tmp_path: Path) -> None:
    assert len(OLDER) >= 2
    page = write_report([*OLDER, RESULTS / "cpu-2threads.json"], tmp_path / "page.html")
    text = page.read_text()
    assert "older format, without the floor" in text
    assert "commit not recorded" in text
    assert "No file has a floor" in text
    entries = read_entries([*OLDER, RESULTS / "cpu-2threads.json"]).entries
    assert text.count("data-verdict=") == len(entries)


def test_the_later_file_counts(tmp_path: Path) -> None:
    old = made_up_results()
    new = made_up_results()
    new["rows"] = new["rows"][:1]
    new["rows"][0]["times"]["upconv"]["median"] *= 2
    files = [write(tmp_path / f"{name}.json", found) for name, found in (("a", old), ("b", new))]
    found = read_entries(files)
    assert found.replaced == 1
    assert len(found.entries) == len(old["rows"])
    assert found.entries[0].source.name == "b.json"
    assert (
        found.entries[0].row.times["upconv"].median == new["rows"][0]["times"]["upconv"]["median"]
    )


def test_a_case_at_two_batches_counts_twice(tmp_path: Path) -> None:
    """The worst of a kind is the worst, whichever file it stands in."""
    one, other = made_up_results(), made_up_results()
    for results, factor in ((one, 0.5), (other, 1.0)):
        results["rows"] = results["rows"][:1]
        row = results["rows"][0]
        row["problem"]["batch"] = int(64 * factor)
        row["times"]["upconv"]["median"] /= factor
    files = [write(tmp_path / "a.json", one), write(tmp_path / "b.json", other)]
    text = write_report(files, tmp_path / "a.html").read_text()
    ratios = [float(found) for found in re.findall(r'data-ratio="([\d.]+)"', text)]
    assert len(ratios) == 2
    summary = text[text.index("summary-caption") :]
    assert f"<td>{times(min(ratios))} <small>kb69</small></td>" in summary
    assert f"<strong>{times((ratios[0] * ratios[1]) ** 0.5)}</strong>" in summary


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/file.json"], "cannot read /no/such/file.json"),
        ([str(ROOT / "pyproject.toml")], "is not JSON"),
        ([str(OLDER[0]), "-o", "/no/such/folder/a.html"], "its folder does not exist"),
        ([str(OLDER[0]), "-o", "/dev/null"], "is not a plain file"),
    ],
)
def test_bad_usage_gets_words_and_code_2(capsys: Capture, words: list[str], message: str) -> None:
    assert cli.main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("upconv report: ")
    assert message in error


def test_a_file_without_rows(tmp_path: Path) -> None:
    empty = made_up_results() | {"rows": []}
    with pytest.raises(ResultsError, match="no row in these files"):
        write_report([write(tmp_path / "a.json", empty)], tmp_path / "a.html")


def test_scales_and_numbers() -> None:
    scale = Scale(0.5, 8.0, 0.0, 80.0)
    assert [scale(value) for value in (0.5, 1.0, 8.0)] == pytest.approx([0.0, 20.0, 80.0])
    assert scale.doublings() == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert Scale(1.0, 2.0**20, 0.0, 1.0).doublings()[:2] == [1.0, 4.0]
    assert Scale(0.9, 12.0, 0.0, 1.0).ticks() == [1.0, 2.0, 5.0, 10.0]
    assert [times(value) for value in (0.714, 12.34, 123.4)] == ["0.71×", "12.3×", "123×"]
    assert [number(value) for value in (0.0703, 421.6, 1234.5)] == ["0.0703", "422", "1234"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def open_page(chromium: Any, made_up: Path) -> Iterator[Any]:
    """Opens the page; afterwards nothing must have been complained about or asked of a network."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def opened(width: int = 1200, address: str = "", **options: Any) -> Page:
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked(request.url))
        page.goto(f"file://{made_up}{address}")
        return page

    def asked(url: str) -> None:
        if not url.startswith(("file://", "data:")):
            complaints.append(f"asked for {url}")

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def visible(page: Page, selector: str) -> list[dict[str, str]]:
    """The data attributes of what can be seen."""
    found: list[dict[str, str]] = page.evaluate(
        """selector => [...document.querySelectorAll(selector)]
        .filter(element => element.getClientRects().length).map(element => ({...element.dataset}))
        """,
        selector,
    )
    return found


def status(page: Page) -> str:
    text: str = page.inner_text("[data-status]")
    return text


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_phones_and_desks(open_page: Any, tmp_path: Path, width: int, scheme: str) -> None:
    page = open_page(width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    picture = page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert len(picture) > 50_000
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", paper)[:3])) / 3
    assert (brightness > 128) == (scheme == "light")
    # Every chart is as wide as there is room for, and no label is cut off at the right.
    ends = page.evaluate(
        "[...document.querySelectorAll('.chart text')].filter(t => t.getClientRects().length)"
        ".map(t => t.getBoundingClientRect().right)"
    )
    assert ends
    assert max(ends) <= width


def test_the_first_kind_is_shown_and_others_by_a_click(open_page: Any) -> None:
    page = open_page()
    rows = visible(page, "tr[data-verdict]")
    kinds = {(row["dtype"], row["layout"], row["direction"]) for row in rows}
    assert kinds == {("tf32", "contiguous", "forward")}
    assert status(page).startswith(f"{len(rows)} of 30 rows shown: geometric mean ")
    page.click("label:has(input[name=dtype][value=bfloat16])")
    rows = visible(page, "[data-row]")
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    assert visible(page, "[data-panel]")[0]["dtype"] == "bfloat16"
    page.click("label:has(input[name=dims][value='3-D'])")
    rows = visible(page, "tr[data-verdict]")
    assert [row["case"] for row in rows] == ["kb72_3d"]
    page.click("label:has(input[name=direction][value=backward])")
    page.click("label:has(input[name=layout][value=channels_last])")
    rows = visible(page, "[data-row]")
    found = {(row["dims"], row["direction"], row["layout"]) for row in rows}
    assert found == {("3-D", "backward", "channels_last")}
    for facet in ("dtype", "layout", "direction", "dims"):
        page.click(f"label:has(input[name={facet}][value=''])")
    assert len(visible(page, "tr[data-verdict]")) == 30
    assert status(page) == "30 of 30 rows shown"
    assert len(visible(page, "[data-panel]")) == 2


def test_filters_that_nothing_fits(open_page: Any) -> None:
    page = open_page(address="#dims=1-D&layout=channels_last")
    assert status(page) == "0 of 30 rows shown: none is of all these kinds"
    assert visible(page, "[data-row]") == visible(page, "[data-group]") == []


def test_the_mean_of_the_script_is_the_mean(open_page: Any) -> None:
    page = open_page(address="#machine=NVIDIA+H200&dtype=tf32&layout=contiguous&direction=backward")
    rows = visible(page, "tr[data-verdict]")
    ratios = [float(row["ratio"]) for row in rows if "ratio" in row]
    mean = times(exp(sum(map(log, ratios)) / len(ratios)))
    assert status(page) == f"4 of 30 rows shown: geometric mean {mean}, worst 0.38× (kb72_3d)"
    table = page.inner_text("table:has(#summary-caption) tr:has([aria-current])")
    assert mean in table


def test_a_kind_is_chosen_by_its_name_and_kept_in_the_address(open_page: Any) -> None:
    page = open_page()
    page.click("text=Backward, bfloat16, channels_last")
    page.wait_for_function("location.hash.includes('dtype=bfloat16')")
    kinds = {(row["dtype"], row["direction"]) for row in visible(page, "[data-row]")}
    assert kinds == {("bfloat16", "backward")}
    page.reload()
    assert {row["dtype"] for row in visible(page, "[data-row]")} == {"bfloat16"}


def test_keys_reach_filters_and_marks(open_page: Any) -> None:
    page = open_page()
    page.focus("input[name=direction]:checked")
    page.keyboard.press("ArrowRight")
    assert {row["direction"] for row in visible(page, "[data-row]")} == {"backward"}
    page.focus(".point:not([hidden])")
    assert page.inner_text("[data-readout]").startswith("kb69, backward, contiguous: PyTorch ")


def test_slower_and_borrowed_rows_are_in_sight(open_page: Any) -> None:
    page = open_page()
    chart = page.inner_text("section:has(> #speed-up)")
    assert "0.60× slower" in chart
    assert "PyTorch’s operator" in chart
    words = page.inner_text("tr[data-case=dcgan1]:visible")
    assert "slower" in words


def test_without_scripts_everything_is_shown(open_page: Any, made_up: Path) -> None:
    page = open_page(java_script_enabled=False)
    assert page.locator("tr[data-verdict]:visible").count() == 30
    assert page.locator("form.filters").is_hidden()


def test_on_paper(open_page: Any, tmp_path: Path) -> None:
    """Dark on white whatever the screen is, without what one clicks."""
    page = open_page(color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator("form.filters").is_hidden()
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
    assert page.pdf(format="A4").startswith(b"%PDF")
