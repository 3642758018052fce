"""Names and defaults of the canonicalisation rules, and the parser of their switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

RULES: Mapping[str, bool] = {
    "attribution": True,
    "counter": True,
    "newest_counter": False,
    "environment": True,
    "date_reminder": True,
    "uuid": True,
    "git_status": False,
    "tool_order": True,
    "argument_order": True,
    "cleared_results": True,
    "thinking": True,
    "replay": True,
}

_WORDS = {"on": True, "true": True, "off": False, "false": False}


def read_rules(value: object) -> Mapping[str, bool]:
    """Parse switches of canonicalisation rules: a table, `RULE=on,RULE=off`, or a list of these."""
    if isinstance(value, Mapping):
        pairs = [(str(name), state) for name, state in value.items()]
    else:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"must be RULE=on or RULE=off, not {value!r}")
        words = [word.strip() for text in texts for word in text.split(",")]
        pairs = [_pair(word) for word in words if word]
    return {name.replace("-", "_"): _state(name, state) for name, state in pairs}


def _pair(word: str) -> tuple[str, str]:
    name, equals, state = word.partition("=")
    if not equals:
        raise ValueError(f"must be RULE=on or RULE=off, not {word!r}")
    return name.strip(), state.strip()


def _state(name: str, state: object) -> bool:
    if name.replace("-", "_") not in RULES:
        raise ValueError(f"there is no rule {name!r}; the rules are {', '.join(RULES)}")
    known = state if isinstance(state, bool) else _WORDS.get(str(state).lower())
    if known is None:
        raise ValueError(f"{name} must be on or off, not {state!r}")
    return known
