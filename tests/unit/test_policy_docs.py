"""docs/policy.md: its example is right, and it leaves nothing out."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from layerzero.broker.configuration.policy_source import parse_layer
from layerzero.broker.selection.policy import Policy, Weights
from layerzero.broker.selection.policy_rules import FIELDS, PREFER_BONUS
from layerzero.broker.selection.policy_values import Known, RuleValues
from layerzero.capabilities import descriptor
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.policy import KEYS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")


def test_example_is_a_policy_for_the_backends_that_come_with_layerzero() -> None:
    """What people copy must work."""
    files = (ROOT / "src" / "layerzero" / "capabilities" / "descriptors").glob("*.json")
    known = Known.of({found.backend: found for found in map(descriptor.load, files)}, OPS)
    examples = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert [len(Policy.of(parse_layer(example, "docs"), known=known).rules) for example in examples] == [2]


def test_document_names_every_key_field_and_default() -> None:
    """A key that is not there is one that nobody finds."""
    for name in (*KEYS, *RuleValues.model_fields, *FIELDS):
        assert f"`{name}`" in TEXT, name
    for name, value in asdict(Weights()).items():
        assert f"`{name}` {value:g}" in TEXT.replace("\n", " "), name
    assert f"default {PREFER_BONUS:.0f}" in TEXT
