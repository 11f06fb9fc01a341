"""What an attention call computes: the choices of the numerics as one immutable value.

The names follow the specification of the project: P is the block of probabilities, B (`offset`) the power of two
by which P is lifted before it becomes an e4m3 code, `delta` the rounding constant of lean P.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

PROBABILITIES = ("exact", "lean", "none")
QK_FORMATS = ("fp8_e4m3", "int8", "none")
V_FORMATS = ("fp8_e4m3", "none")
ROTATIONS = ("hadamard", "signed", "none")
TILES = (64, 128)
ARITHMETICS = ("separate", "fused")
BLOCK = 64


class ConfigError(ValueError):
    """A setting has a value that is not accepted; the message names both."""


@dataclass(frozen=True)
class AttentionConfig:
    """Numerics of one attention call.

    probabilities: "exact" rounds exp2 to e4m3, "lean" computes the code from one multiply-add, "none" keeps fp32 P.
    qk_format: operand format of Q and K; "none" keeps the model's dtype.
    v_format: operand format of V; "none" keeps the model's dtype.
    rotation: orthonormal rotation of Q and K over the head dimension; "signed" is a Hadamard after random signs.
    offset: B, in binades; the largest P of a block lies in (2^(B-1), 2^B].
    delta: added to a lean code before it is rounded, in units of one code (an eighth of a binade).
    tile: keys after which the reference renews the running maximum, 64 or 128; block exponents stay per 64. The GPU
        kernels renew it every 128 and take no other value.
    arithmetic: how the reference rounds on the way to a code of P: "separate" steps, or "fused" multiply-adds as in the
        GPU kernels. The two differ where a score lies within fp32 rounding of a tie.
    """

    probabilities: str = "lean"
    qk_format: str = "fp8_e4m3"
    v_format: str = "fp8_e4m3"
    rotation: str = "hadamard"
    offset: float = 8.0
    delta: float = -0.45
    tile: int = 64
    arithmetic: str = "separate"

    def __post_init__(self) -> None:
        for field, accepted in (
            ("probabilities", PROBABILITIES),
            ("qk_format", QK_FORMATS),
            ("v_format", V_FORMATS),
            ("rotation", ROTATIONS),
            ("tile", TILES),
            ("arithmetic", ARITHMETICS),
        ):
            value = getattr(self, field)
            if value not in accepted:
                raise ConfigError(f"{field}={value!r} is not accepted; choose one of {', '.join(map(str, accepted))}")
        if not -6 <= self.offset <= 8:
            raise ConfigError(f"offset={self.offset!r} is not accepted; it lies in [-6, 8], where P has e4m3 codes")
        if not -1 <= self.delta <= 1:
            raise ConfigError(f"delta={self.delta!r} is not accepted; it lies in [-1, 1]")

    @property
    def quantized(self) -> bool:
        return self.qk_format != "none" or self.v_format != "none"


EXACT = AttentionConfig(probabilities="exact")
LEAN = AttentionConfig()
LEAN_NO_ROTATION = replace(LEAN, rotation="none")
INT8 = replace(LEAN, qk_format="int8")
UNQUANTIZED = AttentionConfig(probabilities="none", qk_format="none", v_format="none", rotation="none")

PRESETS: dict[str, AttentionConfig] = {
    "exact": EXACT,
    "lean": LEAN,
    "lean-no-rotation": LEAN_NO_ROTATION,
    "int8": INT8,
    "unquantized": UNQUANTIZED,
}


def parse(text: str) -> AttentionConfig:
    """Read `PRESET[,field=value…]`, e.g. "lean", "int8,rotation=signed", "exact,tile=128".

    Raises ConfigError that names the part at fault and what would be accepted.
    """
    name, *overrides = [part.strip() for part in text.split(",")]
    if name not in PRESETS:
        raise ConfigError(f"{name!r} is not a preset; choose one of {', '.join(PRESETS)}")
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(AttentionConfig)}
    changes: dict[str, str | int | float] = {}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or key not in kinds:
            raise ConfigError(f"{override!r} is not FIELD=VALUE with a field out of {', '.join(kinds)}")
        try:
            changes[key] = kinds[key](value)
        except ValueError:
            raise ConfigError(f"{key}={value!r} is not accepted; it is of type {kinds[key].__name__}") from None
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]
