"""Prompts with images: fed as mlx-lm feeds them, and reused where the images are the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.processors import load_processor

from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.engine.requests import Stream
from mlxcache.errors import BadRequest
from mlxcache.model.load import ModelSpec, load
from mlxcache.model.vision import Rows, decode
from mlxcache.scheduling.cost import peak
from mlxcache.scheduling.images import ImageCost, measure
from mlxcache.types import Admitted, Chat, Image, Job, Progress, Prompt, Sampling, Text, token_ids
from tests.memory import rounding_bytes
from tests.muse.toy import image

Message = dict[str, Any]
TOKENS = 12


def user(*content: str | Image) -> Message:
    whole = all(isinstance(part, str) for part in content)
    return {"role": "user", "content": "".join(content) if whole else list(content)}  # type: ignore[arg-type]


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@dataclass
class Reply:
    """What a request came to: ids, text, and the counts of its admission."""

    prompt: Prompt
    tokens: list[int]
    text: str
    cached: int


class Client:
    """Asks an engine; every request gets a name of its own."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.names = itertools.count()

    async def submit(self, messages: Sequence[Message], **job: Any) -> tuple[Prompt, Stream]:
        prompt = await self.engine.render(Chat(messages))
        fields = {"max_tokens": TOKENS, "top_logprobs": 0} | job
        stream = await self.engine.submit(Job(f"r{next(self.names)}", prompt, **fields))
        return prompt, stream

    async def ask(self, *messages: Message, **job: Any) -> Reply:
        prompt, stream = await self.submit(messages, **job)
        tokens, text, cached = [], "", -1
        async for event in stream:
            if isinstance(event, Text):
                text += event.text
                tokens += [entry.token_id for entry in event.logprobs]
            elif isinstance(event, Admitted):
                cached = event.cached_tokens
        return Reply(prompt, tokens, text, cached)


def settings_for(model: Path, cache_dir: Path, disk: str = "off") -> Settings:
    return Settings(
        model=str(model),
        trust_remote_code=True,
        ram="600MB",
        prefill_chunk=16,
        cache_dir=cache_dir,
        disk=disk,
    )


@pytest.fixture
async def client(toy_muse: Path, tmp_path: Path) -> AsyncIterator[Client]:
    """An engine in which an image of 20 tokens takes several chunks."""
    engine = Engine(settings_for(toy_muse, tmp_path))
    await engine.start()
    try:
        yield Client(engine)
    finally:
        await engine.stop()


class Reference:
    """mlx-lm alone, as its own server feeds a prompt with images."""

    def __init__(self, path: Path):
        self.model, _, config = mlx_lm.load(str(path), return_config=True, trust_remote_code=True)
        self.processor = load_processor(self.model, config)

    def greedy(self, prompt: Prompt, count: int = TOKENS) -> list[int]:
        ids = mx.array(prompt.fed)
        rows = None
        if prompt.images:
            pixels = [
                self.processor.preprocess_image(decode(span.image.data))[0]
                for span in prompt.images
            ]
            rows = self.model.embed_inputs(ids, pixel_values=pixels)
        steps = generate_step(ids, self.model, max_tokens=count, input_embeddings=rows)
        return [int(token) for token, _ in steps]


@pytest.fixture(scope="module")
def mlx_lm_alone(toy_muse: Path) -> Reference:
    return Reference(toy_muse)


async def test_the_first_turn_is_what_mlx_lm_says(client: Client, mlx_lm_alone: Reference) -> None:
    assert client.engine.info is not None
    assert client.engine.info.has_images
    for content in (
        [image(1)],
        ["What is this? ", image(1), " And this? ", image(2, 300, 50), " Well?"],
        [image(3, 28, 28), image(3, 28, 28), image(4, 400, 300)],
    ):
        reply = await client.ask(user(*content, "Go on."))
        assert len(reply.prompt.images) == sum(isinstance(part, Image) for part in content)
        assert reply.tokens == mlx_lm_alone.greedy(reply.prompt)


async def test_the_same_again_is_cached_to_the_last_token(
    client: Client, mlx_lm_alone: Reference
) -> None:
    cold = await client.ask(user("Look: ", image(1)))
    warm = await client.ask(user("Look: ", image(1)))
    assert cold.cached == 0
    assert warm.cached == len(warm.prompt.ids) - 1
    assert warm.tokens == cold.tokens == mlx_lm_alone.greedy(cold.prompt)


async def test_a_second_turn_feeds_what_is_new(client: Client, mlx_lm_alone: Reference) -> None:
    first = await client.ask(user("Look: ", image(1), " Well?"))
    history = [user("Look: ", image(1), " Well?"), assistant("A picture.")]
    second = await client.ask(*history, user("And here? ", image(2)))
    assert second.cached >= first.prompt.images[0].end
    assert second.cached >= len(first.prompt.ids) - 1
    assert second.tokens == mlx_lm_alone.greedy(second.prompt)
    third = await client.ask(*history, user("And here? ", image(2)), assistant("So."), user("Go."))
    assert third.cached >= second.prompt.images[1].end
    assert third.tokens == mlx_lm_alone.greedy(third.prompt)


async def test_another_image_of_the_same_size_is_not_taken_for_it(
    client: Client, mlx_lm_alone: Reference
) -> None:
    one = await client.ask(user("Look: ", image(1), " Well?"))
    other = await client.ask(user("Look: ", image(2), " Well?"))
    assert one.prompt.fed.tolist() == other.prompt.fed.tolist()
    assert other.cached < other.prompt.images[0].start
    assert other.tokens == mlx_lm_alone.greedy(other.prompt)
    assert other.tokens != one.tokens


async def test_the_second_of_two_images_may_change(client: Client, mlx_lm_alone: Reference) -> None:
    await client.ask(user(image(1), " or ", image(2), "?"))
    reply = await client.ask(user(image(1), " or ", image(3), "?"))
    first, second = reply.prompt.images
    assert first.end < reply.cached < second.start
    assert reply.tokens == mlx_lm_alone.greedy(reply.prompt)


async def test_a_prompt_cancelled_inside_an_image_goes_on_from_there(
    client: Client, mlx_lm_alone: Reference
) -> None:
    messages = [user("Look: ", image(1, 560, 560), " Well?")]  # 400 tokens, 25 chunks
    prompt, stream = await client.submit(messages)
    async for event in stream:
        if isinstance(event, Progress) and event.done > prompt.images[0].start + 16:
            break
    await stream.aclose()
    await asyncio.wait_for(_settled(client.engine), 30)
    reply = await client.ask(*messages)
    (span,) = reply.prompt.images
    assert span.start < reply.cached < span.end
    assert reply.tokens == mlx_lm_alone.greedy(reply.prompt)


async def _settled(engine: Engine) -> None:
    while engine.requests()[0].status not in ("cancelled", "done"):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_with_others_at_once_each_gets_its_own(
    client: Client, mlx_lm_alone: Reference
) -> None:
    asked = [user(image(i, 140 + 28 * i), f" number {i}") for i in range(4)]
    asked += [user("No image at all, but some text to read. " * 8)]
    replies = await asyncio.gather(*(client.ask(message) for message in asked))
    for reply in replies:
        assert reply.tokens == mlx_lm_alone.greedy(reply.prompt)


@pytest.mark.slow
async def test_after_a_restart_an_image_is_known_by_what_it_shows(
    toy_muse: Path, tmp_path: Path, mlx_lm_alone: Reference
) -> None:
    text = "Some words before it. " * 20
    replies = []
    for shown in (image(1, 560, 560), image(1, 560, 560), image(2, 560, 560)):
        engine = Engine(settings_for(toy_muse, tmp_path, disk="1GB"))
        await engine.start()
        try:
            replies.append(await Client(engine).ask(user(text, shown, " Well?")))
        finally:
            await engine.stop()
    cold, restored, other = replies
    assert restored.cached > restored.prompt.images[0].end
    assert restored.tokens == cold.tokens == mlx_lm_alone.greedy(cold.prompt)
    assert other.cached < other.prompt.images[0].start
    assert other.tokens == mlx_lm_alone.greedy(other.prompt)


async def test_penalties_count_real_tokens(client: Client) -> None:
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.5)
    cold = await client.ask(user(image(1), " Well?"), sampling=sampling)
    warm = await client.ask(user(image(1), " Well?"), sampling=sampling)
    assert cold.tokens == warm.tokens
    assert warm.cached > 0


async def test_an_image_passes_the_vision_tower_once_whoever_else_is_fed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are kept from chunk to chunk, and only as long."""
    images = (await client.engine.call(lambda runtime: runtime)).images
    assert images is not None
    made: list[bytes] = []
    rows = images.vision.rows

    def counted(shown: Image) -> Rows:
        made.append(shown.digest)
        return rows(shown)

    monkeypatch.setattr(images.vision, "rows", counted)
    shown = [image(i, 420, 392 + 28 * i) for i in range(3)]
    await asyncio.gather(*(client.ask(user("Look: ", one, " Well?")) for one in shown))
    assert sorted(made) == sorted(one.digest for one in shown)
    assert images._rows == {}


async def test_ids_below_zero_are_refused_where_no_image_stands(client: Client) -> None:
    job = Job("x", Prompt(token_ids([5, -7, 9])))
    with pytest.raises(BadRequest, match="Token ids"):
        await client.engine.submit(job)


async def test_an_image_that_no_memory_is_set_aside_for_is_refused(client: Client) -> None:
    images = (await client.engine.call(lambda runtime: runtime)).images
    assert images is not None
    images.largest = 100
    with pytest.raises(BadRequest, match="An image of 400 tokens is too large"):
        await client.submit([user(image(1, 560, 560))])


@pytest.mark.slow
async def test_memory_stays_within_the_budget(client: Client) -> None:
    """What MLX holds, weights aside, while images of every size are fed."""
    core = await client.engine.call(lambda runtime: runtime)
    assert core.images is not None
    side = int(core.images.largest**0.5) * 28
    mx.reset_peak_memory()
    for seed, (width, height) in enumerate([(side, side), (140, 900), (56, 56), (side, side)]):
        await client.ask(user(image(seed, width, height), "?"))
    weights = client.engine.info.weights_bytes  # type: ignore[union-attr]
    assert mx.get_peak_memory() - weights <= core.kv.budget.limit + rounding_bytes(100)
    kinds = core.kv.budget.by_kind()
    assert core.images.cost.transient(core.images.largest) <= kinds["transient"]


def test_a_model_that_no_image_reaches_is_no_image_model(toy_muse: Path) -> None:
    vision = load(ModelSpec(str(toy_muse), trust_remote_code=True)).vision
    assert vision is not None
    assert measure(vision, 1 << 25) is not None
    vision.token_id -= 1  # the model puts rows at another token
    assert measure(vision, 1 << 25) is None


@pytest.mark.parametrize("room", [1 << 20, 1 << 25, pytest.param(1 << 30, marks=pytest.mark.slow)])
def test_no_image_takes_more_than_it_is_taken_to(toy_muse: Path, room: int) -> None:
    vision = load(ModelSpec(str(toy_muse), trust_remote_code=True)).vision
    assert vision is not None
    cost = measure(vision, room)
    assert cost is not None
    for seed, size in enumerate([(28, 28), (112, 112), (448, 448), (672, 672), (1400, 280)]):
        shown = image(seed, *size)
        vision.text(shown)
        taken = peak(lambda shown=shown: vision.rows(shown))  # type: ignore[misc]
        mx.clear_cache()
        tokens = vision.text(shown).count(vision.image_token)
        assert taken <= cost.transient(tokens) + (1 << 18) + rounding_bytes(16), size


def test_the_longest_image_is_the_longest_that_fits() -> None:
    cost = ImageCost(tokens=64, peak=9000, growth=2.0, row_bytes=4, pixel_bytes=1)
    for room in (0, 200, 10_000, 10**7):
        longest = cost.longest(room, 4096)
        assert cost.transient(longest) <= max(room, 0)
        assert longest == 4096 or cost.transient(longest + 1) > room
