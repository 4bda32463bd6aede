"""YAML in and out, with the scalars of YAML 1.2: `1e-6` is a number, `on` and `no` are strings.

PyYAML follows YAML 1.1, where it is the other way round. Reader and writer share one table of scalar forms,
so what is written reads back equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from grpo_mlm.errors import UserError

_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan"
_FORMS = [  # tag, form, possible first characters
    ("tag:yaml.org,2002:null", r"~|null|", ["~", "n", ""]),
    ("tag:yaml.org,2002:bool", r"true|false", list("tf")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
]


class _Loader(yaml.SafeLoader):
    """Plain data only: no tags that build objects, and no aliases (`base:` is the way to share)."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own protocol

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported", mark)
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))  # in YAML 1.1 a leading zero means octal


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own protocol


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, _form, _first in _FORMS:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_tag, re.compile(rf"^(?:{_form})$"), _first)


def parse_yaml(text: str, source: str) -> Any:
    """The value of one YAML document. UserError names `source` and the line: syntax, duplicate keys."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        duplicates = list(_duplicates(node, ""))
        if duplicates:
            raise UserError(f"{source}: " + "; ".join(duplicates))
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source}{where}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{source}: not valid YAML: nested too deeply") from error
    except (ValueError, KeyError, AttributeError) as error:  # `!!int many`: a tag on a value not of its form
        raise UserError(f"{source}: not valid YAML: a tag does not fit its value ({error})") from error


def format_yaml(value: Any) -> str:
    """YAML that `parse_yaml` reads back equal; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _duplicates(node: yaml.Node, path: str) -> Iterator[str]:
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _duplicates(item, f"{path}{i}.")
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                yield f"line {line}: {path}{name} is a duplicate of line {lines[name]}"
            lines.setdefault(name, line)
            yield from _duplicates(value, f"{path}{name}.")
