"""pip's own configuration, for uv: uv reads only its own, and users who set up pip expect it to count."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from layerzero.envs.build.environ import tool_environ

# In pip's order of precedence; `pip config list` prefixes every key with one of them.
_SECTIONS = ("global", "install", ":env:")
# pip option -> uv variable and the separator uv wants between values (None: one value).
# Variables and not flags, because an index URL may hold a password and argv is public.
_TO_UV: dict[str, tuple[str, str | None]] = {
    "index-url": ("UV_DEFAULT_INDEX", None),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", None),
    "client-cert": ("SSL_CLIENT_CERT", None),
    "timeout": ("UV_HTTP_TIMEOUT", None),
    "default-timeout": ("UV_HTTP_TIMEOUT", None),
    "proxy": ("ALL_PROXY", None),
}
_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})


def parse_config_list(text: str) -> dict[str, str]:
    """`pip config list` prints `section.key='value'` lines; the values that hold for `pip install`."""
    sections: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in text.splitlines():
        dotted, equals, literal = line.partition("=")
        section, dot, key = dotted.rpartition(".")
        if not equals or not dot or section not in sections:
            continue
        try:
            value = ast.literal_eval(literal)
        except (ValueError, SyntaxError):  # a pip that prints values bare
            value = literal
        if str(value).strip():  # pip ignores empty values
            sections[section][key] = str(value)
    return {key: value for section in _SECTIONS for key, value in sections[section].items()}


def read_pip_config(environ: Mapping[str, str]) -> dict[str, str]:
    """Ask the first pip at hand; without any, only PIP_* variables count."""
    base = getattr(sys, "_base_executable", None)  # a venv made by uv has no pip, the interpreter below it may
    for python in dict.fromkeys((sys.executable, base, shutil.which("python3"))):
        if python:
            argv = [python, "-m", "pip", "config", "list"]
            answer = subprocess.run(argv, env=tool_environ(environ, {}), capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                return parse_config_list(answer.stdout)
    variables = {k: v for k, v in environ.items() if k.startswith("PIP_") and v.strip() and k != "PIP_CONFIG_FILE"}
    return {k.removeprefix("PIP_").lower().replace("_", "-"): v for k, v in variables.items()}


def uv_settings(pip: Mapping[str, str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """pip's settings as (flags, variables) for uv. A variable that the user set for uv stays."""
    variables: dict[str, str] = {}
    for key, (variable, separator) in _TO_UV.items():
        if key in pip and variable not in environ:
            value = pip[key].strip()
            variables[variable] = value if separator is None else separator.join(value.split())
    if "UV_INDEX" in variables and "UV_INDEX_STRATEGY" not in environ:
        # pip treats all indexes alike; uv would look no further than the first that knows the name.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if variables.get("SSL_CERT_FILE") and not os.path.isfile(variables["SSL_CERT_FILE"]):
        variables["SSL_CERT_DIR"] = variables.pop("SSL_CERT_FILE")  # pip's cert may be a folder
    flags = ["--no-index"] if pip.get("no-index", "").strip().lower() in _TRUE else []
    return flags, variables
