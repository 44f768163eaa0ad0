"""A loss of one's own: the plain policy gradient, with an option of its own."""

import torch
from pydantic import Field

import etude


class PlainGradient(etude.Grpo):
    """Samples for REINFORCE without a ratio, whose logprobs may be bounded below."""

    floor: float | None = Field(-50.0, le=0, description="Lower bound of a logprob.")

    def loss(self, logprobs_BT, batch):
        bounded_BT = torch.clamp(logprobs_BT, min=self.floor)
        loss = -(batch.weights_BT * batch.advantages_BT * bounded_BT).sum()
        return loss, {"plain_loss": float(loss.detach())}
