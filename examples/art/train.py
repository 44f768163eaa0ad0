"""A plain script of OpenPipe ART: gather, train, next step. It knows nothing of Etude but an address.

python train.py [STEPS]
"""

import asyncio
import os
import random
import sys

import art

SERVER = os.environ.get("ART_SERVER", "http://127.0.0.1:7999")
QUESTIONS, ANSWERS = 16, 16
RATE = 3e-3


def score(letters: str, answer: str) -> float:
    """The share of positions that hold the right letter."""
    right = sum(a == b for a, b in zip(answer, sorted(letters), strict=False))
    return right / max(len(answer), len(letters))


async def rollout(model: art.TrainableModel, letters: str) -> art.Trajectory:
    messages = [{"role": "user", "content": f"Sort: {letters}"}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=12
    )
    choice = completion.choices[0]
    reward = score(letters, choice.message.content or "")
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


async def main(steps: int) -> None:
    model = art.TrainableModel(name="sorter-1", project="sort", base_model="sorter")
    await model.register(art.ServerlessBackend(api_key="none", base_url=f"{SERVER}/v1"))
    for step in range(await model.get_step(), steps):
        rng = random.Random(step)
        questions = ["".join(rng.sample("abcdefghijkl", 6)) for _ in range(QUESTIONS)]
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, letters) for _ in range(ANSWERS)) for letters in questions
        )
        rewards = [trajectory.reward for group in groups for trajectory in group]
        print(f"step {step}: reward {sum(rewards) / len(rewards):.3f}", flush=True)
        await model.train(groups, config=art.TrainConfig(learning_rate=RATE))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
