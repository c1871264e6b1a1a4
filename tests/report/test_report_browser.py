"""What a person sees: the page opens in Chromium without a complaint, draws everything, and can be worked with."""

import pytest

from mindspeed_asyncflow.observe import trace
from mindspeed_asyncflow.observe.report import write_report
from tests.report.runs import STEPS, make_run

pytestmark = pytest.mark.slow

# Different colours on the canvas, which is empty where there is one.
COLORS_OF_CANVAS = """canvas => {
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(pixels).size;
}"""
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"


@pytest.fixture
def opened(browser):
    """Opens a page and afterwards finds that the console stayed silent and nothing was asked from elsewhere."""
    contexts, complaints = [], []

    def open_page(path, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.split("#")[0] == path.as_uri() or complaints.append(request.url))
        page.goto(path.as_uri())
        page.locator("#figures path.ln").first.wait_for(state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_chart_has_content_and_nothing_is_wider_than_the_page(folder, opened, width, scheme):
    page = opened(write_report(folder.path), width, scheme)
    figures = page.locator("#figures figure")
    assert figures.count() >= 5
    for figure in figures.all():
        assert figure.locator("svg[role=img] path.ln, svg[role=img] circle").count() > 0, figure.inner_text()
    assert page.locator("#bars rect.bar").count() > 4
    canvas = page.locator("#laneCanvas")
    assert int(canvas.get_attribute("data-bars")) > 0 and canvas.evaluate(COLORS_OF_CANVAS) > 4
    assert page.evaluate(OVERFLOW) <= 0


def test_an_evaluation_stands_at_the_version_that_it_measured(folder, opened):
    page = opened(write_report(folder.path))
    reward = page.locator("#figures figure", has_text="Reward").first
    assert reward.locator("circle").count() == 2  # one of three had no score
    box = reward.locator("svg[role=img]").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 60)
    assert page.locator("#tip").inner_text().splitlines() == [f"step {STEPS}", "held-out, greedy: 0.97"]


def test_search_finds_answers_by_all_its_words_and_marks_them(folder, opened, expect):
    page = opened(write_report(folder.path))
    assert page.locator("#answerCount").inner_text().startswith(f"{STEPS + 3} of {STEPS + 3}")
    page.fill("#search", "STEP 7")
    expect(page.locator(".answer")).to_have_count(1)
    assert page.locator(".answer mark").all_inner_texts() == ["7", "step", "7"]
    assert "score 1" in page.locator(".answer header").inner_text()
    page.fill("#search", "</pre><b>x")  # shown as it is
    expect(page.locator(".answer")).to_have_count(STEPS)
    page.fill("#search", "nothing has this")
    expect(page.locator(".answer")).to_have_count(0)
    assert page.locator("#answerCount").inner_text() == f"0 of {STEPS + 3} answers"
    page.fill("#search", "")
    page.select_option("#answerKind", "tested")
    assert page.locator(".answer").count() == 3
    page.select_option("#answerOrder", "best")
    assert "score 0.97" in page.locator(".answer header").first.inner_text()


def test_lanes_are_zoomed_by_drag_buttons_and_keys_and_sifted_by_name(folder, opened):
    page = opened(write_report(folder.path))
    canvas = page.locator("#laneCanvas")

    def bars() -> int:
        return int(canvas.get_attribute("data-bars"))

    page.click("#laneAll")
    assert bars() == 2 * STEPS
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 40)
    page.mouse.up()
    close = bars()
    assert 2 <= close < STEPS
    page.click("#laneOut")
    assert bars() > close
    canvas.dblclick(position={"x": 600, "y": 40})
    assert bars() == 2 * STEPS
    canvas.press("+")
    assert bars() < 2 * STEPS
    page.click("#laneAll")
    page.fill("#laneFilter", "TRAINER")
    assert bars() == STEPS
    canvas.hover(position={"x": box["width"] - 8, "y": 36})
    assert page.locator("#tip").inner_text().splitlines()[:2] == ["trainer/step", "trainer0"]


def test_lanes_beyond_the_window_come_by_scrolling_under_the_time_axis(folder, opened, expect):
    now = [0]
    for number in range(60):
        tracer = trace.Tracer(folder.trace, f"worker{number}", clock_ns=lambda: now[0])
        with tracer.span("wide", lane=f"worker{number}"):
            now[0] = STEPS * 1_000_000_000
        now[0] = 0
        tracer.close()
    page = opened(write_report(folder.path))
    page.click("#laneAll")
    canvas, box = page.locator("#laneCanvas"), page.locator("#laneBox")
    box.evaluate("box => box.scrollIntoView()")
    place = canvas.bounding_box()
    assert place["height"] <= 0.7 * 900
    box.evaluate("box => { box.scrollTop = box.scrollHeight; }")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it is told of it
    assert canvas.bounding_box() == place
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] - 16)  # the last lane
    expect(page.locator("#tip")).to_contain_text("worker59")


def test_runs_are_laid_over_each_other_and_seeds_become_a_mean_with_its_range(tmp_path, opened):
    runs = [make_run(tmp_path, f"r{seed}", (f"run.seed={seed}",), gain) for seed, gain in ((1, 0.5), (2, 1.0))]
    page = opened(write_report(runs[0].path, [runs[1].path]))
    reward = page.locator("#figures figure", has_text="Reward").first
    assert reward.locator("path.ln[d*=L]").count() >= 2
    page.check("#bySeed")
    assert reward.locator("polygon.range").count() == 2  # sampled and held-out
    box = reward.locator("svg[role=img]").bounding_box()
    page.mouse.move(box["x"] + 54 + (box["width"] - 66) * 8 / STEPS, box["y"] + 60)
    assert "sampled: 0.5 (0.3333 to 0.6667)" in page.locator("#tip").inner_text()
    assert page.locator("#settingCount").inner_text().startswith("1 of")  # the seed
    assert page.locator("#settingTable td.differs").all_inner_texts() == ["1", "2"]


def test_smoothing_time_and_any_metric_change_the_curves(folder, opened):
    page = opened(write_report(folder.path))
    idle = page.locator("#figures figure", has_text="Idle").first
    before = idle.locator("path.ln").first.get_attribute("d")
    page.fill("#smooth", "4")
    assert idle.locator("path.faint").count() == 1
    page.select_option("#axis", "time")
    assert "seconds" in idle.locator("svg[role=img]").text_content()
    page.select_option("#axis", "step")
    page.fill("#smooth", "1")
    assert idle.locator("path.ln").first.get_attribute("d") == before
    page.select_option("#anyMetric", "actor/grad_norm")
    last = page.locator("#figures figure").last
    assert "Gradient norm before clipping." in last.inner_text()
    assert last.locator("svg[role=img] path.ln").get_attribute("d").count("M") == 2  # a gap where it was not finite


def test_metrics_and_settings_are_found_by_their_words(folder, opened):
    page = opened(write_report(folder.path))
    page.fill("#metricSearch", "clipping gradient")
    assert page.locator("#metricTable td code").all_inner_texts() == ["actor/grad_norm"]
    page.select_option("#settingKind", "")
    page.fill("#settingSearch", "trainer.lr_warmup")
    assert "trainer.lr_warmup_steps" in page.locator("#settingTable td code").all_inner_texts()


def test_every_part_has_a_link_that_leads_to_it(folder, opened):
    page = opened(write_report(folder.path))
    links = page.locator("nav a")
    titles = ["Warnings", "Curves", "Trained answers", "Who worked when", "Answers", "Metrics", "Settings"]
    assert links.all_inner_texts() == titles
    links.last.click()
    assert page.locator("#settings").bounding_box()["y"] < 900


def test_an_empty_folder_shows_no_empty_parts(tmp_path, browser):
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(write_report(tmp_path).as_uri())
    assert errors == []
    assert page.locator("h2:visible").all_inner_texts() == ["Not in this report", "Warnings"]
    page.close()
