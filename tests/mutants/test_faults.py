"""Faults in snippets: what each operator makes of them, and what it leaves alone."""

import pytest

from tests.mutants.faults import faults, signatures


def planted(source, known=None):
    found = faults(source, "a.py", known or {})
    return {(fault.kind, fault.planted(source).strip().splitlines()[-1].strip()) for fault in found}


@pytest.mark.parametrize(
    ("kind", "line", "faulty"),
    [
        ("wrong group", "first = a % b", "first = (a // b)"),
        ("wrong group", "a = me.rank", "a = 0"),
        ("wrong group", "a = group.ranks[b]", "a = b"),
        ("wrong group", "a = replica_group(b, c, d)", "a = shard_group(b, c)"),
        ("wrong group", "a = self.replica_group(b)", "a = self.shard_group(b)"),
        ("wrong factor", "a = b / len(c)", "a = b"),
        ("wrong factor", "a = b * c", "a = (b / c)"),
        ("wrong factor", "a.div_(b)", "a.mul_(b)"),
        ("wrong factor", "a = b.mean(0)", "a = b.sum(0)"),
        ("wrong factor", "a = len(b)", "a = (len(b) + 1)"),
        ("wrong order", "a = reversed(b)", "a = b"),
        ("wrong order", "a = sorted(b, key=c)", "a = list(b)"),
        ("wrong order", "return a, b", "return (b, a)"),
        ("wrong order", "a, b = c", "(b, a) = c"),
        ("wrong order", "a = b - c", "a = (c - b)"),
        ("wrong order", "a = b[::-1]", "a = b[:]"),
        ("missing sum", "a += b", "a = b"),
        ("missing sum", "a = all_reduce(b, group)", "a = b"),
        ("missing sum", "a.add_(b)", "a.copy_(b)"),
        ("missing sum", "a = b + c", "a = c"),
        ("off by one", "a = b[c:d]", "a = b[c + 1:d]"),
        ("off by one", "a = b[:d]", "a = b[:d - 1]"),
        ("off by one", "a = b.narrow(c, d, e)", "a = b.narrow(c, d + 1, e)"),
        ("off by one", "a = range(b)", "a = range(b - 1)"),
        ("stale buffer", "a.copy_(b)", "pass"),
        ("stale buffer", "a = b.clone()", "a = b"),
        ("stale buffer", "a = b.detach()", "a = b"),
        ("stale buffer", "self.a = b", "pass"),
        ("wrong condition", "a = b and c", "a = (b or c)"),
        ("wrong condition", "a = b < c", "a = (b <= c)"),
        ("wrong condition", "a = b is None", "a = (b is not None)"),
        ("wrong condition", "a = b if c else d", "a = (d if c else b)"),
        ("wrong condition", "if a: b()", "if (not a): b()"),
        ("wrong constant", "a = 0", "a = 1"),
        ("wrong constant", "a = f(b=True)", "a = f(b=False)"),
    ],
)
def test_each_kind_finds_its_places(kind, line, faulty):
    assert (kind, faulty) in planted(f"def f():\n    {line}\n")


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError(a % b, c + 1)",
        "assert a < b, a - b",
        "a = f'{b % c}'",
        "warnings.warn(a + b)",
        "a = '%s' % b",
        "if x.is_cuda: a = b % c",
        "if x.type != 'cpu': a = b % c",
        "if x.type == 'cpu': pass\nelse: a = b % c",
        "a = b % c if on_gpu else d",
        "if a in ('b', 'c'): pass",
        "isinstance(a, (b, c))",
        "a = any(f(x) for x in (b, c))",
        "class GpuMemory:\n    def f(self): self.a = b % c",
        '"""The rank % k."""',
        "@cache(1)\ndef f(): pass",
        "def f(a: Tensor[1, 2]) -> Tuple[0, 1]: pass",
        "def __repr__(self): return self.a + 1",
        "def close(self): self.a = None",
        "a = b",
        "a = 1_000_000",
        "zip(a, b, strict=True)",
        "Thread(target=f, daemon=True)",
        "a = dict[str, int](b)",
        "Message = tuple[int, Tensor]",
        'x.device.type == "cpu"',
    ],
)
def test_what_decides_no_value_is_left_alone(source):
    kinds = {kind for kind, _ in planted(source)}
    assert kinds <= {"wrong condition"} if " in " in source else not kinds


def test_the_order_of_what_is_gone_through_is_one_elsewhere():
    assert planted("a = list(f(x) for x in (b, c))")


def test_what_is_the_same_to_python_is_no_fault():
    assert ("wrong factor", "a = 1") not in planted("a = 1 * 1")
    assert not planted("a = b, b")


def test_the_other_branch_of_hardware_is_looked_at():
    assert ("wrong group", "a = (b // c)") in planted("if x.is_cuda: pass\nelse:\n    a = b % c")
    assert ("wrong group", "a = (b // c)") in planted("if x.type == 'cpu':\n    a = b % c")


def test_what_python_warns_of_is_no_fault():
    assert ("wrong group", "a = 1 is None") not in planted("a = group_size is None")


def test_arguments_are_swapped_where_they_are_alike():
    known = signatures(["def f(a: int, b: int, c: str): ...", "class G:\n    a: int\n    b: str"])
    assert known == {"f": ("int", "int", "str"), "G": ("int", "str")}
    assert planted("f(x, y, z)", known) == {("wrong order", "f(y, x, z)")}
    assert not planted("G(x, y)", known)


def test_two_signatures_of_one_name_are_none():
    assert signatures(["def f(a: int, b: int): ...", "def f(a: str): ..."]) == {}


def test_a_fault_knows_its_place():
    source = "def f(a, b):\n    # ü\n    if a[b:]:\n        return g(\n a,\n b % 2,\n )\n"
    (condition,) = [f for f in faults(source, "a.py") if f.kind == "off by one"]
    assert (condition.line, condition.lines, condition.function) == (3, (3, 3), True)
    (group,) = [f for f in faults(source, "a.py") if f.kind == "wrong group"]
    assert (group.line, group.lines) == (6, (4, 7))
    assert str(group) == "a.py:6  wrong group: b % 2  ->  (b // 2)"
    assert "(b // 2),\n" in group.planted(source)
