"""Small traffic like a coding agent's, for tests of metrics and session figures."""

from __future__ import annotations

import random
from typing import Any

from tests.server.api import MESSAGES, Api, words

SYSTEM = words(1, 150)


class Agent:
    """One conversation over Anthropic's API, as the client keeps it."""

    def __init__(self, api: Api, session: str, agent: str | None = None):
        self.api, self.session, self.agent = api, session, agent
        self.messages: list[dict[str, Any]] = []
        self.turns = 0

    def ask(self, text: str, tokens: int = 6) -> dict[str, Any]:
        """One turn: an attribution line that is another each time, and all that was said."""
        self.turns += 1
        noise = f"x-anthropic-billing-header: cch={random.Random(self.turns).randrange(16**5):05x};"
        system = SYSTEM if self.agent is None else words(2, 120)
        self.messages.append({"role": "user", "content": text})
        body = {
            "model": "m",
            "max_tokens": tokens,
            "temperature": 0,
            "system": [{"type": "text", "text": noise}, {"type": "text", "text": system}],
            "messages": self.messages,
        }
        headers = {"x-claude-code-session-id": self.session, "user-agent": "claude-cli/2.1.329"}
        response = self.api.post(MESSAGES, body, **headers)
        assert response.status_code == 200, response.text
        reply = response.json()
        self.messages.append({"role": "assistant", "content": reply["content"] or "."})
        return dict(reply["usage"])
