"""Conversations with images through the engine, with models that mlx-vlm runs.

Each reply has the tokens that mlx-vlm's own model gives in one pass over the whole prompt, and the
history, images included, is fed once. Skipped where mlx-vlm is not installed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcache.engine.runtime import ModelRuntime
from mlxcache.errors import BadRequest
from mlxcache.model import rows
from mlxcache.model.vision import Rows
from mlxcache.scheduling.lanes import Lane, Lanes
from mlxcache.types import Chat, Image, Progress
from tests.conftest import ToyMaker
from tests.engine.running import settled, started
from tests.memory import rounding_bytes
from tests.model.seeing import Whole
from tests.scheduling.drafts import make_draft
from tests.scheduling.guesses import Foretold, use_cheap_drafts
from tests.scheduling.test_images import TOKENS, Client, Message, Reply, assistant, user
from tests.toys.configs import UNBATCHED
from tests.toys.images import screenshot
from tests.toys.vlm import SEEING

QUICK = ("qwen3_vl", "qwen3_5")
CHUNK = 16
"""Tokens of a prefill chunk: an image of 20 takes two or three."""
MOST_NEW = 64


@pytest.fixture(
    scope="module",
    params=[n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SEEING],
)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(family: str, toy: ToyMaker) -> Path:
    return toy(family, images=True, layers=2)


@pytest.fixture(scope="module")
def whole(model: Path) -> Whole:
    return Whole(model)


def opened(model: Path, folder: Path, **more: Any) -> Any:
    return started(model, folder, **({"ram": "600MB", "prefill_chunk": CHUNK} | more))


@pytest.fixture
async def client(model: Path, tmp_path: Path) -> AsyncIterator[Client]:
    async with opened(model, tmp_path) as engine:
        yield Client(engine)


def right(whole: Whole, reply: Reply) -> bool:
    """Whether a reply has the tokens that follow a cold pass over its prompt."""
    count = len(reply.tokens)
    assert count == TOKENS
    return reply.tokens == whole.greedy(reply.prompt.fed, reply.prompt.images, count)


async def test_a_first_turn_is_that_of_a_cold_pass(client: Client, whole: Whole) -> None:
    assert client.engine.info is not None
    assert client.engine.info.has_images
    assert client.engine.info.backend == "mlx-vlm"
    for content in (
        [screenshot(1), " What is this?"],
        ["Compare ", screenshot(1, 2, 9), " with ", screenshot(2, 7, 2), screenshot(3), "!"],
        ["No image at all."],
    ):
        reply = await client.ask(user(*content))
        assert len(reply.prompt.images) == sum(isinstance(part, Image) for part in content)
        assert right(whole, reply)


async def test_a_conversation_is_fed_once_with_its_images(
    client: Client, whole: Whole, family: str
) -> None:
    """Each turn brings an image, and feeds that and what is new."""
    talk = [user("Look: ", screenshot(1), " Well?")]
    before: Reply | None = None
    for turn in range(4):
        reply = await client.ask(*talk)
        assert right(whole, reply)
        if before is not None:
            new = len(reply.prompt.ids) - len(before.prompt.ids)
            record = client.engine.requests()[0]
            assert record.fed_tokens <= new + MOST_NEW
            assert reply.cached >= before.prompt.images[-1].end
            if family not in UNBATCHED and not family.startswith("qwen3_5"):
                assert reply.cached >= len(before.prompt.ids) - 1
        before = reply
        shown = screenshot(turn + 2, 3 + turn, 6 - turn)
        talk += [assistant("I see. " * 3), user("And here? ", shown, " Go on.")]
        await settled(client.engine)


async def test_the_same_again_is_warm_and_another_image_is_not(
    client: Client, whole: Whole
) -> None:
    first = await client.ask(user("Look here: ", screenshot(1), " Well?"))
    same = await client.ask(user("Look here: ", screenshot(1), " Well?"))
    other = await client.ask(user("Look here: ", screenshot(2), " Well?"))
    wide = await client.ask(user("Look here: ", screenshot(1, 10, 2), " Well?"))
    (span,) = same.prompt.images
    assert same.cached >= span.end
    assert same.tokens == first.tokens
    assert other.prompt.fed.tolist() == wide.prompt.fed.tolist() == first.prompt.fed.tolist()
    for reply in (other, wide):
        assert reply.cached < span.start
        assert right(whole, reply)
        assert reply.tokens != first.tokens


async def test_requests_at_once_decode_together_each_at_its_own_positions(
    client: Client, whole: Whole, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = []
    join = rows.join

    def noted(*args: Any, **more: Any) -> Any:
        joined.append(1)
        return join(*args, **more)

    monkeypatch.setattr(rows, "join", noted)
    asked = [user(screenshot(i, 3 + i, 4), f" number {i}") for i in range(3)]
    asked += [user("Only text, which is read beside images. " * 3)]
    replies = await asyncio.gather(*(client.ask(one) for one in asked))
    assert all(right(whole, reply) for reply in replies)
    assert bool(joined) is (family not in UNBATCHED)


async def test_a_batch_that_gets_no_memory_goes_on_in_rows(
    client: Client, whole: Whole, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are fed what the batch computed for them."""
    if family in UNBATCHED:
        pytest.skip("it has no batches")
    steps: list[int] = []
    behind: list[int] = []
    has_room, split = Lanes._has_room, Lanes.split

    def refused(lanes: Lanes, lane: Lane) -> bool:
        steps.append(len(lane.tasks))
        return has_room(lanes, lane) and len(steps) != 4

    def noted(lanes: Lanes, lane: Lane) -> None:
        behind.extend(task.behind for task in lane.tasks)
        split(lanes, lane)

    monkeypatch.setattr(Lanes, "_has_room", refused)
    monkeypatch.setattr(Lanes, "split", noted)
    asked = [user(screenshot(i, 3 + i, 4), f" number {i}") for i in range(3)]
    replies = await asyncio.gather(*(client.ask(one) for one in asked))
    assert all(right(whole, reply) for reply in replies)
    assert max(behind) > 0


async def test_a_prompt_cancelled_inside_an_image_goes_on_from_there(
    client: Client, whole: Whole
) -> None:
    message = user("Look: ", screenshot(1, 20, 20), " Well?")
    prompt, stream = await client.submit([message])
    async for event in stream:
        if isinstance(event, Progress) and event.done > prompt.images[0].start + CHUNK:
            break
    await stream.aclose()
    while client.engine.requests()[0].status not in ("cancelled", "done"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    reply = await client.ask(message)
    (span,) = reply.prompt.images
    assert span.start < reply.cached < span.end
    assert right(whole, reply)


async def test_an_image_passes_the_vision_tower_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else is fed; its rows are kept from chunk to chunk, and only as long."""
    images = (await client.engine.call(lambda runtime: runtime)).images
    assert images is not None
    made: list[bytes] = []
    compute = images.vision.rows

    def counted(shown: Image) -> Rows:
        made.append(shown.digest)
        return compute(shown)

    monkeypatch.setattr(images.vision, "rows", counted)
    shown = [screenshot(i, 10, 6 + i) for i in range(3)]
    await asyncio.gather(*(client.ask(user("Look: ", one, " Well?")) for one in shown))
    history = [user("Look: ", shown[0], " Well?"), assistant("So."), user("Go on.")]
    await client.ask(*history)
    assert sorted(made) == sorted(one.digest for one in shown)
    assert images._rows == {}


@pytest.mark.slow
async def test_after_a_restart_and_by_snapshot_no_row_is_made_again(
    model: Path, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is behind the images needs none of them; another image is not taken for one of them."""
    text = "Some words before it. " * 12
    first = [user(text, screenshot(1, 12, 12), " or ", screenshot(2), " Well?")]
    more = [*first, assistant("The first."), user("Why that one?")]
    file, home = tmp_path / "snapshot", tmp_path / "home"
    async with opened(model, home, disk="1GB") as engine:
        cold = await Client(engine).ask(*first, session="one")
        assert await engine.book.settled()
        (session,) = await engine.sessions.list()
        made = await engine.sessions.files.snapshot(session.session.id)
        file.write_bytes(b"".join(made))
    for folder in (home, tmp_path / "away"):
        async with opened(model, folder, disk="1GB") as engine:
            if folder is not home:
                await engine.sessions.files.restore(file)
            images = (await engine.call(lambda runtime: runtime)).images
            assert images is not None
            with monkeypatch.context() as patched:
                patched.setattr(images.vision, "rows", None)  # an error if it is called
                again = await Client(engine).ask(*first)
                turn = await Client(engine).ask(*more)
            assert again.cached >= again.prompt.images[-1].end
            assert again.tokens == cold.tokens
            assert right(whole, turn)
            other = await Client(engine).ask(user(text, screenshot(3, 12, 12), " Well?"))
            assert other.cached < other.prompt.images[0].start
            assert right(whole, other)


async def test_the_model_without_its_images_has_other_kv(
    model: Path, tmp_path: Path, family: str
) -> None:
    """Quantised KV needs mlx-lm, which feeds the same model no images."""
    if family == "qwen4_exp":
        pytest.skip("mlx-lm does not have it")
    talk = [user("Only text, and enough of it to be kept on disk. " * 10)]
    async with opened(model, tmp_path, disk="1GB") as engine:
        await Client(engine).ask(*talk)
    async with opened(model, tmp_path, disk="1GB", kv_bits=8) as engine:
        assert engine.info is not None
        assert engine.info.backend == "mlx-lm"
        assert not engine.info.has_images
        assert (await Client(engine).ask(*talk)).cached == 0
        with pytest.raises(BadRequest, match="takes no images"):
            await engine.render(Chat([user(screenshot(1))]))


@pytest.mark.slow
async def test_guessed_tokens_are_at_the_right_positions(
    model: Path, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which every other guess has a wrong one, after which the right ones are fed again."""
    foretold = Foretold({})
    monkeypatch.setattr(ModelRuntime, "_make_speculation", lambda *_: foretold)
    async with opened(model, tmp_path, speculate="auto") as engine:
        for seed in range(2):
            message = user(screenshot(seed, 6, 3), " Say it.")
            prompt = await engine.render(Chat([message]))
            expected = whole.greedy(prompt.fed, prompt.images, 2 * TOKENS)
            foretold.foretell(len(prompt.ids), expected)
            reply = await Client(engine).ask(message, max_tokens=2 * TOKENS)
            assert reply.tokens == expected
    assert sum(foretold.proposed) > TOKENS


async def test_a_draft_without_eyes_is_checked_at_the_right_positions(
    toy: ToyMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same weights, and is fed placeholders for images."""
    use_cheap_drafts(monkeypatch)
    model = toy("qwen3_vl", images=True, layers=2)
    whole = Whole(model)
    draft = make_draft(model, tmp_path / "draft", "same")
    async with opened(model, tmp_path / "cache", draft_model=str(draft)) as engine:
        for seed in range(3):
            reply = await Client(engine).ask(user("Look: ", screenshot(seed, 6, 3), " Well?"))
            assert right(whole, reply)
        drafted = sum(record.drafted_tokens for record in engine.requests())
        assert drafted > 0


def changed(talk: list[Message], rng: random.Random) -> list[Message]:
    """A talk as its client may send it next: longer, edited, with other images, or rewound."""
    talk = list(talk)
    kind = rng.choice(["more", "more", "more", "edit", "swap", "rewind", "same"])
    if kind == "more" or not talk:
        said = [assistant("So it is. " * rng.randrange(1, 9))] if talk else []
        shown = [drawn(rng) for _ in range(rng.choice([0, 1, 1, 2]))]
        return [*talk, *said, user(*shown, "Then what? " * rng.randrange(1, 20))]
    if kind == "rewind":
        return talk[: rng.randrange(1, len(talk) + 1, 2)]
    if kind in ("edit", "swap"):
        place = rng.randrange(0, len(talk), 2)
        content = talk[place]["content"]
        parts = [content] if isinstance(content, str) else list(content)
        parts[-1] = f"Or {rng.randrange(99)}."
        if kind == "swap":
            parts[0] = drawn(rng)
        talk[place] = user(*parts)
        del talk[place + 1 + 2 * rng.randrange(3) :]
    return talk


def drawn(rng: random.Random) -> Image:
    return screenshot(rng.randrange(9), rng.randrange(2, 9), rng.randrange(2, 6))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_random_conversations_are_those_of_cold_passes(
    model: Path, tmp_path: Path, whole: Whole, seed: int
) -> None:
    """Two at once, edited and cancelled, with anticipation, and restarts in between."""
    rng = random.Random(seed)
    talks: list[list[Message]] = [[], []]
    for _ in range(2):
        async with opened(model, tmp_path, disk="1GB") as engine:
            client = Client(engine)
            for _ in range(3):
                talks = [changed(talk, rng) for talk in talks]
                if rng.random() < 0.3:
                    _, stream = await client.submit(changed(talks[0], rng))
                    await asyncio.sleep(rng.random() / 20)
                    await stream.aclose()
                replies = await asyncio.gather(*(client.ask(*talk) for talk in talks))
                assert all(right(whole, reply) for reply in replies)
                if rng.random() < 0.5:
                    await settled(engine)


@pytest.mark.slow
async def test_memory_stays_within_the_budget(client: Client) -> None:
    """What MLX holds, weights aside, while images of every size are fed."""
    core = await client.engine.call(lambda runtime: runtime)
    assert core.images is not None
    side = int(core.images.largest**0.5)
    mx.reset_peak_memory()
    for seed, (columns, height) in enumerate([(side, side), (2, 40), (2, 2), (side, side)]):
        await client.ask(user(screenshot(seed, columns, height), "?"))
    weights = client.engine.info.weights_bytes  # type: ignore[union-attr]
    assert mx.get_peak_memory() - weights <= core.kv.budget.limit + rounding_bytes(100)
    assert core.images.cost.transient(core.images.largest) <= core.kv.budget.by_kind()["transient"]
