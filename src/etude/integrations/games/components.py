"""Importing this registers the games; none of their libraries is loaded before one is built."""

import etude.integrations.games.gym_textarena
import etude.integrations.games.reasoning  # noqa: F401
