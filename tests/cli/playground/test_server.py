"""The local server of the playground: its files, its answers, what it refuses."""

import json
import os
import signal
import subprocess
import sys
import threading
from http.client import HTTPConnection

import pytest
from commands import heed_ctrl_c

from zbpp.cli import main
from zbpp.cli.playground.server import make_server, page_files

QUESTION = {
    "do": "plan", "modes": ["ZBH1"],
    "settings": {
        "stages": 2, "microbatches": 3, "f": 1, "b": 1, "w": 1, "comm": 0, "limit": 0,
        "speeds": [1, 1],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def port():
    server = make_server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port, method, path, body=None):
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body)
    reply = connection.getresponse()
    content = reply.read().decode()
    connection.close()
    return reply.status, reply.getheader("Content-Type"), content


def test_the_page_and_all_that_it_names_are_served(port):
    status, kind, page = ask(port, "GET", "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    for name in page_files():
        assert name == "index.html" or f'"{name}"' in page
        assert ask(port, "GET", f"/{name}")[0] == 200
    assert ask(port, "GET", "/../pyproject.toml")[0] == 404


def test_questions_are_answered(port):
    status, kind, text = ask(port, "POST", "/answer", json.dumps(QUESTION))
    assert (status, kind) == (200, "application/json; charset=utf-8")
    assert json.loads(text)["mode"] == "ZBH1"
    wrong = json.dumps(QUESTION | {"modes": ["ZBW"]})
    status, _, text = ask(port, "POST", "/answer", wrong)
    assert status == 200 and "did you mean" in json.loads(text)["reason"]


@pytest.mark.parametrize("body", ["", "no JSON", "[]", "{}", " " * 100_001])
def test_what_is_no_question_is_refused(port, body):
    assert ask(port, "POST", "/answer", body)[0] == 400
    assert ask(port, "POST", "/answer", json.dumps(QUESTION))[0] == 200


def test_the_command_names_its_address_and_ends_by_ctrl_c():
    command = [sys.executable, "-m", "zbpp", "playground"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_ctrl_c,
    ) as p:
        address = p.stdout.readline().decode().strip()
        number = int(address.removeprefix("http://127.0.0.1:").removesuffix("/"))
        assert ask(number, "GET", "/")[0] == 200
        os.kill(p.pid, signal.SIGINT)
        assert b"interrupted" in p.stderr.read()
        assert p.wait(60) == 130


def test_a_port_that_is_taken_is_refused(port, capsys):
    for wrong in (str(port), "70000"):
        assert main(["playground", "--port", wrong]) == 2
        assert f"--port {wrong} cannot be had" in capsys.readouterr().err
