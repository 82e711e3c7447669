"""Whether anything of finite size satisfies a JSON Schema, as far as its references decide. Compiles nothing.

A property that is required and always holds another of its own kind can never end; a library that compiles schemas to
grammars does not see it, and a model would write brackets to its last token. Everything else is left to that library:
where this module cannot tell, it says yes.
"""

from __future__ import annotations

from typing import Any

_MOST_NODES = 20_000


def is_satisfiable(schema: Any) -> bool:
    """Least fixed point: what can be finished without itself is satisfiable, then what can with those, and so on.

    Args:
        schema: A parsed schema.
    """
    nodes: dict[int, Any] = {}
    if not _gather(schema, schema, nodes):
        return True
    finite: set[int] = set()
    changed = True
    while changed:
        changed = False
        for key, node in nodes.items():
            if key not in finite and _finishes(node, schema, finite):
                finite.add(key)
                changed = True
    return id(schema) in finite


def _gather(node: Any, root: Any, nodes: dict[int, Any]) -> bool:
    """Every schema that can be reached; False when there are too many to look at."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if id(node) in nodes or not isinstance(node, dict):
            continue
        if len(nodes) >= _MOST_NODES:
            return False
        nodes[id(node)] = node
        waiting += [part for part in _parts(node) if isinstance(part, dict)]
        if (target := _target(node, root)) is not None:
            waiting.append(target)
    return True


def _parts(node: dict[str, Any]) -> list[Any]:
    found: list[Any] = [node.get("items")]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        value = node.get(key)
        found += value if isinstance(value, list | tuple) else []
    properties = node.get("properties")
    return found + (list(properties.values()) if isinstance(properties, dict) else [])


def _target(node: dict[str, Any], root: Any) -> dict[str, Any] | None:
    """What a reference within the document leads to; None for no reference, and for one that cannot be followed."""
    reference = node.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found if isinstance(found, dict) else None


def _finishes(node: dict[str, Any], root: Any, finite: set[int]) -> bool:
    def known(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in finite

    target = _target(node, root)
    if target is not None and id(target) not in finite:
        return False
    if not all(map(known, _listed(node, "allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        choices = _listed(node, key)
        if choices and not any(map(known, choices)):
            return False
    kinds = _listed(node, "type") or [node.get("type")]
    if kinds == ["object"]:
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        return all(known(properties.get(name)) for name in _listed(node, "required") if isinstance(name, str))
    if kinds == ["array"]:
        least = node.get("minItems", 0)
        first = _listed(node, "prefixItems")
        least = least if isinstance(least, int) else 0
        return all(map(known, first[:least])) and (least <= len(first) or known(node.get("items")))
    return True


def _listed(node: dict[str, Any], key: str) -> list[Any]:
    value = node.get(key)
    return list(value) if isinstance(value, list | tuple) else []
