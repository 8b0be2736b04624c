"""A headless Chromium that selenium drives, and what a person does with the memory page in it."""

import json
import shutil
import time
from pathlib import Path

from PIL import Image

SIZE = (1280, 800)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing_piece() -> str | None:
    if not any(map(shutil.which, BROWSERS)):
        return "no chromium on PATH: install the distribution's chromium package"
    if not shutil.which("chromedriver"):
        return "no chromedriver on PATH: install the distribution's chromium-driver package"
    return None


def start_browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    metrics = {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
    started.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    return started


class Shown:
    """An opened page: what a person can do with it, and where a buffer should be on the screen."""

    def __init__(self, driver, path: Path):
        self.driver = driver
        for log in ("browser", "performance"):
            driver.get_log(log)
        driver.get(path.as_uri())
        self.wait(lambda: self.canvas().get_attribute("data-view"))

    def wait(self, true, seconds=10.0):
        end = time.monotonic() + seconds
        while not (value := true()):
            assert time.monotonic() < end, "the page didn't get there"
            time.sleep(0.02)
        return value

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector) -> str:
        return self.find(selector).text

    def canvas(self, name="canvas"):
        return self.find(f"#{name}")

    def view(self, name="canvas") -> list[float]:
        self.frame()
        return json.loads(self.canvas(name).get_attribute("data-view"))

    def frame(self):
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))")

    def screen(self, memory, buffer) -> tuple[float, float]:
        """The middle of a buffer, in pixels of the canvas: reckoned from the map alone, with every loop unfolded."""
        below = [a for a in memory.allocations if a.number < buffer.allocation]  # the made-up maps have arguments in order
        low = sum(a.num_bytes for a in below) + buffer.offset
        left, right, bottom, top = self.view()
        x, y, width, height = json.loads(self.canvas().get_attribute("data-plot"))
        share = (buffer.first + buffer.last + 1) / 2 / len(memory.program)
        return (
            x + (share - left) / (right - left) * width,
            y + height - (low + buffer.num_bytes / 2 - bottom) / (top - bottom) * height,
        )

    def mouse(self, kind, x, y, **more):
        box = self.canvas().rect
        at = {"x": box["x"] + x, "y": box["y"] + y, **more}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **at})

    def click(self, x, y):
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def search(self, text):
        self.driver.execute_script(
            "const box = document.getElementById('search'); box.value = arguments[0]; box.dispatchEvent(new Event('input'))",
            text,
        )
        self.wait(lambda: self.text("#found") if text else not self.text("#found"))
        time.sleep(0.1)  # a search waits for the typing to pause

    def picture(self, path: Path) -> Image.Image:
        self.frame()
        self.driver.save_screenshot(str(path))
        return Image.open(path).convert("RGB")

    def troubles(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        sent = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
