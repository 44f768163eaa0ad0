"""Undoing what another package did to transformers' attention masks, where models do not run with it."""

from __future__ import annotations

import inspect
import logging
import sys

_LOG = logging.getLogger("etude.models")
_NAME = "_preprocess_mask_arguments"


def mend_masks() -> None:
    """Put transformers' own function back where `import art` has put one of another signature in its place.

    openpipe-art 0.5.17 does so for transformers 5.2, and no model of a later release runs then: "missing 1
    required positional argument: 'layer_idx'".
    """
    from transformers import masking_utils

    current = getattr(masking_utils, _NAME, None)
    source = sys.modules.get(getattr(current, "__module__", ""))
    own = getattr(source, _NAME, None)
    if current is None or own is None or getattr(own, "__module__", "") != masking_utils.__name__:
        return
    if list(inspect.signature(current).parameters) != list(inspect.signature(own).parameters):
        setattr(masking_utils, _NAME, own)
        _LOG.info(
            "%s had changed transformers' masks for another release: that is undone", current.__module__
        )
