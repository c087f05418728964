"""pip's configuration reaches uv with pip's meaning, and never through argv."""

from __future__ import annotations

import pytest

from layerzero.envs.build.installers import without_passwords
from layerzero.envs.build.pip_config import parse_config_list, uv_settings

BEST = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


@pytest.mark.parametrize(
    ("listed", "flags", "variables"),
    [
        ("", [], {}),
        ("global.index-url='https://u:p@i.example/simple'", [], {"UV_DEFAULT_INDEX": "https://u:p@i.example/simple"}),
        ("global.extra-index-url='\\nhttps://a\\nhttps://b'", [], {"UV_INDEX": "https://a https://b", **BEST}),
        ("global.find-links='/a  /b'", [], {"UV_FIND_LINKS": "/a,/b"}),
        ("global.find-links='/a'\ninstall.find-links='/b'", [], {"UV_FIND_LINKS": "/b"}),
        (":env:.find-links='/c'\nglobal.find-links='/a'", [], {"UV_FIND_LINKS": "/c"}),
        ("global.index-url='https://a'\n:env:.index-url=''", [], {"UV_DEFAULT_INDEX": "https://a"}),
        ("global.trusted-host='a b'", [], {"UV_INSECURE_HOST": "a b"}),
        (f"global.cert={__file__!r}", [], {"SSL_CERT_FILE": __file__}),
        ("global.cert='/'", [], {"SSL_CERT_DIR": "/"}),
        (":env:.default-timeout='180'", [], {"UV_HTTP_TIMEOUT": "180"}),
        ("global.no-index='yes'\nglobal.find-links='/a'", ["--no-index"], {"UV_FIND_LINKS": "/a"}),
        ("global.no-index='false'", [], {}),
        ("download.index-url='https://a'\nwheel.no-index='1'", [], {}),
        ("WARNING: something\nglobal.index-url=https://bare\nnonsense", [], {"UV_DEFAULT_INDEX": "https://bare"}),
    ],
)
def test_translation(listed: str, flags: list[str], variables: dict[str, str]) -> None:
    """Who set pip up for a mirror, a wheelhouse or a proxy has set us up."""
    assert uv_settings(parse_config_list(listed), {}) == (flags, variables)


def test_variables_for_uv_win() -> None:
    """They are the more specific wish."""
    pip = parse_config_list("global.extra-index-url='https://a'\nglobal.find-links='/a'")
    mine = {"UV_INDEX": "https://b", "UV_FIND_LINKS": "/b"}
    assert uv_settings(pip, mine) == ([], {})
    assert uv_settings(pip, {"UV_INDEX_STRATEGY": "first-index"})[1] == {
        "UV_INDEX": "https://a",
        "UV_FIND_LINKS": "/a",
    }


def test_passwords_are_hidden_in_what_tools_say() -> None:
    """The output of a tool ends up in errors, logs and bug reports."""
    said = "error: https://user:secret@index.example/simple and https://token@other.example"
    assert without_passwords(said) == "error: https://****@index.example/simple and https://****@other.example"
