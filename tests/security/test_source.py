"""`make check` finds what the source may not contain, and the source is free of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import security

ROOT = Path(__file__).parents[2]
FOR_RUFF = (
    "import pickle",
    "import dill as d",
    "from marshal import loads",
    "import shelve",
    "import torch as t; t.load(path, map_location='cpu')",
    "import torch.serialization as s; s.load(path)",
    "import yaml; yaml.load(text)",
    "from yaml import unsafe_load; unsafe_load(text)",
    "eval(text)",
    "exec(text)",
    "import os as o; o.system('ls')",
    "from os import popen as p; p('ls')",
    "import subprocess; subprocess.run(line, shell=True)",
    "import tempfile; tempfile.mktemp()",
    "import httpx; httpx.get(url, verify=False)",
    "server.bind(('0.0.0.0', 80))",
)


def test_ruff_finds_every_planted_offender():
    command = [Path(sys.executable).with_name("ruff"), "check", "--no-cache", "--output-format=concise"]
    command += ["--stdin-filename", "trainer/planted.py", "-"]
    source = "\n".join(("re.compile(text), model.eval(), yaml.safe_load(text)", *FOR_RUFF))
    said = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True).stdout
    lines = re.findall(r"^trainer/planted\.py:(\d+):\d+: (?:S\d|TID)", said, re.MULTILINE)
    assert {int(line) for line in lines} == set(range(2, 2 + len(FOR_RUFF))), said


@pytest.mark.parametrize(
    "source",
    [
        "numpy.load(path, allow_pickle=True)",
        "server.bind(('', 80))",
        "server.bind(('::', 80))",
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
def test_a_planted_offender_is_found(source):
    assert len(list(security.offences(f"x = 1\n{source}\n"))) == 1


def test_what_is_harmless_is_not():
    assert not list(security.offences("f(trust_remote_code=args.trust_remote_code); server.bind(('127.0.0.1', 0))"))
    assert not list(security.offences("def load(name, path='', *, trust_remote_code=False): ..."))
    assert not list(security.offences("trust_remote_code: bool = False"))


def test_the_package_is_free_of_it(capsys):
    assert security.main() == 0
    assert int(capsys.readouterr().out.split()[-2]) > 100  # it has read the files
