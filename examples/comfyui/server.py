"""A stand-in for ComfyUI's loader and executor: packs from a folder, prompts in the format of its API."""

import sys
from pathlib import Path
from typing import Any

import adapter
import numpy as np

import layerzero as lz

PACKS = [path for path in sorted(Path(__file__).with_name("packs").iterdir()) if (path / "requirements.txt").exists()]


class LoadImage:
    RETURN_TYPES, FUNCTION = ("IMAGE",), "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"size": ("INT", {"default": 256})}}

    def load(self, size: int) -> Any:
        return (lz.share(np.linspace(0, 1, size * size * 3, dtype=np.float32).reshape(1, size, size, 3)),)


def execute(prompt: dict[str, Any], mappings: dict[str, type]) -> dict[str, str | tuple[Any, ...]]:
    """What each node gave, or why it is red. A link is [id of a node, number of its output]; nodes come in order."""
    done: dict[str, Any] = {}
    for key, node in prompt.items():
        cls = mappings[node["class_type"]]
        links = {name: link for name, link in node["inputs"].items() if isinstance(link, list)}
        red = [link[0] for link in links.values() if isinstance(done[link[0]], str)]
        if red:
            done[key] = f"waits for node {red[0]}, which is red"
            continue
        known = {name: field[1]["default"] for name, field in cls.INPUT_TYPES()["required"].items() if len(field) > 1}
        given = {name: done[link[0]][link[1]] for name, link in links.items()}
        try:
            done[key] = tuple(getattr(cls(), cls.FUNCTION)(**{**known, **node["inputs"], **given}))
        except lz.LayerZeroError as error:
            done[key] = error.message.partition("\n")[0]
    return done


PROMPT = {
    "1": {"class_type": "LoadImage", "inputs": {"size": 64}},
    "2": {"class_type": "OldInvert", "inputs": {"image": ["1", 0]}},
    "3": {"class_type": "OldCrash", "inputs": {"image": ["2", 0]}},
    "4": {"class_type": "NewNormalize", "inputs": {"image": ["3", 0]}},
    "5": {"class_type": "NewNormalize", "inputs": {"image": ["2", 0]}},
}
if __name__ == "__main__":
    for pack in PACKS if "--build" in sys.argv else []:
        adapter.environment(pack).build()
    lz.connect()
    nodes = {"LoadImage": LoadImage} | {name: cls for pack in PACKS for name, cls in adapter.nodes(pack).items()}
    for count in (1, 2):
        for key, result in execute(PROMPT, nodes).items():
            print(f"prompt {count}, node {key}:", f"RED: {result}" if isinstance(result, str) else "done")
