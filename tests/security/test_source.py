"""scripts/security.py finds what it forbids, however it is written; the package has none of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "security.py"


@pytest.fixture
def security():
    spec = importlib.util.spec_from_file_location("security", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import dill as d",
        "from marshal import loads",
        "import shelve",
        "torch.load(path)",
        "import torch as t; t.load(path, map_location='cpu')",
        "torch.load(path, weights_only=False)",
        "load_file(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "from yaml import unsafe_load; unsafe_load(text)",
        "eval(text)",
        "exec(text)",
        "compile(text, name, 'exec')",
        "import os as o; o.system('ls')",
        "from os import popen as p; p('ls')",
        "subprocess.run(line, shell=True)",
        "options = {'shell': True}",
        "tempfile.mktemp()",
        "httpx.get(url, verify=False)",
        "server.bind(('0.0.0.0', 80))",
        "server.bind(('', 80))",
        "server.bind(('::', 80))",
        "importlib.import_module('pickle')",
        "builtins.eval(text)",
        "torch.serialization.load(path)",
        "trust_remote_code: bool = True",
        "options.trust_remote_code = True",
        "def load(name, *, trust_remote_code=True): ...",
        "def load(name, trust_remote_code=True): ...",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "arguments = {'trust_remote_code': True}",
        "token = 'hf_" + "a" * 34 + "'",
        "key = 'sk-" + "a1" * 16 + "'",
    ],
)
def test_a_planted_offender_is_found(security, source):
    assert len(list(security.offences(f"x = 1\n{source}\n"))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "yaml.safe_load(text)",
        "re.compile(text)",
        "model.eval()",
        "subprocess.run(words, shell=False)",
        "f(trust_remote_code=args.trust_remote_code)",
        "server.bind(('127.0.0.1', 0))",
        "trust_remote_code: bool = False",
        "def load(name, path='', *, trust_remote_code=False): ...",
    ],
)
def test_harmless_code_is_not_reported(security, source):
    assert not list(security.offences(source))


def test_the_package_is_free_of_it(security, capsys):
    assert security.main() == 0
    assert int(capsys.readouterr().out.split()[-2]) > 100  # it has looked
