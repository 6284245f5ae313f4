"""The command as a process: exit codes, readers that leave, what is not installed."""

import json
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlencode, urlsplit

import pytest
from page_data import panels_of
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


def test_commands_that_need_neither_work_without_torch_and_matplotlib(tmp_path):
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

    def get(path, **settings):
        connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
        connection.request("GET", f"{path}?{urlencode(settings)}")
        reply = connection.getresponse()
        content = reply.read().decode()
        connection.close()
        return reply.status, reply.getheader("Content-Type"), content

    return get


SETTINGS = {
    "stages": 4, "microbatches": 8, "f": 0.7, "b": 1, "w": 1.9, "comm": 0.35,
    "memory_limit": 0,
}  # fmt: skip


def test_the_page_and_all_that_it_names_are_served(ask):
    status, kind, page = ask("/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    names = re.findall(r'(?:src|href)="([\w.]+)"', page)
    assert len(names) >= 2
    for name in names:
        assert ask(f"/{name}")[0] == 200, name
    assert set(re.findall(r'name="(\w+)" min', page)) == SETTINGS.keys()
    assert ask("/../pyproject.toml")[0] == 404


@pytest.mark.parametrize("limit", [0, 3.5])
def test_a_report_has_the_figures_of_the_command_line(ask, zbpp, limit):
    status, _, report = ask("/report", **SETTINGS | {"memory_limit": limit})
    assert status == 200
    rows = dict(re.findall(r'<tr[^>]*><th scope="row">(\w+)</th>(.*?)</tr>', report))
    costs = {name: SETTINGS[name] for name in ("f", "b", "w", "comm")}
    (zbpp.folder / "costs.json").write_text(json.dumps(costs))
    flags = f" --memory_limit {limit}" if limit else ""
    data = zbpp.json(f"compare -p 4 -m 8 --costs costs.json{flags}")
    (compared,) = data["comparisons"]
    refused = 0
    for row in compared["modes"]:
        if "reason" in row:
            refused += 1
            assert "needs memory" in rows[row["mode"]]
        else:
            assert f"{row['bubble_rate']:.2%}" in rows[row["mode"]]
            assert row["mode"] in [panel["name"] for panel in panels_of(report)]
    assert (refused > 0) == (limit > 0)


@pytest.mark.parametrize("wrong", [{"f": "x"}, {"microbatches": 10**6}])
def test_wrong_settings_of_the_playground_are_refused(ask, wrong):
    assert ask("/report", **SETTINGS | wrong)[0] == 400
    assert ask("/report")[0] == 400


def test_a_port_in_use_is_refused(address, zbpp):
    port = urlsplit(address).port
    zbpp(f"playground --port {port}", code=2)
    assert f"--port {port} is not available" in zbpp.err
