"""Versions beside a backend: what is made of its manifest, and when it is made anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from layerzero.envs import manifest as manifests
from layerzero.envs.descriptors import read_all
from layerzero.envs.manifest import EnvManifest
from layerzero.envs.trust import third_party
from layerzero.envs.versions import choice, declaration
from layerzero.envs.versions.declaration import Declared, Wanted
from layerzero.ipc.errors import ConfigError
from layerzero.workers import probe

MANIFEST = """\
summary = "Toy"
provider = "toy.py"
descriptor = "toy.json"
python = "3.11"
platform = "manylinux_2_31"
env = { TOY_COLOUR = "blue" }

[variants.cpu]
requirements = ["toy-lib==2.0", "numpy>=2"]
without = ["left-out"]
"""
DESCRIPTOR = {
    "schema_version": "1.0",
    "backend": "toy",
    "backend_version": "2.0",
    "platform": "cpu",
    "ops": {"null": [{"kernel_id": "toy.null", "priority": 3, "source": "toy.py", "deterministic": True}]},
}
PROVIDER = """\
from layerzero.workers.provider import Loaded

def load():
    def bind(call, inputs, outputs):
        assert call.kernel_id == "toy.null", call
        return lambda: None
    return Loaded({"toy": "1"}, {"toy.null": bind})
"""
OLD = Declared("toy", "1.5.2", "3.10", "cpu", ("toy-lib==1.5.2", "numpy<2"))


@pytest.fixture
def base(tmp_path: Path) -> EnvManifest:
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "toy.toml").write_text(MANIFEST)
    (folder / "toy.json").write_text(json.dumps(DESCRIPTOR))
    (folder / "toy.py").write_text(PROVIDER)
    return manifests.load(folder / "toy.toml")


def discover(base: EnvManifest, store: Path) -> tuple[dict[str, EnvManifest], list[str]]:
    found, problems = third_party.discover([base.path.parent], backends=store / "none", store=store, allowed={})
    return found, [problem.message for problem in problems]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("onnxruntime@1.16", Wanted("onnxruntime", "1.16")),
        ("torch@2.4.1", Wanted("torch", "2.4.1")),
        ("tokenizers-0.23@0.22", Wanted("tokenizers-0.23", "0.22")),
        ("torch@2.4.1+cpu", None),
        ("torch@new", None),
        ("torch@1.x", None),
        ("torch", None),
        ("../torch@1", None),
        ("a@1@2", None),
    ],
)
def test_a_version_is_a_backend_and_a_number(word: str, found: Wanted | None) -> None:
    assert Wanted.of(word) == found


def test_a_series_means_its_releases_and_no_other() -> None:
    assert [v for v in ("1.1", "1.16", "1.16.3", "1.161", "1.160.1") if Wanted("x", "1.16").is_met_by(v)] == [
        "1.16",
        "1.16.3",
    ]


def test_a_version_has_its_own_names_and_the_backends_rest(base: EnvManifest, tmp_path: Path) -> None:
    made = declaration.write(OLD, base, tmp_path)
    assert (made.name, made.version_of, made.python, made.platform) == ("toy@1.5.2", "toy", "3.10", "manylinux_2_31")
    assert made.env == {"TOY_COLOUR": "blue"}
    assert made.variants["cpu"].requirements == OLD.requirements
    assert made.variants["cpu"].without == ("left-out",)
    capabilities, refused = read_all({"toy": base, made.name: made})
    assert refused == {}
    assert capabilities["toy@1.5.2"].kernel_ids == ("toy@1.5.2.null",)
    assert capabilities["toy@1.5.2"].backend_version == "1.5.2"


def test_its_provider_is_the_backends_own_which_sees_its_own_names(base: EnvManifest, tmp_path: Path) -> None:
    """The probe runs it as a worker does."""
    made = declaration.write(OLD, base, tmp_path)
    verdict = probe.probe(made.provider_target, made.descriptor_path)
    assert verdict["ok"], verdict
    assert list(verdict["certified"]) == ["toy@1.5.2.null"]


def test_what_is_declared_follows_a_change_of_the_backend(base: EnvManifest, tmp_path: Path) -> None:
    """An upgrade of LayerZero brings new descriptors: those of versions would claim what nobody knows any more."""
    declaration.write(OLD, base, tmp_path)
    before = discover(base, tmp_path)[0]["toy@1.5.2"]
    stamp = before.path.stat().st_mtime_ns
    assert discover(base, tmp_path)[0]["toy@1.5.2"].path.stat().st_mtime_ns == stamp
    base.descriptor_path.write_text(json.dumps(DESCRIPTOR).replace('"priority": 3', '"priority": 4'))
    after = discover(base, tmp_path)[0]["toy@1.5.2"]
    assert json.loads(after.descriptor_path.read_text())["ops"]["null"][0]["priority"] == 4
    assert (after.python, after.variants["cpu"].requirements) == ("3.10", OLD.requirements)


def test_a_version_without_its_backend_is_a_problem_and_no_backend(base: EnvManifest, tmp_path: Path) -> None:
    declaration.write(OLD, base, tmp_path)
    base.path.unlink()
    found, problems = discover(base, tmp_path)
    assert "toy@1.5.2" not in found
    assert any("backend 'toy' is not here" in text and "lz env remove toy@1.5.2" in text for text in problems)


def test_removing_one_forgets_all_of_it_and_no_other(base: EnvManifest, tmp_path: Path) -> None:
    declaration.write(OLD, base, tmp_path)
    other = declaration.write(Declared("toy", "1.5.21", "3.11", "cpu", OLD.requirements), base, tmp_path)
    lock = declaration.folder(tmp_path) / "toy@1.5.2.cpu.txt"
    lock.write_text("")
    assert declaration.names(tmp_path, Wanted("toy", "1.5")) == ["toy@1.5.21", "toy@1.5.2"]
    assert declaration.remove("toy@1.5.2", tmp_path)
    assert not declaration.remove("toy@1.5.2", tmp_path)
    assert not lock.exists()
    assert list(discover(base, tmp_path)[0].keys() & {"toy@1.5.2", "toy@1.5.21"}) == [other.name]


@pytest.mark.parametrize("line", ["", 'version_of = "other"'])
def test_a_name_with_a_version_says_of_what(base: EnvManifest, line: str) -> None:
    path = base.path.with_name("toy@1.toml")
    path.write_text(f"{line}\n{MANIFEST}")
    with pytest.raises(ConfigError, match="NAME@VERSION"):
        manifests.load(path)


def test_only_a_name_with_a_version_is_one(base: EnvManifest) -> None:
    base.path.write_text(f'version_of = "toy"\n{MANIFEST}')
    with pytest.raises(ConfigError, match="no version_of in others"):
        manifests.load(base.path)


@pytest.mark.parametrize(
    ("template", "release", "beside", "asked"),
    [
        (["torch==2.13.0+cpu", "numpy>=2"], "2.4.1+cpu", [], ["torch==2.4.1+cpu", "numpy>=2"]),
        (["torch==2.13.0,!=2.13.0+cpu"], "2.4.1", [], ["torch!=2.4.1+cpu,==2.4.1"]),
        (["torch==2.13.0+cpu", "numpy>=2"], "2.4.1", ["numpy<2", "sympy"], ["torch==2.4.1+cpu", "numpy<2", "sympy"]),
        (["jax[cuda13]==0.9", "numpy"], "0.8.1", [], ["jax[cuda13]==0.8.1", "numpy"]),
        (["Torch>=2"], "2.4.1", ["torch==2.4.0"], ["torch==2.4.0"]),
    ],
)
def test_the_requirement_of_the_version_is_replaced_and_no_other(
    template: list[str], release: str, beside: list[str], asked: list[str]
) -> None:
    found = choice.requirements(template, Requirement(template[0]), release, beside)
    assert [(Requirement(one).name, Requirement(one).specifier, Requirement(one).extras) for one in found] == [
        (Requirement(one).name, Requirement(one).specifier, Requirement(one).extras) for one in asked
    ]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted("alpha", "2"), "no library of its own"),
        (Wanted("ty", "1"), "did you mean 'toy'"),
    ],
)
def test_what_can_have_no_versions_is_refused(base: EnvManifest, wanted: Wanted, said: str) -> None:
    alpha = manifests.load(Path(__file__).parents[3] / "backends" / "alpha.toml")
    with pytest.raises(ConfigError, match=said):
        choice.template(wanted, {"toy": base, "alpha": alpha})
