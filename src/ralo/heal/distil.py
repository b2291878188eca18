"""The training: a student learns to give the scores that its teacher gives, window after window of a text."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ralo.errors import RaloError
from ralo.heal.checkpoint import Checkpoint
from ralo.heal.network import Network
from ralo.heal.plain import Array, PlainModel
from ralo.heal.settings import Record, Settings, digest, split, starts

CLIP = 1.0  # norm of all gradients together
SCORES = 1 << 27  # that are held at once, of one model; more go in parts, computed again on the way back
LOOK = {"cuda": 50, "cpu": 1}  # steps between two looks at the loss: a GPU would wait for each
SAVE_SECONDS = 60.0
Progress = Callable[[float], None]


def find_device(name: str, threads: int = 0) -> torch.device:
    """auto, cpu or cuda. `threads`: of the CPU; 0 = as torch has it."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise RaloError("--device cuda: torch finds no GPU here; use cpu, or --job to train on another machine")
    if threads:
        torch.set_num_threads(threads)
    return torch.device("cuda" if name != "cpu" and there else "cpu")


class Distillation:
    """A teacher, a student and a text on one device."""

    def __init__(
        self, teacher: PlainModel, student: PlainModel, tokens: NDArray[Any], settings: Settings,
        device: torch.device | None = None, compiled: bool = False, fast: bool | None = None,
    ) -> None:  # fmt: skip
        """`compiled`: by torch, on a GPU. `fast`: products in bf16; None = on a GPU."""
        self.settings, self.device = settings, device or torch.device("cpu")
        on_gpu = self.device.type == "cuda"
        self.fast = on_gpu if fast is None else fast
        self.record, self.moving = Record(), False  # moving: half of a step is done, no state to keep
        train, held = split(tokens, settings.ctx)
        self.train, self.held = (torch.from_numpy(a).to(self.device) for a in (train, held))
        self.said = asdict(settings) | {"student": student.digest(), "text": digest(tokens)}
        self.teacher, self.student = self.network(teacher), self.network(student)
        self.loss: Callable[[Network, Network, Tensor, float], Tensor] = divergence
        if compiled and on_gpu:
            self.loss = torch.compile(divergence, dynamic=False)
        params = list(self.student.parameters())
        if not params:
            raise RaloError("there is nothing to learn in the student")
        self.params = params
        self.optimiser = torch.optim.AdamW(params, settings.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu)

    def network(self, model: PlainModel) -> Network:
        network: Network = Network(model, torch.bfloat16 if self.fast else torch.float32).to(self.device)
        return network

    def run(
        self, folder: Path | None = None, progress: Progress | None = None, save_seconds: float = SAVE_SECONDS
    ) -> dict[str, Array]:
        """Trains to the end; what was learned, by name. `folder`: where the state is kept on the way."""
        kept = Checkpoint(folder, self.said) if folder else None
        self._resume(kept.load() if kept else None)
        if math.isnan(self.record.kl_before):
            self.record.kl_before = self.measure(self.student)
        try:
            self._train(kept, progress, save_seconds)
        except KeyboardInterrupt:
            if kept and not self.moving:
                kept.save(self._state())
            raise
        self.record.kl_after = self.measure(self.student)
        if kept:
            kept.save(self._state())
        return self.student.trained_arrays()

    def _train(self, kept: Checkpoint | None, progress: Progress | None, save_seconds: float) -> None:
        record, settings, total = self.record, self.settings, torch.zeros((), device=self.device)
        before, count = record.seconds, 0
        if self.loss is not divergence:  # compiling is not training
            self._gradients(record.steps)
        began = saved = time.monotonic()
        while settings.done(record.steps, record.seconds) < 1:
            rate = settings.rate(record.steps, record.seconds)
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            total += self._gradients(record.steps)
            torch.nn.utils.clip_grad_norm_(self.params, CLIP)
            self.moving = True
            self.optimiser.step()
            record.steps += 1
            record.tokens += settings.batch * settings.ctx
            self.moving = False
            count += 1
            record.seconds = before + time.monotonic() - began
            if count < LOOK[self.device.type] and settings.done(record.steps, record.seconds) < 1:
                continue
            mean = float(total) / count  # waits for the device
            if not math.isfinite(mean):
                raise RaloError("the loss is no number any more: heal again with a smaller --lr")
            record.losses.append((record.steps, mean))
            total, count = torch.zeros_like(total), 0
            record.seconds = before + time.monotonic() - began
            if progress:
                progress(settings.done(record.steps, record.seconds))
            if kept and time.monotonic() - saved >= save_seconds:
                kept.save(self._state())
                saved = time.monotonic()

    def _gradients(self, step: int) -> Tensor:
        """Of one step, left in the parameters; its loss."""
        first = torch.from_numpy(starts(self.settings, step, len(self.train))).to(self.device, non_blocking=True)
        tokens = self.train[first[:, None] + torch.arange(self.settings.ctx, device=self.device)]
        self.optimiser.zero_grad(set_to_none=True)
        with self._precision():
            loss = self.loss(self.teacher, self.student, tokens, self.settings.mix)
        loss.backward()
        return loss.detach()

    def measure(self, student: Network) -> float:
        """KL from the teacher on the windows that are not trained on."""
        total = torch.zeros((), device=self.device)
        with torch.no_grad(), self._precision():
            for tokens in self.held.split(self.settings.batch):
                total += divergence(self.teacher, student, tokens, 0.0) * tokens.numel()
        return float(total / self.held.numel())

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.fast else contextlib.nullcontext()

    def _state(self) -> dict[str, Any]:
        return {
            "trained": {name: tensor.detach().cpu() for name, tensor in self.student.trained().items()},
            "optimiser": self.optimiser.state_dict(),
            "record": self.record.to_dict(),
        }

    def _resume(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        with torch.no_grad():
            for name, tensor in self.student.trained().items():
                tensor.copy_(state["trained"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.record = Record.of(state["record"])


def divergence(teacher: Network, student: Network, tokens: Tensor, mix: float) -> Tensor:
    """KL(teacher || student) a token, mixed with the cross-entropy of the text itself, over tokens (B, T)."""
    ours = student.hidden(tokens).flatten(0, 1)
    with torch.no_grad():
        theirs = teacher.hidden(tokens).flatten(0, 1)
    following = F.pad(tokens[:, 1:].long(), (0, 1), value=-100).flatten()  # the last of a window has none
    total = torch.zeros((), device=tokens.device)
    for part in _parts(len(ours), max(1, SCORES // student.vocab)):
        inputs = (teacher, student, theirs[part], ours[part], following[part], mix)
        whole = part == slice(0, len(ours)) or not torch.is_grad_enabled()
        total = total + (_loss(*inputs) if whole else checkpoint(_loss, *inputs, use_reentrant=False))
    return total / len(ours)


def _loss(teacher: Network, student: Network, theirs: Tensor, ours: Tensor, following: Tensor, mix: float) -> Tensor:
    """Sum over some positions, from their hidden states."""
    q = F.log_softmax(student.logits(ours).float(), dim=-1)
    with torch.no_grad():
        p = F.log_softmax(teacher.logits(theirs).float(), dim=-1)
    loss = F.kl_div(q, p, reduction="sum", log_target=True)
    return (1 - mix) * loss + mix * F.nll_loss(q, following, reduction="sum") if mix else loss


def _parts(n: int, most: int) -> Iterator[slice]:
    for first in range(0, n, most):
        yield slice(first, min(first + most, n))
