"""The Responses API on a real model: continued over a crash, tools forced, formats followed."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from mlxcache.cli.main import app
from mlxcache.wire.responses_request import SUMMARY
from mlxcache.wire.signatures import SignatureReader
from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import Api, until, words

TURNS = 20
ANSWER: Any = {
    "type": "json_schema",
    "name": "answer",
    "schema": {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}},
        "required": ["sure"],
        "additionalProperties": False,
    },
}
GRAMMAR = 'start: "*** " NAME LF "+" /[a-z]{1,4}/ LF\nNAME: /[A-Z]{2,3}/\n%import common.LF'
PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def fed(response: Any) -> int:
    usage = response.usage
    return int(usage.input_tokens - usage.input_tokens_details.cached_tokens)


def until_durable(api: Api) -> None:
    """Wait until the only session is on disk, which takes seconds after its last turn."""

    def durable() -> bool:
        (found,) = api.http.get("/v1/sessions").json()["data"]
        return bool(found["durable_tokens"] >= found["tokens"] - 1)

    until(durable, 60, lambda: api.http.get("/v1/sessions").text)


def test_a_conversation_is_compacted_warm_and_goes_on_from_its_summary(quoting: Api) -> None:
    """The prompt is that of the next turn: it feeds the request for a summary alone."""
    client = client_of(quoting.url)
    model: Any = {"model": "m", "max_output_tokens": 12}
    head: Any = {"instructions": words(3, 300), "prompt_cache_key": "compacted"}
    said: Any = [{"role": "user", "content": words(5, 60)}]
    first = client.responses.create(input=said, **head, **model)
    said += [*(item.to_dict() for item in first.output), {"role": "user", "content": "Go on."}]
    last: Any = client.responses.create(input=said, **head, **model)
    ends: Any = {"temperature": 0, "min_tokens": 4, "logit_bias": {"2": 100}}
    asked: Any = client.responses.compact(
        input=said, model="m", extra_body={"stop": ["e", " "], "truncation": "auto", **ends}, **head
    )
    assert asked.object == "response.compaction"
    *users, summary = asked.output
    assert [item.content[0].text for item in users] == [words(5, 60), "Go on."]
    assert summary.type == "compaction"
    assert fed(asked) < 250 < last.usage.input_tokens
    trigger: Any = {"type": "compaction_trigger"}
    streamed = client.responses.create(
        input=[*said, trigger], model="m", stream=True, extra_body=ends, **head
    )
    events: list[Any] = list(streamed)
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.item.type for e in events if e.type == "response.output_item.done"] == ["compaction"]
    assert events[-1].type == "response.completed"
    assert fed(events[-1].response) == 1
    (again,) = events[-1].response.output
    text = SignatureReader().recover("", summary.encrypted_content)
    assert text
    assert SignatureReader().recover("", again.encrypted_content) == text
    for wrong, message in (([trigger, *said], "must be the last"), ([trigger], "is empty")):
        with pytest.raises(openai.BadRequestError, match=message):
            client.responses.create(input=wrong, model="m")
    goes_on: Any = [item.to_dict() for item in asked.output] + [
        {"role": "user", "content": "Next."}
    ]
    plain: Any = client.responses.create(input=goes_on, **head, **model)
    goes_on[2] = {"role": "user", "content": f"{SUMMARY}\n\n{text}"}
    spelt: Any = client.responses.create(input=goes_on, **head, **model)
    assert plain.usage.input_tokens == spelt.usage.input_tokens
    others: Any = [{"type": "compaction", "encrypted_content": "gAAAA"}]
    with pytest.raises(openai.InternalServerError, match="cut after 2 tokens"):
        client.responses.compact(input=said, model="m", extra_body={"max_output_tokens": 2}, **head)
    long: Any = [{"role": "user", "content": words(7, 40_000)}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.compact(input=long, model="m", extra_body={"truncation": "auto"})
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="`input` is empty"):
        client.responses.compact(model="m")
    with pytest.raises(openai.BadRequestError, match="cannot be read"):
        client.responses.create(input=others, **model)


@pytest.mark.slow
def test_a_conversation_goes_on_warm_after_a_crash(toy: ToyMaker, tmp_path: Path) -> None:
    """Twenty turns by `previous_response_id`; the server is killed in their middle."""
    model = str(toy("llama", emits={"<|im_end|>": 20}))
    arguments = ("--model", model, "--ram", "200MB")
    instructions, previous = words(9, 400), ""
    costs: list[int] = []
    for turns in (range(TURNS // 2), range(TURNS // 2, TURNS)):
        with served(*arguments, home=tmp_path) as server:
            client = client_of(server.url)
            for turn in turns:
                response = client.responses.create(
                    model="m",
                    instructions=instructions,
                    input=words(turn, 20),
                    previous_response_id=previous or None,
                    max_output_tokens=16,
                    temperature=0,
                )
                previous = response.id
                costs.append(fed(response))
            assert client.responses.retrieve(previous).status != "in_progress"
            until_durable(Api(server))
            server.stop(signal.SIGKILL)
    new = costs[1]
    assert costs[0] > 400
    assert max(costs[2:]) <= new + 64, f"each turn is new text alone: {costs}"


class TestReplies:
    def test_a_stream_says_what_a_whole_response_says(self, sdk: openai.OpenAI) -> None:
        asked: Any = {"model": "m", "input": words(3, 30), "max_output_tokens": 30}
        whole = sdk.responses.create(**asked, temperature=0)
        *_, last = sdk.responses.create(**asked, temperature=0, stream=True)
        final = last.response
        assert final.output_text == whole.output_text
        assert final.usage is not None
        assert whole.usage is not None
        assert final.usage.output_tokens == whole.usage.output_tokens

    def test_a_format_is_followed(self, sdk: openai.OpenAI) -> None:
        for _ in range(3):
            response = sdk.responses.create(
                model="m",
                input="Sure?",
                text={"format": ANSWER},
            )
            assert set(json.loads(response.output_text)) == {"sure"}

    def test_a_custom_tools_text_follows_its_grammar(self, sdk: openai.OpenAI) -> None:
        for seed in range(3):
            response = sdk.responses.create(
                model="m",
                input="Patch it.",
                tools=[PATCH],
                tool_choice={"type": "custom", "name": "patch"},
                extra_body={"seed": seed},
            )
            (call,) = response.output
            assert call.type == "custom_tool_call"
            assert re.fullmatch(r"\*\*\* [A-Z]{2,3}\n\+[a-z]{1,4}\n", call.input)

    def test_a_prompt_beyond_the_context_is_refused(self, sdk: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.responses.create(model="m", input="word " * 60_000)
        assert caught.value.code == "context_length_exceeded"


class TestExplained:
    """`mlxcache explain` with bodies that have only the new items of a conversation."""

    def asked(self, llama: Api, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
        """The replies to the bodies, each of which continues the one before."""
        replies: list[dict[str, Any]] = []
        for body in bodies:
            if replies:
                body["previous_response_id"] = replies[-1]["id"]
            replies.append(llama.post("/v1/responses", body).json())
        return replies

    def test_the_conversation_before_comes_from_the_server(self, llama, toy, tmp_path):
        """More items than one page of a list has."""
        limits = {"max_output_tokens": 8, "temperature": 0, "instructions": words(1, 40)}
        many = [{"role": "user", "content": word} for word in words(2, 110).split()]
        bodies = [limits | {"input": one} for one in (many, "And then?", words(3, 5))]
        replies = self.asked(llama, *bodies)
        files = [tmp_path / "b.json", tmp_path / "c.json"]
        for file, body in zip(files, bodies[1:], strict=True):
            file.write_text(json.dumps(body), encoding="utf-8")
        where = ("--model", str(toy("llama")), "--url", llama.url, "--json")
        ran = CliRunner().invoke(app, ["explain", *map(str, files), *where])
        assert ran.exit_code == 0, ran.output
        found = json.loads(ran.output)
        counts = [reply["usage"]["input_tokens"] for reply in replies[1:]]
        assert [*found["prompt_tokens"].values()] == counts
        assert found["lost"] is None
        assert found["shared_tokens"] > 110

    def test_a_response_that_the_server_does_not_have_is_an_error(self, llama, tmp_path):
        body = {"input": "And then?", "previous_response_id": "resp_of_another"}
        (tmp_path / "b.json").write_text(json.dumps(body), encoding="utf-8")
        ran = CliRunner().invoke(app, ["explain", str(tmp_path / "b.json"), "--url", llama.url])
        assert ran.exit_code == 1
        told = " ".join(ran.output.split())
        assert "only its new items" in told
        assert "resp_of_another" in told
        assert "does not have" in told
