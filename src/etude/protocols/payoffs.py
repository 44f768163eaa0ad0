"""The payoffs of verifiers and provers in the named protocols, and the terms that set them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.protocols.decision import sign
from etude.protocols.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Terms:
    """The parameters that the named protocols share: rewards, penalties and the scale of decisions."""

    verifier_reward: float = 1.0
    """For the right verdict."""
    verifier_incorrect_penalty: float = -1.0
    """For the wrong verdict."""
    verifier_terminated_penalty: float = -1.0
    """When the rounds run out without a decision."""
    verifier_no_guess_reward: float = 0.0
    """For each of its turns that goes by without a decision, the last one apart."""
    verifier_neither_accept_nor_reject_reward: float | None = None
    """For deciding on neither; None: half-way between the right and the wrong verdict."""
    verifier_decision_spectrum: str = "accept_reject"
    """The scale of decisions, by its name in `SCALES`."""
    force_guess: Literal["accept", "reject", "truth"] | None = None
    """Takes the place of every decision of the verifier, and of a last turn without one."""
    prover_reward: float = 1.0
    """For a decision that is all for the prover's stance; in proportion for one that is in between."""
    shared_reward: bool = False
    """Whether provers earn what the verifier earns."""
    prover_invalid_response_penalty: float | None = None
    """For a prover whose answer stays malformed, which then ends the play; None: it plays on."""

    @property
    def neither_reward(self) -> float:
        """The reward of a verifier for neither."""
        reward = self.verifier_neither_accept_nor_reject_reward
        return (self.verifier_reward + self.verifier_incorrect_penalty) / 2 if reward is None else reward


_PROVER_TERMS = ("prover_reward", "shared_reward", "prover_invalid_response_penalty")


def terms_of(protocol: Callable[..., Any], values: Mapping[str, Any], *, has_provers: bool = True) -> Terms:
    """The terms of a named protocol, which is the function `protocol`, with the values given for some.

    Raises RequestError for names that are neither terms nor parameters of the function itself, and for
    values that they cannot have.
    """
    allowed = [term.name for term in fields(Terms) if has_provers or term.name not in _PROVER_TERMS]
    for name, value in values.items():
        if name not in allowed:
            own = inspect.signature(protocol).parameters.values()
            known = [parameter.name for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
            raise RequestError(
                f"{protocol.__name__} has no parameter '{name}'" + alternatives(name, [*known, *allowed])
            )
        is_valid, expected = _check_term(name, value)
        if not is_valid:
            raise RequestError(f"{protocol.__name__}: {name} must be {expected}, found {value!r}")
    return Terms(**values)


def _check_term(name: str, value: Any) -> tuple[bool, str]:
    """Whether a term may have a value, and its values in words."""
    match name:
        case "shared_reward":
            return isinstance(value, bool), "true or false"
        case "verifier_decision_spectrum":
            return isinstance(value, str), "the name of a scale"
        case "force_guess":
            return value in (None, "accept", "reject", "truth"), "accept, reject or truth"
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_number or (value is None and getattr(Terms(), name) is None), "a finite number"


@dataclass(frozen=True, slots=True)
class ProofPayoff:
    """Pays the verifier for the right verdict, and each prover for the verdict that it argues for."""

    terms: Terms
    verifier: str
    provers: tuple[str, ...] = ()

    def __call__(self, outcome: Outcome) -> Mapping[str, float]:
        """The rewards of all agents for a round."""
        verifier = self._of_verifier(outcome)
        provers = {prover: self._of_prover(prover, outcome, verifier) for prover in self.provers}
        return {self.verifier: verifier, **provers}

    def _of_verifier(self, outcome: Outcome) -> float:
        terms = self.terms
        if outcome.decision is not None:
            rightness = outcome.decision * sign(outcome.truth)
            extreme = terms.verifier_reward if rightness > 0 else terms.verifier_incorrect_penalty
            return terms.neither_reward + abs(rightness) * (extreme - terms.neither_reward)
        if outcome.decider != self.verifier:
            return 0.0
        return terms.verifier_terminated_penalty if outcome.over else terms.verifier_no_guess_reward

    def _of_prover(self, prover: str, outcome: Outcome, of_verifier: float) -> float:
        terms = self.terms
        if terms.prover_invalid_response_penalty is not None and prover in outcome.invalid:
            return terms.prover_invalid_response_penalty
        if terms.shared_reward:
            return of_verifier
        if outcome.decision is None:
            return 0.0
        return terms.prover_reward * (1 + outcome.decision * sign(outcome.sides[prover])) / 2
