"""The rule of the reward `accuracy`, case by case."""

import pytest

from fused_grpo.trainer.rewards import accuracy


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so 6 * 12 = 72\n#### 72", "I multiply: <<6*12=72>>\n#### 72", 1.0),
        ("#### $1,030.", "10 + 20\n#### 1030", 1.0),
        (r"Thus \boxed{1030.0} of 7", "1,030", 1.0),
        (r"\boxed{3} no, \boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}}", 1.0),
        ("there are 5, or 42", 42, 1.0),
        ("42, or 5", "42", 0.0),
        ("10-3", "3", 1.0),
        ("it is -3", "3", 0.0),
        ("it is −3", "-3", 1.0),
        ("1,2", "12", 0.0),
        ("#### 1,072", "72", 0.0),
        ("####", "72", 0.0),
        (r"\boxed{72", "72", 1.0),
        ("no number", "72", 0.0),
        ("#### paris.", "Paris", 1.0),
        ("Paris is it", "Paris", 0.0),
        ("#### B", "B", 1.0),
        (r"\boxed{x^2}", "x^2", 1.0),
        ("2", "x^2", 0.0),
        ("2", "H2O", 0.0),
        ("2", None, None),
        ("2", "#### ", None),
    ],
)
def test_the_final_answer_is_what_counts(completion, answer, reward):
    assert accuracy([completion], [answer]) == [reward]
    said = {"role": "assistant", "content": completion}
    assert accuracy([[said]], [answer]) == [reward]
    # Behind the model's last turn an environment that is done may say the answer.
    assert accuracy([[said, {"role": "tool", "name": "submit", "content": f"#### {answer}"}]], [answer]) == [reward]
