"""`ralo serve` on the command line: where it listens, what it needs, and one line for what cannot be."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import COMMAND, environment, ralo, refused
from serving import serving

from ralo.cli import main


def test_one_line_says_where(chatting: Path) -> None:
    with serving("-m", chatting, "--threads", 1, "--name", "my model") as server:
        line = server.log.read_text()
        assert line == f"ralo serve: my model at {server.url}/ (API at {server.url}/v1, Ctrl-C ends)\n"
        assert server.host == "127.0.0.1" and server.port != 8080
        assert server.get("/v1/models").json()["data"][0]["id"] == "my model"
        assert server.get("/v1/models/my%20model").status_code == 200
        server.signal(signal.SIGINT)
        assert server.process.wait(10) == 0 and server.said == ""


def test_it_is_reached_from_this_machine_alone(chatting: Path) -> None:
    with serving("-m", chatting, "--threads", 1) as server:
        table = Path("/proc/net/tcp")
        if not table.exists():
            pytest.skip("open ports are read from /proc")
        listening = [line.split()[1] for line in table.read_text().splitlines()[1:] if line.split()[3] == "0A"]
        assert [at for at in listening if at.endswith(f":{server.port:04X}")] == [f"0100007F:{server.port:04X}"]


def test_ipv6(chatting: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no ::1")
    with serving("-m", chatting, "--threads", 1, "--host", "::1") as server:
        assert server.host == "[::1]"
        assert server.get("/v1/models").status_code == 200
        assert server.get("/v1/models", headers={"Host": "example.com"}).status_code == 403


def test_settings_from_the_environment(chatting: Path) -> None:
    with serving(RALO_MODEL=str(chatting), RALO_THREADS="1", RALO_API_KEY="of the house", RALO_NAME="it") as server:
        assert server.get("/v1/models").status_code == 401
        answer = server.get("/v1/models", headers={"Authorization": "Bearer of the house"})
        assert answer.json()["data"][0]["id"] == "it"
        assert "of the house" not in server.log.read_text()


def test_a_port_that_is_taken_is_said_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(capsys, "serve", "-m", "/nowhere", "--port", port)  # a model that would be said otherwise
    assert line == f"ralo serve: cannot listen at 127.0.0.1:{port}: Address already in use"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("-m", "/nowhere"), "/nowhere: no such model"),
        (("--host", "no.such.host.invalid"), "cannot listen at no.such.host.invalid:0: "),
        (("--host", "192.0.2.7"), "cannot listen at 192.0.2.7:0: Cannot assign requested address"),
        (("--host", ""), "--host is empty"),
        (("--host", ".."), "cannot listen at ..:0: "),
        (("--host", "\u00e9.."), "cannot listen at "),
        (("--host", "a" * 300), ":0: "),
        (("--host", "::zz"), "cannot listen at ::zz:0: "),
        (("--port", "65536"), "--port must be a whole number from 0 to 65535, got '65536'"),
        (("--port", "http"), "--port must be a whole number"),
        (("--texts", "0"), "--texts must be a whole number from 1 to 1024"),
        (("--queue", "0"), "--queue must be a whole number from 1"),
        (("--drain-s", "-1"), "--drain-s must be a number from 0"),
        (("--drain-s", "nan"), "--drain-s must be a number"),
        (("--max-tokens", "0"), "--max-tokens must be a whole number from 1"),
        (("--cache-mb", "much"), "--cache-mb must be a whole number"),
        (("--kwta-k", "2"), "--kwta-k must be"),
        (("--ports", "1"), "did you mean --port?"),
    ],
)
def test_refuses_in_one_line(args: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "serve", "--port", 0, *args)
    assert message.startswith("ralo serve: ") and line in message


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "httptools", "prometheus_client", "pydantic"])
def test_packages_that_are_not_there(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from ralo.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-W", "error", "-c", code, "serve"]
    done = subprocess.run([*command, "--port", "0"], capture_output=True, env=environment(), text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ralo serve: serving needs some more packages: pip install 'ralo[serve]'\n"
    done = subprocess.run([*command, "--help"], capture_output=True, env=environment(), text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--drain-s" in done.stdout and "--kwta-k" in done.stdout


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in ("--host", "--port", "--api-key", "--name", "--texts", "--queue", "--cache-mb", "--allow-host"):
        assert flag in shown


def test_a_signal_while_a_model_is_loaded_ends_it(chatting: Path) -> None:
    with subprocess.Popen([*COMMAND, "serve", "-m", str(chatting), "--port", "0"], env=environment()) as process:
        process.terminate()
        assert process.wait(20) in (0, -signal.SIGTERM)


def test_a_key_of_odd_bytes_is_no_trouble(chatting: Path) -> None:
    with serving("-m", chatting, "--threads", 1, "--api-key", "k\udcff") as server:
        assert server.get("/v1/models", headers={"Authorization": b"Bearer k\xff"}).status_code == 200
        assert server.get("/v1/models", headers={"Authorization": b"Bearer k"}).status_code == 401


def test_a_tokenizer_that_is_not_there_is_said_at_once(chatting: Path, tmp_path: Path) -> None:
    for file in chatting.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = ralo("serve", "-m", tmp_path, "--port", 0)
    assert done.code == 2 and done.err.count("\n") == 1 and "tokenizer" in done.err
