"""Questions, and a reward in two parts, for a real model on a CPU: copy this file and change both. README.md has the
command that trains with them. Started as a script it shows what the reward gives for three completions.
"""

import re
from typing import Any

Messages = list[dict[str, str]]  # the completion of a chat model: one message, its text is `content`


def questions(split: str) -> list[dict[str, Any]]:
    """The rows; the reward functions get what is beside the prompt, here `answer`."""
    return [{"prompt": f"What is {a} times {b}?", "answer": a * b} for a in range(2, 12) for b in range(2, 12)]


def near(completions: list[Messages], answer: list[int], **columns: Any) -> list[float]:
    """Partial credit: 1 if the last number is right, less the further away it is, 0 without one."""
    written = [re.findall("[0-9]+", messages[-1]["content"]) for messages in completions]
    pairs = zip(written, answer, strict=True)
    return [max(0.0, 1 - abs(int(numbers[-1]) - want) / want) if numbers else 0.0 for numbers, want in pairs]


def brief(completions: list[Messages], **columns: Any) -> list[float]:
    """1 for one word, a half for two, and so on."""
    return [1 / max(1, len(messages[-1]["content"].split())) for messages in completions]


if __name__ == "__main__":
    texts = ["12", "3 times 4 is 10", "I like tea."]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    for text, *parts in zip(texts, near(completions, [12] * 3), brief(completions), strict=True):
        print(f"{text:16} near {parts[0]:.2f}  brief {parts[1]:.2f}")
