"""Tool calls of Kimi K3: tags that name the type of each argument, or one JSON object for all.

<|open|>call tool="NAME" index="1"<|sep|>
<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|><|close|>call<|sep|>
"""

from __future__ import annotations

import re

from mlxcache.model.tool_syntax.json_calls import HeadedCalls
from mlxcache.model.tool_syntax.scanning import BlockScanner
from mlxcache.model.tool_syntax.schema import Tools
from mlxcache.model.tool_syntax.syntax import Call, Scanner
from mlxcache.model.tool_syntax.tags import TagSyntax

_CALL = r"<\|open\|>call\b[^<>]{0,200}?\btool=\"(?P<call>[^\"<>]{1,256})\"[^<>]{0,200}<\|sep\|>"
_JSON = r"\s*<\|open\|>json\b[^<>]{0,200}<\|sep\|>"
_AS_JSON = re.compile(rf"\s*{_CALL}{_JSON}")


class KimiK3Calls(TagSyntax):
    """Syntax of Kimi K3's tool calls, in tags or in JSON."""

    def __init__(self) -> None:
        super().__init__(
            call=_CALL,
            parameter=(
                r"<\|open\|>argument\b[^<>]{0,100}?\bkey=\"(?P<name>[^\"<>]{0,256})\""
                r"(?:\s+type=\"(?P<hint>\w{1,20})\")?[^<>]{0,100}<\|sep\|>"
            ),
            close="<|close|>argument<|sep|>",
            end=re.escape("<|close|>call<|sep|>"),
            several=True,
            unescape=_unescape,
        )
        end = re.escape("<|close|>json<|sep|>") + r"\s*" + re.escape("<|close|>call<|sep|>")
        self._as_json = HeadedCalls(f"{_CALL}{_JSON}", end)

    def scanner(self) -> Scanner:
        """Make a scanner that finds the end of one tool block while it arrives."""
        return BlockScanner(self.begins, self.ends, _is_json)

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block. Raises Malformed or ValueError if it cannot be read.

        `tools`: the tools of the request, whose schemas give the types of arguments in tags.
        """
        if not _is_json(text):
            return super().read(text, tools)
        calls = self._as_json.read(text, tools)
        return [{**call, "name": _unescape(call["name"])} for call in calls]


def _is_json(text: str) -> bool:
    return _AS_JSON.match(text) is not None


def _unescape(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")
