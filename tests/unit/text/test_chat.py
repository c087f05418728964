"""Chat templates: what they may do, and what is said of those that do not fit. tests/transformer_models has the
comparison with Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerzero import ConfigError, InvalidArgument
from layerzero.text import ChatTemplate
from layerzero.text.chat import templates_of

pytest.importorskip("jinja2")
ROLES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "Hello"}]


def test_a_chat_becomes_text() -> None:
    template = ChatTemplate("{{ bos_token }}" + ROLES, {"bos_token": "<s>"})
    assert template.render(CHAT, add_generation_prompt=True) == "<s><user>Hello<assistant>"


def test_an_answer_can_be_continued() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}</s>{% endfor %}")
    chat = [*CHAT, {"role": "assistant", "content": "Good "}]
    assert template.render(chat, continue_final_message=True) == "Hello</s>Good "
    assert chat[-1]["content"] == "Good "
    blocks = [{"role": "assistant", "content": [{"type": "text", "text": "one"}]}]
    template = ChatTemplate("{% for m in messages %}{{ m.content[0].text }}</s>{% endfor %}")
    assert template.render(blocks, continue_final_message=True) == "one"


@pytest.mark.parametrize(
    ("source", "chat", "options", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, {}, "refuses this chat: roles must alternate"),
        ("{{ messages[3].role }}", CHAT, {}, "refuses this chat"),
        ("{{ messages[0].content + 1 }}", CHAT, {}, "fails on this chat: TypeError"),
        ("{{ 1 | tojson(default=1) }}", CHAT, {}, "tojson has no argument 'default'"),
        (
            ROLES,
            [{"role": "user", "content": object()}],
            {},
            r"messages\[0\]\['content'\] is object; allowed: None, numbers",
        ),
        (ROLES, ["Hello"], {}, r"messages\[0\] is str; allowed: a mapping with role and content"),
        (ROLES, CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "pass one"),
        (ROLES, [], {"continue_final_message": True}, "no text to continue"),
        ("nothing of it", CHAT, {"continue_final_message": True}, "does not show the last message's text"),
    ],
)
def test_what_a_template_refuses_is_said(source: str, chat: Any, options: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        ChatTemplate(source).render(chat, **options)


def test_values_in_a_circle_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InvalidArgument, match=r"lies 65 levels deep; allowed: 64"):
        ChatTemplate(ROLES).render([{"role": "user", "content": circle}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ dict.__base__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for _ in range(100000000) %}{% endfor %}",
    ],
)
def test_a_template_does_not_leave_its_sandbox(source: str) -> None:
    try:
        text = ChatTemplate(source).render(CHAT)
    except InvalidArgument:
        return
    assert text == ""  # Jinja's name for what is not there


def test_a_source_that_is_no_template_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="not Jinja that can be read"):
        ChatTemplate("{% for %}")


def test_a_folder_has_templates_in_several_places(tmp_path: Path) -> None:
    assert templates_of(tmp_path, {"chat_template": "one"}) == {"default": "one"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert templates_of(tmp_path, {"chat_template": named}) == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("more", encoding="utf-8")
    assert templates_of(tmp_path, json.loads('{"chat_template": "one"}')) == {"default": "file", "rag": "more"}
