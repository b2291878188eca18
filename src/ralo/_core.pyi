"""
ralo's kernels: shapes are checked here, the arithmetic is in csrc/kernels.
"""

from typing import Annotated

import numpy
from numpy.typing import NDArray


def levels() -> list[str]:
    """ISA levels this CPU can run, best first"""

def level() -> str:
    """The ISA level in use"""

def force_level(name: str) -> None: ...

def threads() -> int: ...

def set_threads(n: int) -> None: ...

PAD: int = 64

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

def select_above(x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], norms: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, least: float, out: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    The channels with |x| * norm of at least `least`, ascending, into out; how many
    """

class Matrix:
    """A packed linear map, input-channel-major"""

    def __init__(self, quant: str, ic: int, oc: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None: ...

    def apply(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], add: bool = False, exact: bool = True) -> int:
        """
        y = x W + bias, or y += where add; not exact: activations of several tokens may be rounded to bytes. Returns the bytes of weights read
        """

    def apply_some(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], channels: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], add: bool = False) -> int:
        """
        One token, of its input channels only those of an ascending list: the rest is not read
        """

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

class Norm:
    """RMS norm, or layer norm where there is a bias"""

    def __init__(self, weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, eps: float) -> None: ...

    def run(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None: ...

class Attention:
    """The attention half of a layer"""

    def __init__(self, norm: Norm, qkv: Matrix, o: Matrix, heads: int, kv_heads: int, head_dim: int, q_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, k_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, window: int) -> None: ...

    def run(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], cache: LayerCache, past: int, cos: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, sin: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, exact: bool = True) -> tuple[int, int]:
        """
        x (T, D padded) += attention; stores keys and values; bytes of weights and of cache read
        """

class Mlp:
    """The MLP half of a layer"""

    def __init__(self, norm: Norm, up: Matrix, down: Matrix, d_ff: int, gated: bool, act: str) -> None: ...

    def run(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], exact: bool = True) -> int:
        """x (T, D padded) += MLP; bytes of weights read"""
