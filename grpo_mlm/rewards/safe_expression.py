"""Values of expressions that a model wrote, without executing them: only known nodes of the syntax tree have one."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}


def evaluate(
    text: str,
    constant: Callable[[Any], Any] = lambda value: value,
    name: Callable[[str], Any] | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> Any:
    """Value of literals, lists, arithmetic, and, where given, names and calls of `functions`.

    `constant` turns a literal of the text (number, string, bool, None) into a value, sympy's, say; it raises
    ValueError for those that have none. ValueError for anything else in the text; arithmetic errors as they come.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | None | str() | int() | float() as v):
                return constant(v)
            case ast.BinOp():
                return BINARY[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp() if type(node.op) in UNARY:
                return UNARY[type(node.op)](value(node.operand))
            case ast.List():
                return [value(e) for e in node.elts]
            case ast.Tuple():
                return tuple(value(e) for e in node.elts)
            case ast.Name() if name is not None:
                return name(node.id)
            case ast.Call(func=ast.Name(id=called), keywords=[]) if called in (functions or {}):
                return (functions or {})[called](*(value(a) for a in node.args))
        raise ValueError(f"{type(node).__name__} has no place in an answer")

    try:
        tree = ast.parse(text.strip(), mode="eval")
        return value(tree.body)
    except (SyntaxError, KeyError, RecursionError) as error:
        raise ValueError(f"not an expression: {error}") from None
