"""An advantage of one's own: how much better than the group's mean, as a share of it."""

import etude


class MaxRL(etude.Grpo):
    """Groups of episodes, compared by their share of the group's success."""

    def compare(self, rewards):
        mean = sum(rewards) / len(rewards)
        return [(reward - mean) / mean if mean else 0.0 for reward in rewards]
