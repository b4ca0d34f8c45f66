"""The page in a real browser: live, usable by everybody, and silent towards all others."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Response, Route, expect

from tessera.shared.api.admin import EnrolmentSpec
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation
from tessera.shared.api.tasks import Failure, LiveValues, LogEvent, Progress
from tessera.shared.api.token_format import hash_of
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tests.coordinator.api.test_secure_sums import Ring
from tests.support.browser import chromium
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()
SOON = 15_000
expect.set_options(timeout=SOON)
SHOTS = os.environ.get("TESSERA_PAGE_SHOTS")
"""A folder for pictures of every page, if one is named."""

NOW = datetime.now(UTC)
LIVE = LiveValues(
    started_at=NOW, cpus=16, cpu_load=5.3, memory_bytes=1 << 37, memory_used_bytes=1 << 33, gpu_name="Tensor 9",
    gpu_memory_bytes=1 << 37, gpu_memory_used_bytes=1 << 36, gpu_use=0.87, disk_free_bytes=1 << 39,
    log=(LogEvent(at=NOW, event="training", run="wards", round=2),),
)  # fmt: skip

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PAGES = {
    "overview": "/", "runs": "/runs", "run": "/runs/{run}", "rounds": "/runs/{run}/rounds",
    "round": "/runs/{run}/rounds/1", "open-round": "/runs/{run}/rounds/2", "sites": "/sites",
    "worker": "/workers/{worker}", "tokens": "/tokens", "rotate": "/tokens/{site_token}/rotate",
    "suspend": "/sites/{site}/suspend", "approvals": "/approvals", "failures": "/failures",
    "audit": "/audit", "storage": "/storage",
    "methods": "/runs/new", "start": "/runs/new?method=fedfrozen", "cancel": "/runs/{run}/cancel",
    "gone": "/runs/nothing", "compare": "/runs/compare?run={run}&run={other}", "by-bytes": "/runs/{run}?x=bytes",
}  # fmt: skip


@dataclass
class Visit:
    """A page, and all that should not have happened on it."""

    page: Page
    url: str
    said: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda fault: self.said.append(str(fault)))
        self.page.on("request", self._request)
        self.page.on("response", self._response)
        self.page.set_default_timeout(SOON)

    def _console(self, message: ConsoleMessage) -> None:
        # A 404 that is asked for is told of too.
        if message.type in ("error", "warning") and "status of 404" not in message.text:
            self.said.append(message.text)

    def _request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc:
            self.elsewhere.append(request.url)

    def _response(self, response: Response) -> None:
        if response.status >= 400 and "nothing" not in response.url:
            self.said.append(f"{response.status} {response.url}")

    def open(self, path: str) -> Page:
        self.page.goto(f"{self.url}/page{path}")
        return self.page

    def sign_in(self, token: str, opens: str = "Overview") -> Page:
        self.open("/")
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        expect(self.page.get_by_role("heading", level=1)).to_have_text(opens)
        return self.page

    def nothing_amiss(self) -> None:
        assert self.said == []
        assert self.elsewhere == []


def visiting(context: BrowserContext, coordinator: LiveCoordinator) -> Visit:
    return Visit(context.new_page(), coordinator.url)


@dataclass
class Scene:
    """A federation in the midst of things."""

    coordinator: LiveCoordinator
    ids: dict[str, str]
    token: str


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with LiveCoordinator(tmp_path_factory.mktemp("scene")) as coordinator:
        client = coordinator.client()
        workers = [
            ScriptedWorker(
                coordinator.client("site", site), name="gpu-1", kinds=("train", "evaluate"), held_out={"data": 5},
                methods=("fedfrozen",),
            )
            for site in ("north-hospital", "lakeside")
        ]  # fmt: skip
        for worker in workers:
            worker.enrol()
        run = start_run(
            client, MODEL, values(MODEL), name="wards", rounds=9, evaluation=Evaluation(sites=True),
            method=MethodSpec(name="fedfrozen", settings={"warmup_rounds": 1}), cohort=Cohort(quorum=2),
        )  # fmt: skip
        for accuracy in (0.5, 0.75):
            for worker in workers:
                while (task := worker.take()).kind == "evaluate":
                    worker.evaluate(task, accuracy=accuracy, loss=1 - accuracy)
                if accuracy < 0.6:
                    worker.train(task)
                else:
                    worker.client.heartbeat(
                        task.id, task.token, Progress(phase="training", step=3, steps=8, loss=0.5), LIVE
                    )
        failing = ScriptedWorker(coordinator.client("site", "st-mary"), name="cpu", datasets={"xray": 9}).enrol()
        once = start_run(
            client,
            MODEL,
            values(MODEL),
            name="xray",
            dataset="xray",
            cohort=Cohort(max_attempts=1, max_task_attempts=1),
        )
        task = failing.take()
        failing.client.fail(task.id, Failure(token=task.token, code="out-of-memory", detail="it does not fit"))
        until(lambda: client.run(once.id).state == "paused")
        busy = next(one for one in client.workers() if one.site == "lakeside")
        token = next(one.id for one in client.tokens() if one.role == "site")
        ids = {"run": run.id, "worker": busy.id, "site": next(iter(client.sites())).id, "site_token": token,
               "other": once.id}  # fmt: skip
        yield Scene(coordinator, ids, coordinator.token("admin"))


def test_every_page_is_accessible_to_everybody(browser: Browser, scene: Scene) -> None:
    with browser.new_context(color_scheme="light", reduced_motion="reduce") as context:
        visit = visiting(context, scene.coordinator)
        found = {"sign-in": violations_in_both_colours(visit.open("/sign-in"), "sign-in")}
        visit.sign_in(scene.token)
        for name, path in PAGES.items():
            page = visit.open(path.format(**scene.ids))
            for summary in page.locator("details.part > summary").all():
                summary.click()
            found[name] = violations_in_both_colours(page, name)
        assert {name: told for name, told in found.items() if told} == {}
        visit.nothing_amiss()


def violations_in_both_colours(page: Page, name: str) -> list[str]:
    found = violations(page)
    shoot(page, f"{name}-light")
    page.emulate_media(color_scheme="dark")
    # What is not about colours is the same in both.
    found += violations(page, everything=False)
    shoot(page, f"{name}-dark")
    page.emulate_media(color_scheme="light")
    return found


def violations(page: Page, *, everything: bool = True) -> list[str]:
    rules = {"type": "tag", "values": RULES} if everything else {"type": "rule", "values": ["color-contrast"]}
    if page.evaluate("!window.axe"):
        page.evaluate(Axe().axe_script)
    options = {"runOnly": rules, "resultTypes": ["violations"]}
    return [
        f"{one['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for one in page.evaluate("options => axe.run(options).then(found => found.violations)", options)
        for node in one["nodes"]
    ]


def shoot(page: Page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)


def test_no_page_is_wider_than_a_phone(browser: Browser, scene: Scene) -> None:
    with browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as context:
        visit = visiting(context, scene.coordinator)
        visit.sign_in(scene.token)
        widths = {}
        for name, path in PAGES.items():
            page = visit.open(path.format(**scene.ids))
            widths[name] = page.evaluate("document.documentElement.scrollWidth")
            if name in ("run", "runs", "sites", "worker", "compare", "start"):
                assert violations(page) == [], name
            if name in ("audit", "round"):
                box = page.locator(".scroll").first
                assert box.evaluate("box => box.scrollWidth <= box.clientWidth"), name
            shoot(page, f"{name}-phone")
        assert {name: width for name, width in widths.items() if width > 360} == {}
        visit.nothing_amiss()


@pytest.mark.parametrize(("site", "run"), [("lakeside", "run"), ("st-mary", "other")])
def test_a_sites_own_pages_are_accessible_and_need_no_script(
    browser: Browser, scene: Scene, site: str, run: str
) -> None:
    token, paths = scene.coordinator.token("site", site), ("/site", f"/site/runs/{scene.ids[run]}")
    with browser.new_context(color_scheme="light", viewport={"width": 360, "height": 740}) as context:
        visit = visiting(context, scene.coordinator)
        visit.sign_in(token, opens=site)
        for number, path in enumerate(paths):
            page = visit.open(path)
            assert violations_in_both_colours(page, f"site-{site}-{number}") == []
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
        visit.nothing_amiss()
    with browser.new_context(java_script_enabled=False) as context:
        page = visiting(context, scene.coordinator).sign_in(token, opens=site)
        page.get_by_role("link", name="Refresh").click()
        page.get_by_role("region", name="Runs").or_(page.get_by_role("group", name="Runs")).get_by_role(
            "link"
        ).click()
        expect(page.get_by_role("heading", level=2, name="Your scores")).to_be_visible()


def test_a_run_is_seen_from_its_start_to_its_end_without_loading_anew(
    browser: Browser, coordinator: LiveCoordinator
) -> None:
    client = coordinator.client()
    worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
    start_run(client, MODEL, values(MODEL), name="before", dataset="none")
    with browser.new_context() as context:
        visit = visiting(context, coordinator)
        page = visit.sign_in(coordinator.token("orchestrator"))
        page.get_by_role("link", name="Start a run").first.click()
        expect(page.get_by_role("radio", name=re.compile("^fedavg"))).to_be_checked()
        page.get_by_label("Model and version").select_option(index=1)
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_label("Model and version").locator(":checked")).to_contain_text("before")
        expect(page.get_by_label(re.compile("^Dataset")).first).to_have_value("data")
        for label, said in {"name": "watched", "rounds": "many"}.items():
            page.get_by_label(re.compile(f"^{label} \\(required\\)", re.IGNORECASE)).fill(said)
        page.get_by_role("button", name="Preview the first round").click()
        expect(page.get_by_role("alert")).to_contain_text("The run was not created")
        wrong = page.get_by_label(re.compile("^Rounds"))
        expect(wrong).to_have_attribute("aria-invalid", "true")
        wrong.fill("2")
        visit.said.clear()  # the 422 was asked for
        page.get_by_role("button", name="Preview the first round").click()
        expect(page.get_by_role("row", name=re.compile("a.w"))).to_contain_text("yes")
        page.get_by_role("button", name="Start the run").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("watched running")
        expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
        page.evaluate("window.sameLoading = true")
        task = worker.take()
        worker.client.heartbeat(task.id, task.token, Progress(phase="training", step=7, steps=9, loss=0.25))
        expect(page.locator("#now").locator("xpath=ancestor::section")).to_contain_text(
            "training step 7 of 9, loss 0.25"
        )
        worker.train(task)
        worker.train(worker.take())
        expect(page.get_by_role("heading", level=1)).to_contain_text("watched completed")
        expect(page.locator("#announced")).to_contain_text("version 2 of 2")
        assert page.evaluate("window.sameLoading")
        visit.nothing_amiss()


def test_a_secure_sum_is_followed_from_the_first_sender_to_the_opened_set(
    browser: Browser, coordinator: LiveCoordinator
) -> None:
    ring = Ring(coordinator)
    with browser.new_context(viewport={"width": 360, "height": 740}, reduced_motion="reduce") as context:
        visit = visiting(context, coordinator)
        visit.sign_in(coordinator.token("viewer"))
        page = visit.open(f"/runs/{ring.run.id}/rounds/1")
        section = page.get_by_role("region", name="Secure sum: what each party saw")
        expect(section).to_contain_text("Sites send their updates under masks.")
        for site in ring.sites:
            site.train(1.0)
        expect(section).to_contain_text("The helpers check who sent, and sign the set.")
        ring.help()
        expect(section).to_contain_text("The coordinator has the sums below, and no single update")
        expect(section.get_by_role("listitem")).to_have_text(f"{len(ring.model.blocks)} blocks: the sum of 3 sites")
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        shoot(page, "secure-sum-phone")
        visit.nothing_amiss()


def test_a_run_is_cancelled_only_after_a_second_look(browser: Browser, coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    run = start_run(client, MODEL, values(MODEL), dataset="none")
    with browser.new_context() as context:
        visit = visiting(context, coordinator)
        visit.sign_in(coordinator.token("admin"))
        page = visit.open(f"/runs/{run.id}")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("paused")
        page.get_by_role("link", name="Cancel").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Cancel test?")
        assert client.run(run.id).state == "paused"
        page.get_by_role("button", name="Cancel the run").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("cancelled")
        visit.nothing_amiss()


def test_everything_is_reached_by_keyboard_and_focus_survives_what_is_new(browser: Browser, scene: Scene) -> None:
    with browser.new_context() as context:
        visit = visiting(context, scene.coordinator)
        page = visit.open("/")
        # The browser focuses the field when it first draws the page, which may be after it is loaded.
        expect(page.get_by_label("Token")).to_be_focused()
        page.keyboard.type(scene.token)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Start a run")).to_be_focused()
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        expect(page.locator("#pulse")).to_have_attribute("data-state", "live")
        # What is fetched anew takes nobody's place away.
        with page.expect_response(re.compile("part=live")):
            scene.coordinator.client().create_site(f"site-{os.getpid()}")
        page.wait_for_timeout(200)
        expect(page.get_by_role("link", name="Start a run")).to_be_focused()
        visit.nothing_amiss()


def test_a_page_shows_that_it_could_not_be_updated_until_it_is(
    browser: Browser, coordinator: LiveCoordinator
) -> None:
    client, part = coordinator.client(), re.compile("part=live")
    with browser.new_context() as context:
        visit = visiting(context, coordinator)
        page = visit.sign_in(coordinator.token("viewer"))
        pulse = page.locator("#pulse")
        faults: dict[str, Callable[[Route], None]] = {
            "error 503": lambda route: route.fulfill(status=503),
            "reconnecting": lambda route: route.abort(),
        }
        for number, (shown, fault) in enumerate(faults.items()):
            expect(pulse).to_have_text("live")
            page.route(part, fault)
            client.create_site(f"faulty-{number}")
            expect(pulse).to_have_text(shown)
            page.unroute(part)
            client.create_site(f"well-{number}")
        expect(pulse).to_have_text("live")
        visit.said.clear()  # the errors were asked for
        visit.nothing_amiss()


def test_live_updates_keep_unfinished_input(browser: Browser, coordinator: LiveCoordinator) -> None:
    client = coordinator.client()

    def ask(site: str) -> None:
        with Client(coordinator.url, verify=False) as worker:
            worker.ask_to_join(EnrolmentSpec(site=site, worker="gpu-1", secret_hash=hash_of(site)))

    ask("nroth")
    with browser.new_context() as context:
        visit = visiting(context, coordinator)
        visit.sign_in(coordinator.token("admin"))
        page = visit.open("/approvals")
        expect(page.locator("#pulse")).to_have_text("live")
        card = page.get_by_role("listitem").filter(has_text="nroth/gpu-1")
        create, site = card.get_by_role("checkbox"), card.get_by_role("textbox", name="Site")
        create.uncheck()
        ask("south")
        client.create_site("known")
        # A box alone does not hold updates up, and keeps its state.
        expect(page.get_by_role("heading", name="south/gpu-1")).to_be_visible()
        expect(create).not_to_be_checked()
        site.fill("north")
        card.get_by_role("button", name="Admit").focus()
        client.create_site("other")
        expect(page.locator("#pulse")).to_have_text("paused while you write")
        expect(site).to_have_value("north")
        expect(create).not_to_be_checked()
        visit.nothing_amiss()


def test_a_hidden_page_keeps_no_connection_open(browser: Browser, coordinator: LiveCoordinator) -> None:
    turn = """hidden => {
        Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with browser.new_context() as context:
        visit = visiting(context, coordinator)
        page = visit.sign_in(coordinator.token("viewer"))
        expect(page.locator("#pulse")).to_have_text("live")
        with page.expect_event("requestfailed", lambda request: request.url.endswith("/events")):
            page.evaluate(turn, True)
        coordinator.client().create_site("meanwhile")
        with page.expect_response(re.compile("part=live")):
            page.evaluate(turn, False)
        expect(page.locator("#pulse")).to_have_text("live")
        visit.nothing_amiss()


def test_as_many_pages_as_anybody_opens_are_answered(browser: Browser, coordinator: LiveCoordinator) -> None:
    with browser.new_context() as context:
        visit = visiting(context, coordinator)
        first = visit.sign_in(coordinator.token("viewer"))
        expect(first.locator("#pulse")).to_have_text("live")
        # A browser opens six connections to a host.
        for _ in range(7):
            page = context.new_page()
            page.goto(first.url)
            expect(page.locator("#pulse")).to_have_text("live")
        visit.nothing_amiss()


def test_colours_are_chosen_and_stay_without_any_script(browser: Browser, scene: Scene) -> None:
    with browser.new_context(java_script_enabled=False, color_scheme="light") as context:
        visit = visiting(context, scene.coordinator)
        page = visit.sign_in(scene.token)
        for theme in ("dark", "light", "system"):
            page.get_by_role("button", name=re.compile("^Colours")).click()
            assert page.locator("html").get_attribute("data-theme") == theme
        page.get_by_role("link", name="Runs", exact=True).click()
        page.get_by_role("link", name="wards").first.click()
        page.locator("summary").first.click()
        expect(page.locator("details table").first).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")


def test_a_chart_shows_the_values_under_the_pointer_and_hides_lines(browser: Browser, scene: Scene) -> None:
    with browser.new_context() as context:
        visit = visiting(context, scene.coordinator)
        visit.sign_in(scene.token)
        panel = visit.open(f"/runs/{scene.ids['run']}").locator(".panel").first
        panel.locator(".chart").hover(position={"x": 5, "y": 60})
        expect(panel.locator(".tip")).to_contain_text("version0global0.5")
        expect(panel.locator(".chart path.c0")).to_be_visible()
        panel.locator(".legend").get_by_text("global").click()
        expect(panel.locator(".chart path.c0")).to_be_hidden()
        expect(panel.locator(".chart path.c1")).to_be_visible()
        visit.nothing_amiss()


def test_a_hostile_worker_runs_nothing_in_anybodys_browser(browser: Browser, coordinator: LiveCoordinator) -> None:
    hostile = '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\'"><svg onload=window.owned=1>'
    worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL), cohort=Cohort(max_attempts=1))
    task = worker.take()
    worker.client.fail(task.id, Failure(token=task.token, code=hostile[:64], detail=hostile))
    until(lambda: coordinator.client().run(run.id).state == "paused")
    with browser.new_context() as context:
        visit = visiting(context, coordinator)
        visit.sign_in(coordinator.token("admin"))
        for path in ("/", "/failures", f"/runs/{run.id}", f"/runs/{run.id}/rounds/1", f"/audit?run={run.id}"):
            page = visit.open(path)
            assert page.evaluate("window.owned") is None, path
            assert page.locator("img").count() == 0, path
        expect(visit.open("/failures").locator("main")).to_contain_text("<img src=x onerror=")
        visit.nothing_amiss()


def test_scripts_and_styles_that_are_not_the_pages_own_do_not_run(browser: Browser, scene: Scene) -> None:
    """That the policy is in force, and not only sent."""
    with browser.new_context() as context:
        visit = visiting(context, scene.coordinator)
        page = visit.sign_in(scene.token)
        page.evaluate(
            """() => {
                const script = document.createElement("script");
                script.textContent = "window.owned = 1";
                document.body.append(script);
                document.body.insertAdjacentHTML("beforeend", '<b id="styled" style="color: red" onclick="1">x</b>');
            }"""
        )
        assert page.evaluate("window.owned") is None
        assert page.evaluate("getComputedStyle(document.getElementById('styled')).color") != "rgb(255, 0, 0)"
        assert page.evaluate("fetch('https://elsewhere.invalid/').catch(() => 'refused')") == "refused"
        assert any("Content Security Policy" in said for said in visit.said)


def test_a_machine_whose_driver_does_not_start_skips_and_is_told_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "node"
    node.write_text(
        "#!/bin/sh\necho 'node: error while loading shared libraries: libatomic.so.1: not found' >&2\nexit 127\n"
    )
    node.chmod(0o755)
    monkeypatch.setenv("PLAYWRIGHT_NODEJS_PATH", str(node))
    with (
        pytest.raises(pytest.skip.Exception, match=r"apt-get install chromium libatomic1 \(node: .*libatomic"),
        chromium(),
    ):
        pass
