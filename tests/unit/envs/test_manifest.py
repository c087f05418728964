"""Manifests: every mistake is named with file, key, value and what is allowed, and disables one environment only."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.capabilities.descriptor import parse
from layerzero.envs.build.lock import lock_command, read_lock
from layerzero.envs.manifest import VariantName, discover, load
from layerzero.ipc.errors import ConfigError

VALID = """\
summary = "s"
provider = "torch_cpu"
descriptor = "torch"
python = "3.11"

[variants.cpu]
requirements = ["numpy>=2"]
"""


def write(folder: Path, text: str, name: str = "sample.toml") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('summary = "s"', "", ["summary: missing"]),
        ('summary = "s"', "summary = 5", ["summary", "5", "valid string"]),
        ('summary = "s"', 'summary = "s"\nsumary = "x"', ["sumary", "'x'", "Known: summary", "mean 'summary'"]),
        ('summary = "s"', 'summary = "s"\nname = "other"', ["name", "'other'", "must be absent"]),
        ('python = "3.11"', 'python = "3"', ["python", "'3'", r"^3\.[1-9][0-9]$"]),
        ('python = "3.11"', "", ["`python`", "venv"]),
        ('python = "3.11"', 'python = "3.11"\nplatform = "win"', ["platform", "'win'", "manylinux_2_"]),
        ('python = "3.11"', 'python = "3.11"\ninterpreter = "uv"', ["'uv'", "'venv', 'host' or 'existing'"]),
        ('python = "3.11"', 'interpreter = "existing"', ['"existing" needs `executable`, an absolute path']),
        ('python = "3.11"', 'interpreter = "existing"\nexecutable = "bin/python"', ["an absolute path"]),
        ('python = "3.11"', 'python = "3.11"\nexecutable = "/bin/python"', ["no other one has it"]),
        ('python = "3.11"', 'python = "3.11"\ninterpreter = "existing"\nexecutable = "/x"', ["the Python that it is"]),
        ('python = "3.11"', 'interpreter = "existing"\nexecutable = "/x"', ["is for functions"]),
        ('python = "3.11"', 'interpreter = "host"', ["host", "[variants.*] must be absent"]),
        ('"torch_cpu"', '"Torch"', ["provider", "'Torch'", "[a-z_]"]),
        ('"torch_cpu"', '"../evil.py"', ["provider", "'../evil.py'", "stays under"]),
        ('"torch_cpu"', '"/evil.py"', ["provider", "'/evil.py'", "stays under"]),
        ('"torch_cpu"', '"absent.py"', ["provider", "'absent.py'", "existing file"]),
        ('"torch_cpu"', f'"{"a" * 300}.py"', ["provider", "File name too long"]),
        ('"torch_cpu"', '"round.py"', ["provider", "Symlink loop"]),
        ('summary = "s"', 'summary = "s"\nenv = {A = "\\u0000"}', ["env.A", "without NUL"]),
        ('summary = "s"', f'summary = "s"\nx = {"[" * 5000}', ["cannot be read as TOML", "nested too deeply"]),
        ('"torch"', '"link.json"', ["descriptor", "'link.json'", "stays under"]),
        ("variants.cpu", "variants.tpu", ["variants.tpu", "'tpu'", "'cpu', 'cu12', 'cu13', 'rocm', 'xpu' or 'hpu'"]),
        ("[variants.cpu]", "[variants.xpu]\nrequirements = []\n[variants.cpu]", ["xpu must be the only one"]),
        ('"numpy>=2"', '"numpy=>2"', ["variants.cpu.requirements.0", "'numpy=>2'", "must be a requirement"]),
        ('"numpy>=2"', '"--index-url=x"', ["variants.cpu.requirements.0", "'--index-url=x'", "requirement"]),
        ('["numpy>=2"]', "[]\nindex = 1", ["variants.cpu.index", "1", "Known: requirements"]),
        ("[variants.cpu]", '[env]\nPYTHONPATH = "x"\n[variants.cpu]', ["env.PYTHONPATH", "variable name other than"]),
        ("[variants.cpu]", "[env]\nA = 1\n[variants.cpu]", ["env.A", "1", "valid string"]),
        ('python = "3.11"', "python = ", ["TOML", "line 4"]),
    ],
)
def test_error_names_file_key_value_and_what_is_allowed(tmp_path: Path, old: str, new: str, named: list[str]) -> None:
    """Whoever edits a manifest must be able to fix it from the message alone."""
    (tmp_path / "outside.json").write_text("{}")
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "round.py").symlink_to(folder / "round.py")
    (folder / "link.json").symlink_to(tmp_path / "outside.json")
    assert old in VALID
    path = write(folder, VALID.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert [part for part in [str(path), *named] if part not in caught.value.message] == []


def test_name_of_the_file_is_checked(tmp_path: Path) -> None:
    """The name becomes part of paths and commands."""
    with pytest.raises(ConfigError, match="'Bad Name'"):
        load(write(tmp_path, VALID, "Bad Name.toml"))


def test_broken_manifest_disables_only_itself(tmp_path: Path) -> None:
    """One bad file of a third party must not take the other backends away."""
    good = write(tmp_path, VALID, "good.toml")
    bad = write(tmp_path, VALID + "[", "bad.toml")
    found, problems = discover([tmp_path])
    assert found["good"].path == good
    assert "bad" not in found
    assert [(p.name, p.path) for p in problems] == [("bad", bad)]


def test_duplicate_name_names_both_files_and_keeps_the_first(tmp_path: Path) -> None:
    """Two files with one name would make it a matter of luck which library runs."""
    first = write(tmp_path / "a", VALID, "dup.toml")
    second = write(tmp_path / "b", VALID, "dup.toml")
    found, problems = discover([tmp_path / "a", tmp_path / "b"])
    assert found["dup"].path == first
    assert len(problems) == 1
    assert str(first) in problems[0].message
    assert str(second) in problems[0].message


def test_missing_folder_is_a_problem_not_an_error(tmp_path: Path) -> None:
    """A setting that points nowhere must be reported and leave the built-in environments usable."""
    found, problems = discover([tmp_path / "absent"])
    assert "torch" in found
    assert "absent" in problems[0].message


SOURCE_ONLY = {"flash-attn"}  # published without wheels, so without a lock; served as an overlay
NOT_LOCKED = {"torch-rocm", "torch-xpu", "torch-hpu"}  # wheels of indexes out of our reach; never run, and they say so


def test_built_in_manifests_are_valid_and_locked() -> None:
    """Every shipped environment must be buildable as shipped."""
    found, problems = discover()
    assert problems == []
    on_cpu = {"torch", "mlx", "numba", "onnxruntime", "onnx-reference", "openblas", "zentorch"}
    assert set(found) >= {*on_cpu, "null", *SOURCE_ONLY}
    for manifest in found.values():
        for variant in manifest.variants:
            if manifest.name in SOURCE_ONLY | NOT_LOCKED:
                assert not manifest.lock_path(variant).exists()
                continue
            lock = read_lock(manifest, variant)
            assert {"pyzmq", "msgpack"} <= set(lock.pins)
            assert "://" not in lock.text
            blocks = lock.text.split("\n", 2)[2].replace("\\\n", " ").splitlines()
            assert [line for line in blocks if "--hash=sha256:" not in line] == []


@pytest.mark.parametrize("wanted", ["cpu", "cu13"])
def test_backends_of_other_devices_serve_beside_every_variant(wanted: VariantName) -> None:
    """They take the CPU's tensors: a machine with an AMD GPU keeps its backends for the CPU."""
    found, _ = discover()
    assert {name: found[name].variant_for(wanted) for name in NOT_LOCKED} == {
        "torch-rocm": "rocm",
        "torch-xpu": "xpu",
        "torch-hpu": "hpu",
    }
    assert found["torch"].variant_for(wanted) == wanted
    assert lock_command(found["torch-xpu"], "xpu") == "lz env lock torch-xpu"


def test_sample_descriptor_is_valid() -> None:
    """The sample is what documentation points third parties to."""
    folder = Path(__file__).parents[2] / "samples" / "manifests"
    manifest = load(folder / "tiny.toml")
    assert parse(manifest.descriptor_path.read_text(), "tiny").backend == "tiny"
    assert manifest.provider_target == str(folder.resolve() / "tiny.py")
