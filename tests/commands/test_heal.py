"""`ralo heal` as a user runs it: a pack that is nearer to its model, here or by way of another machine; what it
refuses, in one line each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from commandline import last_line, ralo, refused
from tiny import write_hf

from ralo.cli import main
from ralo.formats import packed
from ralo.lm import load
from ralo.modes import Proc

FLAGS = ["--steps", "20", "--ctx", "48", "--batch", "4", "--lr", "3e-3", "--device", "cpu"]
FIGURES = {"tokens", "seconds", "steps", "lr", "kl_before", "kl_after"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch = pytest.importorskip("torch", reason="healing needs torch: pip install ralo[heal]")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heal") / "words.txt"
    rng = np.random.default_rng(0)
    path.write_text(" ".join(rng.choice(["the", "house", "other", "is", "in", "on", "it", "and"], 1500)))
    return path


@pytest.fixture(scope="module")
def rich(proc_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of few bits and many deltas: there is much to learn."""
    to = tmp_path_factory.mktemp("heal") / "pack"
    assert main(["pack", *proc_flags, "--proc-deltas", "0.05", "--proc-bits", "2.2", "-o", str(to)]) == 0
    return to


@pytest.fixture(scope="module")
def flags(proc_model: Path, rich: Path, words: Path) -> list[str]:
    return ["-m", str(rich), "--teacher", str(proc_model), "--text", str(words), "--threads", "1", *FLAGS]


@pytest.fixture(scope="module")
def healed(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, str]:
    """A healed pack, what was said in JSON, and the line above it."""
    to = tmp_path_factory.mktemp("heal") / "new" / "healed"
    done = ralo("heal", *flags, "-o", to, "--json", OMP_NUM_THREADS="1")
    assert (done.code, done.err) == (0, ""), done.err
    return to, last_line(done.out), done.out.splitlines()[0]


def test_heals_and_says_so(healed, rich: Path) -> None:
    to, values, line = healed
    assert set(values) == FIGURES | {"path", "kl_stored", "device"}
    assert (values["path"], values["steps"], values["tokens"], values["device"]) == (str(to), 20, 20 * 4 * 48, "cpu")
    assert 0 < values["kl_after"] < values["kl_before"] and values["kl_stored"] < values["kl_before"]
    assert line.startswith(f"{to}: KL {values['kl_before']:.4f} -> {values['kl_after']:.4f} (")
    assert line.endswith(f" as stored), {20 * 4 * 48} tokens in {values['seconds'] / 60:.1f} minutes")
    assert [f.name for f in to.parent.iterdir()] == ["healed"]  # nothing is left of the way
    before, after = (json.loads((path / packed.INFO).read_text()) for path in (rich, to))
    assert after["proc"]["settings"].pop("healed") == {name: values[name] for name in FIGURES}
    assert after["proc"]["matrices"].keys() == before["proc"]["matrices"].keys()
    assert all(after["proc"]["matrices"][name] != digest for name, digest in before["proc"]["matrices"].items())
    del before["proc"]["matrices"], after["proc"]["matrices"]
    assert after == before
    assert (to / packed.WEIGHTS).stat().st_size == (rich / packed.WEIGHTS).stat().st_size


def test_the_healed_pack_is_nearer(healed, proc_model: Path, rich: Path, words: Path) -> None:
    """As ralo itself runs it, over the model that it was made from."""
    text = words.read_text()
    kl = [
        load(proc_model, modes=[Proc(pack=str(pack), shed_eps=0.0)]).perplexity(text, ctx=48, tokens=700).kl
        for pack in (rich, healed[0])
    ]
    assert kl[1] < 0.9 * kl[0]
    assert len(load(healed[0]).generate("the house", 4, seed=1).tokens) == 4  # else by chance it may end at once


def test_by_way_of_another_machine(healed, flags: list[str], rich: Path, tmp_path: Path, capsys) -> None:
    from ralo.heal import train_job

    job, result = tmp_path / "job", tmp_path / "result"
    assert main(["heal", *flags, "--job", str(job), "--json"]) == 0
    said = last_line(capsys.readouterr().out)
    assert said == {"job": str(job), "bytes": job.stat().st_size, "tensors": 4, "tokens": said["tokens"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_job.py", str(job), str(result), "--device", "cpu"])
        assert train_job.main() == 0
    assert "KL " in capsys.readouterr().out
    to = tmp_path / "healed"
    assert main(["heal", "-m", str(rich), "--result", str(result), "-o", str(to), "--json"]) == 0
    out = capsys.readouterr().out
    assert set(last_line(out)) == FIGURES | {"path"} and "as stored" not in out
    for name, matrix in load(to).model.weights.matrices().items():
        here = load(healed[0]).model.weights.matrices()[name]
        if matrix.quant == "proc":  # frozen weights travel as bf16, which is felt a little
            assert np.corrcoef(matrix.unpack().reshape(-1), here.unpack().reshape(-1))[0, 1] > 0.9999
    other = tmp_path / "other"
    assert main(["pack", "-m", str(flags[3]), "-o", str(other)]) == 0
    capsys.readouterr()
    line = refused(capsys, "heal", "-m", other, "--result", result, "-o", tmp_path / "no")
    assert line == f"ralo heal: {result}: is of another pack than {other}"


def test_all_weights_with_kwta_in_the_loop(proc_model: Path, words: Path, tmp_path: Path, capsys) -> None:
    pack, to = tmp_path / "pack", tmp_path / "healed"
    assert main(["pack", "-m", str(proc_model), "-o", str(pack)]) == 0
    flags = ["-m", str(pack), "--teacher", str(proc_model), "--text", str(words), *FLAGS, "--lr", "1e-3"]
    capsys.readouterr()
    line = refused(capsys, "heal", *flags, "-o", to)
    assert line == f"ralo heal: {pack}: has no factors or deltas that could learn; --train all is for every weight"
    assert main(["heal", *flags, "-o", str(to), "--train", "all", "--kwta-k", "0.2", "--json"]) == 0
    values = last_line(capsys.readouterr().out)
    assert values["kl_stored"] < 0.95 * values["kl_before"]
    assert json.loads((to / packed.INFO).read_text()) == json.loads((pack / packed.INFO).read_text())


def test_stopped_and_run_again(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from ralo.heal.distil import Distillation

    to, steps = tmp_path / "healed", []
    kept = to.with_name("healed.healing")
    gradients = Distillation._gradients

    def counted(self: Distillation, step: int):
        steps.append(step)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return gradients(self, step)

    monkeypatch.setattr(Distillation, "_gradients", counted)
    assert main(["heal", *flags, "-o", str(to)]) == 130
    assert kept.is_dir() and not to.exists()
    capsys.readouterr()
    line = refused(capsys, "heal", *flags, "-o", to, "--seed", "1")
    assert line == f"ralo heal: {kept}: is of a healing with other settings (seed was 0); use those, or remove it"
    assert main(["heal", *flags, "-o", str(to)]) == 0
    assert steps == [*range(4), *range(3, 20)] and to.is_dir() and not kept.exists()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"-m": None}, "-m PACK is missing: the pack to heal"),
        ({"-m": "{model}"}, "{model}: is not a pack; make one with ralo pack"),
        ({"-o": None}, "-o DIR is missing: the directory to write"),
        ({"-o": "{pack}"}, "{pack}: already there; choose another directory or remove it"),
        ({"--teacher": None}, "--teacher MODEL is missing: the dense model that the pack was made from"),
        ({"--teacher": "nowhere"}, "nowhere: no such model"),
        ({"--teacher": "{pack}"}, "{pack}: has weights that were made for a pack; the teacher is the dense model"),
        ({"--teacher": "{other}"}, "{other}: is another model than the one that {pack} was made from"),
        ({"--text": None}, "--text FILE is missing: ordinary text to learn on"),
        ({"--text": "nowhere"}, "nowhere: No such file or directory"),
        ({"--text": "{short}"}, "healing needs at least 192, better some millions"),
        ({"--tokens": "100"}, "the text has 100 tokens; healing needs at least 192, better some millions"),
        ({"--ctx": "2000"}, "--ctx 2000 must be from 1 to the model's context of 1024"),
        ({"--job": "x", "--result": "y"}, "--job and --result are both given"),
        ({"--job": "{short}"}, "{short}: already there; choose another name or remove it"),
        ({"--result": "nowhere"}, "nowhere: no such file"),
        ({"--result": "{short}"}, "{short}: is not a result of ralo heal"),
        ({"--lr": "2"}, "--lr must be a number from 1e-09 to 1, got '2'"),
        ({"--train": "some"}, "--train must be one of factors, all, got 'some'"),
        ({"--device": "tpu"}, "--device must be one of auto, cpu, cuda, got 'tpu'"),
    ],
)
def test_refuses(changes, line: str, flags: list[str], proc_model: Path, rich: Path, tmp_path: Path, capsys):
    names = {"model": str(proc_model), "pack": str(rich), "short": str(tmp_path / "short.txt")}
    names["other"] = str(tmp_path / "other")
    (tmp_path / "short.txt").write_text("the house")
    if "{other}" in line:
        sizes = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 160, "max_position_embeddings": 1024}
        write_hf(tmp_path / "other", "llama", seed=1, eos_token_id=None, **sizes)
    given = dict(zip(flags[::2], flags[1::2], strict=True)) | {"-o": str(tmp_path / "to")} | changes
    args = [part.format(**names) for pair in given.items() if pair[1] is not None for part in pair]
    assert line.format(**names) in refused(capsys, "heal", *args)
    assert not (tmp_path / "to").exists() and not (tmp_path / "to.healing").exists()


def test_without_torch(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """It is said before any work; a job needs none."""
    for name in [name for name in sys.modules if name.startswith("ralo.heal.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys.modules["ralo.heal"], "distil", None, raising=False)
    monkeypatch.delattr(sys.modules["ralo.heal"], "distil")
    monkeypatch.setitem(sys.modules, "torch", None)
    line = refused(capsys, "heal", *flags, "-o", tmp_path / "to")
    assert line == "ralo heal: healing needs torch: install ralo[heal], or train on another machine (--job)"
    assert main(["heal", *flags, "--job", str(tmp_path / "job")]) == 0


def test_no_gpu(flags: list[str], tmp_path: Path, capsys) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    line = refused(capsys, "heal", *flags, "-o", tmp_path / "to", "--device", "cuda")
    assert line == "ralo heal: --device cuda: torch finds no GPU here; use cpu, or --job to train on another machine"
