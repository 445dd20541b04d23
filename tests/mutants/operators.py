"""Mutation operators: small faults of the kinds that distributed programs have.

An operator takes one node of the syntax tree and yields possible replacements. It knows no types,
so some replacements are nonsense: then any test kills them. Two attributes of a node say what it
cannot: `decides`, that it is a condition, and `alike`, the positions of arguments that may be
confused with the next.
"""

import ast
from collections.abc import Callable, Iterator

Operator = Callable[[ast.AST], Iterator[ast.AST]]

# Calls that give a sum over ranks of their first argument, or start one.
SUMS = {
    *("all_reduce", "reduce_from", "reduce_scatter", "reduce_scatter_to", "sum_over_hosts"),
    *("summed", "_summed", "_sum", "average", "_average"),
}
# Methods that change their object, or wait for a change.
CHANGES = {
    *("add_", "clear", "clone", "copy_", "detach", "detach_", "discard", "div_", "fill_"),
    *("lerp_", "mul_", "sub_", "update", "wait", "zero_"),
}
SIDES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    **SIDES,
}
MOST = 16
"""Larger numbers are memory sizes or time limits, where any near one is as good."""


def wrong_group(node: ast.AST) -> Iterator[ast.AST]:
    """Rank % k for rank // k, the first rank for this one, ranks of a group for ranks of all."""
    if isinstance(node, ast.BinOp) and not _text(node.left):
        if isinstance(node.op, ast.Mod):
            yield ast.BinOp(node.left, ast.FloorDiv(), node.right)
        elif isinstance(node.op, ast.FloorDiv):
            yield ast.BinOp(node.left, ast.Mod(), node.right)
    match node:
        case ast.Name(id="rank", ctx=ast.Load()) | ast.Attribute(attr="rank", ctx=ast.Load()):
            yield ast.Constant(0)
        case ast.Name(id="group_size", ctx=ast.Load()):
            yield ast.Constant(1)
        case ast.Attribute(attr="group_size", ctx=ast.Load()):
            yield ast.Constant(1)
        case ast.Subscript(value=ast.Attribute(attr="ranks"), slice=index, ctx=ast.Load()):
            if not isinstance(index, ast.Slice):
                yield index
        case ast.Call(func=ast.Attribute(attr="index", value=ranks), args=[rank]):
            if _name(ranks).endswith("ranks"):
                yield rank
        case ast.Call(func=ast.Name(id="replica_group"), args=[rank, k, _]):
            yield ast.Call(ast.Name("shard_group"), [rank, k], [])
        case ast.Call(func=ast.Attribute(attr="replica_group", value=owner), args=args):
            yield ast.Call(ast.Attribute(owner, "shard_group"), args, [])
        case ast.Call(func=ast.Attribute(attr="shard_group", value=owner), args=args):
            yield ast.Call(ast.Attribute(owner, "replica_group"), args, [])


def wrong_factor(node: ast.AST) -> Iterator[ast.AST]:
    """A division or a multiplication that is omitted or inverted, a mean for a sum."""
    match node:
        case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv(), right=right):
            yield left
            yield ast.BinOp(left, ast.Mult(), right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right) if not (_made(left) or _made(right)):
            yield left
            yield right
            yield ast.BinOp(left, ast.Div(), right)
        case ast.BinOp(left=left, op=ast.Pow()):
            yield left
        case ast.AugAssign(target=target, op=ast.Mult(), value=value):
            yield ast.AugAssign(target, ast.Div(), value)
        case ast.AugAssign(target=target, op=ast.Div(), value=value):
            yield ast.AugAssign(target, ast.Mult(), value)
        case ast.Call(func=ast.Attribute(attr="mul_" | "div_" as name, value=owner), args=args):
            other = {"mul_": "div_", "div_": "mul_"}[name]
            yield ast.Call(ast.Attribute(owner, other), args, node.keywords)
        case ast.Call(func=ast.Attribute(attr="mean" | "sum" as name, value=owner), args=args):
            other = {"mean": "sum", "sum": "mean"}[name]
            yield ast.Call(ast.Attribute(owner, other), args, node.keywords)
        case ast.Call(func=ast.Name(id="len"), args=[_]):
            yield ast.BinOp(node, ast.Add(), ast.Constant(1))
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield operand


def wrong_order(node: ast.AST) -> Iterator[ast.AST]:
    """A sorted or reversed sequence that is not, a pair that is swapped."""
    match node:
        case ast.Call(func=ast.Name(id="reversed"), args=[of]):
            yield of
        case ast.Call(func=ast.Name(id="sorted"), args=[of, *_]):
            yield ast.Call(ast.Name("list"), [of], [])
        case ast.Tuple(elts=[first, second]) if not _equal(first, second):
            yield ast.Tuple([second, first], node.ctx)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            yield ast.BinOp(right, ast.Sub(), left)
        case ast.Slice(lower=None, upper=None, step=ast.UnaryOp(op=ast.USub())):
            yield ast.Slice()
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            other = {"min": "max", "max": "min"}[name]
            yield ast.Call(ast.Name(other), node.args, node.keywords)
        case ast.Call(func=function, args=args, keywords=keywords):
            for at in getattr(node, "alike", ()):
                if not _equal(args[at], args[at + 1]):
                    swapped = [*args[:at], args[at + 1], args[at], *args[at + 2 :]]
                    yield ast.Call(function, swapped, keywords)


def missing_sum(node: ast.AST) -> Iterator[ast.AST]:
    """A sum over ranks, rows or rounds that has one summand only."""
    match node:
        case ast.AugAssign(target=target, op=ast.Add(), value=value):
            yield ast.Assign([target], value, lineno=node.lineno)
        case ast.Call(func=function, args=[first, *_]) if _name(function) in SUMS:
            yield first
        case ast.Call(func=ast.Attribute(attr="add_", value=owner), args=[what]):
            yield ast.Call(ast.Attribute(owner, "copy_"), [what], [])
        case ast.Call(func=ast.Name(id="sum"), args=[of]):
            default = [ast.keyword("default", ast.Constant(0))]
            yield ast.Call(ast.Name("max"), [of], default)
        case ast.BinOp(left=left, op=ast.Add(), right=right) if not (_text(left) or _text(right)):
            yield left
            yield right


def off_by_one(node: ast.AST) -> Iterator[ast.AST]:
    """A piece that begins or ends one too soon or too late."""
    match node:
        case ast.Slice(lower=lower, upper=upper, step=step) if (
            lower is not None or upper is not None
        ):
            if lower is not None:
                yield ast.Slice(_plus(lower, 1), upper, step)
            if upper is not None:
                yield ast.Slice(lower, _plus(upper, -1), step)
        case ast.Call(func=ast.Attribute(attr="narrow") as function, args=[dim, start, length]):
            yield ast.Call(function, [dim, _plus(start, 1), length], [])
            yield ast.Call(function, [dim, start, _plus(length, -1)], [])
        case ast.Call(func=ast.Name(id="range") as function, args=[stop]):
            yield ast.Call(function, [_plus(stop, -1)], [])
            yield ast.Call(function, [ast.Constant(1), stop], [])
        case ast.Call(func=ast.Name(id="range") as function, args=[start, stop, *step]):
            yield ast.Call(function, [_plus(start, 1), stop, *step], [])
            yield ast.Call(function, [start, _plus(stop, -1), *step], [])
        case ast.Call(func=ast.Name(id="pairwise")):
            yield ast.Subscript(ast.Call(ast.Name("list"), [node], []), ast.Slice(ast.Constant(1)))


def stale_buffer(node: ast.AST) -> Iterator[ast.AST]:
    """Data that should have been copied, cleared, awaited or updated, and is not."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in CHANGES:
            yield ast.Pass()
        case ast.Call(func=ast.Attribute(attr=name, value=owner)) if name in CHANGES:
            yield owner
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.AugAssign():
            yield ast.Pass()


def wrong_condition(node: ast.AST) -> Iterator[ast.AST]:
    """A condition that is negated, or one of two that is omitted."""
    match node:
        case ast.Name() | ast.Attribute() | ast.Call() if getattr(node, "decides", False):
            yield ast.UnaryOp(ast.Not(), node)
        case ast.BoolOp(op=op, values=[first, second, *rest]):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield ast.BoolOp(other, [first, second, *rest])
            yield first if not rest else ast.BoolOp(op, [first, second, *rest[:-1]])
            yield second if not rest else ast.BoolOp(op, [second, *rest])
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in OPPOSITES:
            yield ast.Compare(left, [OPPOSITES[type(op)]()], right)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(test, orelse, body)


def wrong_constant(node: ast.AST) -> Iterator[ast.AST]:
    """0 for 1, 1 for 0, a small number plus one, true for false."""
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)) if value in (0, 1):
            yield ast.Constant(1 - value)
        case ast.Constant(value=int(value)) if value <= MOST:
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)) if 0 < value <= MOST:
            yield ast.Constant(value / 2)


OPERATORS: dict[str, Operator] = {
    operator.__name__.replace("_", " "): operator
    for operator in (
        *(wrong_group, wrong_factor, wrong_order, missing_sum),
        *(off_by_one, stale_buffer, wrong_condition, wrong_constant),
    )
}


def _name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _made(node: ast.AST) -> bool:
    """Whether a node is a literal text or sequence, which `*` repeats."""
    return _text(node) or isinstance(node, ast.Tuple | ast.List)


def _equal(first: ast.AST, second: ast.AST) -> bool:
    return ast.dump(first) == ast.dump(second)


def _plus(node: ast.expr, more: int) -> ast.expr:
    match node:
        case ast.Constant(value=int(value)):
            return ast.Constant(value + more)
    return ast.BinOp(node, ast.Add() if more > 0 else ast.Sub(), ast.Constant(abs(more)))
