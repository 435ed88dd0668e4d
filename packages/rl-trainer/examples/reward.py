"""A reward function of your own, tried on four responses."""

import asyncio

from rl_trainer.rewards import Failure, InlineScorer, Sample


def score(data_source, solution_str, ground_truth, extra_info=None):
    """Three parts for the right number, one for a short response; arguments as verl's."""
    right = float(int(solution_str) == int(ground_truth))  # raises for a text that is no number
    short = float(len(solution_str) <= 3)
    return {"score": 0.75 * right + 0.25 * short, "acc": right, "short": short}


async def main():
    responses = ["82", "00082", "7", "eighty-two"]
    samples = [Sample(data_source="sums", solution_str=text, ground_truth="82") for text in responses]
    for text, outcome in zip(responses, await InlineScorer(score).score(samples), strict=True):
        # A response whose call fails is not trained on; its reward is never taken for 0.
        print(text, outcome.description if isinstance(outcome, Failure) else outcome.numbers)


if __name__ == "__main__":
    asyncio.run(main())
