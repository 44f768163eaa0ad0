"""The named variants of GRPO: each a choice of the same few options, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

Variant = Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"]
"""GRPO (Shao et al., 2024), Dr. GRPO (Liu et al., 2025), DAPO (Yu et al., 2025), GSPO (Zheng et al., 2025),
and CISPO (MiniMax, 2025)."""

DEFAULT_VARIANT: Variant = "dapo"

_PLAIN: Mapping[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "beta": 0.0,
    "aggregation": "token",
    "constant_length": 256,
    "ratio": "token",
    "surrogate": "clip",
    "kl_estimator": "k3",
    "entropy_bonus": 0.0,
    "correction": "none",
    "correction_level": "token",
    "correction_floor": 0.0,
    "correction_cap": 2.0,
    "off_policy_limit": None,
    "advantage_scale": "std",
}

_DIFFERENCES: Mapping[Variant, Mapping[str, Any]] = {
    "dapo": {},
    "grpo": {"clip_high": 0.2, "beta": 0.04, "aggregation": "sequence"},
    "dr_grpo": {"clip_high": 0.2, "aggregation": "constant", "advantage_scale": "none"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence", "ratio": "sequence"},
    # The bound that was found best by Khatri et al. (2025), which is on the ratio itself: 5.
    "cispo": {"clip_high": 4.0, "surrogate": "cispo"},
}


def variant_options(variant: Variant = DEFAULT_VARIANT) -> dict[str, Any]:
    """All that a variant decides, by the names of `Grpo`'s fields and `advantage_scale`."""
    return {**_PLAIN, **_DIFFERENCES[variant]}


def with_variant(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and the rest as the variant has it that it names under `variant`.

    A name that is no variant's is left for validation to refuse.
    """
    variant = given.get("variant", DEFAULT_VARIANT)
    known = isinstance(variant, str) and variant in _DIFFERENCES
    return {**variant_options(cast("Variant", variant)), **given} if known else dict(given)
