"""The policy: what it means for a kernel, how its layers add up, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.broker.selection.policy import Layer, Policy, Weights, compose
from layerzero.broker.selection.policy_rules import FIELDS, PREFER_BONUS, fact, parse_condition
from layerzero.broker.selection.policy_values import MAX_PROBLEMS, Known, Values
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import ConfigError, InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.policy import KEYS, PER_CALL, variables
from layerzero.ipc.vocabulary.tensors import TensorSpec

KERNELS = {"torch.attention": "attention", "mlx.attention": "attention", "torch.matmul": "matmul"}
KNOWN = Known(("mlx", "torch"), KERNELS, (*OPS, "attention.causal", "attention.full"))


DEVICE = DeviceSpec(device_type="cuda", device_name="H200", device_vendor="nvidia", sm_version=90)


def call(op: str = "attention", queries: int = 128, is_causal: bool = False) -> SelectionContext:
    """Attention of `queries` on 256 keys in float16, or a matmul."""
    if op == "matmul":
        square = TensorSpec.contiguous("float16", (4, 4))
        return SelectionContext(op, (square, square), (square,), {}, DEVICE)
    q, k = (TensorSpec.contiguous("float16", (1, 2, n, 64)) for n in (queries, 256))
    attrs = {"is_causal": is_causal, "scale": 0.1, "causal_alignment": "top_left", "layout": "BHSD"}
    return SelectionContext(op, (q, k, k, None, None, None), (q,), attrs, DEVICE)


CALL = call()


def layer(origin: str = "policy.yaml", **values: Any) -> Layer:
    return Layer(origin, values)


def policy(**values: Any) -> Policy:
    return Policy.of(layer(**values), known=KNOWN)


def codes(found: Policy, kernel_id: str, context: SelectionContext = CALL) -> list[str]:
    return [r.code.value for r in found.judge(context, kernel_id, kernel_id.partition(".")[0]).rejections]


def problems(**values: Any) -> list[str]:
    found, texts = compose([layer(**values)], KNOWN)
    assert (found is None) == bool(texts)
    return texts


def test_without_layers_everything_is_allowed_and_nothing_preferred() -> None:
    """The defaults must be those of docs/policy.md."""
    found = Policy.of()
    verdict = found.judge(CALL, "torch.attention", "torch")
    assert (verdict.rejections, verdict.bonus, verdict.why) == ((), 0.0, ())
    assert (found.strict_mode, found.plan_mode, found.allow_adaptation) == (False, False, True)
    assert (found.allow_jit_compile, found.requires_deterministic, found.memory_headroom_bytes) == (True, False, None)
    assert (found.shadow_rate, found.tune_budget, found.dispatch_table) == (0.0, 0.0, None)
    assert found.weights == Weights()
    assert found.isolation("torch") == "lifted"


def test_lock_rejects_every_other_kernel_and_names_its_origin() -> None:
    """A lock that nobody satisfies must lead to the line that set it."""
    found = policy(locks={"attention": "torch.attention"})
    assert codes(found, "torch.attention") == []
    (rejection,) = found.judge(CALL, "mlx.attention", "mlx").rejections
    assert rejection.code is Reason.POLICY_LOCKED
    assert rejection.detail == "attention is locked to 'torch.attention' (policy.yaml)"
    assert codes(found, "torch.matmul", call("matmul")) == []


def test_lock_may_be_for_causal_attention_only() -> None:
    """The spec's own example locks attention.causal."""
    found = policy(locks={"attention.causal": "mlx.*"})
    assert codes(found, "torch.attention", call(is_causal=True)) == ["POLICY_LOCKED"]
    assert codes(found, "torch.attention", CALL) == []


def test_exact_lock_wins_over_glob_and_call_over_file() -> None:
    """Which of two locks holds must not depend on their order in the file."""
    locks = {"*": "torch.*", "attention": "mlx.*"}
    for items in (locks, dict(reversed(locks.items()))):
        assert codes(policy(locks=items), "torch.attention") == ["POLICY_LOCKED"]
    later = policy(locks=locks).with_overlay({"layers": [{"origin": "lz.lock", "values": {"locks": {"*": "torch.*"}}}]})
    assert codes(later, "torch.attention") == []


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        ({"avoid_sources": ["ml*"]}, "backend 'mlx' is in avoid_sources: ml* (policy.yaml)"),
        ({"allow_sources": "torch"}, "backend 'mlx' is not in allow_sources: torch (policy.yaml)"),
        (
            {"avoid_kernels": ["mlx.attention"]},
            "kernel 'mlx.attention' is in avoid_kernels: mlx.attention (policy.yaml)",
        ),
        ({"allow_kernels": ["torch.*"]}, "kernel 'mlx.attention' is not in allow_kernels: torch.* (policy.yaml)"),
        ({"rules": [{"avoid": "mlx"}]}, "kernel 'mlx.attention' is in avoid: mlx (policy.yaml)"),
        ({"rules": [{"allow": "torch"}]}, "kernel 'mlx.attention' is not in allow: torch (policy.yaml)"),
    ],
)
def test_lists_deny_and_say_which(values: dict[str, Any], detail: str) -> None:
    """Both sides of each list, of the policy and of a rule."""
    found = policy(**values)
    (rejection,) = found.judge(CALL, "mlx.attention", "mlx").rejections
    assert (rejection.code, rejection.detail) == (Reason.POLICY_DENIED, detail)
    assert codes(found, "torch.attention") == []


def test_preference_is_a_bonus_that_names_its_rule() -> None:
    """A report must be able to say why a slower kernel won."""
    found = policy(rules=[{"match": {"sm": ">=90"}, "prefer": "torch", "bonus": 5}, {"prefer": ["torch.*"]}])
    verdict = found.judge(CALL, "torch.attention", "torch")
    assert verdict.bonus == 5 + PREFER_BONUS
    assert verdict.why == ("prefer torch: +5 (policy.yaml)", "prefer torch.*: +10000 (policy.yaml)")
    assert found.judge(CALL, "mlx.attention", "mlx").bonus == 0


def test_ruling_says_what_judge_says() -> None:
    """The engine looks the rules up once for a call."""
    found = policy(avoid_sources=["mlx"], rules=[{"match": {"op": "attention.*"}, "lock": "torch.*"}])
    policy_for_call = found.policy_for_call(CALL)
    for kernel_id in KERNELS:
        backend = kernel_id.partition(".")[0]
        assert policy_for_call.judge(kernel_id, backend) == found.judge(CALL, kernel_id, backend)


@pytest.mark.parametrize(
    ("field_name", "written", "holds"),
    [
        ("sm", ">=90", True),
        ("sm", "<90", False),
        ("sm", 90, True),
        ("seq_len", "==256", True),
        ("seq_len_q", "!=128", False),
        ("seq_len", "128..255", False),
        ("seq_len", ["<16", "200..300"], True),
        ("batch_size", "<=1", True),
        ("batch_size", ">1", False),
        ("dtype", "float*", True),
        ("dtype", ["bfloat16", "float32"], False),
        ("dtype", "!=float16", False),
        ("device_type", "cuda", True),
        ("device_vendor", "amd", False),
        ("is_causal", False, True),
        ("op", "attention.*", True),
        ("op", "!=attention", False),
        ("op", "==attention.full", True),
        ("head_dim", "64", True),
    ],
)
def test_conditions(field_name: str, written: Any, holds: bool) -> None:
    """Every operator and kind of fact."""
    assert parse_condition(field_name, written).holds(CALL) is holds


@pytest.mark.parametrize("written", [">=1", "!=1", "*"])
def test_condition_on_a_fact_that_the_call_lacks_is_not_met(written: str) -> None:
    """A matmul has no heads, so a rule about them is not about it."""
    field_name = "layout" if written == "*" else "head_dim"
    assert not parse_condition(field_name, written).holds(call("matmul"))


@pytest.mark.parametrize("field_name", FIELDS)
def test_every_field_is_a_fact_of_a_call(field_name: str) -> None:
    """The document promises that a rule can be about it."""
    assert fact(CALL, field_name) is not None


@given(st.sampled_from([">=", "<=", "==", "!=", ">", "<"]), st.integers(-5, 50), st.integers(0, 60))
def test_comparisons_are_pythons(operator: str, limit: int, value: int) -> None:
    """An off-by-one here moves a whole range of calls to another kernel."""
    holds = parse_condition("seq_len_q", f"{operator}{limit}").holds(call(queries=value))
    assert holds is eval_comparison(operator, value, limit)


def eval_comparison(operator: str, left: int, right: int) -> bool:
    return {
        ">=": left >= right,
        "<=": left <= right,
        "==": left == right,
        "!=": left != right,
        ">": left > right,
        "<": left < right,
    }[operator]


def test_values_of_later_layers_replace_and_say_where_they_are_from() -> None:
    """call > environment > file > default."""
    found = Policy.of(
        Layer("policy.yaml", {"strict_mode": True, "weights": {"jit": 1, "perfdb": 2}}, {("weights", "jit"): 3}),
        Layer("LAYERZERO_WEIGHTS", {"weights": "perfdb=7"}),
        known=KNOWN,
    ).with_overlay({"layers": [{"origin": "lz.configure", "values": {"strict_mode": False}}]})
    assert (found.strict_mode, found.weights) == (False, Weights(jit=1.0, perfdb=7.0))
    rows = found.describe()
    assert rows["strict_mode"] == {"value": False, "origin": "lz.configure"}
    assert rows["weights.jit"] == {"value": 1.0, "origin": "policy.yaml:3"}
    assert rows["weights.perfdb"] == {"value": 7.0, "origin": "LAYERZERO_WEIGHTS"}
    assert rows["weights.transform"] == {"value": 1.0, "origin": "default"}


def test_rules_of_all_layers_hold() -> None:
    """A preference of a caller must not lift what the file forbids."""
    overlay = {"layers": [{"origin": "lz.prefer", "values": {"rules": [{"prefer": ["mlx"]}]}}]}
    verdict = policy(rules=[{"avoid": "mlx"}]).with_overlay(overlay).judge(CALL, "mlx.attention", "mlx")
    assert [r.code for r in verdict.rejections] == [Reason.POLICY_DENIED]
    assert verdict.why == ("prefer mlx: +10000 (lz.prefer)",)


def test_isolation_is_per_backend_and_per_kernel_with_a_default() -> None:
    """One value is for all backends; a later entry replaces its own backend's only."""
    found = Policy.of(layer(backend_isolation="auto"), layer(backend_isolation={"torch": "in_process"}), known=KNOWN)
    assert (found.isolation("torch"), found.isolation("mlx")) == ("in_process", "auto")
    one = Policy.of(layer(backend_isolation={"torch": "subprocess", "torch.matmul": "lifted"}), known=KNOWN)
    assert (one.isolation("torch", "torch.matmul"), one.isolation("torch", "torch.attention")) == (
        "lifted",
        "subprocess",
    )
    keys = [one.isolation_key(kernel.partition(".")[0], kernel) for kernel in ("torch.attention", "mlx.attention")]
    assert keys == ["torch", "*"]
    assert "did you mean 'torch.matmul'" in problems(backend_isolation={"torch.matmull": "lifted"})[0]
    assert "image of each backend's environment" in problems(backend_isolation={"torch": "container"})[0]


@pytest.mark.parametrize(("text", "nbytes"), [(1024, 1024), ("512 MiB", 2**29), ("1.5GB", 1_500_000_000), ("7", 7)])
def test_sizes(text: Any, nbytes: int) -> None:
    """Memory is written as people write it."""
    assert policy(memory_headroom_bytes=text).memory_headroom_bytes == nbytes


def test_hash_tells_policies_apart_and_no_more() -> None:
    """Cached decisions are kept by it: where a value comes from does not matter, and what it is does."""
    one = Policy.of(Layer("a", {"locks": {"attention": "torch.*"}}))
    assert one.hash == Policy.of(Layer("b", {"locks": "attention=torch.*"})).hash
    others = [
        Policy.of(),
        Policy.of(Layer("a", {"locks": {"attention": "mlx.*"}})),
        Policy.of(Layer("a", {"weights": {"jit": 3}})),
        Policy.of(Layer("a", {"rules": [{"lock": "torch.*"}]})),
        Policy.of(Layer("a", {"rules": [{"match": {"sm": 90}, "lock": "torch.*"}]})),
        Policy.of(Layer("a", {"locks": {"*": "torch.*"}}), Layer("b", {"rules": [{"lock": "mlx.*"}]})),
        Policy.of(Layer("b", {"rules": [{"lock": "mlx.*"}]}), Layer("a", {"locks": {"*": "torch.*"}})),
    ]
    assert len({one.hash, *(other.hash for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"stict_mode": True},
            "no key of a policy is called 'stict_mode'; did you mean 'strict_mode'? Known: locks,",
        ),
        ({"graph_strict_mode": True}, "take graph_strict_mode out: it had no effect"),
        ({"strict_mode": "maybe"}, "strict_mode: "),
        ({"dispatch_table": "table.json"}, "dispatch_table: not an absolute path"),
        ({"shadow_rate": 2}, "shadow_rate: Input should be less than or equal to 1, got 2"),
        ({"weights": {"perf_db": 2}}, "no weight is called 'perf_db'; did you mean 'perfdb'?"),
        ({"weights": "jit"}, "weights: 'jit' is not NAME=VALUE; several are separated by ';', got 'jit'"),
        ({"memory_headroom_bytes": "a lot"}, "memory_headroom_bytes: not a size; allowed: bytes, or a number with KiB"),
        ({"locks": {"atention": "torch.*"}}, "no op is called 'atention'; did you mean 'attention'?"),
        (
            {"locks": {"attention": "torch.atention"}},
            "no kernel is called 'torch.atention'; did you mean 'torch.attention",
        ),
        (
            {"locks": {"attention": "torch.matmul"}},
            "'torch.matmul' serves matmul, not attention; kernels of it: torch.att",
        ),
        ({"avoid_sources": ["xformers"]}, "no backend is called 'xformers'. Known: mlx, torch"),
        ({"avoid_sources": []}, "avoid_sources: "),
        ({"allow_kernels": "troch.*"}, "no kernel matches 'troch.*'; did you mean"),
        ({"backend_isolation": {"torhc": "auto"}}, "no backend or kernel is called 'torhc'; did you mean 'torch'?"),
        (
            {"rules": [{"match": {"sms": 1}, "prefer": "torch"}]},
            "no field of a call is called 'sms'; did you mean 'sm'?",
        ),
        (
            {"rules": [{"match": {"sm": "big"}, "prefer": "torch"}]},
            "sm is 'big' ('big' is not a number); allowed: a num",
        ),
        ({"rules": [{"match": {"sm": "9..1"}, "prefer": "torch"}]}, "the range 9..1 is empty"),
        ({"rules": [{"match": {"dtype": ">3"}, "prefer": "torch"}]}, "dtype is '>3'; allowed: a name, a glob"),
        ({"rules": [{"match": {"is_causal": "x"}, "prefer": "torch"}]}, "is_causal is 'x'; allowed: true or false"),
        (
            {"rules": [{"match": {"op": "matmal"}, "prefer": "torch"}]},
            "no op is called 'matmal'; did you mean 'matmul'?",
        ),
        ({"rules": [{"match": {"sm": []}, "prefer": "torch"}]}, "an empty list matches no call"),
        ({"rules": [{"match": {"sm": 1}}]}, "the rule does nothing; give it one of prefer, avoid,"),
        ({"rules": [{"prefer": "trch"}]}, "no kernel or backend is called 'trch'; did you mean 'torch'?"),
        ({"rules": [{"avoid": "mlx", "bonus": 4}]}, "bonus belongs to prefer"),
        ({"rules": [{"perfer": "torch"}]}, "no key of a rule is called 'perfer'; did you mean 'prefer'?"),
        ({"rules": [{"lock": "torch.nothing"}]}, "no kernel is called 'torch.nothing'"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_right(values: dict[str, Any], text: str) -> None:
    """Nothing of a policy is dropped in silence."""
    assert any(text in problem for problem in problems(**values)), problems(**values)


def test_all_problems_are_listed_at_once() -> None:
    """One run of `lz policy check` shows everything."""
    with pytest.raises(ConfigError) as caught:
        policy(a=1, b=2, strict_mode="maybe")
    assert len(caught.value.facts["problems"]) == 3


@pytest.mark.parametrize(
    "overlay",
    [
        {"layers": "all"},
        {"locks": {}},
        {"layers": [{}] * 65},
        {"layers": [{"origin": 1, "values": {}}]},
        {"layers": [{"origin": "x", "values": {"tune_budget": 1}}]},
        {"layers": [{"origin": "x", "values": {"locks": {"attention": "nobody"}}}]},
        {"layers": [{"origin": "x", "values": []}]},
    ],
)
def test_overlay_of_another_process_is_checked(overlay: dict[str, Any]) -> None:
    """It comes over a socket."""
    with pytest.raises(InvalidArgument):
        policy().with_overlay(overlay)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text() | st.sampled_from(KEYS), c),
    )
)
def test_no_written_value_breaks_the_reader(value: Any) -> None:
    """Whatever is written gives a policy or problems."""
    found, texts = compose([Layer("x", value)], KNOWN)
    assert (found is None) == bool(texts)


def test_keys_are_those_of_the_model() -> None:
    """The client's list of variables and the broker's model are in two places."""
    assert set(KEYS) == set(Values.model_fields)
    assert {"rules", "op", "sm"} <= {*PER_CALL, *FIELDS}


def test_variables_become_layers() -> None:
    """Their text is read by the broker; others of the same prefix are none of the policy's."""
    environ = {"LAYERZERO_LOCKS": "attention=torch.*", "LAYERZERO_STRICT_MODE": "", "LAYERZERO_STORE": "/x"}
    assert variables(environ) == [{"origin": "LAYERZERO_LOCKS", "values": {"locks": "attention=torch.*"}}]
    [gone] = variables({"LAYERZERO_GRAPH_STRICT_MODE": "true"}, PER_CALL)
    with pytest.raises(ConfigError, match="LAYERZERO_GRAPH_STRICT_MODE: take graph_strict_mode out"):
        Policy.of(Layer(gone["origin"], gone["values"]))
    found = Policy.of(Layer("LAYERZERO_ALLOW_SOURCES", {"allow_sources": "torch; mlx"}), known=KNOWN)
    assert codes(found, "torch.attention") == []


def test_an_unknown_key_does_not_hide_the_wrong_names_beside_it() -> None:
    """Who repairs a file wants all its mistakes at once."""
    known = Known(("torch",), {"torch.attention": "attention"}, ("attention",))
    _, problems = compose([Layer("file", {"strct_mode": True, "locks": {"attention": "torch.atention"}})], known)
    assert len(problems) == 2
    assert "strict_mode" in problems[0]
    assert "did you mean 'torch.attention'" in problems[1]


def overlay_of(*names: str) -> dict[str, Any]:
    return {"layers": [{"origin": "lz.configure", "values": dict.fromkeys(names, 1)}]}


def test_problems_end_after_twenty() -> None:
    """Each costs a search for the nearest name: a million of them cost a broker 40 s, and its answer had 514 MiB."""
    with pytest.raises(InvalidArgument) as caught:
        policy().with_overlay(overlay_of(*(f"k{number}" for number in range(3000))))
    assert len(caught.value.message) < 50_000
    with pytest.raises(InvalidArgument) as caught:
        policy().with_overlay({"layers": [overlay_of(f"k{n}")["layers"][0] for n in range(64)]})
    assert len(caught.value.facts["problems"]) == MAX_PROBLEMS + 1
    assert "and more problems" in caught.value.facts["problems"][-1]
    rules = {"rules": [{"prefer": [f"n{i}.{j}" for j in range(256)]} for i in range(16)]}
    with pytest.raises(InvalidArgument) as caught:
        policy().with_overlay({"layers": [{"origin": "lz.prefer", "values": rules}]})
    assert len(caught.value.facts["problems"]) <= MAX_PROBLEMS + 1


def test_an_overlay_has_a_size() -> None:
    """It is in each route that is defined with it."""
    names = [f"a long name of something that nobody has, number {number}" for number in range(2000)]
    with pytest.raises(InvalidArgument, match=r"allowed: 49,152"):
        policy().with_overlay(overlay_of(*names))
    with pytest.raises(InvalidArgument, match=r"allowed: 49,152"):
        policy().with_overlay({"layers": [{"origin": "x" * 50_000, "values": {}}]})


def test_traces_mean_kernels_and_processes() -> None:
    """The greatest share of those that mean a call; a later layer changes the entries that it names."""
    first = Layer("a file", {"traces": {"torch.*": 0.1, "*.silu": 0.5, "process:7": 1.0}})
    policy = Policy.of(first, Layer("lz trace on", {"traces": {"*.silu": 0}}))
    calls = (("torch.silu", ["silu"], 1), ("mlx.silu", ["silu"], 1), ("mlx.gelu", ["gelu"], 7))
    assert [policy.traced(*call) for call in calls] == [0.1, 0, 1]
    assert policy.describe()["traces.*.silu"] == {"value": 0.0, "origin": "lz trace on"}
    known = Known(("torch",), {"torch.silu": "silu"}, ("silu",))
    for wrong in ({"torch.sillu": 1}, {"process:": 1}, {"torch.*": 1.5}, {"process:x": 1}):
        with pytest.raises(ConfigError):
            Policy.of(Layer("a file", {"traces": wrong}), known=known)


def test_traces_mean_calls_by_several_fields() -> None:
    """All that an entry names has to match; entries have names, by which later layers change them."""
    entries = [
        {"kernel": "torch.*", "op": "attention", "process": "*train*", "share": 0.01},
        {"process": "my app*", "share": 0.5},
        {"op": "silu", "process": 7, "share": 1},
    ]
    policy = Policy.of(Layer("a file", {"traces": entries}))
    train = ("torch.attention", ("attention", "attention.full"), 1, "train.py")
    assert policy.traced(*train) == 0.01
    for part, other in ((0, "mlx.attention"), (1, ("silu",)), (3, "serve.py")):
        assert policy.traced(*train[:part], other, *train[part + 1 :]) == 0  # type: ignore[arg-type]
    assert policy.traced("mlx.gelu", ("gelu",), 1, "my app 2") == 0.5
    assert (policy.traced("mlx.silu", ("silu",), 7), policy.traced("mlx.silu", ("silu",), 8)) == (1, 0)
    names = {name for name in policy.describe() if name.startswith("traces.")}
    first = "kernel=torch.* op=attention process=*train*"
    assert names == {f"traces.{first}", "traces.process=my app*", "traces.op=silu process=7"}
    layers = (Layer("a file", {"traces": entries}), Layer("lz trace on", {"traces": {first: 1}}))
    assert Policy.of(*layers).traced(*train) == 1
    known = Known(("torch",), {"torch.silu": "silu"}, ("silu",))
    for wrong, why in (
        ({"kernel": "torch.sillu", "share": 1}, "did you mean"),
        ({"op": "sillu", "share": 1}, "did you mean"),
        ({"kernels": "torch.*", "share": 1}, "did you mean 'kernel'"),
        ({"kernel": "torch.*"}, "needs a share"),
        ({"share": 1}, "needs a share, and one of"),
        ({"process": "", "share": 1}, "process is ''"),
        ({"op": "silu", "share": 2}, "less than or equal to 1"),
        (3, "is no map"),
    ):
        with pytest.raises(ConfigError, match=why):
            Policy.of(Layer("a file", {"traces": [wrong]}), known=known)
