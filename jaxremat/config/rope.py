"""Rope for longer sequences: how each kind of stretching changes rope's frequencies.

The model was first trained on shorter sequences.

    stretching = parse_rope_scaling('{"rope_type": "llama3", "factor": 8.0, ...}')
    stretching.at(theta=500_000.0, dim=128, seq_len=2048)    # Stretched(divisors=(1.0, ..., 8.0), attention_factor=1.0)

The text is the JSON that a `config.json` has under `rope_scaling` or `rope_parameters`, without `rope_theta`. A token at position
t is turned by the angle `t * theta ** (-2 * i / dim)` in the pair of features number i. Stretching divides that angle by a number
of the pair's own. Some kinds also multiply sines and cosines by an `attention_factor`. This module imports no JAX.

References:
    transformers/modeling_rope_utils.py, whose formulas these are; Chen et al. 2023, "Extending Context Window" (linear); Peng et
    al. 2023, "YaRN"; Ding et al. 2024, "LongRoPE"; Grattafiori et al. 2024, "The Llama 3 Herd of Models".
"""

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec

from jaxremat.errors import UsageError

_Factor = Annotated[float, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Length = Annotated[int, msgspec.Meta(ge=2)]


@dataclass(frozen=True)
class Stretched:
    """What stretching does at one sequence length.

    Attributes:
        divisors: for each pair of features, what its angles are divided by.
        attention_factor: what the sines and cosines are multiplied by.
    """

    divisors: tuple[float, ...]
    attention_factor: float = 1.0


class _Stretching(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rope_type"):
    """The base of all kinds. The field `rope_type` of the JSON says which kind it is."""

    def at(self, *, theta: float, dim: int, seq_len: int) -> Stretched:
        """What it does to the frequencies.

        Args:
            theta: rope's base wavelength.
            dim: the features of a head that are turned, an even number.
            seq_len: tokens per sequence.
        """
        raise NotImplementedError


class Linear(_Stretching, frozen=True, tag="linear"):
    """All angles are divided by `factor`."""

    factor: _Factor

    def at(self, *, theta: float, dim: int, seq_len: int) -> Stretched:
        return Stretched((self.factor,) * (dim // 2))


class Dynamic(_Stretching, frozen=True, tag="dynamic"):
    """Longer sequences than `original_max_position_embeddings` get a larger theta.

    Others stay as they are.
    """

    factor: _Factor
    original_max_position_embeddings: _Length

    def at(self, *, theta: float, dim: int, seq_len: int) -> Stretched:
        length = max(seq_len, self.original_max_position_embeddings)
        grown = self.factor * length / self.original_max_position_embeddings - (self.factor - 1)
        return Stretched(tuple(grown ** (2 * i / (dim - 2)) for i in range(dim // 2)))


class Llama3(_Stretching, frozen=True, tag="llama3"):
    """Long wavelengths are divided by `factor`, and short ones aren't.

    Those in between are divided by a blend of the two.
    """

    factor: _Factor
    low_freq_factor: _Positive
    high_freq_factor: _Positive
    original_max_position_embeddings: _Length

    def at(self, *, theta: float, dim: int, seq_len: int) -> Stretched:
        def divisor(i: int) -> float:
            turns = self.original_max_position_embeddings / (2 * math.pi * theta ** (2 * i / dim))
            if turns > self.high_freq_factor:
                return 1.0
            if turns < self.low_freq_factor:
                return self.factor
            smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            return 1 / ((1 - smooth) / self.factor + smooth)

        return Stretched(tuple(map(divisor, range(dim // 2))))


class Yarn(_Stretching, frozen=True, tag="yarn"):
    """Pairs that turn less than `beta_slow` times are divided by `factor`.

    Those that turn more than `beta_fast` times aren't.

    The attention factor is `0.1 * ln(factor) + 1` unless it is given.
    """

    factor: _Factor
    original_max_position_embeddings: _Length
    attention_factor: _Positive | None = None
    beta_fast: _Positive = 32.0
    beta_slow: _Positive = 1.0
    mscale: _Positive | None = None
    mscale_all_dim: _Positive | None = None
    truncate: bool = True

    def at(self, *, theta: float, dim: int, seq_len: int) -> Stretched:
        def pair_of(turns: float) -> float:
            length = self.original_max_position_embeddings
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001

        def divisor(i: int) -> float:
            ramp = min(max((i - low) / width, 0), 1)
            return 1 / (ramp / self.factor + 1 - ramp)

        return Stretched(tuple(map(divisor, range(dim // 2))), self._attention_factor())

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    def _scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1


class LongRope(_Stretching, frozen=True, tag="longrope"):
    """Each pair has a divisor for shorter sequences, and one for longer ones.

    The shorter ones are those up to `original_max_position_embeddings`.

    The attention factor is `sqrt(1 + ln(factor) / ln(original_max_position_embeddings))` unless it is given.
    """

    short_factor: tuple[_Positive, ...]
    long_factor: tuple[_Positive, ...]
    factor: _Positive
    original_max_position_embeddings: _Length
    attention_factor: _Positive | None = None

    def at(self, *, theta: float, dim: int, seq_len: int) -> Stretched:
        is_long = seq_len > self.original_max_position_embeddings
        name, divisors = ("long_factor", self.long_factor) if is_long else ("short_factor", self.short_factor)
        if len(divisors) != dim // 2:
            raise UsageError(
                f"--rope-scaling has {len(divisors)} numbers in {name}, and rope turns {dim // 2} pairs of features",
                allowed="a number for each pair",
                cause="--head-dim or --rotary-fraction was changed",
                next_step="give as many numbers, or leave --rope-scaling '' out of it",
            )
        factor = self.attention_factor
        if factor is None:
            stretched = math.log(max(self.factor, 1)) / math.log(self.original_max_position_embeddings)
            factor = math.sqrt(1 + stretched)
        return Stretched(divisors, factor)


RopeScaling = Linear | Dynamic | Llama3 | Yarn | LongRope
#: The kinds of stretching, as `rope_type` names them.
ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope")


def parse_rope_scaling(text: str) -> RopeScaling | None:
    """The stretching that `text` says, or None for an empty text.

    Raises:
        UsageError: `text` is no JSON, or it isn't one of the kinds with that kind's fields.
    """
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=RopeScaling)
    except msgspec.DecodeError as error:
        why = error if isinstance(error, msgspec.ValidationError) else f"that isn't JSON ({error})"
        raise UsageError(
            f"--rope-scaling got {text if len(text) <= 100 else f'{text[:97]}...'!r}: {why}",
            allowed=f"JSON as config.json has it, with a rope_type of {', '.join(ROPE_TYPES)} and its fields",
            next_step='write it like --rope-scaling \'{"rope_type": "linear", "factor": 2.0}\'',
        ) from None


def rope_scaling_text(scaling: RopeScaling | None) -> str:
    """The text of a stretching, which `parse_rope_scaling` reads."""
    return msgspec.json.encode(scaling).decode() if scaling else ""
