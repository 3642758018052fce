"""What clients send to the addresses in their settings, as far as a server can tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

ASKED = [{"role": "user", "content": "Hello."}]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request; a `body` makes it a POST."""

    url: str
    key: str | None = None
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


def _chat(base: str, model: str, key: str | None, **more: Any) -> Sent:
    body = {"model": model, "messages": ASKED, "stream": True, "max_tokens": 8} | more
    return Sent(f"{base.rstrip('/')}/chat/completions", key, body)


def open_code(settings: dict[str, Any]) -> Iterator[Sent]:
    """`@ai-sdk/openai-compatible` under its provider's options, for the model that is chosen."""
    name, _, model = settings["model"].partition("/")
    provider = settings["provider"][name]
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["models"][model]["limit"]["context"] > 0
    options = provider["options"]
    usage = {"include_usage": True}
    yield _chat(options["baseURL"], model, options.get("apiKey"), stream_options=usage)


def pi(settings: dict[str, Any]) -> Iterator[Sent]:
    """Each model of models.json."""
    for provider in settings["providers"].values():
        assert provider["api"] == "openai-completions"
        for model in provider["models"]:
            assert model["contextWindow"] > model["maxTokens"] > 0
            options = {"stream_options": {"include_usage": True}, "store": False}
            yield _chat(provider["baseUrl"], model["id"], provider["apiKey"], **options)


def zed(settings: dict[str, Any]) -> Iterator[Sent]:
    """Each model of each provider of settings.json, with the id of a thread as a header."""
    for provider in settings["language_models"]["openai_compatible"].values():
        assert provider["custom_headers"] == {"X-Session-Id": {"source": "agent_thread_id"}}
        for one in provider["available_models"]:
            assert one["max_tokens"] > one["max_output_tokens"] > 0
            sent = _chat(provider["api_url"], one["name"], "local")
            yield replace(sent, headers={"X-Session-Id": "5f2c8e0b-thread"})


def llm(settings: list[dict[str, Any]]) -> Iterator[Sent]:
    """Each model of extra-openai-models.yaml."""
    for one in settings:
        assert one["supports_tools"] is True
        yield _chat(one["api_base"], one["model_name"], "DUMMY_KEY")


def continue_dev(settings: dict[str, Any]) -> Iterator[Sent]:
    """Each model of config.yaml: provider `openai` chats, `autocomplete` completes a text."""
    for one in settings["models"]:
        assert one["provider"] == "openai"
        base, key = one["apiBase"].rstrip("/"), one["apiKey"]
        if "chat" in one["roles"]:
            yield _chat(base, one["model"], key)
        if "autocomplete" in one["roles"]:
            text = {"model": one["model"], "prompt": "def add(a, b):", "max_tokens": 8}
            yield Sent(f"{base}/completions", key, text)


def open_webui(settings: dict[str, str]) -> Iterator[Sent]:
    """The list of models, then a chat, and a title for it with the chat's id as a header."""
    base, key = settings["OPENAI_API_BASE_URL"], settings["OPENAI_API_KEY"]
    assert settings["ENABLE_OLLAMA_API"] == "false"
    assert settings["RAG_SYSTEM_CONTEXT"] == "true"
    headers = json.loads(settings["OPENAI_API_CONFIGS"])["0"]["headers"]
    chat = {name: value.replace("{{CHAT_ID}}", "1b9d6bcd-chat") for name, value in headers.items()}
    assert chat == {"X-Session-Id": "1b9d6bcd-chat"}
    yield Sent(f"{base}/models", key)
    sent = _chat(base, "current-model", key, stream_options={"include_usage": True})
    yield replace(sent, headers=chat)
    title = [{"role": "user", "content": "### Task:\nGenerate a concise title for: Hello."}]
    yield replace(_chat(base, "current-model", key, messages=title, stream=False), headers=chat)


def prometheus(settings: dict[str, Any]) -> Iterator[Sent]:
    """Each target of each job, at the usual path."""
    for job in settings["scrape_configs"]:
        for group in job["static_configs"]:
            for target in group["targets"]:
                path = job.get("metrics_path", "/metrics")
                yield Sent(f"{job.get('scheme', 'http')}://{target}{path}")


CLIENTS: dict[str, Callable[[Any], Iterator[Sent]]] = {
    "OpenCode": open_code,
    "llm": llm,
    "pi": pi,
    "Zed": zed,
    "Continue": continue_dev,
    "Open WebUI": open_webui,
    "Prometheus": prometheus,
}
