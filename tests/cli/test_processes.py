"""The command as a process: exit codes, readers that leave, what is not installed."""

import json
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from pool import PATIENCE_S
from ranks import heed_ctrl_c

LINES = {
    "zbpp show 1F1B -p 40 -m 90 | head -1": (
        0,
        r"1F1B: 40 stages, 90 micro-batches\n",
        "",
    ),
    "zbpp show ZBV -p 2 -m 3 >&-": (0, "", ""),
    "zbpp show ZBH1 -p 2 -m 3 >/dev/full": (
        1,
        "",
        r"zbpp: the output is lost: .*No space left.*\n",
    ),
    "zbpp show missing.json": (2, "", r"zbpp: missing\.json: cannot be read.*\n"),
}


@pytest.mark.parametrize("line", LINES)
def test_a_process_ends_with_its_exit_code(line, tmp_path):
    """A reader that has left is no error, a full disk is one line."""
    code, out, err = LINES[line]
    command = line.replace("zbpp", f"{sys.executable} -m zbpp", 1)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == code
    assert re.fullmatch(out, done.stdout) and re.fullmatch(err, done.stderr)


HIDDEN = """
import importlib.metadata, platform, sys

def version(package, real=importlib.metadata.version):
    if package in ("torch", "matplotlib"):
        raise importlib.metadata.PackageNotFoundError(package)
    return real(package)

class Hide:
    def find_spec(self, name, *_):
        if name in ("torch", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name}", name=name)

importlib.metadata.version = version
platform.python_version = lambda: "3.99.1"
sys.meta_path.insert(0, Hide())
from zbpp.cli import main

sizes = ["-p", "2", "-m", "3"]
for words in (
    ["plan", "ZBV", *sizes, "-o", "x.json"],
    ["show", "ZBV", *sizes],
    ["show", "ZBV", *sizes, "-o", "trace.json"],
    ["show", "ZBV", *sizes, "-o", "x.html"],
    ["compare", *sizes],
    ["doctor"],
):
    assert main(words) == 0, words
assert not {"torch", "matplotlib"} & set(sys.modules)
assert main(["show", "ZBV", *sizes, "-o", "x.svg"]) == 2
sys.exit(main(["train"]))
"""


def test_without_torch_and_matplotlib_all_works_that_needs_neither(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2, done.stderr
    assert "matplotlib     missing: pip install 'zbpp[viz]'\n" in done.stdout
    assert "torch          missing: pip install 'zbpp[train]'\n" in done.stdout
    assert re.search(r"python +3\.99\.1 \(.*; not tested: 3\.11, 3", done.stdout)
    picture, train = done.stderr.splitlines()
    assert picture.startswith("zbpp: ") and "pip install 'zbpp[viz]'" in picture
    assert train == "zbpp: this needs torch; install it: pip install 'zbpp[train]'"


# The playground.


@pytest.fixture(scope="module")
def address():
    """Of ``zbpp playground``, which Ctrl-C ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "zbpp", "playground"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    with process:
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert "interrupted" in process.stderr.read()
        assert process.wait(PATIENCE_S) == 130


@pytest.fixture
def ask(address):
    """Ask the server; gives the status, the type and the text of its reply."""

    def request(method, path, body=None):
        connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
        connection.request(method, path, body)
        reply = connection.getresponse()
        content = reply.read().decode()
        connection.close()
        return reply.status, reply.getheader("Content-Type"), content

    return request


SETTINGS = {
    "stages": 4, "microbatches": 8, "f": 1, "b": 1, "w": 1, "comm": 0, "limit": 0,
    "speeds": [1, 1, 1, 1],
}  # fmt: skip
UNEVEN = SETTINGS | {"f": 0.7, "w": 1.9, "comm": 0.35, "speeds": [0.5, 1, 1.75, 1]}


@pytest.fixture
def answer(ask):
    def question(do, *modes, **settings):
        body = {"do": do, "settings": SETTINGS | settings, "modes": modes}
        status, kind, text = ask("POST", "/answer", json.dumps(body))
        assert (status, kind) == (200, "application/json; charset=utf-8")
        return json.loads(text)

    return question


def test_the_page_and_all_that_it_names_are_served(ask):
    status, kind, page = ask("GET", "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    names = re.findall(r'(?:src|href)="([\w.]+)"', page)
    assert len(names) >= 3
    for name in names:
        assert ask("GET", f"/{name}")[0] == 200, name
    assert ask("GET", "/../pyproject.toml")[0] == 404


@pytest.mark.parametrize(
    ("mode", "settings"),
    [("ZBH1", {}), ("VMin", UNEVEN), ("auto", {"limit": 2.5}), ("ZBH1", {"limit": 2})],
    ids=str,
)
def test_answers_are_those_of_the_command_line(answer, zbpp, mode, settings):
    chosen = SETTINGS | settings
    times = {k: chosen[k] for k in ("f", "b", "w", "comm")}
    speed = [1 / factor for factor in chosen["speeds"]]
    (zbpp.folder / "costs.json").write_text(json.dumps(times | {"speed": speed}))
    line = f"{mode} -p 4 -m 8 --costs costs.json"
    if chosen["limit"]:
        line += f" --memory_limit {chosen['limit']}"
    found = answer("plan", mode, **settings)
    if "reason" in found:
        zbpp(f"plan {line} -o plan.json", code=2)
        assert (mode, chosen["limit"]) == ("ZBH1", 2)
        assert found["reason"] in zbpp.err.replace("\n", " ")
        return
    zbpp(f"plan {line} -o plan.json")
    file = json.loads((zbpp.folder / "plan.json").read_text())
    assert json.loads(found["file"]) == file
    shown = zbpp.json(f"show {line}")
    assert found["bubble"] == shown["bubble_rate"]
    assert (found["peak"], found["gap"]) == (max(shown["peak_memory"]), shown["gap"])


def test_timelines_have_a_panel_a_mode(answer):
    drawn = answer("draw", "1F1B", "ZBV")
    assert re.findall(r"<b>(.*?)</b>", drawn["html"]) == ["1F1B", "ZBV"]
    lengths = re.findall(r"(\S+) from start to end", drawn["html"])
    assert lengths == ["33", "25.5"]


@pytest.mark.needs("matplotlib")
def test_a_chart_has_a_label_a_mode(answer):
    html = answer("chart", "1F1B", "ZBV")["html"]
    assert ">1F1B</text>" in html and ">ZBV</text>" in html


def test_settings_without_a_plan_have_a_reason(answer):
    assert "too many for a page" in answer("plan", "ZBV", microbatches=10**6)["reason"]
    assert "did you mean" in answer("plan", "ZBW")["reason"]


@pytest.mark.parametrize("body", ["no JSON", "{}", " " * 100_001])
def test_requests_that_are_no_questions_are_refused(ask, body):
    assert ask("POST", "/answer", body)[0] == 400
    assert ask("GET", "/")[0] == 200


def test_a_port_that_is_taken_is_refused(address, zbpp):
    port = urlsplit(address).port
    zbpp(f"playground --port {port}", code=2)
    assert f"--port {port} cannot be had" in zbpp.err
