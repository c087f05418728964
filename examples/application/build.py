"""Build the environment of transformers_minilm.py, unless it is there, and print its interpreter: `make demo`."""

from pathlib import Path

from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build
from layerzero.envs.build.progress import Lines

MANIFEST = Path(__file__).with_name("minilm-application.toml")


def interpreter(store: Path) -> Path:
    return build.ensure(manifest.load(MANIFEST), store=store, progress=Lines()).python


if __name__ == "__main__":
    print(interpreter(settings.load().store))
