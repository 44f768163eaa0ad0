"""The named variants of GRPO, as a config and a job of the server have them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from etude.backends.local_config import GrpoConfig
from etude.learner.variants import variant_options
from etude.server.hyperparameters import GrpoHyperparameters, resolved

TABLE = {
    "dapo": (0.2, 0.28, 0.0, "token", "token", "clip", "std"),
    "grpo": (0.2, 0.2, 0.04, "sequence", "token", "clip", "std"),
    "dr_grpo": (0.2, 0.2, 0.0, "constant", "token", "clip", "none"),
    "gspo": (3e-4, 4e-4, 0.0, "sequence", "sequence", "clip", "std"),
    "cispo": (0.2, 4.0, 0.0, "token", "token", "cispo", "std"),
}
NAMES = ("clip_low", "clip_high", "beta", "aggregation", "ratio", "surrogate", "advantage_scale")


@pytest.mark.parametrize("variant", TABLE)
def test_a_variant_is_a_choice_of_options(variant):
    expected = dict(zip(NAMES, TABLE[variant], strict=True))
    in_config = GrpoConfig(variant=variant).model_dump()
    at_server = resolved("grpo", GrpoHyperparameters(variant=variant), 4, None, fine_tuned=False)
    for found in (in_config, at_server):
        assert found["variant"] == variant
        assert {name: found[name] for name in NAMES} == expected


def test_without_a_name_it_is_the_default_of_every_option():
    others = {"variant", "reward_kl", "max_staleness"}  # These say which data there is, and what it is worth.
    plain = {name: field.default for name, field in GrpoConfig.model_fields.items() if name not in others}
    assert variant_options() == plain
    assert GrpoConfig().model_dump(exclude=others) == plain
    job = resolved("grpo", GrpoHyperparameters(), 4, None, fine_tuned=False)
    assert {name: job[name] for name in plain} == plain


def test_each_option_of_a_variant_can_be_changed():
    found = GrpoConfig(variant="gspo", clip_high=0.01)
    assert (found.clip_low, found.clip_high, found.ratio) == (3e-4, 0.01, "sequence")
    asked = GrpoHyperparameters(variant="gspo", clip_high=0.01, clip_low="auto")
    job = resolved("grpo", asked, 4, None, fine_tuned=False)
    assert (job["clip_low"], job["clip_high"], job["ratio"]) == (3e-4, 0.01, "sequence")


@pytest.mark.parametrize("name", ["grop", 3, ["grpo"]])
def test_no_other_name_is_taken(name):
    with pytest.raises(ValidationError, match="variant"):
        GrpoConfig(variant=name)


def test_a_stored_config_is_read_back_as_it_was():
    found = GrpoConfig(variant="cispo", beta=0.1)
    assert GrpoConfig(**found.model_dump()) == found
