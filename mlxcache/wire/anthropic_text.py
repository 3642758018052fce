"""Content blocks as the text that stands for them in a message, or as images.

Text is itself. What only another server could run or read, such as a web search of an earlier
conversation, is described as plainly as can be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.wire import anthropic_types as wire
from mlxcache.wire.anthropic_tools import Toolbox
from mlxcache.wire.images import Inlet, Item


class Reader:
    """Reads blocks; a reference to a tool reads as that tool's description."""

    def __init__(self, tools: Toolbox, inlet: Inlet):
        self._tools = tools
        self._inlet = inlet

    def item(self, block: wire.Block, where: str) -> Item:
        """One block's text, or its image. Raises as `text` does, Unsupported for what is no text
        where the model takes no images."""
        if isinstance(block, wire.Image) and self._inlet.served:
            return self._inlet.source(block.source, where)
        return self.text(block, where)

    def items(self, content: wire.Content, where: str) -> tuple[list[Item], bool]:
        """Each block's text or image, and whether any block carries a cache_control mark."""
        found = list(blocks(content, where))
        return [self.item(block, at) for at, block in found], any(marked_by(b) for _, b in found)

    def texts(self, content: wire.Content, where: str) -> tuple[list[str], bool]:
        """Each block's text, and whether any block carries a cache_control mark."""
        texts = []
        marked = False
        for at, block in blocks(content, where):
            texts.append(self.text(block, at))
            marked |= marked_by(block)
        return texts, marked

    def text(self, block: wire.Block, where: str) -> str:
        """One block's text. Raises BadRequest for a block that stands for no text."""
        match block:
            case wire.Text(text=text):
                pass
            case wire.Compaction(content=content):
                text = content or ""
            case wire.ToolReference(tool_name=name):
                text = self._tools.loaded(name)
            case wire.ToolChange():
                text = self._tool_change(block, where)
            case wire.Document():
                text = self._document(block, where)
            case wire.SearchResult(title=title, source=source, content=inner):
                text = join([title, source, *self.texts(inner, where)[0]])
            case wire.ServerToolUse(name=name):
                text = f"[{name}] {_json(block.input)}"
            case wire.ServerToolResult():
                text = self._server_result(block)
            case wire.Image() if not self._inlet.served:
                raise Unsupported(
                    f"{where}: content of type 'image' is not supported.", param=where
                )
            case _:
                raise BadRequest(f"{where}: such a block cannot stand here.", param=where)
        return text

    def _document(self, block: wire.Document, where: str) -> str:
        source = block.source
        if source.type not in ("text", "content"):
            kind = source.type[:64]
            message = f"{where}: documents with a source of type {kind!r} are not supported."
            raise Unsupported(message, param=where)
        inner = source.data if source.type == "text" else source.content
        texts, _ = self.texts(inner, f"{where}.source")
        return join([block.title or "", block.context or "", *texts])

    def _server_result(self, block: wire.ServerToolResult) -> str:
        content = block.content
        if isinstance(content, dict) and isinstance(content.get("tool_references"), list):
            names = [r.get("tool_name") for r in content["tool_references"] if isinstance(r, dict)]
            return join([self._tools.loaded(name) for name in names if isinstance(name, str)])
        return f"[{block.type}] {_json(_readable(content))}"

    def _tool_change(self, block: wire.ToolChange, where: str) -> str:
        if "definition" in block.tool:
            at = f"{where}.tool.definition"
            return self._tools.define(wire.tool(block.tool["definition"], at), at)
        name = block.tool.get("name")
        if not isinstance(name, str):
            raise BadRequest(f"{where}.tool.name: a string is required.", param=where)
        if block.type == "tool_removal":
            return f"The tool {name} can no longer be called."
        return self._tools.loaded(name)


def blocks(content: wire.Content, where: str) -> Iterator[tuple[str, wire.Block]]:
    """Each block with its path in the body; a string is one block of text."""
    if isinstance(content, str):
        yield where, wire.Text(content)
        return
    for i, raw in enumerate(content):
        at = f"{where}.content[{i}]"
        yield at, wire.block(raw, at)


def marked_by(block: wire.Block) -> bool:
    """Whether `block` itself carries a cache_control mark."""
    return getattr(block, "cache_control", None) is not None


def join(texts: list[str]) -> str:
    """One text of many: a blank line between any two, empty ones left out."""
    return "\n\n".join(text for text in texts if text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {k: _readable(v) for k, v in value.items() if not k.startswith("encrypted_")}
    return value
