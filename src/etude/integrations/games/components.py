"""Importing this registers the games; none of their libraries is loaded before one is built."""

import etude.integrations.games.gym
import etude.integrations.games.reasoning
import etude.integrations.games.textarena  # noqa: F401
