"""The demo model is written once and whole, loads, and babbles in English that ends by itself."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_sampler

from mlxcache.errors import ModelError
from mlxcache.model import demo
from tests.demo import train as train_demo
from tests.demo.text import Chats, Prose, prose
from tests.toys.tokenizer import train_tokenizer

QUESTIONS = ["Hello", "What is a list?", "Explain the import statement.", "Fix the failing test."]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.materialise(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(directory))


@pytest.fixture(scope="module")
def paragraphs() -> Prose:
    return prose()


def reply(loaded: tuple[Any, Any], messages: list[dict[str, str]], temperature: float) -> str:
    model, tokenizer = loaded
    mx.random.seed(0)
    last = None
    text = ""
    for last in mlx_lm.stream_generate(
        model,
        tokenizer,
        tokenizer.apply_chat_template(messages, add_generation_prompt=True),
        max_tokens=200,
        sampler=make_sampler(temp=temperature),
    ):
        text += last.text
    assert last is not None
    assert last.finish_reason == "stop", text
    return text


def assert_reads_like_english(text: str) -> None:
    words = text.split()
    plain = [
        word for word in words if re.fullmatch(r"[\"'(]*[A-Za-z][A-Za-z'-]*[.,;:)\"'?!]*", word)
    ]
    assert len(words) >= 3, text
    assert len(plain) >= 0.7 * len(words), text
    assert len(set(words)) >= 0.4 * len(words), text


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_reply_is_english_and_ends_by_itself(
    loaded: tuple[Any, Any], question: str, temperature: float
) -> None:
    assert_reads_like_english(reply(loaded, [{"role": "user", "content": question}], temperature))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_reply_behind_a_long_system_turn_is_english_too(
    loaded: tuple[Any, Any], paragraphs: Prose, temperature: float
) -> None:
    text = " ".join(paragraph for _, paragraph in random.Random(5).sample(paragraphs, 60))
    system = {"role": "system", "content": f"You are a coding agent. {text}"}
    messages = [system, {"role": "user", "content": "What is a list?"}]
    assert_reads_like_english(reply(loaded, messages, temperature))


def test_the_demo_says_that_it_is_one(loaded: tuple[Any, Any]) -> None:
    assert "demo model" in reply(loaded, [{"role": "user", "content": "Who are you?"}], 0.0)
    assert "babble" in demo.DEMO_NOTICE


def test_its_config_lets_agents_connect(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert config["max_position_embeddings"] >= 131072
    weights: Any = mx.load(str(directory / "model.safetensors"))
    assert {value.dtype for value in weights.values()} == {mx.float32}


def test_it_has_one_to_three_million_parameters_in_less_than_two_megabytes() -> None:
    """A wheel has it, so its compressed size counts."""
    shipped = demo.DATA / "demo.safetensors"
    assert 1e6 < sum(value.size for value in demo.read_weights(shipped).values()) < 3e6
    assert sum(len(zlib.compress(path.read_bytes())) for path in demo.DATA.iterdir()) < 2e6


def test_weights_of_a_row_are_whole_multiples_of_its_factor(tmp_path: Path) -> None:
    """They differ from the trained ones by half a factor at most, also in a row of zeros."""
    mx.random.seed(1)
    trained = {"m": mx.random.normal((5, 300)) * mx.array([[1.0], [0.01], [0], [3], [1e-4]])}
    trained["norm"] = mx.array([0.5, 1.5, 2.25])
    shrunk = train_demo.shrink(trained)
    assert shrunk["m"].dtype == mx.int8
    mx.save_safetensors(str(tmp_path / "w.safetensors"), shrunk)
    read = demo.read_weights(tmp_path / "w.safetensors")
    assert read.keys() == trained.keys()
    assert {value.dtype for value in read.values()} == {mx.float32}
    assert mx.array_equal(read["norm"], trained["norm"])
    factors = shrunk["m" + demo.SCALE].astype(mx.float32)[:, None]
    assert mx.all(mx.abs(read["m"] - trained["m"]) <= factors * 0.5001).item()
    assert mx.array_equal(read["m"] / factors, mx.round(read["m"] / factors))
    assert mx.all(mx.abs(read["m"][4] - trained["m"][4]) < 2e-4).item()


def test_a_second_call_writes_nothing(tmp_path: Path) -> None:
    first = demo.materialise(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert demo.materialise(tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == before
    assert list(tmp_path.iterdir()) == [first]


def test_processes_that_write_it_at_once_agree(tmp_path: Path) -> None:
    code = "import sys, pathlib; from mlxcache.model.demo import materialise; "
    code += "print(materialise(pathlib.Path(sys.argv[1])))"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    told = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(told) == 1
    assert len(list(tmp_path.iterdir())) == 1
    assert mlx_lm.load(told.pop().decode())


def test_losing_the_race_to_another_process_is_no_error(tmp_path: Path, directory: Path) -> None:
    demo._write(tmp_path, directory)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="cannot be made"):
        demo.materialise(tmp_path / "file")


def test_training_forward_is_the_models_own_where_nothing_is_moved(
    loaded: tuple[Any, Any],
) -> None:
    model, tokenizer = loaded
    tokens = mx.array([(tokenizer.encode("The quick brown fox. ") * 40)[:160]])
    logits = train_demo.forward(model, tokens, mx.zeros(1, mx.int32), mx.zeros(1))
    assert mx.allclose(logits, model(tokens), atol=2e-3)


@pytest.mark.slow
def test_what_the_script_saves_is_what_the_demo_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paragraphs: Prose
) -> None:
    texts = [text for _, text in paragraphs]
    tokenizer = train_tokenizer(texts, demo.CONFIG["vocab_size"], thinking=False)
    trained = train_demo.train(tokenizer, Chats(paragraphs, texts, seed=0), steps=3, seed=0)
    train_demo.save(trained, tokenizer, tmp_path / "data")
    shutil.copy(demo.DATA / "chat_template.jinja", tmp_path / "data")
    monkeypatch.setattr(demo, "DATA", tmp_path / "data")
    model, _ = mlx_lm.load(str(demo.materialise(tmp_path)))
    tokens = mx.array([tokenizer.encode("Return the value of the name.").ids])
    expected = trained(tokens) * train_demo.SHARPNESS
    assert mx.allclose(model(tokens), expected, atol=0.15)  # the largest logits are about 5


def test_chats_are_the_same_for_the_same_seed_and_close_their_turns(paragraphs: Prose) -> None:
    first, again = (Chats(paragraphs, ["x = 1\n" * 400], seed=3) for _ in range(2))
    for _ in range(20):
        text = first.exchange()
        assert text == again.exchange()
        assert text.count("<|im_start|>") == text.count("<|im_end|>") == 2
        assert first.background() == again.background()
