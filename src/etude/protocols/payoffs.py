"""What verifiers and provers earn in the named protocols."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.protocols.decision import Verdict, sign
from etude.protocols.outcome import Outcome
from etude.protocols.turn import Stance


@dataclass(frozen=True, slots=True)
class Terms:
    """What the named protocols have in common: rewards, penalties and the scale of decisions."""

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
        """What a verifier earns for neither."""
        given = self.verifier_neither_accept_nor_reject_reward
        return (self.verifier_reward + self.verifier_incorrect_penalty) / 2 if given is None else given


class VerifierTerms(TypedDict, total=False):
    """The terms of a protocol without provers; see `Terms`."""

    verifier_reward: float
    verifier_incorrect_penalty: float
    verifier_terminated_penalty: float
    verifier_no_guess_reward: float
    verifier_neither_accept_nor_reject_reward: float | None
    verifier_decision_spectrum: str
    force_guess: Literal["accept", "reject", "truth"] | None


class ProofTerms(VerifierTerms, total=False):
    """The terms of a protocol with provers; see `Terms`."""

    prover_reward: float
    shared_reward: bool
    prover_invalid_response_penalty: float | None


def terms_of(protocol: Callable[..., Any], given: Mapping[str, Any], allowed: type) -> Terms:
    """The terms of a named protocol, which is the function `protocol`, with what is given set.

    Raises RequestError for names that are neither `allowed` nor parameters of the function itself, and
    for values that they cannot have.
    """
    known = parameters_of(protocol, allowed)
    for name, value in given.items():
        if name not in allowed.__annotations__:
            raise RequestError(f"{protocol.__name__} has no parameter '{name}'" + alternatives(name, known))
        expected = _expected(name, value)
        if expected is not None:
            raise RequestError(f"{protocol.__name__}: {name} must be {expected}, found {value!r}")
    return Terms(**given)


def parameters_of(protocol: Callable[..., Any], terms: type) -> list[str]:
    """All parameters of a named protocol: those that its function spells out, then its terms."""
    own = inspect.signature(protocol).parameters.values()
    return [each.name for each in own if each.kind is not each.VAR_KEYWORD] + list(terms.__annotations__)


def _expected(name: str, value: Any) -> str | None:
    """What a term must be, in words; None when it is."""
    match name:
        case "shared_reward":
            return None if isinstance(value, bool) else "true or false"
        case "verifier_decision_spectrum":
            return None if isinstance(value, str) else "the name of a scale"
        case "force_guess":
            return None if value in (None, "accept", "reject", "truth") else "accept, reject or truth"
    if value is None and getattr(Terms(), name) is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return None if is_number else "a finite number"


@dataclass(frozen=True, slots=True)
class ProofPayoff:
    """Pays the verifier for the right verdict, and each prover for the verdict that it argues for."""

    terms: Terms
    verifier: str
    stances: tuple[tuple[str, Stance], ...] = ()
    """The provers, and what each argues for."""

    def __call__(self, outcome: Outcome) -> Mapping[str, float]:
        """What each agent earns with a round."""
        earned = {self.verifier: self._of_verifier(outcome)}
        for prover, stance in self.stances:
            argued = _side(prover, stance, outcome)
            earned[prover] = self._of_prover(prover, argued, outcome, earned[self.verifier])
        return earned

    def _of_verifier(self, outcome: Outcome) -> float:
        terms = self.terms
        if outcome.decision is not None:
            rightness = outcome.decision * sign(outcome.truth)
            extreme = terms.verifier_reward if rightness > 0 else terms.verifier_incorrect_penalty
            return terms.neither_reward + abs(rightness) * (extreme - terms.neither_reward)
        if outcome.decider != self.verifier:
            return 0.0
        return terms.verifier_terminated_penalty if outcome.over else terms.verifier_no_guess_reward

    def _of_prover(self, prover: str, stance: Verdict, outcome: Outcome, of_verifier: float) -> float:
        terms = self.terms
        if terms.prover_invalid_response_penalty is not None and prover in outcome.invalid:
            return terms.prover_invalid_response_penalty
        if terms.shared_reward:
            return of_verifier
        if outcome.decision is None:
            return 0.0
        return terms.prover_reward * (1 + outcome.decision * sign(stance)) / 2


def _side(agent: str, stance: Stance, outcome: Outcome) -> Verdict:
    """What an agent with that stance argues for in a play."""
    match stance:
        case "example":
            return outcome.stance
        case "drawn" | "opposed":
            return outcome.sides[agent]
        case own:
            return own
