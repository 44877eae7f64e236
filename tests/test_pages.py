"""The report of our whole recorded run in a real browser: figures render, links resolve, keys and contrast work."""

import re

import nbformat
import pytest
from markupsafe import escape

from artifact.study import chain, evidence, experiments, figures, report, results

CONTRAST = """() => {
    const parse = text => (text.match(/[\\d.]+/g) ?? []).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92
        : ((c + 0.055) / 1.055) ** 2.4).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = element => {
        for (let at = element; at; at = at.parentElement) {
            const [r, g, b, a = 1] = parse(getComputedStyle(at).backgroundColor);
            if (a > 0.99) return [r, g, b];
        }
        return [255, 255, 255];
    };
    const under = element => {  // what is drawn below a text of a figure: the last filled shape around its middle
        const {left, right, top, bottom} = element.getBoundingClientRect();
        const [x, y] = [(left + right) / 2, (top + bottom) / 2];
        const shapes = [...element.closest('.svg-container').querySelectorAll('.shapelayer path, .bg, .points path')];
        const [r, g, b] = shapes.filter(shape => {
            const box = shape.getBoundingClientRect(), style = getComputedStyle(shape);
            return box.left <= x && x <= box.right && box.top <= y && y <= box.bottom && style.fill.startsWith('rgb')
                && Number(style.fillOpacity) > 0.5;
        }).map(shape => parse(getComputedStyle(shape).fill)).at(-1) ?? [255, 255, 255];
        return [r, g, b];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const text = node.textContent.trim(), element = node.parentElement;
        if (!text || !element.getClientRects().length || element.closest('script, style')) continue;
        const style = getComputedStyle(element), drawn = element.namespaceURI.endsWith('svg');
        if (style.visibility === 'hidden' || Number(style.opacity) === 0) continue;
        const front = light(parse(drawn ? style.fill : style.color));
        const back = light(drawn ? under(element) : ground(element));
        const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
        const px = parseFloat(style.fontSize), large = px >= 24 || (px >= 18.66 && Number(style.fontWeight) >= 700);
        if (!element.closest('.heatmaplayer'))
            found.push([ratio, large ? 3 : 4.5, text.slice(0, 40), drawn]);
    }
    return found;
}"""
FOCUSED = """() => {
    const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
    return [at.tagName, at.getAttribute('href') ?? at.id ?? '', style.outlineStyle !== 'none'
            && parseFloat(style.outlineWidth) > 0, box.width > 0 && box.height > 0];
}"""


@pytest.fixture(scope="module")
def site(root, tmp_path_factory):
    """The report of our recorded run, with every figure drawn again and its picture where there is one."""
    home = tmp_path_factory.mktemp("results")
    for name in evidence.finished("full", evidence.recorded()):
        shipped = evidence.recorded() / "full" / name
        run = chain.notebook(name, "full", home)
        for path in sorted(shipped.glob("*.csv")):
            results.write_bytes(run._path(path.name), path.read_bytes())
        content = nbformat.read(root / "notebooks" / f"{name}.ipynb", as_version=4)
        for number, cell in enumerate(cell for cell in content.cells if cell.cell_type == "code"):
            cell.execution_count = number + 1
            for key in re.findall(r'run\.figure\("(\w+)"', cell.source):
                _draw(run, key, shipped)
                cell.outputs.append(nbformat.v4.new_output(
                    "display_data", {"application/vnd.plotly.v1+json": {}}, metadata={"artifact": {"figure": key}}))
        run.close()
        nbformat.write(content, run.folder / "notebook.ipynb")
    return report.build("full", home).parent


def _draw(run, key, shipped):
    plot = figures.known(key)
    frame = results.read(shipped / plot.result)
    drawn = figures.draw(key, experiments.beside(frame) if plot.published else frame)
    results.write_text(run._path(f"figures/{key}.json"), drawn.to_json())
    picture = shipped / "figures" / f"{key}.png"
    if picture.is_file():
        results.write_bytes(run._path(f"figures/{key}.png"), picture.read_bytes())


@pytest.fixture(scope="module")
def opened(site, browser, complaints):
    """A page without a network and the console's complaints."""
    page = browser.new_context(offline=True, viewport={"width": 1200, "height": 900}).new_page()
    page.set_default_timeout(60_000)
    return page, complaints(page, requests=True)


def pages(site):
    return sorted([*site.glob("*.html"), *(site / "notebooks").glob("*.html")])


def test_every_page_loads_its_figures_render_its_text_has_contrast(site, opened, screenshots):
    page, troubles = opened
    drawn, poor = set(), []
    for path in pages(site):
        page.goto(path.as_uri(), wait_until="load")
        for place in page.query_selector_all(".plot"):
            place.wait_for_selector(".main-svg", state="attached")
            assert place.query_selector(".main-svg").bounding_box()["height"] > 100, place.get_attribute("id")
            drawn.add(place.get_attribute("id"))
        for image in page.query_selector_all("img"):
            if image.is_visible():
                assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
        found = page.evaluate(CONTRAST)
        assert len(found) > 10
        poor += [f"{path.name}: {text!r} {ratio:.2f} of {least}" for ratio, least, text, _ in found if ratio < least]
        page.screenshot(path=screenshots / f"report-{path.stem}.png")
    keys = {f"plot-{plot.notebook}-{key}" for key, plot in figures.FIGURES.items()}
    assert keys <= drawn and troubles == []
    assert not poor, "\n".join(poor)


def test_every_link_of_every_page_resolves(site, opened):
    page, _ = opened
    ids = {}
    for path in pages(site):
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        ids[path.as_uri()] = set(page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)"))
        ids[path.as_uri(), "links"] = page.evaluate("[...document.links].map(one => one.href)")
    for path in pages(site):
        for link in ids[path.as_uri(), "links"]:
            file, _, anchor = link.partition("#")
            if file.startswith("https://"):
                continue  # a paper or a repository, named in a text
            assert file.startswith(site.as_uri()), f"{path.name} -> {link}"
            assert file in ids or (site / file.removeprefix(site.as_uri() + "/")).is_file(), f"{path.name} -> {link}"
            assert not anchor or file not in ids or anchor in ids[file], f"{path.name} -> {link}"


def test_all_of_it_is_reached_by_keyboard_and_the_place_is_seen(site, opened):
    page, _ = opened
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED)[1] == "#main"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.goto((site / "index.html").as_uri())
    links = page.evaluate("document.querySelectorAll('a[href]').length")
    reached = []
    for _ in range(3 * links + 60):
        page.keyboard.press("Tab")
        tag, where, outlined, seen = page.evaluate(FOCUSED)
        if tag == "BODY":
            break
        assert outlined and seen, f"{tag} {where} has the focus and does not show it"
        reached.append(where)
    assert len([where for where in reached if where]) >= links
    page.locator("nav a", has_text="Glossary").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('Glossary')")


def test_it_prints_and_fits_narrow_screens(site, opened, screenshots):
    page, _ = opened
    for path in pages(site):
        page.set_viewport_size({"width": 400, "height": 800})
        page.goto(path.as_uri(), wait_until="load")
        page.wait_for_function("document.documentElement.scrollWidth <= 400")
    page.set_viewport_size({"width": 1200, "height": 900})
    for name in ("index", "claims"):
        page.goto((site / f"{name}.html").as_uri(), wait_until="load")
        page.pdf(path=screenshots / f"report-{name}.pdf", format="A4")
        assert (screenshots / f"report-{name}.pdf").stat().st_size > 10_000
        page.emulate_media(media="print")
        assert not page.locator("nav").is_visible()
        page.emulate_media(media="screen")


def test_figures_say_in_words_what_they_show(site):
    text = (site / "gallery.html").read_text(encoding="utf-8")
    for key, plot in figures.FIGURES.items():
        assert f'id="{plot.notebook}-{key}"' in text and str(escape(plot.caption)) in text
