"""lz.load: whole models of files, in real environments, as callables."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.envs import model_files
from tests.envs.linear_model import Linear
from tests.process.harness import Site, in_threads

import layerzero as lz


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    one = Site(tmp_path_factory.mktemp("store"))
    with one.environment():
        model_files.ONNX.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def onnx_model(folder: Path, kind: str) -> Any:
    path = folder / f"{kind}.onnx"
    if not path.exists():
        assert model_files.write_onnx(str(path), kind) == "1.18.1"
    return lz.load(path, env=model_files.ONNX, timeout_s=30)


X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.timeout(300)
def test_a_model_is_a_callable_whose_arrays_are_not_copied(site: Site, folder: Path) -> None:
    with onnx_model(folder, "one") as model:
        assert [str(port) for port in (*model.inputs, *model.outputs)] == [
            "x: float32[rows, 4]",
            "y: float32[rows, 4]",
            "sum: float32[rows, 4]",
        ]
        x = lz.share(X)
        np.testing.assert_array_equal(model(x, y=x), X + X)
        report = model.last_report()
        assert (report.copies, report.uncopied_bytes) == ((), 3 * X.nbytes)
        np.testing.assert_array_equal(model.submit(x=x, y=X).result(), X + X)
        assert [copy.nbytes for copy in model.last_report().copies] == [X.nbytes]  # what lay in ordinary memory


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((X,), {}, "input 'y' is missing; allowed: x: float32[rows, 4]; y: float32[rows, 4]"),
        ((X, X, X), {}, "is given 3 inputs; allowed: x"),
        ((X,), {"z": X}, "has no input 'z'; allowed: x"),
        ((X, X), {"x": X}, "input 'x' is given twice"),
        ((X, X.astype(np.float64)), {}, "input 'y' is float64[3, 4]; convert it; allowed: y: float32[rows, 4]"),
        ((X, X[:2]), {}, "input 'y' is [2, 4], and 'rows' is 3 in 'x'; allowed: y"),
        ((X, X[:, :3]), {}, "input 'y' is [3, 3]; allowed: y: float32[rows, 4]"),
        ((X, X[0]), {}, "input 'y' has 1 dimensions, [4]; allowed"),
        ((X, [1.0]), {}, "input 'y' is list; allowed"),
    ],
)
def test_arguments_are_compared_with_the_inputs(site: Site, folder: Path, args: Any, kwargs: Any, said: str) -> None:
    with onnx_model(folder, "one") as model, pytest.raises(lz.InvalidArgument) as caught:
        model(*args, **kwargs)
    assert f"one.onnx: {said}" in str(caught.value) or f"one.onnx {said}" in str(caught.value)


def test_several_outputs_are_a_tuple_in_place(site: Site, folder: Path) -> None:
    with onnx_model(folder, "two") as model:
        for rows in (3, 1, 2000):  # and an answer that is larger than the last one
            x = lz.share(np.ones((rows, 4), np.float32) * 3)
            total, product = model(x, x)
            np.testing.assert_array_equal(total, np.full((rows, 4), 6))
            np.testing.assert_array_equal(product, np.full((rows, 4), 9))
            assert model.last_report().copies == ()


def test_a_shape_that_no_graph_tells_is_known_after_the_first_run(site: Site, folder: Path) -> None:
    """It may be another one then: values decide."""
    with onnx_model(folder, "unknown") as model:
        x = lz.share(X)
        first, second = model(x), None
        assert [copy.nbytes for copy in model.last_report().copies] == [first.nbytes]
        second = model(x)
        assert model.last_report().copies == ()
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(second, np.nonzero(X))
        fewer = X.copy()
        fewer[1] = 0
        np.testing.assert_array_equal(model(fewer), np.nonzero(fewer))


def test_a_graph_that_lies_about_its_shapes_is_served(
    site: Site, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with onnx_model(folder, "lying") as model:
        for _ in range(2):
            np.testing.assert_array_equal(model(X), np.concatenate([X, X]))
    assert "not as the graph says" in caplog.text


def test_a_model_is_opened_again_after_its_workers_death(site: Site, folder: Path) -> None:
    with onnx_model(folder, "one") as model:
        model(X, X)
        pid = next(row["pid"] for row in lz.status()["backends"] if row["name"] == model.env.backend)
        os.kill(pid, signal.SIGKILL)
        np.testing.assert_array_equal(model(X, X), X + X)
        assert model.last_report().is_rebuilt or model.last_report().failures
    with pytest.raises(lz.InvalidArgument, match="closed"):
        model(X, X)


def test_models_in_an_environment_with_several_workers(site: Site, folder: Path) -> None:
    """Each is in one worker, which its calls go to; it is opened again alone after that one's death."""
    path = folder / "one.onnx"
    onnx_model(folder, "one").close()
    pair = model_files.ONNX.options(workers=2)
    here: list[lz.Model] = []
    in_threads(4, lambda: here.append(lz.load(path, env=pair, timeout_s=60)))
    places = {id(model): served_by(model) for model in here}
    assert set(places.values()) <= {pair.backend, f"{pair.backend}.2"}
    x = lz.share(X)
    futures = [model.submit(x, x) for model in here * 4]
    for future in futures:
        np.testing.assert_array_equal(future.result(), X + X)
    doomed = places[id(here[0])]
    pid = next(row["pid"] for row in lz.status()["backends"] if row["name"] == doomed)
    os.kill(pid, signal.SIGKILL)
    for model in here:
        assert served_by(model) == places[id(model)]
        assert not model.last_report().is_rebuilt or places[id(model)] == doomed
    for model in here:
        model.close()
    with pytest.raises(lz.InvalidArgument, match="one: a list of environments is for functions"):
        lz.load(path, env=[model_files.ONNX, model_files.TORCH])  # type: ignore[list-item]


def served_by(model: lz.Model) -> str:
    x = lz.share(X)
    np.testing.assert_array_equal(model(x, x), X + X)
    assert model.last_report().copies == ()
    return model.last_report().served_by


def test_a_changed_file_is_an_error(site: Site, folder: Path) -> None:
    """Of one that is opened again."""
    path = folder / "changing.onnx"
    model_files.write_onnx(str(path), "one")
    model = lz.load(path, env=model_files.ONNX)
    path.write_bytes(path.read_bytes() + b"\0")
    pid = next(row["pid"] for row in lz.status()["backends"] if row["name"] == model.env.backend)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(lz.InvalidArgument, match=r"changing\.onnx has changed since lz.load read it"):
        model(X, X)


def test_a_broken_model_says_what_its_library_says(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no protobuf")
    with pytest.raises(lz.RemoteError, match=r"broken\.onnx in model-onnx raised .*INVALID_PROTOBUF|InvalidProtobuf"):
        lz.load(path, env=model_files.ONNX)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # as model_files knows
def test_models_of_torch_in_all_forms(site: Site, tmp_path: Path) -> None:
    """TorchScript, an exported program, and safetensors with a class: the same numbers; a pickle is refused."""
    model_files.TORCH.build(quiet=True)
    assert model_files.write_torch(str(tmp_path)).startswith("2.13")
    scripted = lz.load(tmp_path / "linear.pt", env=model_files.TORCH)
    exported = lz.load(tmp_path / "linear.pt2", env=model_files.TORCH)
    loaded = lz.load(tmp_path / "linear.safetensors", cls=Linear, args=(4, 3), env=model_files.TORCH)
    assert [model.kind for model in (scripted, exported, loaded)] == ["torchscript", "exported", "safetensors"]
    x = lz.share(X)
    expected = scripted(x)
    assert (expected.shape, expected.dtype) == ((3, 3), np.float32)
    np.testing.assert_array_equal(exported(x), expected)
    assert exported.last_report().uncopied_bytes == X.nbytes
    np.testing.assert_array_equal(loaded(x, scale=2.0), 2 * expected)
    port = exported.inputs[0]
    assert (port.dtype, port.shape is not None and port.shape[1]) == ("float32", 4)
    with pytest.raises(lz.InvalidArgument, match=r"linear.pt2: input 'input' is float64\[3, 4\]"):
        exported(X.astype(np.float64))
    with pytest.raises(lz.InvalidArgument, match="has no input 'y'; allowed: x: any dtype; scale"):
        loaded(y=X)
    with pytest.raises(lz.InvalidArgument, match=r"is a pickle, as torch.save writes them.*weights_only"):
        lz.load(tmp_path / "pickle.pt", env=model_files.TORCH)
    with pytest.raises(lz.InvalidArgument, match="the weights are not those of"):
        lz.load(tmp_path / "linear.safetensors", cls=Linear, args=(4, 2), env=model_files.TORCH)
