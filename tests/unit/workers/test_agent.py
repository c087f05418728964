"""What an agent says of where it is."""

from __future__ import annotations

from pathlib import Path

from layerzero.envs.build import stage
from layerzero.workers.agent import describe_place, source_hash


def test_a_provider_of_the_agents_own_is_part_of_what_certificates_depend_on(tmp_path: Path) -> None:
    """It may compute what the broker's provider does not: the verdict on one says nothing of the other."""
    provider = tmp_path / "provider.py"
    sources = [describe_place("alpha", "").source]
    for text in ("one", "other"):
        provider.write_text(text)
        sources.append(describe_place("alpha", str(provider)).source)
    assert len(set(sources)) == 3


def test_a_agents_copy_of_our_code_is_named_as_what_was_staged() -> None:
    """Else one verdict would be two, and workers would be probed twice."""
    assert source_hash() == stage.source_hash()
