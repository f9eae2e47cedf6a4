"""Nothing that looks like a secret is published, whatever it is called and wherever it stands; all else is kept."""

import dataclasses
import json
import string
import time
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.common.formatting import to_json
from fused_grpo.trainer.common.redaction import public_text, redacted, without_secrets
from fused_grpo.trainer.logging.model_card import CardFacts, model_card
from fused_grpo.trainer.logging.run_output import Results

WORDS = ["password", "db_pass", "pass", "pwd", "DB_PWD", "passphrase", "client_secret", "clientSecret", "credentials"]
WORDS += [
    "cookie",
    "Set-Cookie",
    "auth",
    "proxy-authorization",
    "token",
    "hub_token",
    "accessToken",
    "SLACK_TOKEN_PROD",
]
WORDS += ["key", "api_key", "apiKey", "x-api-key", "OPENAI_APIKEY", "AccountKey", "AWS_ACCESS_KEY_ID", "GITHUB_PAT"]
WORDS += ["privateKey", "refresh_tokens", "jwt", "ssh_key", "API_KEY2", "db.password", "session token", "userPwd"]
PLAIN = ["max_new_tokens", "max_tokens", "tokenizer", "TOKENIZERS_PARALLELISM", "num_keys", "key_value_heads", "passes"]
PLAIN += ["num_key_value_heads", "bypass", "keyboard", "KEYBOARD", "eos_token", "pad_token_id", "image_token", "HOME"]
PLAIN += [
    "stop_token_ids",
    "thinking_token_budget",
    "sort_key",
    "keys_to_ignore",
    "author",
    "compass",
    "pattern",
    "OLDPWD",
]
PLAIN += ["additional_special_tokens", "loss_per_token", "pass_at_k", "monkey", "token_type_ids", "signature", "path"]
LETTERS = string.ascii_letters + string.digits
TAIL = st.text(LETTERS, min_size=24, max_size=40)
FORMS = [
    "hf_",
    "sk-",
    "sk-proj-",
    "sk_live_",
    "ghp_",
    "gho_",
    "github_pat_",
    "glpat-",
    "gldt-",
    "xoxb-1-2-",
    "xoxp-",
    "AIza",
]
FORMS += [
    "npm_",
    "pypi-",
    "nvapi-",
    "gsk_",
    "Bearer ",
    "Authorization: Bearer ",
    "https://x?page=1&sig=",
    "https://me:",
]
FORMS += [
    "https://x/?X-Amz-Signature=",
    "https://x?Expires=9&Signature=",
    "x=https://y?access_token=",
    "host=db password=",
]
FORMS += [
    "Endpoint=sb://x;SharedAccessKey=",
    "a;AccountKey=",
    "PGPASSWORD=",
    "UID=sa;PWD=",
    '{"hub_token": "',
    "hub_token: ",
    "'token': '",
    "https://hooks.slack.com/services/T0/B0/",
    "wandb_v1_",
    '{"api_key": "',
    "password: ",
    "pwd=",
    "--token=",
]
FORMS += ["-----BEGIN RSA PRIVATE KEY-----\n", "-----BEGIN OPENSSH PRIVATE KEY-----\nx\n", "postgres://u:"]


@st.composite
def formed(draw: Any) -> tuple[str, str]:
    """A secret, and a text that shows by its form that it is one."""
    kind = draw(st.sampled_from([*FORMS, "AKIA", "ASIA", "eyJ"]))
    tail = draw(
        st.text(string.ascii_uppercase + string.digits, min_size=16, max_size=16) if kind[-2:] == "IA" else TAIL
    )
    end = f".{tail}.{tail}" if kind == "eyJ" else "@db/x" if kind.endswith(":") and "//" in kind else ""
    return tail, f"{kind}{tail}{end}"


@st.composite
def nested(draw: Any, leaf: Any, name: str) -> Any:
    """`leaf` under a name, somewhere in a configuration."""
    value: Any = {name: leaf} if name else leaf
    for step in draw(st.lists(st.sampled_from(["list", "dict", "tuple"]), max_size=4)):
        value = {"list": ["x", value], "dict": {"note": value, "n": 5}, "tuple": (value, 1.5)}[step]
    return value


@settings(max_examples=150, deadline=None, database=None)
@given(data=st.data(), word=st.sampled_from(WORDS), secret=TAIL)
def test_what_has_the_name_of_a_secret_is_nowhere(data, word, secret) -> None:
    kind = data.draw(st.sampled_from(["text", "list", "dict"]))
    value = {"text": secret, "list": ["x", secret], "dict": {"a": {"b": secret}}}[kind]
    assert secret not in json.dumps(redacted(data.draw(nested(value, word))))
    plain = {"PWD": "x", "HOME": "/root"}
    assert without_secrets({f"MY_{word}": secret} | plain) == plain
    assert secret not in public_text(f"first {word.replace(' ', '_').replace('.', '_')}='{secret}' last")


@settings(max_examples=150, deadline=None, database=None)
@given(
    data=st.data(),
    pair=formed(),
    before=st.sampled_from(["", "use ", "a,", "("]),
    after=st.sampled_from(["", " now", '"']),
)
def test_what_has_the_form_of_a_secret_is_nowhere(data, pair, before, after) -> None:
    secret, text = pair
    text = f"{before}{text}{after}"
    assert secret not in json.dumps(redacted(data.draw(nested(text, data.draw(st.sampled_from(["", "note", *PLAIN]))))))
    assert without_secrets({"SETTING": text}) == {}
    args = GRPOConfig("x", model_init_kwargs={"note": text})
    assert secret not in json.dumps(args.to_dict()) + model_card(
        CardFacts(name="m", rewards=["r"], steps=1, results=Results()), args
    )


@pytest.mark.parametrize("name", PLAIN)
def test_options_that_only_sound_like_secrets_are_kept(name) -> None:
    assert redacted({name: "x"}) == {name: "x"}
    assert redacted({name: [5, 0.5]}) == {name: [5, 0.5]}
    assert not name.isupper() or without_secrets({name: "x"}) == {name: "x"}


def test_every_option_of_a_run_and_of_a_model_is_kept(monkeypatch) -> None:
    from transformers import GenerationConfig, LlamaConfig

    options = {field.name: "x" for field in dataclasses.fields(GRPOConfig) if field.name != "hub_token"}
    options |= dict.fromkeys([*LlamaConfig().to_dict(), *GenerationConfig().to_dict()], "x")
    monkeypatch.setenv("HOME", "/srv/x")
    assert redacted(options) == options
    assert redacted(GRPOConfig().to_dict()) == to_json(GRPOConfig().to_dict())


@pytest.mark.parametrize(
    "text",
    [
        "http://proxy:3128", "me@example.org", "https://x.org/@me", "/usr/bin:/bin", "a=b", "basic arithmetic",
        "risk-adjusted-return-measure", "sk-learn-intelex-extension", "max_tokens=5;eos_token=<|end|>",
        "num_keys=3, passes=2", "key=5", "f0e1d2c3b4a5968778695a4b3c2d1e0f12345678",
        "global-batch-size-64-of-many", "https://h/x?page=1&size=2", "Answer key: 42",
        "The token: the unit of a text", "key: value", "Qwen/Qwen2.5-1.5B-Instruct",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
    ],
)  # fmt: skip
def test_text_without_a_secret_is_kept(text) -> None:
    assert public_text(text) == text


def test_numbers_and_switches_are_no_secrets_but_a_password_is() -> None:
    kept = {"key": 5, "token": 0.5, "use_auth_token": True, "password": None, "pass": 3, "ask_password": False}
    assert redacted(kept) == kept
    assert redacted({"password": 1234, "db_pwd": 5}) == {"password": "<redacted>", "db_pwd": "<redacted>"}
    assert yaml.safe_load(yaml.safe_dump(redacted({"sk-" + "a" * 30: 1}))) == {"<redacted>": 1}


@pytest.mark.parametrize(
    "text", ["a", "a:", "a=", "sk-", "eyJa.", "key=", "-----BEGIN PRIVATE KEY-----", "://a@", "'", " "]
)
def test_long_text_is_read_in_time(text) -> None:
    start = time.thread_time()  # not of what else the machine does
    public_text(text * 8_000)
    assert time.thread_time() - start < 2


@pytest.mark.parametrize("digits", [100, 4200, 4300, 5000])
def test_an_integer_of_any_length_can_be_written(digits):
    """As what a reward logs of an answer such as 10**5000, which ended a run."""
    value = to_json({"a": [10**digits, -(10**digits)]})
    assert json.loads(json.dumps(value)) == value
