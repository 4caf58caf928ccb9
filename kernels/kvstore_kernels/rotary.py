"""Rotary position embedding: a model's frequencies, and the rotation that moves keys to another position.

A key at position p is R(p) k, and R(p + o) = R(o) R(p). So moving a key needs only the difference of the positions.
Values carry no position. Dims pair up as (i, i + rotary_dim / 2) (NeoX's halves: Llama, Mistral, Qwen).

Source: Su et al., RoFormer (2021); llama3 and yarn (Peng et al., 2023) bit for bit as the transformers library computes
them.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from kvstore.errors import InvalidRequest
from kvstore.spec import RopeSpec

KINDS = ("default", "linear", "llama3", "yarn")
BLOCK_ELEMENTS = 1 << 20


class Scratch(threading.local):
    """Memory that each thread keeps for the CPU path: one run of bytes, as large as the largest request. Touching fresh
    memory costs as much as the work that is done in it."""

    def __init__(self) -> None:
        self._run = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of any content. It is the caller's until this thread's next call. On a device it is fresh,
        because the allocators there keep memory themselves."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        count = math.prod(shape)
        if len(self._run) < count * dtype.itemsize:
            with torch.inference_mode(False):  # else only calls in inference mode could write to it
                self._run = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        return self._run[: count * dtype.itemsize].view(dtype).view(shape)


@dataclass(frozen=True, eq=False)
class Rotary:
    """A model's rotation. ``frequencies``: fp32 [pairs], radians per position. ``scaling``: yarn's factor on rotated
    queries and keys, 1 for other kinds; a stored key already includes it."""

    frequencies: torch.Tensor
    scaling: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Number of leading dims of a head that rotate."""
        return 2 * self.frequencies.shape[0]


@dataclass(frozen=True, eq=False)
class Rotation:
    """The turn of each token of a run, which is the same for all heads and layers. ``cos``, ``sin``: fp32
    [tokens, pairs], or [1, pairs] when all tokens turn alike."""

    cos: torch.Tensor
    sin: torch.Tensor

    @cached_property
    def both_cos(self) -> torch.Tensor:
        """Cosines for both halves of a head, [tokens, 2 * pairs]."""
        return torch.cat([self.cos, self.cos], -1)

    def of(self, start: int, stop: int) -> Rotation:
        """Return the rotation of the tokens ``start`` to ``stop``, as views."""
        if stop - start == self.cos.shape[0] or self.cos.shape[0] == 1:
            return self
        part = Rotation(*(each.narrow(0, start, stop - start) for each in (self.cos, self.sin)))
        part.__dict__["both_cos"] = self.both_cos.narrow(0, start, stop - start)
        return part


@lru_cache(maxsize=64)
def rotary_of(rope: RopeSpec) -> Rotary:
    """Return the rotation that a spec describes, on the CPU.

    Raises: InvalidRequest for a kind that depends on the prompt's length or is unknown, for M-RoPE, for a model that
    does not rotate, and for a factor that is missing or no finite number of the right sign.
    """
    if rope.kind not in KINDS:
        raise InvalidRequest(f"rope kind {rope.kind!r} cannot be moved to another position; known: {', '.join(KINDS)}")
    if rope.mrope:
        raise InvalidRequest("rope.mrope: positions of several axes (M-RoPE) cannot be moved yet")
    if rope.rotary_dim <= 0:
        raise InvalidRequest("rope.rotary_dim is 0: the model's keys carry no rotation, so they cannot be moved")
    periods = rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    plain = 1.0 / periods
    if rope.kind == "default":
        return Rotary(plain)
    factors = _Factors(rope)
    if rope.kind == "linear":
        return Rotary(plain / factors.positive("factor"))
    if rope.kind == "llama3":
        return Rotary(_llama3(plain, factors))
    return Rotary(_yarn(rope, periods, factors), _yarn_scaling(factors))


def rotation(rotary: Rotary, target: int | torch.Tensor, source: int | torch.Tensor = 0) -> Rotation:
    """Return the turn that takes keys rotated for ``source`` positions to ``target`` positions.

    Shapes: each one whole number or int64 [tokens]; two numbers give one turn for all tokens. ``source`` 0: the plain
    rotation, without yarn's scaling. Angles are rounded to fp32 as the model rounds them, and then subtracted in fp64.
    Far from position 0, the moved key is then nearer to the model's own key than with a turn by the difference.
    """
    angles = _angles(rotary, target) - _angles(rotary, source)
    return Rotation(angles.cos().float(), angles.sin().float())


def rotate(x: torch.Tensor, turn: Rotation, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate keys (or queries). Dims beyond the turn's pairs stay unchanged.

    Shapes: ``x`` [..., tokens, dim] and ``out`` alike; computed in fp32, rounded once to ``out``'s dtype (default
    ``x``'s). ``out`` may be ``x``.
    Raises: InvalidRequest for shapes that do not fit.
    """
    check_turn(x, turn)
    if out is None:
        out = torch.empty_like(x)
    with torch.no_grad():
        turn_into(out, x, turn)
    return out


def check_turn(x: torch.Tensor, turn: Rotation) -> None:
    """Raises InvalidRequest unless the turn has as many tokens as ``x``, or one for all, and no more dims."""
    pairs = turn.cos.shape[-1]
    if 2 * pairs > x.shape[-1]:
        raise InvalidRequest(f"x has {x.shape[-1]} dims per head, the rotation turns {2 * pairs}")
    if turn.cos.shape[0] not in (1, x.shape[-2]):
        raise InvalidRequest(f"x has {x.shape[-2]} tokens, the rotation is for {turn.cos.shape[0]}")


def turn_into(out: torch.Tensor, x: torch.Tensor, turn: Rotation, scale: float = 1.0) -> None:
    """Rotate ``x`` times ``scale`` into ``out``, without the checks of ``rotate``.

    Cost: on the CPU five passes over blocks of 4 MiB that stay in the cache; each calling thread keeps two of them.
    """
    tokens, pairs = x.shape[-2], turn.cos.shape[-1]
    rest = x.shape[-1] - 2 * pairs
    if rest and (out is not x or scale != 1.0):
        kept = x.narrow(-1, 2 * pairs, rest)
        out.narrow(-1, 2 * pairs, rest).copy_(kept if scale == 1.0 else kept.float() * scale)
    source, target = (x.narrow(-1, 0, 2 * pairs), out.narrow(-1, 0, 2 * pairs)) if rest else (x, out)
    step = min(tokens, max(1, BLOCK_ELEMENTS * tokens // max(1, source.numel())))
    block = _kept.block((*x.shape[:-2], step, 2 * pairs), x.device)
    for start in range(0, tokens, max(1, step)):
        count = min(step, tokens - start)
        if count < step:
            block = _kept.block((*x.shape[:-2], count, 2 * pairs), x.device)
        wide, result = block.wide, block.result
        part = turn.of(start, start + count)
        wide.copy_(source.narrow(-2, start, count))
        if scale != 1.0:
            wide.mul_(scale)
        torch.mul(wide, part.both_cos, out=result)
        block.result_halves[0].addcmul_(block.wide_halves[1], part.sin, value=-1)
        block.result_halves[1].addcmul_(block.wide_halves[0], part.sin)
        target.narrow(-2, start, count).copy_(result)


class _Block:
    """Scratch for one block: the values in fp32 and the result, each with views of its two halves."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape = shape
        self.wide = _wide.tensor(shape, torch.float32, device)
        self.result = _result.tensor(shape, torch.float32, device)
        self.wide_halves, self.result_halves = self.wide.chunk(2, -1), self.result.chunk(2, -1)


class _KeptBlock(threading.local):
    """The block of each thread's last call. It is kept because a model's planes have one shape and views cost time."""

    def __init__(self) -> None:
        self._last: _Block | None = None

    def block(self, shape: tuple[int, ...], device: torch.device) -> _Block:
        if device.type != "cpu":
            return _Block(shape, device)  # streams must not share a block
        last = self._last
        if last is None or last.shape != shape:
            with torch.inference_mode(False):
                last = self._last = _Block(shape, device)
        return last


_wide, _result, _kept = Scratch(), Scratch(), _KeptBlock()


def _angles(rotary: Rotary, positions: int | torch.Tensor) -> torch.Tensor:
    """Return the angles as fp64 [tokens, pairs], each rounded to fp32 as the model rounds it."""
    device = positions.device if isinstance(positions, torch.Tensor) else None
    column = torch.as_tensor(positions, device=device).reshape(-1, 1).float()
    return (column * rotary.frequencies.to(column.device)).double()


class _Factors:
    """The scaling's parameters by name."""

    def __init__(self, rope: RopeSpec) -> None:
        self._kind = rope.kind
        self._values = dict(rope.factors)

    def get(self, name: str) -> float | None:
        return self._values.get(name)

    def positive(self, name: str) -> float:
        value = self._values.get(name)
        if value is None or not math.isfinite(value) or value <= 0:
            raise InvalidRequest(f"rope.factors: {self._kind} needs {name!r}, a positive number, not {value}")
        return value


def _llama3(plain: torch.Tensor, factors: _Factors) -> torch.Tensor:
    """Return llama3's frequencies: long waves stretched by the factor, short ones kept, those between blended."""
    factor, low, high = (factors.positive(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise InvalidRequest(f"rope.factors: high_freq_factor {high} must be above low_freq_factor {low}")
    context = factors.positive("original_max_position_embeddings")
    waves = 2 * math.pi / plain
    share = (context / waves - low) / (high - low)
    blended = (1 - share) * plain / factor + share * plain
    stretched = torch.where(waves > context / low, plain / factor, blended)
    return torch.where(waves < context / high, plain, stretched)


def _yarn(rope: RopeSpec, periods: torch.Tensor, factors: _Factors) -> torch.Tensor:
    """Return yarn's frequencies: fast dims keep theirs, slow ones are interpolated, with a ramp between the two."""
    factor, context = factors.positive("factor"), factors.positive("original_max_position_embeddings")

    def dim_of(rotations: float) -> float:
        """Return the pair, as a fraction, that turns ``rotations`` times over the original context."""
        return (rope.rotary_dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dim_of(factors.get("beta_fast") or 32), dim_of(factors.get("beta_slow") or 1)
    if factors.get("truncate") != 0:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(periods), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_scaling(factors: _Factors) -> float:
    given = factors.get("attention_factor")
    if given is not None:
        return given
    factor, numerator, denominator = factors.positive("factor"), factors.get("mscale"), factors.get("mscale_all_dim")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return magnitude(numerator) / magnitude(denominator) if numerator and denominator else magnitude(1)
