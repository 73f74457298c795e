"""Headless Chromium, driven over a pipe in the DevTools protocol: nothing but the standard library."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


def chromium():
    """The program, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    def __init__(self, program, profile):
        self.program, self.profile = program, profile
        self.number, self.buffer = 0, b""

    def __enter__(self):
        theirs_in, self.to = os.pipe()
        self.back, theirs_out = os.pipe()
        # The browser reads from 3 and writes to 4: out of the way of both first.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 60) for end in (theirs_in, theirs_out)]
        command = [self.program, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", *command],
            pass_fds=ends,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self.to)
        os.close(self.back)

    def open(self, file, **options):
        return Tab(self, file, **options)

    def send(self, method, session=None, **params):
        """Send a command and give its result; events that come meanwhile go to `heard`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        heard = []
        while True:
            answer = self.receive(60)
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"], heard
            heard.append(answer)

    def receive(self, seconds):
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("chromium does not answer")
            self.buffer += os.read(self.back, 1 << 20)
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)


class Tab:
    """A page that is loaded; `events` holds what the browser told about it."""

    def __init__(self, browser, file, *, width=1100, height=900, scheme="light", media=""):
        self.browser, self.events = browser, []
        self.target = browser.send("Target.createTarget", url="about:blank")[0]["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=self.target, flatten=True)
        self.session = attached[0]["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=feature)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Page.navigate", url=file.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(browser.receive(60))
        self.settle()

    def send(self, method, **params):
        result, heard = self.browser.send(method, self.session, **params)
        self.events += heard
        return result

    def evaluate(self, code):
        asked = {"expression": code, "returnByValue": True, "awaitPromise": True}
        answer = self.send("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def settle(self):
        """Two frames: what was asked to be drawn is drawn."""
        self.evaluate(
            "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))"
        )

    def drag(self, x, y, across, down):
        for kind, place in (
            ("mousePressed", (x, y)),
            ("mouseMoved", (x + across / 2, y + down / 2)),
            ("mouseMoved", (x + across, y + down)),
            ("mouseReleased", (x + across, y + down)),
        ):
            button = {"button": "left", "buttons": 0 if kind == "mouseReleased" else 1}
            where = {"x": place[0], "y": place[1]}
            self.send("Input.dispatchMouseEvent", type=kind, clickCount=1, **where, **button)
        self.settle()

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        self.settle()

    def screenshot(self):
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def complaints(self):
        """Errors, warnings and uncaught exceptions of the page."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event for event in self.events if event.get("method") in kinds]

    def requests(self):
        """Addresses the page asked for, data inside itself apart."""
        asked = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith("data:")]

    def close(self):
        self.browser.send("Target.closeTarget", targetId=self.target)
