"""YAML as `yaml.safe_load` reads it, but for numbers: 1e-7 is one, as in YAML 1.2 and in JSON."""

from __future__ import annotations

import re

import yaml


class YamlLoader(yaml.SafeLoader):
    """A safe loader. YAML 1.1 wants a dot and a sign (1.0e-7), and makes text of other floats."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
