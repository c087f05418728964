"""Chats as the text that a model was trained on, by the Jinja templates that come with models.

A template is a program of a stranger. It runs in Jinja's sandbox and sees numbers, texts, lists and mappings made anew
from the caller's, nothing else that has methods. Names and filters are those that templates of Transformers may use.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerzero import ConfigError, InvalidArgument

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
CONFIG_FILE = "tokenizer_config.json"
DEFAULT = "default"
FOR_TOOLS = "tool_use"
MAX_DEPTH = 64  # of what a template sees
_CUT = "\N{INFORMATION SEPARATOR FOUR}\N{INFORMATION SEPARATOR THREE}cut"  # where the last message's text ends
_KEPT_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """Template of a chat, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """source: Jinja. special_tokens: bos_token, eos_token and their like, which templates name.

        Raises ConfigError: no Jinja is installed, or `source` is no template of it."""
        try:
            import jinja2
        except ImportError as exc:
            raise ConfigError("chat templates need Jinja: pip install 'layerzero-broker[text]'") from exc
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as exc:
            raise ConfigError(f"the chat template is not Jinja that can be read: {exc}") from exc

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Text of a chat.

        messages: mappings with `role` and `content`. tools: JSON schemas of functions. documents: mappings with
        `title` and `text`. add_generation_prompt: what begins an answer is at the end. continue_final_message: the text
        ends where the last message's does, so that the answer goes on with it. variables: others that the template
        knows. Values are None, numbers, texts, sequences and mappings.

        Raises InvalidArgument: what the template says of the chat, or a value that is of no such kind."""
        import jinja2

        wrong = sorted(_KEPT_VARIABLES & variables.keys())
        if wrong:
            raise InvalidArgument(f"{wrong[0]} is an argument of its own")
        if add_generation_prompt and continue_final_message:
            raise InvalidArgument(
                "add_generation_prompt begins a message and continue_final_message goes on with one; pass one"
            )
        chat = [_plain(message, f"messages[{n}]") for n, message in enumerate(messages)]
        for n, message in enumerate(chat):
            if not isinstance(message, dict):
                raise InvalidArgument(
                    f"messages[{n}] is {type(messages[n]).__name__}; allowed: a mapping with role and content"
                )
        if continue_final_message:
            _mark(chat)
        try:
            text: str = self._template.render(
                **self._special_tokens,
                **{name: _plain(value, name) for name, value in variables.items()},
                messages=chat,
                tools=_plain(tools, "tools"),
                documents=_plain(documents, "documents"),
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as exc:
            raise InvalidArgument(f"the chat template refuses this chat: {exc}") from exc
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, OverflowError) as exc:
            raise InvalidArgument(f"the chat template fails on this chat: {type(exc).__name__}: {exc}") from exc
        if not continue_final_message:
            return text
        # Templates that strip a message's text have stripped it, up to the mark.
        before, found, _rest = text.rpartition(_CUT)
        if not found:
            raise InvalidArgument("the chat template does not show the last message's text, so it cannot be continued")
        return before


def templates_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Sources of the chat templates of a model's folder, by name; "default" is the one that chats have unasked."""
    found: dict[str, str] = {}
    match config.get("chat_template"):
        case str() as source:
            found[DEFAULT] = source
        case [*named]:
            found = {str(one["name"]): str(one["template"]) for one in named if isinstance(one, Mapping)}
    files = [
        (DEFAULT, folder / TEMPLATE_FILE),
        *((f.stem, f) for f in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))),
    ]
    for name, file in files:
        if file.is_file():
            found[name] = file.read_text(encoding="utf-8")
    return found


def _plain(value: Any, path: str, depth: int = 0) -> Any:
    """The value, made anew of Python's own kinds."""
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"{path[:80]}... lies {depth} levels deep; allowed: {MAX_DEPTH}")
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            keys = [_plain(key, f"a key of {path}", depth + 1) for key in value]
            items = [_plain(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()]
            return dict(zip(keys, items, strict=True))
        case list() | tuple():
            return [_plain(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]
    raise InvalidArgument(f"{path} is {type(value).__name__}; allowed: None, numbers, text, sequences and mappings")


def _mark(chat: list[dict[str, Any]]) -> None:
    """Mark the end of the last message's text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _CUT
        return
    for block in reversed(content if isinstance(content, list) else []):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            block["text"] += _CUT
            return
    raise InvalidArgument(
        "the last message has no text to continue; allowed: content, as a text or as blocks with text"
    )


def _environment() -> Any:
    """Jinja's sandbox, as templates of Transformers expect it (docs: "Writing a chat template")."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: says which text is an answer, and stands for that text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    class Namespace(jinja2.utils.Namespace):
        """Without attributes that begin with an underscore, by which Python's insides are reached."""

        def __init__(*args: Any, **names: Any) -> None:
            attributes = dict(*args[1:], **names)
            for name in attributes:
                _refuse_hidden(name)
            jinja2.utils.Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_hidden(name)
            super().__setitem__(name, value)

    def _refuse_hidden(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def make_dict(*args: Any, **names: Any) -> dict[Any, Any]:
        """Not the class itself, whose attributes lead further."""
        return dict(*args, **names)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().astimezone().strftime(pattern)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """Jinja's own is for HTML and escapes <, > and &."""
        allowed = {name: options.pop(name) for name in ("indent", "separators", "sort_keys") if name in options}
        if options:
            raise jinja2.TemplateError(f"tojson has no argument {min(options)!r}")
        return json.dumps(value, ensure_ascii=ensure_ascii, **allowed)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals.update(
        raise_exception=raise_exception,
        strftime_now=strftime_now,
        namespace=Namespace,
        dict=make_dict,
    )
    return env
