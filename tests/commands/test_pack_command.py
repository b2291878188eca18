"""`ralo pack`: a directory that runs as the original does, and nothing left behind where it cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from commandline import environment, last_line, ralo, refused
from tiny import write_gguf

from ralo.cli import main
from ralo.commands import pack
from ralo.formats import packed
from ralo.lm import load
from ralo.tokenizer import Tokenizer

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
from ralo.cli import main
sys.exit(main(sys.argv[1:]))
"""


def greedy(model: Path, quant: str = "auto") -> str:
    return load(model, quant).generate("the house", 12, temperature=0).text


def test_runs_as_the_original_does(tiny: Path, tmp_path: Path) -> None:
    to = tmp_path / "new" / "packed"
    done = ralo("pack", "-m", tiny, "--quant", "int4", "-o", to, "--json")
    assert (done.code, done.err) == (0, "")
    values = last_line(done.out)
    assert values == {"path": str(to), "quant": "int4", "bytes": sum(f.stat().st_size for f in to.iterdir())}
    assert done.out.startswith(f"{to}: int4, ")
    assert sorted(f.name for f in to.iterdir()) == [
        "ralo.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "weights.safetensors",
    ]
    assert os.listdir(to.parent) == ["packed"]
    run = ("-p", "the house", "-n", 12, "--temperature", 0, "--json")
    from_pack, original = ralo("run", "-m", to, *run), ralo("run", "-m", tiny, "--quant", "int4", *run)
    assert last_line(from_pack.out)["text"] == last_line(original.out)["text"]
    assert last_line(from_pack.out)["quant"] == "int4"


def test_a_gguf_file_and_the_chat_template_come_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = "{{ messages[0].content }}"
    model = write_gguf(tmp_path / "m.gguf", "llama", quant="q8_0", metadata={"tokenizer.chat_template": template})
    assert main(["pack", "-m", str(model), "-o", str(tmp_path / "packed")]) == 0
    assert greedy(tmp_path / "packed") == greedy(model)
    assert load(tmp_path / "packed").tokenizer.chat_template == template


def test_a_packed_directory_keeps_its_precision(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "packed"
    assert main(["pack", "-m", str(tiny), "-o", str(to)]) == 0
    capsys.readouterr()
    assert f"{to}: is packed at int8; load the original to run it at int4" in refused(
        capsys, "run", "-m", to, "--quant", "int4"
    )
    assert f"{to}: is packed already" in refused(capsys, "pack", "-m", to, "-o", tmp_path / "again")


def test_a_pack_of_another_format_says_to_pack_again(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "packed"
    main(["pack", "-m", str(tiny), "-o", str(to)])
    capsys.readouterr()
    info = json.loads((to / "ralo.json").read_text())
    (to / "ralo.json").write_text(json.dumps(info | {"format": 5}))
    assert (
        "ralo.json: is of pack format 5, this ralo reads 1, 2, 3 and 4; take a newer ralo, or pack the model again"
        in refused(capsys, "run", "-m", to)
    )


def test_a_read_only_model_loads_runs_and_packs(tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    for file in model.iterdir():
        file.chmod(0o444)
    model.chmod(0o555)
    assert ralo("run", "-m", model, "-n", 2).code == 0
    assert ralo("pack", "-m", model, "-o", tmp_path / "packed").code == 0
    model.chmod(0o755)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ((), "-o DIR is missing: the directory to write"),
        (("-o", ""), "-o DIR is missing"),
        (("-o", "."), ".: already there; choose another directory or remove it"),
        (("-o", "file"), "file: already there"),
        (("-o", "dangling"), "dangling: already there"),
        (("-o", "file/packed"), "file/packed: cannot be written: Not a directory"),
        (("-o", "/proc/ralo/packed"), "/proc/ralo/packed: cannot be written: "),
        (("-o", "x" * 300), "cannot be written: File name too long"),
        (("-o", "busy"), "busy.partial: already there; if no other pack is writing it, remove it"),
    ],
)
def test_places_that_cannot_be_written(
    output: tuple[str, ...],
    line: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("precious")
    Path("dangling").symlink_to("nowhere")
    Path("busy.partial").mkdir()
    Path("busy.partial/weights").write_text("of another process")
    before = sorted(tmp_path.rglob("*"))
    assert line in refused(capsys, "pack", "-m", tiny, *output)
    assert sorted(tmp_path.rglob("*")) == before and Path("file").read_text() == "precious"


def test_a_directory_that_may_not_be_written(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o555)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("root may write everywhere")
    line = refused(capsys, "pack", "-m", tiny, "-o", tmp_path / "packed")
    assert line == f"ralo pack: {tmp_path / 'packed'}: cannot be written: Permission denied"
    tmp_path.chmod(0o755)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(tiny: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "pack", "-m", tiny, "-o", small_disk / "deep" / "down" / "packed")
    assert line.endswith("weights.safetensors: cannot be written: No space left on device")
    assert os.listdir(small_disk) == []


def test_a_file_that_may_not_grow(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, "pack", "-m", str(tiny), "-o", str(tmp_path / "deep" / "packed")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cannot be written: File too large" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130), (MemoryError(), 2)]
)
def test_cut_off_at_the_last_file(
    error: BaseException,
    code: int,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def save(*_: Any) -> NoReturn:
        raise type(error)(*error.args)  # a new one: the old would keep the weights alive through its traceback

    monkeypatch.setattr(Tokenizer, "save", save)
    assert main(["pack", "-m", str(tiny), "-o", str(tmp_path / "deep" / "packed")]) == code
    assert capsys.readouterr().err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_packed_is_said_before_the_work(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*_: Any) -> NoReturn:
        raise AssertionError("quantised for nothing")

    monkeypatch.setattr(pack, "build", build)
    assert "no tokenizer" in refused(capsys, "pack", "-m", "random:D=64,L=1,F=64,H=4", "-o", tmp_path / "packed")
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(capsys, "pack", "-m", model, "-o", tmp_path / "packed")
    assert not packed.is_packed(tmp_path / "packed")


def test_has_no_flag_for_a_cache_that_it_does_not_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "pack", "--kv", "int8", "-o", tmp_path / "packed")
    assert "unrecognized arguments: --kv int8" in line
