"""
ralo's kernels: shapes are checked here, the arithmetic is in csrc/kernels.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import numpy
from numpy.typing import NDArray


def levels() -> list[str]:
    """ISA levels this CPU can run, best first"""

def level() -> str:
    """The ISA level in use"""

def force_level(name: str) -> None: ...

def near_rows() -> bool:
    """Whether rows are asked for into the first-level cache"""

def set_near_rows(near: bool) -> None: ...

def asking_paces() -> tuple[int, int]:
    """How slowly lines of medium and of large matrices are asked for"""

class Tempo:
    """Finds the pace at which lines from memory are asked for"""

    def __init__(self, first: int) -> None: ...

    fastest: Final[int] = ...
    """(arg: object, /) -> int"""

    slowest: Final[int] = ...
    """(arg: object, /) -> int"""

    @property
    def usual(self) -> int: ...

    def next(self) -> tuple[int, int]:
        """
        The pace of the next reading, and on which side of the usual one it lies
        """

    def note(self, pace: int, side: int, place: int, cost: float) -> None:
        """What that reading took"""

def threads() -> int: ...

def set_threads(n: int) -> None: ...

PAD: int = 64

FEW_TOKENS: int = 8

SHARED_TOKENS: int = 16

GROUP_INT8: int = 64

GROUP_INT4: int = 32

def row_bytes(quant: str, oc: int) -> int:
    """Bytes of one input channel's weights"""

def groups(quant: str, oc: int) -> int:
    """Scales of one input channel"""

def pack(quant: str, rows: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], oc: int, o0: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu')] | None) -> bool:
    """
    Output-major rows (n, ic) into outputs [o0, o0 + n); False if a value is not finite
    """

def select_top(x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, k: int, out: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    The k channels with the largest |x| * norm, ascending, into out; how many
    """

def select_near(x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, k: int, guess: float, out: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """From k - k / 64 to k of them; the guess is about where the bound lies"""

def select_mass(x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, mass: float, power: float, out: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    The fewest channels that hold a share of the sum of (|x| * norm)^power, ascending, into out; how many
    """

def finite(x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bool:
    """Whether there is no NaN and no infinity"""

def select_above(x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, least: float, out: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    The channels with |x| * norm of at least `least`, ascending, into out; how many
    """

def select_likely(score: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], least: float, out: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    The scores whose share of the sum of e^score is at least `least`, ascending, into out; how many
    """

class Matrix:
    """A packed linear map, input-channel-major"""

    def __init__(self, quant: str, ic: int, oc: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None: ...

    def apply(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], add: bool = False, exact: bool = True) -> int:
        """
        y = x W + bias, or y += where add; not exact: activations of several tokens may be rounded to bytes. Returns the bytes of weights read
        """

    def norms(self, out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """L2 norm of each input channel's weights"""

    def apply_some(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], channels: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], add: bool = False) -> int:
        """
        One token, of its input channels only those of an ascending list: the rest is not read
        """

    def row_dots(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], list: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """
        y[i] = x . row i of int8 weights for the i of an ascending list, x (oc); bytes of weights read
        """

    def apply_part(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], o0: int, o1: int) -> int:
        """
        One token, outputs [o0, o1) only, multiples of PAD: the weights of the others are not read
        """

class Halves:
    """An int8 matrix in two halves of four bits, each channel-major"""

    def __init__(self, matrix: Matrix, upper: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], lower: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """upper, lower: (ic, oc / 2), which are filled"""

    def apply(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], kept: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], fine: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], add: bool = False) -> int:
        """
        One token: upper halves of the channels `kept`, lower ones of `fine`, which are some of those; returns the bytes of weights read
        """

class Tiles:
    """Upper halves of an int8 matrix, 64 outputs after 64 outputs"""

    def __init__(self, matrix: Matrix, o0: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        data (tiles, 32 ic), scales (tiles, ic), ic padded, are filled: outputs from o0 on
        """

    @property
    def nbytes(self) -> int: ...

    def apply(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], fine: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], add: bool = False) -> int:
        """
        One token: upper halves of all channels but `fine`, which are read whole; returns the bytes of weights read
        """

SEED_BLOCKS: int = 4

SEED_TURN: int = 16

class ProcMatrix(Matrix):
    """A linear map whose weights are rebuilt from seeds while it is applied"""

    def __init__(self, ic: int, oc: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, tables: Annotated[NDArray[numpy.int8], dict(shape=(4, 4, 4, 16), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], at: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)], deltas: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def unpack(self, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """The weights (ic, oc), deltas included"""

    def digest(self) -> int:
        """A number that stands for the rebuilt weights, the same on every CPU"""

class SeedSearch:
    """Finds the seeds of a channel's weights"""

    def __init__(self, tables: Annotated[NDArray[numpy.int8], dict(shape=(4, 4, 4, 16), order='C', device='cpu', writable=False)], sigma: float) -> None: ...

    def row(self, w: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], seeds: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Seeds and scales for the weights (oc) of one channel, and the weights they give
        """

NO_BLOCK: int = 65535

class HashedMatrix(Matrix):
    """
    A linear map of some blocks a channel, whose weights are a hash and deltas
    """

    def __init__(self, ic: int, oc: int, block: int, base_scale: float, blocks: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], bits: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None: ...

    def unpack(self, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """The weights (ic, oc), deltas included"""

    def digest(self) -> int:
        """A number that stands for the rebuilt weights, the same on every CPU"""

class FactoredMatrix(Matrix):
    """A linear map whose weights are products of smaller ones"""

    def __init__(self, ic: int, oc: int, steps: tuple[Matrix, ...], rows: Sequence[int], orders: Sequence[Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None], to: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, outputs: int, kept: int, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None:
        """
        steps: matrices one after another, `rows` of a token through each; orders: where a step's values lie in what came before; to: where the product's outputs lie in what the last step gave; kept: outputs of the first step, its last, that are added to the last ones of the whole
        """

TILE_TOKENS: int = 128

HEAD_PAD: int = 16

class LayerCache:
    """One layer's keys and values at f32, f16 or int8"""

    def __init__(self, kind: str, k: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], v: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], k_scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None, v_scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None) -> None: ...

    def store(self, keys: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], at: int) -> None:
        """Keys and values (T, heads * e) to positions [at, at + T)"""

    def attend(self, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], heads: int, past: int, window: int, scale: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], exact: bool = True) -> int:
        """
        Causal attention of positions [past, past + T); window 0 = all keys; returns the bytes of cache read
        """

def norm_rms(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], w: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], eps: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None: ...

def norm_layer(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], w: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], b: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], eps: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None: ...

def norm_heads(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], w: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], eps: float) -> None:
    """RMS norm of each head, in place"""

def rope(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], heads: int, cos: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sin: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None:
    """In place, pairs (i, i + half)"""

def act(name: str, gate: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], up: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)] | None, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """out = f(gate) * up, or f(gate) where up is None"""

def stream_read(words: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """Sum of the words, read by all threads: a bandwidth yardstick"""

class LayerState:
    """What the modes of one layer remember of one text"""

    def __init__(self) -> None: ...

    def clone(self) -> LayerState: ...

    def trim(self, length: int) -> None: ...

    @property
    def nbytes(self) -> int: ...

class Slot:
    """A mode at one place in one layer"""

    @property
    def on(self) -> bool:
        """off: dense"""

    @on.setter
    def on(self, arg: bool, /) -> None: ...

    @property
    def nonfinite(self) -> int:
        """results that were not finite and were computed densely instead"""

class Input(Slot):
    """In front of a linear map"""

class Tap(Input):
    """Changes nothing and keeps what came by"""

    def __init__(self, n: int) -> None: ...

    def take(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]:
        """Rows (T, n) since the last call"""

class AttendSlot(Slot):
    """In place of attention over the cache"""

    def attend(self, cache: LayerCache, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], heads: int, past: int, window: int, scale: float, state: LayerState, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], exact: bool = True) -> int:
        """
        Attention of positions [past, past + T), which are in the cache already; returns the bytes of cache read
        """

class WeightSlot(Slot):
    """In place of a linear map's weights: others of the same shape"""

    def __init__(self, matrix: Matrix) -> None: ...

class MlpSlot(Slot):
    """In place of an MLP after its norm"""

class Norm:
    """RMS norm, or layer norm where there is a bias"""

    def __init__(self, weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, eps: float) -> None: ...

    def run(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None: ...

class Attention:
    """The attention half of a layer"""

    def __init__(self, norm: Norm, qkv: Matrix, o: Matrix, heads: int, kv_heads: int, head_dim: int, q_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, k_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, window: int) -> None: ...

    def run(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], cache: LayerCache, past: int, cos: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, sin: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, exact: bool = True, state: LayerState | None = None) -> tuple[int, int]:
        """
        x (T, D padded) += attention; stores keys and values; bytes of weights and of cache read. Without the text's state it is dense
        """

    def use(self, qkv: Input | None, o: Input | None, attend: AttendSlot | None, qkv_weights: WeightSlot | None = None, o_weights: WeightSlot | None = None) -> None:
        """Puts modes into the slots; None is dense"""

class Mlp:
    """The MLP half of a layer"""

    def __init__(self, norm: Norm, up: Matrix, down: Matrix, d_ff: int, gated: bool, act: str) -> None: ...

    def run(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], past: int = 0, exact: bool = True, state: LayerState | None = None) -> int:
        """x (T, D padded) += MLP; bytes of weights read"""

    def use(self, up: Input | None, down: Input | None, mlp: MlpSlot | None, up_weights: WeightSlot | None = None, down_weights: WeightSlot | None = None) -> None:
        """Puts modes into the slots; None is dense"""

class Decoder:
    """A model: embedding, layers as pairs (Attention, Mlp), final norm, head"""

    def __init__(self, embedding: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], kind: str, positions: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, layers: Sequence[tuple[Attention, Mlp]], final_norm: Norm, head: Matrix) -> None: ...

    def use(self, head: Input | None, head_weights: WeightSlot | None) -> None:
        """Puts modes into the head's slots; None is dense"""

    def scores(self, hidden: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], dense: bool, logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> int:
        """
        Final hidden states (T, D) to scores (T, V padded); bytes of weights read
        """

    def run(self, tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], caches: Sequence[LayerCache], past: int, cos: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, sin: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, exact: bool, states: Sequence[LayerState] | None, hidden: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None) -> tuple[int, int]:
        """
        Tokens (T) through the model: final hidden states (T, D), and scores (T, V padded) where asked for; bytes of weights and of cache read. Without the text's states it is dense
        """

    def run_each(self, tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], caches: Sequence[Sequence[LayerCache]], pasts: Sequence[int], cos: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, sin: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, states: Sequence[Sequence[LayerState] | None], hidden: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> tuple[int, int]:
        """
        One token (N) each of several texts, each as if it ran alone; of every text the caches, the tokens before and the states, None for dense
        """

class KwtaInput(Input):
    """Only the input channels with the largest |x| * norm are read"""

    def __init__(self, n: int, norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, block: int, pick: str, amount: float, temp: float, duty: int, seed: bool, renorm: bool, guess: float = 0.0, halves: Halves | None = None, fine: int = 0, fine_guess: float = 0.0) -> None:
        """
        halves: of the winners only the `fine` best are read whole, of the others the upper half
        """

    def winners(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> list[int]:
        """The channels that win by themselves, without a text's state"""

    @property
    def plant(self) -> bool:
        """the next result gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    def counts(self) -> dict[str, float]: ...

class KwtaTiles(Input):
    """All channels by upper halves, the best of them whole"""

    def __init__(self, n: int, norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, tiles: Tiles, fine: int, guess: float = 0.0) -> None: ...

    @property
    def plant(self) -> bool:
        """the next result gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    def counts(self) -> dict[str, float]: ...

class KwtaHead(Input):
    """
    Scores from upper halves of the head, those of likely tokens from whole weights
    """

    def __init__(self, n: int, norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, tiles: Tiles, fine: int, guess: float, rows: Matrix, least: float) -> None:
        """
        rows: the head with a row of n weights for every token; least: how likely it must be
        """

    @property
    def plant(self) -> bool:
        """the next result gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    def counts(self) -> dict[str, float]: ...

def neuron_rows(matrix: Matrix, o0: int, f: int) -> tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None, None))], Annotated[NDArray[numpy.uint16], dict(shape=(None, None))] | None]:
    """
    Outputs [o0, o0 + f) neuron by neuron, the same stored values: data (f, row_bytes) and scales (groups, d padded) or None
    """

def neurons(quant: str, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, list: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    y[j] = x . neuron j for the j of an ascending list, or all; returns the bytes of weights read
    """

class RankGuess:
    """Which gates may win, by factors of the gate"""

    def __init__(self, factors: Matrix, quant: str, d: int, f: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, slack: float, keep: int = 0) -> None:
        """
        data, scales: rows of the gate. A candidate: guess + slack > 0; or, with keep, as many by |act(guess)| * norm
        """

class KwtaMlp(MlpSlot):
    """
    Only the neurons with the largest |act(gate)| * norm are read of up and down
    """

    def __init__(self, quant: str, d: int, f: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, block: int, pick: str, amount: float, temp: float, duty: int, seed: bool, zeros: bool, guess: RankGuess | None = None, gate_data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, gate_scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, tiles: Tiles | None = None, fine: int = 0, fine_guess: float = 1.0) -> None:
        """
        guess: gates that will hardly win are not read; gate_data, gate_scales: the gate is read by its rows; tiles: by upper halves, its `fine` best channels whole
        """

    @property
    def plant(self) -> bool:
        """the next winner gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    def counts(self) -> dict[str, float]: ...

class KwtaKeys(AttendSlot):
    """Only the values of the most important keys are read"""

    def __init__(self, keep: float, keep_abs: int = 0, sinks: int = 4, recent: int = 32, min_ctx: int = 0, seed: bool = False) -> None: ...

    @property
    def plant(self) -> bool:
        """the next result gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    def counts(self) -> dict[str, int]: ...

def key_scores(cache: LayerCache, head: int, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, first: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """q (g, padded e) times the keys at the positions, or from `first` on"""

def attend_some(cache: LayerCache, head: int, scores: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """
    Softmax of the scores (g, n) of the keys at the positions, times their values: out (g, e)
    """

def key_energy(cache: LayerCache, head: int, first: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """||k||^2 of keys from `first` on"""

def key_importance(scores: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    The largest weight that one of g heads gives a key, each head's best key weighing 1
    """

def popcounts() -> list[str]:
    """
    Ways to count bits that this CPU has at the level in use, fastest first
    """

CODE_KEYS: int = 64

class PackKeys(AttendSlot):
    """Packed keys choose, exact attention answers"""

    def __init__(self, code: str = 'signs', eps: float = -1.0, popcount: str = 'lut', keep: float = 1.0, keep_abs: int = 256, sinks: int = 4, recent: int = 32, min_ctx: int = 0, p: float = 0.0, mix: float = 1.0, rest: bool = True, check_every: int = 0, phase: int = 0, limit: float = 0.5, bits: int = 1) -> None: ...

    @property
    def plant(self) -> bool:
        """the next result gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    @property
    def bitmaps(self) -> int: ...

    @property
    def popcount(self) -> str: ...

    def counts(self) -> dict[str, float]: ...

def code_keys(cache: LayerCache, head: int, blocks: int, code: str, eps: float) -> tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None, None, None, None), order='C', device='cpu')], Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu')], Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu')], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]]:
    """Codes of one kv head: bits, scales, means, sums of values"""

def code_query(q: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], scale: float, code: str, eps: float, bits: int, planes: Annotated[NDArray[numpy.uint64], dict(shape=(None, None, None), order='C', device='cpu')], factor: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], offset: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Queries (g, padded e) as planes of bits"""

def code_scan(popcount: str, code: str, bits: Annotated[NDArray[numpy.uint64], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], planes: Annotated[NDArray[numpy.uint64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], factor: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], offset: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], blocks: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], bound: float, from_position: int, at: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')], importance: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """Keys whose importance is at least the bound; returns how many"""

def pack_bits(x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], eps: float, pos: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu')], neg: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu')] | None) -> tuple[int, float]:
    """
    Bit i of pos: |x[i]| > eps; with neg: x[i] > eps, and of neg: x[i] < -eps. How many, and the sum of their |x|
    """

def gate_codes(quant: str, d: int, f: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, share: float = 0.699999988079071) -> tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None, None, None, None))], Annotated[NDArray[numpy.float32], dict(shape=(None,))]]:
    """
    Rows of neurons as signs of the weights above `share` of a row's mean magnitude: bits (f / 8, d / 64, 2, 8) and the mean of those (f)
    """

def gate_counts(popcount: str, bits: Annotated[NDArray[numpy.uint64], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)], x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], planes: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu')], counts: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')]) -> float:
    """
    x as bit planes, and the sum of weight signs times those numbers; the step of the numbers
    """

class GateGuess:
    """Which gates may be open, from two bits a weight"""

    def __init__(self, d: int, f: int, bits: Annotated[NDArray[numpy.uint64], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], offset: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, slack: float, keep: float = 0.0, popcount: str = 'lut') -> None:
        """
        A candidate: guess + offset + slack > 0; or, with keep, that share of neurons by the guess of |act(gate)|
        """

class PackMlp(MlpSlot):
    """Only neurons whose |act(gate)| > eps are read of up and down"""

    def __init__(self, quant: str, d: int, f: int, up_data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, up_scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, gate_data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, gate_scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, eps: float, rho: float, guess: GateGuess | None = None) -> None:
        """
        up: rows of neurons; None: only down is skipped, as where there is no gate. gate: None: read by input channels. rho: a window with a larger share of active neurons runs dense. guess: gates that are surely shut are not read
        """

    @property
    def plant(self) -> bool:
        """the next gate gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    def counts(self) -> dict[str, float]: ...

class Pacer:
    """How much each layer of a token may spend; level 0 is all of the work"""

    def __init__(self, levels: int, layers: int, still: int) -> None: ...

    def begin(self, seconds: float) -> None:
        """A token starts, whose layers may take so long"""

    def replay(self, levels: Sequence[int]) -> None:
        """A token starts, whose levels are known"""

    def end(self) -> float:
        """Seconds that the token's layers took"""

    def level(self, layer: int) -> int: ...

    @property
    def used(self) -> list[int]:
        """Levels by layer, of the last token"""

    @property
    def least(self) -> float:
        """Seconds that a token's layers take at the last level"""

    @property
    def seconds(self) -> list[float]:
        """Of a layer, by level; 0: not known yet"""

    @property
    def levels(self) -> int: ...

    @property
    def layers(self) -> int: ...

class EventInput(Input):
    """Only the channels that moved since they were sent are read"""

    def __init__(self, n: int, norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, block: int, most: Sequence[int], track: bool, theta: float, quorum: float, conv_eps: float, conv_j: int, age_max: int, layer: int, pacer: Pacer | None) -> None: ...

    @property
    def plant(self) -> bool:
        """the next result gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    def counts(self) -> dict[str, float]: ...

class EventBlocks(Input):
    """Blocks of channels keep their last result; the document's form"""

    def __init__(self, n: int, block: int, most: Sequence[int], theta: float, beta: float, decay: float, age_max: int, layer: int, pacer: Pacer | None) -> None: ...

    @property
    def plant(self) -> bool:
        """the next result gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    def counts(self) -> dict[str, float]: ...

class EventKeys(AttendSlot):
    """The same keys for some tokens, where that is good enough"""

    def __init__(self, keys: int, limits: Sequence[float], sinks: int = 4, recent: int = 32, min_ctx: int = 1024, age_max: int = 32, turn: int = 0, turns: int = 1, query_theta: float = 0.0, reuse_theta: float = 0.0, beta: float = 1.0, decay: float = 0.0, layer: int = 0, pacer: Pacer | None = None, half: Sequence[bool] = []) -> None: ...

    @property
    def plant(self) -> bool:
        """the next result gets a NaN: shows that the guard works"""

    @plant.setter
    def plant(self, arg: bool, /) -> None: ...

    def counts(self) -> dict[str, float]: ...
