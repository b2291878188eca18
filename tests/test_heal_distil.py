"""Training: it brings a student nearer to its teacher, moves nothing else, and goes on where it was stopped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from heal_models import factored, from_seeds, made, tiny_weights

from ralo.errors import RaloError
from ralo.heal.plain import PlainModel
from ralo.heal.settings import HELD_WINDOWS, LAST, Settings, split, starts
from ralo.heal.takeout import ALL, FACTORS, plain_model
from ralo.heal.writeback import written_back

torch = pytest.importorskip("torch", reason="healing needs torch: pip install ralo[heal]")
from ralo.heal import distil  # noqa: E402
from ralo.heal.distil import Distillation, divergence  # noqa: E402

torch.set_num_threads(1)
TEXT = np.random.default_rng(0).integers(0, 97, 6000).astype(np.uint32)
SETTINGS = Settings(ctx=24, batch=6, lr=3e-3, steps=60)
FEW = replace(SETTINGS, steps=7)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[PlainModel, PlainModel]:
    """A dense model, and the same with layers that were factored too hard."""
    cfg, weights = tiny_weights(tmp_path_factory.mktemp("heal"))
    hard = made(weights, factored(8), ("o", "up", "down"))
    return plain_model(cfg, weights, 24), plain_model(cfg, hard, 24, FACTORS)


def work(models, settings: Settings = FEW, **options) -> Distillation:
    return Distillation(*models, TEXT, settings, **options)


def same(a, b) -> bool:
    return set(a) == set(b) and all(np.array_equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- it learns


def test_the_divergence_falls_clearly(models):
    healing, shown = work(models, SETTINGS), []
    trained = healing.run(progress=shown.append)
    r = healing.record
    assert r.kl_before > 0.3 and r.kl_after < 0.8 * r.kl_before
    assert (r.steps, r.tokens) == (60, 60 * 6 * 24) and r.seconds > 0
    assert [step for step, _ in r.losses] == list(range(1, 61)) and r.losses[-1][1] < 0.8 * r.losses[0][1]
    assert shown == sorted(shown) and len(shown) == 60 and shown[-1] == 1
    assert set(trained) == set(models[1].trained)
    assert healing.measure(healing.student) == r.kl_after


@pytest.mark.parametrize("what", ["deltas", "all", "kwta"])
def test_other_things_that_learn(tmp_path, what):
    cfg, weights = tiny_weights(tmp_path)
    if what == "deltas":
        student = plain_model(cfg, made(weights, from_seeds, ("up",)), 24, FACTORS)
    else:
        student = plain_model(cfg, made(weights, factored(8)), 24, ALL, 1.0 if what == "all" else 0.3)
    rate = 3e-2 if what == "deltas" else 3e-3  # some weights alone must go further
    healing = work((plain_model(cfg, weights, 24), student), replace(SETTINGS, steps=25, lr=rate))
    healing.run()
    assert healing.record.kl_after < 0.9 * healing.record.kl_before


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_products_in_bf16_as_on_a_gpu(tmp_path, kind):
    cfg, weights = tiny_weights(tmp_path, kind)
    hard = made(made(weights, factored(8), ("qkv", "down")), from_seeds, ("up",))
    models = plain_model(cfg, weights, 24), plain_model(cfg, hard, 24, FACTORS)
    fine, fast = (work(models, replace(SETTINGS, steps=25), fast=fast) for fast in (False, True))
    assert fast.teacher.head.w0.dtype == torch.bfloat16
    for healing in (fine, fast):
        assert all(values.dtype == np.float32 for values in healing.run().values())
    assert fast.record.kl_before == pytest.approx(fine.record.kl_before, rel=0.02)
    assert fast.record.kl_after == pytest.approx(fine.record.kl_after, rel=0.03)
    assert fast.record.kl_after < 0.95 * fast.record.kl_before


def test_int4_learns_as_it_will_be_stored(tmp_path):
    cfg, weights = tiny_weights(tmp_path)
    coarse = made(weights, factored(30, "int4"))
    healing = work((plain_model(cfg, weights, 24), plain_model(cfg, coarse, 24, FACTORS)), SETTINGS)
    back = written_back(coarse, healing.run())
    assert [s.quant for s in back.layers[0].up.steps] == ["int4", "int4"]
    stored = healing.measure(healing.network(plain_model(cfg, back, 24)))
    assert stored == pytest.approx(healing.record.kl_after, rel=1e-5) and stored < 0.9 * healing.record.kl_before


def test_only_what_learns_moves(models):
    healing = work(models)

    def state() -> dict:
        both = {"teacher": healing.teacher, "student": healing.student}
        return {f"{who} {name}": t.clone() for who, net in both.items() for name, t in net.state_dict().items()}

    before = state()
    healing.run()
    learned = {f"student {name}" for name, _ in healing.student.named_parameters()}
    assert len(learned) == len(models[1].trained) == 12
    assert {name for name, tensor in state().items() if not torch.equal(tensor, before[name])} == learned


def test_nothing_to_learn(models):
    with pytest.raises(RaloError, match="there is nothing to learn in the student"):
        work((models[0], models[0]))


# ---------------------------------------------------------------- loss


def reference(healing: Distillation, tokens, mix: float) -> float:
    with torch.no_grad():
        p, q = (torch.log_softmax(net(tokens).double(), -1) for net in (healing.teacher, healing.student))
    kl = (p.exp() * (p - q)).sum(-1)
    following = tokens[:, 1:].long()
    loss = -q[:, :-1].gather(-1, following[..., None]).sum()
    return float(((1 - mix) * kl.sum() + mix * loss) / tokens.numel())


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("scores", [1 << 27, 97 * 10], ids=["at once", "in parts"])
def test_the_loss(models, mix, scores, monkeypatch):
    healing, tokens = work(models), torch.tensor(TEXT[:48].astype(np.int32)).reshape(2, 24)
    plain = divergence(healing.teacher, healing.student, tokens, mix)
    plain.backward()
    want = [p.grad.clone() for p in healing.params]
    monkeypatch.setattr(distil, "SCORES", scores)
    healing.optimiser.zero_grad()
    loss = divergence(healing.teacher, healing.student, tokens, mix)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(reference(healing, tokens, mix), rel=1e-5)
    for p, gradient in zip(healing.params, want, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_no_number(models):
    healing = work(models)
    healing.loss = lambda teacher, student, tokens, mix: student(tokens).sum() * float("nan")
    with pytest.raises(RaloError, match="the loss is no number any more: heal again with a smaller --lr"):
        healing.run()


# ---------------------------------------------------------------- text and step size


def test_the_end_of_the_text_is_not_trained_on():
    train, held = split(TEXT, 24)
    assert held.shape == (HELD_WINDOWS, 24) and np.array_equal(np.concatenate([train, held.reshape(-1)]), TEXT)
    assert split(TEXT[:500], 24)[1].shape == (2, 24) and split(TEXT[:96], 24)[1].shape == (1, 24)
    for step in range(200):
        found = starts(SETTINGS, step, len(train))
        assert len(found) == 6 and found.min() >= 0 and found.max() + 24 <= len(train)
    assert np.array_equal(starts(SETTINGS, 3, 999), starts(SETTINGS, 3, 999))
    assert not np.array_equal(starts(SETTINGS, 3, 999), starts(replace(SETTINGS, seed=1), 3, 999))
    with pytest.raises(RaloError, match="the text has 95 tokens; healing needs at least 96, better some millions"):
        split(TEXT[:95], 24)


def test_step_size():
    rates = [Settings(lr=1.0, steps=100).rate(step, 0.0) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and max(rates) <= 1
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(LAST)
    by_time = Settings(lr=1.0, minutes=2.0)
    assert by_time.rate(7, 3.0) == pytest.approx(0.5) and by_time.rate(7, 120.0) == pytest.approx(LAST)
    assert by_time.done(10**6, 60.0) == 0.5 and by_time.done(0, 121.0) == 1


def test_minutes_end_it(models):
    healing = work(models, replace(SETTINGS, steps=0, minutes=0.01))
    healing.run()
    assert 0.6 <= healing.record.seconds < 5 and healing.record.steps > 0


# ---------------------------------------------------------------- stopped and resumed


class Stop:
    """Stops a training after some steps."""

    def __init__(self, after: int, how: type[BaseException]) -> None:
        self.left, self.how = after, how

    def __call__(self, done: float) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.how


@pytest.mark.parametrize(("how", "save_seconds"), [(KeyboardInterrupt, 60.0), (MemoryError, 0.0)])
def test_resumed_equals_uninterrupted(models, tmp_path, how, save_seconds):
    """Interrupted it saves at once; killed, what it saved last counts."""
    whole = work(models)
    want = whole.run()
    folder = tmp_path / "out.healing"
    for after in (2, 1):
        with pytest.raises(how):
            work(models).run(folder, Stop(after, how), save_seconds)
    resumed = work(models)
    assert same(resumed.run(folder), want)
    r = resumed.record
    assert (r.steps, r.kl_before, r.kl_after) == (7, whole.record.kl_before, whole.record.kl_after)
    assert r.losses == whole.record.losses and sorted(f.name for f in folder.iterdir()) == ["settings.json", "state.pt"]
    again = work(models)
    assert same(again.run(folder, Stop(0, AssertionError)), want)  # nothing is left to do


def test_a_folder_of_another_training(models, tmp_path):
    folder = tmp_path / "out.healing"
    work(models).run(folder)
    with pytest.raises(RaloError, match=r"is of a healing with other settings \(lr was 0.003\); use those, or remove"):
        work(models, replace(FEW, lr=1e-3)).run(folder)
    with pytest.raises(RaloError, match=r"other settings \(text was '"):
        Distillation(*models, TEXT[1:], FEW).run(folder)
    with pytest.raises(RaloError, match=r"other settings \(student was '"):
        work((models[0], replace(models[1], act="relu"))).run(folder)
    (folder / "settings.json").write_text("?")
    with pytest.raises(RaloError, match=r"other settings \(unreadable\)"):
        work(models).run(folder)


def test_a_damaged_state(models, tmp_path):
    folder = tmp_path / "out.healing"
    work(models).run(folder)
    state = folder / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(RaloError, match=r"state.pt: is damaged; remove .*out.healing and heal again"):
        work(models).run(folder)


def test_where_nothing_can_be_written(models, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RaloError, match="Not a directory"):
        work(models).run(tmp_path / "file" / "out.healing")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    assert distil.find_device("auto") == distil.find_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(RaloError, match="--device cuda: torch finds no GPU here"):
        distil.find_device("cuda")
