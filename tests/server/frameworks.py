# mypy: ignore-errors
"""A conversation through a framework for agents: it runs the tool, and keeps the history.

    python frameworks.py http://127.0.0.1:8081 FRAMEWORK API QUESTION...

Prints the reply to each question. Frameworks are imported where they are used, as each takes
seconds and brings its own dependencies.
"""

import asyncio
import json
import sys

RULES = f"Be brief, {sys.argv[3]}. " * 60  # each API is cold at first
MODEL = "current-model"
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["path", "lines"],
}


def read(path: str, lines: list[int]) -> str:
    """Read a file."""
    assert (path, lines) == ("a b.txt", [1, 20])
    return "alpha"


async def openai_agents(url, api):
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    kinds = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    model = kinds[api](MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key="local"))
    tools = [agents.function_tool(read)]
    agent = agents.Agent("reader", instructions=RULES, tools=tools, model=model)
    history = []

    async def ask(question):
        nonlocal history
        asked = {"role": "user", "content": question}
        run = agents.Runner.run_streamed(agent, [*history, asked])
        async for _ in run.stream_events():
            pass
        history = run.to_input_list()
        return run.final_output

    return ask


async def langchain(url, api):
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    if api == "messages":
        model = ChatAnthropic(model=MODEL, base_url=url, api_key="local", streaming=True)
    else:
        own = {"use_responses_api": api == "responses", "streaming": True}
        model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="local", **own)
    agent = create_agent(model, [read], system_prompt=RULES)
    history = []

    async def ask(question):
        nonlocal history
        asked = {"role": "user", "content": question}
        history = (await agent.ainvoke({"messages": [*history, asked]}))["messages"]
        return history[-1].text

    return ask


async def pydantic_ai(url, api):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if api == "messages":
        model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="local"))
    else:
        kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
        model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="local"))
    agent = Agent(model, instructions=RULES, tools=[read])
    history = []

    async def ask(question):
        nonlocal history
        result = await agent.run(question, message_history=history)
        history = result.all_messages()
        return result.output

    return ask


async def litellm(url, api):
    import litellm

    litellm.suppress_debug_info = True  # else it prints where its pages are
    where = {
        "chat": (f"openai/{MODEL}", f"{url}/v1"),
        "messages": (f"anthropic/{MODEL}", url),
    }
    model, base = where[api]
    function = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
    fixed = {
        "model": model,
        "api_base": base,
        "api_key": "local",
        "tools": [{"type": "function", "function": function}],
    }
    history = [{"role": "system", "content": RULES}]

    async def ask(question):
        history.append({"role": "user", "content": question})
        while True:
            stream = await litellm.acompletion(messages=history, stream=True, **fixed)
            reply = litellm.stream_chunk_builder(
                [chunk async for chunk in stream], messages=history
            )
            said = reply.choices[0].message
            history.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return said.content
            for call in said.tool_calls:
                result = read(**json.loads(call.function.arguments))
                history.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return ask


async def main(url, framework, api, *questions):
    ask = await {
        "openai-agents": openai_agents,
        "langchain": langchain,
        "pydantic-ai": pydantic_ai,
        "litellm": litellm,
    }[framework](url, api)
    for question in questions:
        print(json.dumps(await ask(question)), flush=True)


asyncio.run(main(*sys.argv[1:]))
