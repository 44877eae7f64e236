"""The report: every figure leads to its notebook, data and claims; nothing comes from elsewhere; all can read it."""

import json
import re
from html.parser import HTMLParser

import nbformat
import pandas as pd
import pytest

from artifact.study import chain, claims, provenance, report, results, style

FIGURE = {"data": [{"type": "bar", "x": ["paged", "pim-aware"], "y": [1226, 2805]}],
          "layout": {"title": {"text": "M3 by <b>allocator</b>"}, "width": 640, "height": 400}}
PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c636000000002"
                    "0001e221bc330000000049454e44ae426082")


def claim(**changes):
    return claims.Claim.model_validate({
        "id": "m1", "work": "kv-pimple", "text": "Rows <script>alert(1)</script> hit & miss",
        "notebook": "11_bandwidth", "result": "headline.csv",
        "where": {"allocator": "paged"}, "metric": "m1_row_hit_frac", "published": "0.77",
        "source": "README", "tolerance": "digits", "scale": "smoke", "tier": "cpu", "figure": "headline", **changes})


CLAIMS = [claim(), claim(id="wrong", published="0.79"), claim(id="later", scale="full", figure=None),
          claim(id="near", published="0.78", expected="within-deviation", deviation={"within": 0.02, "reason": "why"})]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A report of one finished notebook with two figures, one of them without a PNG, and of one run by hand."""
    root = tmp_path_factory.mktemp("results")
    frame = pd.DataFrame({"allocator": ["paged", "pim-aware"], "m1_row_hit_frac": [0.7694, 0.9633],
                          "origin": "simulated"})
    run = chain.notebook("11_bandwidth", "smoke", root)
    run.write("headline.csv", frame)
    for key in ("headline", "bandwidth"):
        results.write_text(run._path(f"figures/{key}.json"), json.dumps(FIGURE))
        results.write(frame, run._path(f"figures/{key}.csv"))
    results.write_bytes(run.folder / "figures" / "headline.png", PNG)
    run.close()
    outputs = [nbformat.v4.new_output("display_data", {"application/vnd.plotly.v1+json": FIGURE},
                                      metadata={"artifact": {"figure": key}}) for key in ("headline", "bandwidth")]
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_markdown_cell("# Does one rule help?\nSee [placement](10_placement.ipynb)."),
                      nbformat.v4.new_code_cell("run.figure('headline', frame)", execution_count=1, outputs=outputs)]
    nbformat.write(notebook, run.folder / "notebook.ipynb")
    by_hand = chain.notebook("10_placement", "smoke", root)
    by_hand.write("placement.csv", frame)
    by_hand.close()
    unfinished = chain.notebook("12_sensitivity", "smoke", root)
    unfinished.write("half.csv", frame)
    return report.build("smoke", root, CLAIMS).parent


class Page(HTMLParser):
    """What a page refers to, its ids, and what stands in it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.ids, self.images, self.tags = [], [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and "src" in given or tag == "link":
            self.loads.append(given.get("src") or given["href"])
        if tag == "img":
            self.images.append(given)


def pages(site):
    return {path: Page(path) for path in site.rglob("*.html") if path.parent.name != "11_bandwidth"}


def test_every_link_leads_somewhere_and_nothing_comes_from_elsewhere(site):
    found = pages(site)
    assert {path.relative_to(site).as_posix() for path in found} == {
        *(f"{name}.html" for name in report._PAGES), "notebooks/10_placement.html", "notebooks/11_bandwidth.html"}
    for path, page in found.items():
        for target in [*page.links, *page.loads]:
            assert not re.match(r"[a-z]+:|//", target), f"{path.name} -> {target}"
            file, _, anchor = target.partition("#")
            goal = (path.parent / file).resolve() if file else path
            assert goal.is_relative_to(site) and goal.is_file(), f"{path.name} -> {target}"
            if anchor:
                assert anchor in (found[goal].ids), f"{path.name} -> {target}"
        assert len(page.ids) == len(set(page.ids)), path.name
    assert not re.search(r"url\(|@import", (site / "report.css").read_text())
    assert [path.relative_to(site).as_posix() for path in site.rglob("plotly*.js")] == ["plotly.min.js"]


def test_every_figure_has_its_notebook_its_data_and_its_claims(site):
    gallery = Page(site / "gallery.html")
    for key in ("headline", "bandwidth"):
        assert f"11_bandwidth-{key}" in gallery.ids
        assert f"notebooks/11_bandwidth.html#11_bandwidth-{key}" in gallery.links
        assert f"figures/11_bandwidth/{key}.csv" in gallery.links
    assert "data/11_bandwidth/headline.csv" in gallery.links
    assert {"claims.html#claim-m1", "claims.html#claim-wrong", "claims.html#claim-later"} <= set(gallery.links)
    assert "gallery.html#11_bandwidth-headline" in Page(site / "claims.html").links
    assert all(image["alt"].strip() for page in pages(site).values() for image in page.images)


def test_verdicts_are_words_and_claims_are_text(site):
    text = (site / "claims.html").read_text()
    for word in ("reproduced", "contradicted", "within deviation", "not measured here", "expected: reproduced"):
        assert word in text
    assert "<script>alert(1)" not in text and "&lt;script&gt;alert(1)" in text
    assert "run `artifact reproduce --scale full --only 11`" in text
    notebook = (site / "notebooks" / "11_bandwidth.html").read_text()
    assert "Does one rule help?" in notebook and 'href="10_placement.html"' in notebook


def test_pages_serve_keyboards_and_screen_readers(site):
    for path, page in pages(site).items():
        text = path.read_text()
        assert text.startswith("<!doctype html>\n<html lang=\"en\">") and page.tags.count("h1") <= 1
        assert page.links[0] == "#main" and "main" in page.ids and "<nav aria-label" in text
    css = (site / "report.css").read_text()
    assert ":focus-visible" in css and "@media print" in css


def test_colours_contrast_as_wcag_aa_asks(site):
    css = (site / "report.css").read_text()
    named = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", css))
    code = re.findall(r"^\.highlight .*?(?<!-)color: (#[0-9A-Fa-f]{6})", css, re.MULTILINE)
    texts = [named[name] for name in ("ink", "soft", "link", *claims.VERDICTS)] + code
    assert len(texts) > 20
    for text in texts:
        for ground in (named["paper"], "#fff4cc", named["wash"]) if text not in code else (named["paper"],):
            assert style.contrast(text, ground) >= 4.5, f"{text} on {ground}"


def test_provenance_shows_every_finished_run(site):
    text = (site / "provenance.html").read_text()
    manifest = json.loads((site.parent / "11_bandwidth" / "manifest.json").read_text())
    assert manifest["files"]["headline.csv"]["sha256"] in text and "sweep requests" in text
    assert "12_sensitivity" not in text and "10 placement" in text


def test_a_report_of_nothing_is_an_error_that_says_what_to_run(cli, tmp_path):
    done = cli("report", "--scale", "smoke", "--results", tmp_path)
    assert done.code == 2 and "run `artifact reproduce --scale smoke`" in done.err and done.err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_a_second_report_replaces_the_first(site):
    (site / "old.html").write_text("")
    index = report.build("smoke", site.parents[1], CLAIMS)
    assert index.is_file() and not (site / "old.html").exists() and not (site.parent / "report.new").exists()


def test_a_browser_without_a_network_shows_it(site, browser, complaints):
    page = browser.new_context(offline=True).new_page()
    troubles = complaints(page, requests=True)
    page.goto((site / "index.html").as_uri(), timeout=120_000)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.get_by_role("link", name="11 bandwidth").first.click()
    page.wait_for_selector("#plot-11_bandwidth-bandwidth .main-svg")
    assert page.locator(".plot .main-svg").count() >= 2
    page.goto((site / "gallery.html").as_uri(), timeout=120_000)
    page.wait_for_selector("#plot-11_bandwidth-bandwidth .main-svg")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= 400", timeout=10_000)  # fits a narrow screen
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert troubles == []


def test_without_a_browser_the_report_is_written_all_the_same(site, monkeypatch, tmp_path):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    index = report.build("smoke", site.parents[1], CLAIMS)
    assert index.is_file() and provenance.chromium() == (None, None)
    assert {path.name for path in index.parent.glob("*.html")} == {f"{name}.html" for name in report._PAGES}
