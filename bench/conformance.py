"""ONNX's own node tests through `lz`, on each backend of the CPU by name: right, or refused with a reason. Writes
results/conformance.md, and exits with 1 where a result is wrong or a call fails.

    python bench/conformance.py [--quick]

Needs onnx 1.23 or newer beside LayerZero (pip install -e '.[conformance]'): its tests are made by its code. A test is
of one node; those of an operator written out in others ("expanded") are left out. What is compared is an operator's
first result, by the test's own tolerance: means, present keys and their like are no results of our ops. A past is put
before the new keys, and tables are looked up, before the call; conformance_calls.py and conformance_vision.py have
all that is mapped.

Numbers of half precision that ONNX wants were rounded at each step, so that they miss the exact ones by more than a
test's own tolerance. A result outside of it counts as "nearer" if its greatest distance to what ONNX's reference
evaluator makes of the same inputs in float64 is no more than that of the wanted numbers; else it is wrong.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import conformance_calls
import conformance_vision
import numpy as np
from common import backend_versions, finish, own_broker, parser, verdict
from conformance_calls import Node, Unserved

import layerzero as lz

CALLS = {**conformance_calls.CALLS, **conformance_vision.CALLS}
BACKENDS = ("torch", "onnxruntime", "mlx", "numba", "openblas", "zentorch", "onnx-reference")
QUICK = ("Softmax", "MatMul", "LayerNormalization")


class Case(NamedTuple):
    name: str
    op: str
    model: Any
    node: Node
    wanted: Any
    rtol: float
    atol: float


class Outcome(NamedTuple):
    op: str
    backend: str  # "": refused before a backend was asked
    what: str  # unserved, or of a backend: right, nearer, lacks (the op), refused or wrong
    why: str


def cases(ops: tuple[str, ...]) -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that overflow where they should
        from onnx import helper
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases(None)
    for test in found:
        if len(test.model.graph.node) != 1 or test.model.graph.node[0].op_type not in ops:
            continue
        (node,) = test.model.graph.node
        attrs = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        opset = {one.domain: one.version for one in test.model.opset_import}[""]
        for given, wanted in test.data_sets:
            rest = iter([_array(one) for one in given])
            inputs = [next(rest) if name else None for name in node.input]
            made = Node(attrs, list(node.input), inputs, list(node.output), opset)
            yield Case(test.name, node.op_type, test.model, made, _array(wanted[0]), test.rtol, test.atol)


def _array(given: Any) -> np.ndarray:
    from onnx import TensorProto, numpy_helper

    return numpy_helper.to_array(given) if isinstance(given, TensorProto) else np.asarray(given)


def outcomes(case: Case) -> Iterator[Outcome]:
    try:
        call = CALLS[case.op](case.node)
    except Unserved as option:
        yield Outcome(case.op, "", "unserved", str(option))
        return
    for backend in BACKENDS:
        yield Outcome(case.op, backend, *tried(case, call, backend))


def tried(case: Case, call: Any, backend: str) -> tuple[str, str]:
    try:
        got = call(backend=backend)
    except lz.NoBackend as error:
        codes = {r.code for c in error.report.candidates if c.backend == backend for r in c.reasons}
        return ("lacks", "") if codes == {"OP_UNSUPPORTED"} else ("refused", ", ".join(sorted(codes)) or str(error))
    except lz.InvalidArgument as error:
        return "refused", str(error).splitlines()[0]
    except lz.LayerZeroError as error:
        return "wrong", f"{case.name}: {str(error).splitlines()[0]}"
    if (got.dtype, got.shape) != (case.wanted.dtype, case.wanted.shape):
        return "wrong", f"{case.name}: {got.dtype} {got.shape} in place of {case.wanted.dtype} {case.wanted.shape}"
    one, wanted = (array.astype(np.float64) for array in (got, case.wanted))
    if np.allclose(one, wanted, case.rtol, case.atol, equal_nan=True):
        return "right", ""
    if got.dtype.itemsize == 2:
        truth = exact(case)
        far, limit = (float(np.max(np.abs(values - truth))) for values in (one, wanted))
        if far <= limit:  # false where one is NaN
            return "nearer", f"{case.name}: at most {far:.2g} from exact, where ONNX's numbers are {limit:.2g}"
    return "wrong", f"{case.name}: at most {float(np.max(np.abs(one - wanted))):.2g} from ONNX's numbers"


def exact(case: Case) -> np.ndarray:
    """The first result in float64."""
    from onnx.reference import ReferenceEvaluator

    given = zip(case.node.names, case.node.inputs, strict=True)
    feeds = {name: _wide(array) for name, array in given if array is not None}
    return np.asarray(ReferenceEvaluator(case.model).run(None, feeds)[0], np.float64)


def _wide(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


def main() -> None:
    args = parser(__doc__, "softmax, matmul and layer_norm alone").parse_args()
    found = list(cases(QUICK if args.quick else tuple(CALLS)))
    with own_broker():
        results = [(case, list(outcomes(case))) for case in found]
        versions = backend_versions()
    every = [outcome for _, made in results for outcome in made]
    rows = []
    for op in sorted({case.op for case in found}):
        own = [made for case, made in results if case.op == op]
        asked = [made for made in own if made[0].backend]
        cells = []
        for backend in BACKENDS:
            counts = Counter(outcome.what for made in asked for outcome in made if outcome.backend == backend)
            parts = [f"{counts[what]} {what}" for what in ("right", "nearer", "refused", "wrong") if counts[what]]
            cells.append(", ".join(parts) or "-")
        served = sum(any(outcome.what in ("right", "nearer") for outcome in made) for made in own)
        rows.append([op, str(len(own)), str(served), str(len(own) - len(asked)), *cells])
    wrong = [outcome for outcome in every if outcome.what == "wrong"]
    counts = Counter(outcome.what for outcome in every if outcome.backend)
    served = sum(int(row[2]) for row in rows)
    notes = [
        f"{len(found)} tests of {len(rows)} operators of onnx {version('onnx')}; {served} are served by a backend or "
        f"more. Of their calls on backends by name that have the op {counts['right']} are right, {counts['nearer']} "
        f"nearer to the exact numbers than ONNX's, {counts['refused']} refused with a reason, {counts['wrong']} wrong "
        f"(aim: none: {verdict(not wrong)}). -: the backend lacks the op, or no call came to it.",
        "",
        "Refused before a backend was asked, since our op has no such option:",
        "",
        *(f"- {op}: {why}: {n}" for (op, why), n in _tally(every, "unserved").items()),
        "",
        "Refused calls, of one backend each:",
        "",
        *(f"- {op}: {why}: {n}" for (op, why), n in _tally(every, "refused").items()),
        *(["", "Nearer:", ""] if counts["nearer"] else []),
        *(f"- {o.backend}: {o.why}" for o in every if o.what == "nearer"),
        *(["", "Wrong:", ""] if wrong else []),
        *(f"- {o.backend}: {o.why}" for o in wrong),
    ]
    print("\n".join(notes))
    headings = ["operator", "tests", "served", "no such option", *BACKENDS]
    title = "ONNX's node tests through lz"
    finish("conformance", title, versions, headings, rows, notes, is_quick=args.quick)
    sys.exit(bool(wrong))


def _tally(every: list[Outcome], what: str) -> Counter[tuple[str, str]]:
    return Counter((o.op, o.why) for o in every if o.what == what)


if __name__ == "__main__":
    main()
