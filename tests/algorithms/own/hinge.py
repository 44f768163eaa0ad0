"""A preference loss of one's own: the hinge of SLiC (Zhao et al., 2023)."""

import torch

import etude


class Hinge(etude.Dpo):
    """Pairs of episodes, pushed apart until they are far enough."""

    def pair_loss(self, margin_P):
        return torch.relu(1 - self.beta * margin_P)
