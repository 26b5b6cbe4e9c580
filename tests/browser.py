"""Chromium without a window, to look at pages as users see them."""

import shutil
from contextlib import contextmanager

from tests.support import BOUND_S
from tests.transports.loopback import wait_until

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
)


def missing():
    """Say what Chromium needs and is not installed; None if all is there."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs the package selenium"
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return (
        f"needs {' and '.join(programs)} (Debian: chromium, chromium-driver)" if programs else None
    )


@contextmanager
def chromium(folder, size=(1400, 900)):
    """Chromium with a new profile in a folder: selenium's driver, which keeps the console's log."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_script_timeout(60)
        yield driver
    finally:
        driver.quit()


def visit(driver, url):
    """Open a page of the dashboard, and wait until bokeh has drawn it."""
    driver.get(url)
    wait_for_bokeh(driver)


def wait_for_bokeh(driver):
    """Wait until bokeh has drawn the page that is open."""
    until(
        driver, "return !!window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle"
    )


def until(driver, script, *args, limit_s=BOUND_S):
    """Wait until a script returns something true, and return that."""
    return wait_until(
        lambda: driver.execute_script(script, *args), limit_s, lambda: f"{script} {args}"
    )


def data(driver, source):
    """What one of bokeh's data sources has on the page, by column."""
    columns = """
        const data = Bokeh.documents[0].get_model_by_name(arguments[0]).data;
        const entries = data instanceof Map ? [...data] : Object.entries(data);
        return Object.fromEntries(entries.map(([name, column]) => [name, Array.from(column)]));
    """
    return driver.execute_script(columns, source)


def complaints(driver):
    """What the console has of warnings and errors since it was asked last."""
    return [line["message"] for line in driver.get_log("browser") if line["level"] != "INFO"]
